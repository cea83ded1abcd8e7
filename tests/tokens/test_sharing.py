"""Gradients of q and k that several heads share are summed before they are rounded, in every family."""

import pytest
import torch

import penstock as ps

PLAIN = {"gla": ("g",), "kda": ("g", "beta"), "gated_delta_rule": ("h", "beta"), "rwkv7": ("g", "a", "b")}
ORDERS = {"rwkv7": ("q", "g", "k", "v", "a", "b")}
WIDE = 8  # heads of v; two groups


def drawn(name):
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    B, T, K, V = 1, 70, 16, 8
    found = {"q": normal(B, T, 2, K), "k": torch.nn.functional.normalize(normal(B, T, 2, K), dim=-1), "v": normal(B, T, WIDE, V)}
    more = {
        "g": lambda: -normal(B, T, WIDE, K).abs() / 16, "h": lambda: -normal(B, T, WIDE).abs() / 16,
        "beta": lambda: normal(B, T, WIDE).sigmoid(), "a": lambda: -found["k"] / 2, "b": lambda: found["k"] / 2,
    }  # fmt: skip
    found |= {one: more[one]() for one in PLAIN[name]}
    return {one: x.bfloat16() for one, x in found.items()}, normal(B, T, WIDE, V).bfloat16()


def gradients(name, impl, given, upstream):
    leaves = {one: x.detach().clone().requires_grad_() for one, x in given.items()}
    order = ORDERS.get(name, ("q", "k", "v", *PLAIN[name]))
    output = getattr(ps, name)(*(leaves[one] for one in order), impl=impl).output
    return dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), upstream.to(output.dtype))))


@pytest.mark.parametrize("impl", ["cpu", "chunkwise"])
@pytest.mark.parametrize("name", PLAIN)
def test_gradients_of_shared_heads_are_rounded_once(name, impl):
    given, upstream = drawn(name)
    found = gradients(name, impl, given, upstream)
    wide = gradients(name, impl, {one: x.float() for one, x in given.items()}, upstream)
    for one in {"q", "k", "a", "b"} & given.keys():
        torch.testing.assert_close(found[one], wide[one].bfloat16(), rtol=2**-8, atol=0)  # at most one unit in the last place apart
        assert (found[one] != wide[one].bfloat16()).float().mean() < 0.01
