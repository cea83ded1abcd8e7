"""Attention beside RWKV-7's time mix: initial weights, training, scores, rows of the cache, and who refuses it."""

from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from differences import slope
from passing import alone
from public_models import rwkv7 as formula

import penstock as ps
from penstock.layers import RWKV7AttentionConfig, rwkv7_attention
from penstock.models import CausalLM, rwkv7

IDS = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 13, "hidden_size": 16, "num_layers": 2, "head_size": 8}


def mixer_of(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    return model_of("rwkv7b", dtype).layers[1].mixer


def test_a_new_model_is_that_without_it() -> None:
    """The output is 0, and the first step of training changes its last norm."""
    torch.manual_seed(0)
    plain = CausalLM(rwkv7(**SIZES)).double()
    torch.manual_seed(0)
    model = CausalLM(rwkv7(**SIZES, attention_rank=3)).double()
    assert model.load_state_dict(plain.state_dict(), strict=False).unexpected_keys == []
    assert torch.allclose(model(IDS).logits, plain(IDS).logits)
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    assert all(layer.mixer.attention.lnv.weight.grad.abs().max() > 0 for layer in model.layers)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_reach_every_part(checkpointing: bool | str) -> None:
    """By finite differences."""
    model = model_of("rwkv7b", torch.float64)
    model.gradient_checkpointing = checkpointing
    places = ["embeddings.weight", *(f"layers.1.mixer.attention.{name}" for name, _ in mixer_of().attention.named_parameters())]
    weights = [model.get_parameter(place) for place in places]
    gradients = torch.autograd.grad(model.loss(IDS[:, :-1], IDS[:, 1:]), weights)
    for place, weight, gradient in zip(places, weights, gradients):
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        expected = slope(lambda: model.loss(IDS[:, :-1], IDS[:, 1:]), weight, direction)
        assert torch.allclose((gradient * direction).sum(), expected, rtol=1e-5, atol=1e-10), place


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_scores_of_any_size(size: float) -> None:
    """Large ones reach the bound of 64. Norms are scaled, so all queries and keys have that size."""
    mixer = mixer_of()
    with torch.no_grad():
        for norm in (mixer.attention.lnq, mixer.attention.lnk):
            norm.weight.mul_(size)
    x = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w, past = dict(mixer.attention.state_dict()), {}
    ids = torch.arange(7).view(1, 7)
    state = mixer.initial_state(1, x, 0)
    y = mixer.attention(ids, x.flip(-1), x, state, rwkv7_attention.Sequences(x))[0]
    expected = [formula.attention(one, w, n, one.flip(-1), past) for n, one in enumerate(x[0])]
    assert torch.allclose(y[0], torch.stack(expected), rtol=1e-9, atol=1e-12)


def test_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ends = model_of("rwkv7b", torch.float64), torch.tensor([0, 5, 5, 18])
    whole, packed = model(IDS).logits, model(IDS.view(1, -1), cu_seqlens=ends).logits
    monkeypatch.setattr(rwkv7_attention, "ROWS", 2)
    assert torch.allclose(model(IDS).logits, whole, rtol=1e-12)
    assert torch.allclose(model(IDS.view(1, -1), cu_seqlens=ends).logits, packed, rtol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_other_sequences_and_old_tokens_of_rows_do_not_matter(packed: bool) -> None:
    """A row of NaN beside a sequence, and NaN behind its last token in the pool, change no bit of it."""
    mixer = alone(mixer_of(torch.float32))
    x = torch.randn(2, 4, 24, generator=torch.Generator().manual_seed(4))
    given, ends = (x.view(1, 8, 24), torch.tensor([0, 4, 8])) if packed else (x, None)
    pools = [mixer.initial_state(3, x, 9) for _ in range(2)]
    for one in pools[1].cache[:2]:
        one.fill_(float("nan"))
    for one in pools[1][:5]:
        one[1].fill_(float("nan"))
    slots = torch.tensor([0, 1])
    clean, beside = (mixer.advance(given, pool, cu_seqlens=ends, slots=slots) for pool in pools)
    assert torch.equal(clean.reshape(2, 4, 24)[0], beside.reshape(2, 4, 24)[0])


def test_rows_without_room() -> None:
    model, ids = model_of("rwkv7b"), IDS[:, :5]
    pool = model.initial_state(2, max_length=4)
    with pytest.raises(ps.RangeError, match=r"advance: state must be a pool with room for 5 tokens a row, got room for 4\."):
        model.advance(ids, pool)


def test_sizes_that_do_not_fit() -> None:
    config = ARCHITECTURES["rwkv7b"]
    with pytest.raises(ps.RangeError, match=r"Config: vocab_size must be 13, the tokens of the time mixes, got 14\."):
        replace(config, vocab_size=14, channel=rwkv7(**SIZES).channel)
    with pytest.raises(ps.RangeError, match="attention_rank must be a whole number of at least 1, got 0"):
        RWKV7AttentionConfig(attention_rank=0)
    with pytest.raises(ps.RangeError, match=r"Config: vocab_size must be 65536, the tokens of the time mixes, got 13\."):
        CausalLM(replace(config, mixer=RWKV7AttentionConfig(8)))
