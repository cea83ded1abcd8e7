"""Linear maps whose tokens have adapters of their own, against models with merged weights."""

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from random_adapters import factors_of, merged

from penstock.errors import RangeError, ShapeError
from penstock.layers.adapted import NONE, Adapted, adapted, chosen

pytestmark = pytest.mark.sampled(file=True)

RANKS = (3, 5)


@torch.no_grad()
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_sequence_of_a_batch_has_its_adapter(name):
    """Forward, in place and step by step; the first sequence has none, and without ``chosen`` nobody has one."""
    dtype = torch.float64
    model = model_of(name, dtype)
    adapters = {f"{rank}": factors_of(model, rank, rank) for rank in RANKS}
    assert adapters["3"]
    served, numbers = adapted(model, adapters), [NONE, 1, 0, 1]
    models = [model, *(merged(name, factors, dtype) for factors in adapters.values())]
    lengths = [9, 4, 1, 7]
    ids = torch.randint(13, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens, rows = torch.tensor(numbers).repeat_interleave(torch.tensor(lengths)), torch.tensor(numbers)
    wanted = [models[n + 1](ids[:, begin:end]) for n, begin, end in zip(numbers, ends, ends[1:])]
    with chosen(tokens):
        found = served(ids, cu_seqlens=ends).logits
    torch.testing.assert_close(found, torch.cat([one.logits for one in wanted], 1), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found[:, 9:13], model(ids[:, 9:13]).logits, rtol=1e-2)
    pool = served.initial_state(4, max_length=32)
    with chosen(tokens, rows):
        logits = served.advance(ids, pool, cu_seqlens=ends, last_only=True)
    torch.testing.assert_close(logits, torch.cat([one.logits[:, -1] for one in wanted]), rtol=1e-9, atol=1e-9)
    following = torch.tensor([[1], [2], [3], [4]])
    with chosen(rows):
        logits = served.advance(following, pool, last_only=True)
    steps = [models[n + 1](one[None], last.state).logits[:, -1] for n, one, last in zip(numbers, following, wanted)]
    torch.testing.assert_close(logits, torch.cat(steps), rtol=1e-9, atol=1e-9)
    assert torch.equal(served(ids).logits, model(ids).logits)


@torch.no_grad()
def test_infinities_of_one_adapter_stay_with_its_tokens():
    model = model_of("gla")
    one, other = factors_of(model, 3, 0), factors_of(model, 3, 1)
    one["layers.0.mixer.v_proj.weight"] = tuple(x * 1e38 for x in one["layers.0.mixer.v_proj.weight"])
    served, ids = adapted(model, {"one": one, "other": other}), torch.tensor([[1, 2, 3], [1, 2, 3]])
    with chosen(torch.tensor([0, 0, 0, 1, 1, 1])):
        mixed = served(ids).logits
    with chosen(torch.tensor([1, 1, 1, 1, 1, 1])):
        alone = served(ids).logits
    assert not mixed[0].isfinite().all()
    assert torch.equal(mixed[1], alone[1])


def test_modules_are_new_and_share_weights_and_hooks():
    model = model_of("rwkv6")
    served, calls = adapted(model, {"a": factors_of(model, 3, 0, ["mixer.key"])}), []
    ours, theirs = dict(model.named_parameters()), dict(served.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(theirs[name] is x for name, x in ours.items())
    assert not any(isinstance(one, Adapted) for one in model.modules())
    changed = [name for name, one in served.named_modules() if isinstance(one, Adapted)]
    assert changed == ["layers.0.mixer.key", "layers.1.mixer.key"]
    assert served.state_dict().keys() == model.state_dict().keys()
    model.layers[1].mixer.key.register_forward_hook(lambda *_: calls.append("key"))
    model.layers[0].register_forward_hook(lambda *_: calls.append("layer"))
    served(torch.tensor([[1, 2]]))
    assert calls == ["layer", "key"]


def test_what_is_no_linear_map_is_refused():
    model = model_of("rwkv6")
    down, up = torch.randn(3, 24), torch.randn(24, 3)
    for name in ("embeddings.weight", "layers.0.mixer.time_decay_w1", "layers.0.mixer_norm.bias"):
        with pytest.raises(RangeError, match=rf"Engine: adapters must be of linear maps, .* got {name} in 'a'. Merge it"):
            adapted(model, {"a": {name: (down, up)}})
    for name in ("layers.0.mixer.none.weight", "layers.0.mixer", ""):
        with pytest.raises(RangeError, match=rf"adapters must be of weights of the model, got {name or repr(name)} in 'a'. Names are"):
            adapted(model, {"a": {name: (down, up)}})
    with pytest.raises(ShapeError, match=r"factors of layers.0.mixer.key.weight that fit \[24, 24\], got \[3, 23\] and \[24, 3\] in 'b'"):
        adapted(model, {"b": {"layers.0.mixer.key.weight": (down[:, 1:], up)}})
