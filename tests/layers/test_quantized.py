"""Weights of 8 and 4 bits: their codes against the formula of each format, and the linear map as a module."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import ShapeError
from penstock.layers import modes, quantized
from penstock.layers.cpu import linear as native
from penstock.layers.linear import Linear
from penstock.layers.quantization import FRACTIONS, KINDS, Quantized, is_large
from penstock.layers.quantized import QuantizedLinear
from penstock.layers.shared_input import linears_of

SIZES = [(5, 64), (24, 136), (3, 1), (33, 200)]


def made(N, K, kind, dtype=torch.float32, bias=False, scale=0.3):
    torch.manual_seed(N + K)
    one = Linear(K, N, bias=bias).to(dtype)
    nn.init.normal_(one.weight, std=scale)
    return one, QuantizedLinear.of(one, kind).requires_grad_(False)


def written_out(weight: Quantized, K):
    """The weight by its definition, one number at a time."""
    codes, scales = weight.codes.tolist(), weight.scales.double()
    w = torch.zeros(len(codes), K, dtype=torch.float64)
    for n, row in enumerate(codes):
        for k in range(K):
            if weight.kind == "int8":
                w[n, k] = row[k] * scales[n]
            else:
                byte = row[k // 64 * 32 + k % 32]
                w[n, k] = ((byte & 15 if k % 64 < 32 else byte >> 4) - 8) * scales[n, k // 64]
    return w


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_weights_are_what_the_format_says(N, K, kind):
    _, one = made(N, K, kind)
    assert torch.equal(one.quantized.weight(K, torch.float64), written_out(one.quantized, K))


@pytest.mark.parametrize(("N", "K"), SIZES)
def test_8_bits_err_by_half_a_step(N, K):
    plain, one = made(N, K, "int8")
    step = plain.weight.abs().amax(1) / 127
    error = (one.quantized.weight(K, torch.float64) - plain.weight).abs().amax(1)
    assert (error <= 0.5 * step * (1 + 1e-4)).all()


@pytest.mark.parametrize(("N", "K"), SIZES)
def test_4_bits_err_at_most_as_one_scale_for_the_largest_weight(N, K):
    """That scale is the first of those that are compared: 8 steps for the largest weight, so half a step, and one at the other end."""
    plain, one = made(N, K, "int4")
    error = F.pad((one.quantized.weight(K, torch.float64) - plain.weight).square(), (0, -K % 64)).unflatten(1, (-1, 64)).sum(2)
    grouped = F.pad(plain.weight.double(), (0, -K % 64)).unflatten(1, (-1, 64))
    scale = (grouped.gather(2, grouped.abs().argmax(2, keepdim=True)) / -8).bfloat16().double()
    assert FRACTIONS[0] == 1
    first = ((grouped / scale).round().clamp(-8, 7) * scale - grouped).square().sum(2)
    assert (error <= first * (1 + 1e-4)).all()
    assert (grouped.abs().amax(2) * 2**-3 >= scale.squeeze(2).abs() * (1 - 2**-8)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_groups_of_zeros_and_of_tiny_numbers_stay_finite(kind):
    plain, _ = made(4, 128, kind)
    with torch.no_grad():
        plain.weight[1] = 0
        plain.weight[2] = 1e-42
        plain.weight[3, :64] = 0
    found = QuantizedLinear.of(plain, kind).quantized.weight(128, torch.float32)
    assert found.isfinite().all()
    assert not found[1].any()
    assert (found[2].abs() <= 1e-42).all()
    assert not found[3, :64].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_maps_are_those_of_the_weight(kind, bias, rows, dtype):
    plain, one = made(24, 136, kind, dtype, bias)
    x = torch.randn(2, rows, 136).to(dtype)
    wanted = F.linear(x.double(), written_out(one.quantized, 136), plain.bias.double() if bias else None)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    for context in (torch.no_grad, torch.enable_grad, modes.rows_alike):
        with context():
            y = one(x.clone().requires_grad_(context is torch.enable_grad))
        assert (y.shape, y.dtype) == ((2, rows, 24), dtype)
        torch.testing.assert_close(y.double(), wanted, rtol=rounding, atol=4 * rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_input(kind):
    _, one = made(7, 70, kind, torch.float64)
    x = torch.randn(3, 70, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(one, (x,))
    assert not list(one.parameters())


@pytest.mark.skipif(native.UNAVAILABLE is not None, reason="the native library is not built")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_rows_alike(kind, dtype):
    """To the bit, a row does not depend on the others."""
    _, one = made(50, 200, kind, dtype)
    x = torch.randn(130, 200).to(dtype)
    with modes.rows_alike():
        whole = one(x)
        assert all(torch.equal(one(x[begin:end]), whole[begin:end]) for begin, end in ((0, 1), (5, 8), (64, 130), (129, 130)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 40])
@torch.no_grad()
def test_compiled_graphs(kind, rows):
    _, one = made(24, 136, kind)
    x = torch.randn(rows, 136)
    torch.testing.assert_close(torch.compile(one, fullgraph=True, backend="aot_eager")(x), one(x))


def test_autocast_computes_in_its_dtype():
    _, one = made(24, 136, "int8")
    x = torch.randn(3, 136)
    with torch.autocast("cpu", torch.bfloat16):
        y = one(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), one(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_keep_their_dtype(kind):
    _, one = made(24, 136, kind, bias=True)
    moved = copy.deepcopy(one).to(torch.bfloat16)
    assert torch.equal(moved.codes, one.codes)
    assert torch.equal(moved.scales, one.scales)
    assert (moved.dtype, moved.bias.dtype) == (torch.bfloat16, torch.bfloat16)
    assert moved.to("meta").scales.is_meta
    assert copy.deepcopy(one).half().dtype == torch.float16


def test_state_dicts_and_repr():
    _, one = made(5, 64, "int4")
    assert {name: list(x.shape) for name, x in one.state_dict().items()} == {"codes": [5, 32], "scales": [5, 1]}
    assert repr(one) == "QuantizedLinear(in_features=64, out_features=5, int4)"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("columns", [0, 1, 63, 130, 135, 137, 192, 1000])
@torch.no_grad()
def test_other_inputs_are_refused(kind, rows, columns):
    """Whatever computes the map, and also a width that the padding of int4 has."""
    _, one = made(24, 136, kind)
    message = rf"QuantizedLinear: x must be of shape \[...,136\], got \[{rows}, {columns}\]. Its last axis are the inputs of the map."
    with pytest.raises(ShapeError, match=message):
        one(torch.randn(rows, columns))
    with pytest.raises(ShapeError, match=r"got \[\]"):
        one(torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scales_of_another_dtype(kind, dtype):
    """``load_state_dict(assign=True)`` keeps that of the file."""
    _, one = made(24, 136, kind)
    one.load_state_dict({"codes": one.codes, "scales": one.scales.to(dtype)}, assign=True)
    assert one.scales.dtype == dtype
    for rows in (1, 3, 40):
        x = torch.randn(rows, 136)
        wanted = x.double() @ written_out(one.quantized, 136).T
        torch.testing.assert_close(one(x).double(), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_scales_of_another_length_are_not_read():
    _, one = made(24, 136, "int8")
    one.load_state_dict({"codes": one.codes, "scales": one.scales}, assign=True)
    one.scales = one.scales[:20].clone()
    with pytest.raises(RuntimeError):
        one(torch.randn(3, 136))


def test_maps_with_hooks_share_no_kernel():
    plain, one = made(5, 64, "int8")
    maps = [plain, one, made(5, 64, "int4")[1], made(9, 64, "int8", bias=True)[1], plain.weight]
    assert quantized.together(maps) == [1, 3]
    assert quantized.together([]) == []
    one.register_forward_hook(lambda *_: None)
    assert quantized.together(maps) == [2]


@torch.no_grad()
def test_more_maps_than_a_launch_takes(kernels_on_a_cpu):
    """Among others, with biases."""
    maps = [made(N, 64, "int8", torch.float16, bias=N % 2 == 0)[1] for N in range(3, 11)]
    maps.insert(2, made(5, 64, "int8", torch.float16)[0])
    x = torch.randn(2, 64).half()
    for y, one in zip(linears_of(x, maps), maps):
        torch.testing.assert_close(y, one(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("rows", "columns", "large"), [(2048, 2048, True), (512, 2048, True), (511, 2048, False), (65536, 64, False)])
def test_large_maps(rows, columns, large):
    assert is_large(rows, columns, 2048) == large
