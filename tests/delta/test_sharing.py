"""What passes over the same tokens share: tiles that depend on no states, raw inputs, repeated heads."""

from dataclasses import replace

import pytest
import torch
from deltas import Delta
from sampling import slow

from penstock.call.implementation import Upstream
from penstock.delta.operators import DELTA
from penstock.delta.slices import _unwritten
from penstock.delta.triton import launch
from penstock.gpu import sharing

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
OF = Delta("kda", B=1, T=66, H=2, K=4, V=4, raw=True)
CASES = [replace(OF, G=1), *slow(OF, replace(OF, variant="gated_delta_rule", G=1), replace(OF, variant="rwkv7", raw=False))]


def given(case):
    tensors = case.tensors()
    return [tensors[name] for name in DELTA.names]


def forward(case, tensors):
    return DELTA(case.variant, tensors, case.options, "triton_chunkwise")


def backward(case, tensors, wanted):
    return DELTA.backward(case.variant, tensors, case.options, "triton_chunkwise", Upstream(case.upstream(), (), (), wanted))


def tiles():
    return [id(x) for _, written in sharing.kept().values() for x in written]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_passes_take_the_tiles_of_summaries(case, monkeypatch):
    """Results are bitwise equal to those of passes alone, and the stage of raw inputs runs once."""
    x, every = given(case), [True] * len(DELTA.names)
    with torch.no_grad():
        wanted, of_inputs = forward(case, x), backward(case, x, every)
        runs = []
        for stage in (launch.raw_forward, launch.raw_differentiable):
            monkeypatch.setattr(launch, stage.__name__, lambda *given, stage=stage: runs.append(stage.__name__) or stage(*given))
        with sharing.shared():
            DELTA(case.variant, (*x[:-1], None), case.options, "triton_chunkwise")
            first = tiles()
            assert first
            DELTA(case.variant, _unwritten(x[:-1]), case.options, "triton_chunkwise")
            found = forward(case, x)
            assert tiles() == first
            assert runs == ["raw_forward"] * case.raw
        with sharing.shared():
            alone = backward(case, x, [False] * (len(every) - 1) + [True])
            first = tiles()
            assert first
            assert [one is not None for one in alone] == [False] * (len(every) - 1) + [True]
            gradients = backward(case, x, every)
            assert tiles() == first
            assert runs.count("raw_differentiable") == case.raw
    assert all(torch.equal(*pair) for pair in zip(found, wanted))
    assert torch.equal(alone[-1], of_inputs[-1])
    for one, other in zip(gradients, of_inputs):
        assert one is other is None or torch.equal(one, other)


def test_once():
    x, y, runs = torch.zeros(1), torch.zeros(1), []

    def made(key, *read):
        return sharing.once(key, read, lambda: runs.append(1) or object())

    assert made("a", x) is not made("a", x)
    with sharing.shared():
        assert made("a", x) is made("a", x) is not made("a", y)
        assert made("b", x) is not made("a", x)
        outside = made("a", x)
        with sharing.shared():
            assert made("a", x) is not outside
        assert made("a", x) is outside
    assert made("a", x) is not outside
