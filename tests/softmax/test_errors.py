"""Wrong arguments of softmax attention: which exception, and its message."""

import math

import numpy
import pytest
import torch

import penstock as ps

X = torch.randn(1, 5, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, X[:, :, :3], X[:, :, :3]), {}, ps.ShapeError, "q must be of a multiple of k's 3 heads, got 4 heads"),
        ((X, X, X[:, :4]), {}, ps.ShapeError, "v must be of shape [B,Tk,G,D] = [1, 5, 4, 8], got [1, 4, 4, 8]"),
        ((X[0], X, X), {}, ps.ShapeError, "q must be of shape [B,Tq,H,D], got [5, 4, 8]"),
        ((X[..., :0], X[..., :0], X[..., :0]), {}, ps.ShapeError, "D must be at least 1, got 0"),
        ((X, X, X.double()), {}, ps.DtypeError, "v must be float32"),
        ((X.int(), X, X), {}, ps.DtypeError, "q must be float16"),
        ((X, X, None), {}, ps.DtypeError, "v must be a torch.Tensor"),
        ((X, X.to("meta"), X), {}, ps.DeviceError, "k must be on cpu, where q is, got meta"),
        ((X, X, X), {"window": 0}, ps.RangeError, "window must be at least 1"),
        ((X, X, X), {"window": 2.5}, ps.DtypeError, "window must be a whole number or None, got 2.5 of type float"),
        ((X, X, X), {"scale": math.nan}, ps.RangeError, "scale must be finite, got nan"),
        ((X, X, X), {"scale": -math.inf}, ps.RangeError, "scale must be finite, got -inf"),
        ((X, X, X), {"scale": 10**400}, ps.RangeError, "scale must be finite, got 1000"),
        ((X, X, X), {"scale": "1"}, ps.DtypeError, "scale must be a number or None, got '1' of type str"),
        ((X, X, X), {"scale": True}, ps.DtypeError, "scale must be a number or None, got True of type bool"),
        ((torch.randn(90, 9, 9, 9).tolist(), X, X), {}, ps.DtypeError, "q must be a torch.Tensor, got [["),
        ((X, X, X), {"causal": 1}, ps.DtypeError, "causal must be True or False"),
        ((X, X, X), {"return_lse": 1}, ps.DtypeError, "return_lse must be True or False"),
        ((X, X, X), {"impl": "flash"}, ps.RangeError, "impl must be one of auto, triton, sdpa, reference, got 'flash'"),
        ((X, X, X), {"cu_seqlens": torch.tensor([0, 4])}, ps.RangeError, "cu_seqlens must be offsets that begin at 0"),
        ((X, X, X), {"cu_seqlens_k": torch.tensor([0, 5])}, ps.ShapeError, "cu_seqlens_k must be left out without cu_seqlens"),
        (
            (X, X, X),
            {"cu_seqlens": torch.tensor([0, 5]), "cu_seqlens_k": torch.tensor([0, 2, 5])},
            ps.ShapeError,
            "cu_seqlens_k must be of shape [N+1] = [2], got [3]",
        ),
        (
            (X, X[:, :4], X[:, :4]),
            {"cu_seqlens": torch.tensor([0, 5])},
            ps.ShapeError,
            "cu_seqlens_k must be given if Tq and Tk differ, got Tq = 5 and Tk = 4 without it",
        ),
        ((X.expand(2, 5, 4, 8),) * 3, {"cu_seqlens": torch.tensor([0, 5])}, ps.ShapeError, "B must be 1 with cu_seqlens, got 2"),
        (
            tuple(torch.randn(1, 2, 1, 257) for _ in range(3)),
            {"impl": "triton"},
            ps.ImplementationRefused,
            "at most 256 elements, these have 257",
        ),
    ],
)  # fmt: skip
def test_messages(arguments, options, error, message):
    with pytest.raises(ps.PenstockError) as caught:
        ps.softmax_attention(*arguments, **options)
    assert type(caught.value) is error
    assert f"softmax_attention: {message}" in str(caught.value) or message in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("scale", [0.5, 2, numpy.float32(0.5), numpy.float64(0.5), numpy.int64(2)], ids=repr)
def test_numbers_of_numpy_are_numbers(scale):
    assert torch.equal(ps.softmax_attention(X, X, X, scale=scale), ps.softmax_attention(X, X, X, scale=float(scale)))


@pytest.mark.parametrize("offsets", [[0, 4], [1, 5], [0, 3, 2, 5], [0.0, 5.0], [[0, 5]]], ids=str)
def test_wrong_offsets_are_reported_once(offsets):
    """cu_seqlens also stands in for cu_seqlens_k."""
    with pytest.raises(ps.InvalidArgument) as caught:
        ps.softmax_attention(X, X, X, cu_seqlens=torch.tensor(offsets))
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith("softmax_attention: cu_seqlens must be ")


def test_windows_beyond_int64_mask_nothing():
    q = torch.randn(1, 5, 2, 8)
    compiled = torch.compile(lambda q: ps.softmax_attention(q, q, q, window=10**30), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), ps.softmax_attention(q, q, q))
