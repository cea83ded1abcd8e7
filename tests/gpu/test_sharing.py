"""Results of launches that several calls share."""

import threading

import pytest
import torch
from cases import Case, draw
from sampling import slow

from penstock.gpu import sharing
from penstock.recurrence.operators import RECURRENCE, SUMMARY
from penstock.recurrence.triton import states
from penstock.recurrence.variants import VARIANTS


def calls(variant):
    """Inputs of one sequence of a head, which is cut into segments."""
    return draw(Case(variant, B=1, T=513, H=1, G=1, K=16, V=16, dtype=torch.float16, gate="logsigmoid/16", state=True))


def summarized(variant, x, y, g, adjoint=False):
    scale = 0.25 if adjoint and VARIANTS[variant].scale is None else 1.0
    return SUMMARY(f"summary({variant!r})", (x, y, g, None), (scale, False, adjoint), "triton")


def forward(variant, x):
    tensors = (*(x[name] for name in ("q", "k", "v", "g", "u")), None, x["initial_state"])
    return RECURRENCE(variant, tensors, (None, False, True), "triton_chunkwise")


@pytest.mark.parametrize("variant", ["retention", "rwkv6", *slow(*(one for one in VARIANTS if one not in ("retention", "rwkv6")))])
def test_passes_take_the_sums_of_their_summaries(variant, monkeypatch):
    monkeypatch.setattr(states, "SUMS", 0)  # backward, the gradients of states of more tokens than these come from segments too
    x = {name: t if t is None else t.requires_grad_() for name, t in calls(variant).items()}
    leaves = [t for t in x.values() if t is not None]
    alone = forward(variant, x)
    upstream = torch.randn_like(alone[0]), torch.randn_like(alone[1])
    wanted = torch.autograd.grad(alone, leaves, upstream)
    with sharing.shared():
        with torch.no_grad():
            summarized(variant, x["k"], x["v"], x["g"])
        assert len(sharing.kept()) == 1
        found = forward(variant, x)
        assert not sharing.kept()
        with torch.no_grad():
            summarized(variant, x["q"], upstream[0], x["g"], adjoint=True)
        grads = torch.autograd.grad(found, leaves, upstream)
        assert not sharing.kept()
    assert all(torch.equal(*pair) for pair in zip((*found, *grads), (*alone, *wanted)))


def test_other_tokens_take_nothing():
    """Equal values at other addresses: the sums stay where they are. Another initial state has the same sums."""
    x, other = calls("simple_gla"), {name: t if t is None else t.clone() for name, t in calls("simple_gla").items()}
    with sharing.shared():
        summarized("simple_gla", x["k"], x["v"], x["g"])
        for name in ("k", "v", "g"):
            forward("simple_gla", {**x, name: other[name]})
            assert len(sharing.kept()) == 1
        found = forward("simple_gla", {**x, "initial_state": None})
        assert not sharing.kept()
    assert torch.equal(found[0], forward("simple_gla", {**other, "initial_state": None})[0])


def test_blocks_are_of_one_thread():
    with sharing.shared():
        seen = []
        one = threading.Thread(target=lambda: seen.append(sharing.kept()))
        one.start()
        one.join()
        assert seen == [None]
        with sharing.shared():
            sharing.kept()["inner"] = (), ()
        assert sharing.kept() == {}
    assert sharing.kept() is None
