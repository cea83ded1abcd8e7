"""DeepEmbed of RWKV-7: sizes and values that do not fit, initial weights, training, and explanations."""

from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from differences import slope

import penstock as ps
from penstock.layers import RWKV7ChannelConfig
from penstock.layers.deep_embed import DEEP_EMBED, DeepEmbed, deep_embed
from penstock.models import CausalLM, Config, rwkv7

IDS = torch.randint(13, (2, 7), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 13, "hidden_size": 16, "num_layers": 2, "head_size": 8}


def test_a_new_model_is_that_without_it() -> None:
    """All factors are 1, and the first step of training changes them."""
    torch.manual_seed(0)
    plain = CausalLM(rwkv7(**SIZES)).double()
    torch.manual_seed(0)
    model = CausalLM(rwkv7(**SIZES, embedding_rank=3)).double()
    assert model.load_state_dict(plain.state_dict(), strict=False).unexpected_keys == []
    for one in (plain, model):
        for layer in one.layers:
            torch.nn.init.ones_(layer.channel.value.weight)
    assert torch.allclose(model(IDS).logits, plain(IDS).logits)
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    assert all(layer.channel.s1.grad.abs().max() > 0 for layer in model.layers)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_reach_every_part(checkpointing: bool | str) -> None:
    """By finite differences; of the embeddings too, which D depends on."""
    model = model_of("rwkv7a", torch.float64)
    model.gradient_checkpointing = checkpointing
    names = ("s_emb.weight", "s_emb_x.weight", "s1", "s2", "s0")
    places = ["embeddings.weight", *(f"layers.1.channel.{name}" for name in names)]
    weights = [model.get_parameter(place) for place in places]
    gradients = torch.autograd.grad(model.loss(IDS[:, :-1], IDS[:, 1:]), weights)
    for weight, gradient in zip(weights, gradients):
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        expected = slope(lambda: model.loss(IDS[:, :-1], IDS[:, 1:]), weight, direction)
        assert torch.allclose((gradient * direction).sum(), expected, rtol=1e-6)


def test_only_rows_of_tokens_that_occur_get_gradients() -> None:
    model = model_of("rwkv7a", torch.float64)
    model.loss(IDS[:, :-1] % 5, IDS[:, 1:]).backward()
    rows = model.layers[0].channel.s_emb.weight.grad.abs().sum(1)
    assert (rows[:5] > 0).all()
    assert (rows[5:] == 0).all()


def test_sizes_that_do_not_fit() -> None:
    config = ARCHITECTURES["rwkv7a"]
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(ps.RangeError, match=r"Config: vocab_size must be 13, the tokens of the channel mixes, got 14\."):
        replace(config, vocab_size=14)
    for sizes in ({"embedding_rank": 4}, {"vocab_size": 13}):
        with pytest.raises(ps.RangeError, match="RWKV7ChannelConfig: vocab_size must be a number with embedding_rank, and None without"):
            RWKV7ChannelConfig(40, **sizes)
    with pytest.raises(ps.RangeError, match="embedding_rank must be a whole number of at least 1, got 0"):
        rwkv7(**SIZES, embedding_rank=0)


def test_direct_calls_take_tokens_and_embeddings() -> None:
    mixer, x = RWKV7ChannelConfig(40, 3, 13).build(16), torch.randn(2, 5, 16)
    ids = IDS[:, :5, None]
    assert mixer(x, values={"ids": ids.int(), "embedded": x})[0].shape == x.shape
    for values, message in (
        (None, "values must be a dict of ids, embedded, got None"),
        ({"ids": ids}, "values must be a dict of ids, embedded, got ids"),
        ({"ids": ids.float(), "embedded": x}, r"values\['ids'\] must be int32 or int64, got torch.float32"),
        ({"ids": ids + 13, "embedded": x}, r"values\['ids'\] must be from 0 to 12, got "),
        ({"ids": ids - 13, "embedded": x}, r"values\['ids'\] must be from 0 to 12, got -"),
        ({"ids": ids[..., 0], "embedded": x}, r"values\['ids'\] must be of shape \[B,T,A\] = \[2, 5, 1\], got \[2, 5\]"),
        ({"ids": ids, "embedded": x[..., 1:]}, r"values\['embedded'\] must be of shape \[B,T,A\] = \[2, 5, 16\], got \[2, 5, 15\]"),
    ):
        with pytest.raises(ps.InvalidArgument, match=message):
            mixer(x, values=values)


def test_layers_and_mixers_are_explained() -> None:
    model = model_of("rwkv7a")
    for module in (model, model.layers[1], model.layers[1].channel):
        for mode in ("training", "prompt", "decode"):
            assert "deep_embed runs formula" in str(ps.explain(module, tokens=3, mode=mode))


def call_of(rows: int, dtype: torch.dtype = torch.float32, E: int = 5) -> DeepEmbed:
    """The first rows are the same for any number of them."""
    draw, F = torch.Generator().manual_seed(4), 140
    table = torch.nn.Embedding(11, E * E).to(dtype)
    up, offset = (torch.randn(shape, generator=draw).to(dtype) for shape in ((E, F), (1, 1, F)))
    torch.nn.init.normal_(table.weight, generator=draw)
    k, hidden, part = (torch.randn(1, 9, size, generator=draw)[:, :rows].to(dtype) for size in (F, E, E * E))
    return DeepEmbed(k, hidden, torch.arange(9)[None, :rows] * 5 % 11, table, part, up, offset)


@torch.no_grad()
def test_the_kernel_computes_rows_alike(kernels_on_a_cpu) -> None:
    """Bits of a token do not depend on how many there are; tokens may be int32, and parts views."""
    whole, few = call_of(9), call_of(4)
    y = deep_embed(*whole)
    assert torch.equal(deep_embed(*few._replace(ids=few.ids.int())), y[:, :4])
    assert torch.allclose(y, DEEP_EMBED.computed(whole), rtol=1e-4, atol=1e-5)


def test_calls_that_the_kernel_refuses(kernels_on_a_cpu) -> None:
    refuses, call = DEEP_EMBED.form("deep_embed").refuses, call_of(3)
    assert refuses(call) == "gradients are on"
    hooked, rescaled = torch.nn.Embedding(11, 25), torch.nn.Embedding(11, 25, max_norm=1.0)
    hooked.register_forward_hook(lambda module, given, y: y)
    with torch.no_grad():
        assert refuses(call) is None
        for change, why in (
            ({"table": hooked}, "the table has a forward hook"),
            ({"table": rescaled}, "the table has max_norm"),
            ({"part": call.part.half()}, "all tensors must have one dtype"),
            ({"up": call.up.T.contiguous().T}, "parameters must be contiguous"),
            ({"ids": call.ids[:, :0]}, "there are no tokens"),
        ):
            assert refuses(call._replace(**change)) == why
        assert refuses(call_of(3, E=65)) == "it takes matrices of at most 64 rows, got 65"
        with torch.autocast("cpu", torch.bfloat16):
            assert refuses(call) == "autocast is on"


def test_tokens_of_graphs_are_read_from_the_buffer() -> None:
    """A step gets a view of its tokens, no copy: the same call with other numbers in the tensor is that of other tokens."""
    model, ids = model_of("rwkv7a"), IDS[:, :1].clone()
    seen = []
    model.layers[0].channel.register_forward_pre_hook(lambda module, given: seen.append(given[3]["ids"]))
    model.advance(ids, model.initial_state(2))
    assert seen[0].data_ptr() == ids.data_ptr()
