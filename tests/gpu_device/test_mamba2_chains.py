"""Chains of Mamba-2 on a GPU against their formulas in float64. Run with ``pytest -m gpu``."""

from copy import deepcopy

import mamba2_cases as cases
import pytest
import torch
from mamba2_cases import norm_of, normal
from torch import nn

from penstock.layers import Mamba2Config
from penstock.layers.mamba2_chains import gated_norm, time_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"), pytest.mark.timeout(600)]

PUBLISHED = [(24, 64, 1), (64, 64, 1), (80, 64, 1), (128, 64, 8)]
"""Heads, their channels, and groups of published models."""


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("limits", cases.LIMITS, ids=str)
@pytest.mark.parametrize("sizes", [*cases.HEADS, (80, 64)], ids=str)
def test_time_steps(sizes, limits, dtype):
    cases.check_time_steps(sizes, limits, dtype, "cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("sizes", [*cases.GROUPS, *cases.WIDE, (128, 64, 1)], ids=str)
def test_gated_norm(sizes, mapped, dtype):
    cases.check_gated_norm(sizes, dtype, "cuda", mapped)


def test_small_steps():
    cases.check_small_steps("cuda")


def test_nan_of_a_token_stays_its_own():
    cases.check_nan("cuda")


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("sizes", PUBLISHED, ids=str)
def test_many_tokens_of_published_sizes(sizes, dtype):
    """Each program takes several tokens; strides as in a layer."""
    cases.check_gated_norm(sizes, dtype, "cuda", False, tokens=(2, 1500), K=128)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("sizes", PUBLISHED, ids=str)
def test_bits_of_a_token_do_not_depend_on_the_number_of_tokens(sizes, dtype):
    H, V, G = sizes
    given = [normal(3, 70, *rest, dtype=dtype, device="cuda") for rest in ((H, V), (H * V + 256,), (2 * H * V + 256 + H,))]
    D, weight, dt_bias, A_log = (normal(size, dtype=dtype, seed=seed, device="cuda") for seed, size in enumerate((H, H * V, H, H)))

    def chains(rows, tokens):
        o, mixed, whole = (one[rows, tokens].contiguous() for one in given)
        x = mixed[..., : H * V].unflatten(-1, (H, V))
        y = gated_norm(o, x, D, whole[..., : H * V], norm_of(weight, G), nn.Identity())
        return [*time_steps(whole[..., -H:], dt_bias, A_log, x, (0.0, 0.1))[:2], y]

    whole = chains(slice(None), slice(None))
    for rows, tokens in ((slice(1, 2), slice(4, 5)), (slice(0, 3), slice(9, 10)), (slice(2, 3), slice(20, 61))):
        assert all(torch.equal(one[rows, tokens], part) for one, part in zip(whole, chains(rows, tokens)))


def test_gradients_are_the_same_each_time():
    o, x, z = (normal(2, 3000, *rest, dtype=torch.bfloat16, device="cuda").requires_grad_() for rest in ((64, 64), (64, 64), (4096,)))
    D, weight = (normal(size, device="cuda").requires_grad_() for size in (64, 4096))
    found = []
    for _ in range(2):
        y = gated_norm(o, x, D, z, norm_of(weight, 1), nn.Identity())
        found.append(torch.autograd.grad(y, (o, x, D, z, weight), z))
    assert all(torch.equal(one, other) for one, other in zip(*found))


def test_offsets_beyond_32_bits():
    """The last tokens of tensors with more than 2^31 elements, which have few rows with a large stride."""
    H, V, tokens, stride = 2, 64, 70, 2**25
    base = torch.empty(tokens * stride, dtype=torch.bfloat16, device="cuda")
    x = base.as_strided((1, tokens, H, V), (0, stride, V, 1))
    x.copy_(normal(1, tokens, H, V))
    o, z, D, weight = (
        normal(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((1, tokens, H, V), (1, tokens, H * V), (H,), (H * V,))
    )
    dt, near = normal(1, tokens, H, dtype=torch.bfloat16, device="cuda"), x.contiguous()
    results = [
        [gated_norm(o, one, D, z, norm_of(weight, 1), nn.Identity()), *time_steps(dt, D, D, one, (0.0, 1.0))[:2]] for one in (x, near)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_of_16_bits(dtype):
    """Its output and gradients are as close to those in float64 as those of plain PyTorch on a CPU are, within a factor of 2."""
    torch.manual_seed(0)
    layer, x, results = Mamba2Config(num_heads=8, n_groups=2).build(256).to(dtype), torch.randn(2, 150, 256).to(dtype), []
    for kind, device in ((torch.float64, "cpu"), (dtype, "cpu"), (dtype, "cuda")):
        module, given = deepcopy(layer).to(device, kind), x.to(device, kind).requires_grad_()
        y, _ = module(given)
        grads = torch.autograd.grad(y.double().square().mean(), [given, *module.parameters()])
        results.append([one.detach().double().cpu() for one in (y, *grads)])
    for exact, plain, ours in zip(*results):
        assert (ours - exact).norm() <= 2 * (plain - exact).norm() + torch.finfo(dtype).eps * exact.norm()
