"""Products and the inverse of the portable kernels of the delta rule, by launches of their own: on a GPU, or under the interpreter."""

import itertools

import torch
import triton
import triton.language as tl

from penstock.delta.triton.portable.inverse import solve
from penstock.delta.triton.portable.products import product, product_apart, product_with_T, tf32_part
from penstock.gpu.levels import sums_by_parts
from penstock.gpu.tiles import in_two, to_bfloat16, to_tf32

C = 64
ERRORS = {"tf32x3": 2.0**-19, "bf16": 2.0**-13, "ieee": 2.0**-19, "tf32": 2.0**-9}
"""Of the sum of the magnitudes of terms: two operands of 22, 16, 24 and 11 significant bits, truncated, and float32 sums of 64 terms."""
NAN = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001]).int().view(torch.float32)
"""NaN as written in Python, as a GPU of NVIDIA computes it, with a sign, and with the least bits, of which TF32 has none."""


@triton.jit(do_not_specialize=["once"])
def penstock_test_product(a, b, c, once, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, BY: tl.constexpr):
    """C = A B [M,N], by one of three functions."""
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    x = tl.load(a + m * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n)
    if BY == "T":
        z = product_with_T(x, y, PRECISION)
    elif BY == "loop":
        z = product_apart(x, y, once, True, PRECISION)
    else:
        z = product(x, y, PRECISION)
    tl.store(c + m * N + n, z)


@triton.jit
def penstock_test_parts(x, parts, N: tl.constexpr, OWN: tl.constexpr):
    """The operand x [N] of each of three products [3,N]."""
    at = tl.arange(0, N)
    for n in tl.range(3, num_stages=1):
        tl.store(parts + n * N + at, tf32_part(tl.load(x + at), n, OWN))


@triton.jit
def penstock_test_nan(x, y, chosen, N: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """What three functions that round [3,N], and sums over rows [C,N], make of x [N]."""
    at = tl.arange(0, N)
    one = tl.load(x + at)
    high, low = in_two(one)
    tl.store(y + at, to_tf32(one))
    tl.store(y + N + at, to_bfloat16(one))
    tl.store(y + 2 * N + at, high.to(tl.float32) + low.to(tl.float32))
    i = tl.arange(0, C)[:, None]
    picked = tl.load(chosen + i * C + tl.arange(0, C)[None, :])
    tile = tl.zeros((C, N), tl.float32) + one[None, :]
    tl.store(y + 3 * N + i * N + at[None, :], sums_by_parts(picked, tile, PARTS))


@triton.jit
def penstock_test_solve(pairs, beta, solved, tokens, C: tl.constexpr, STREAMS: tl.constexpr, SOLVE: tl.constexpr):
    """T - I = (I - diag(beta) N)^-1 - I [C,C]."""
    solve(pairs, solved, beta, tokens, 1, tl.arange(0, C), C, STREAMS, SOLVE)


def multiplied(a, b, precision, by="", warps=8):
    """A B by the kernels' product, by that with T ("T") or in a loop ("loop")."""
    c = a.new_empty(len(a), b.shape[1])
    penstock_test_product[(1,)](a, b, c, 1, len(a), b.shape[1], len(b), precision, by, num_warps=warps)
    return c


def inverse(pairs, beta, precision, tokens=C, in_place=False, warps=8):
    """T - I by the kernels' ``solve``. ``in_place``: T - I takes the memory of N."""
    found = pairs.clone() if in_place else torch.full_like(pairs, float("nan"))
    given = found if in_place else pairs
    penstock_test_solve[(1,)](
        given, given if beta is None else beta, found, tokens, C, 2 if beta is None else 1, precision, num_warps=warps
    )
    return found


def check_products(precision, device):
    """A B of some shapes against float64, and of operands with inf and NaN."""
    random = torch.Generator().manual_seed(0)
    for by, M, N, K in itertools.product(("", "T", "loop"), (64, 128), (32, 64), (64, 128)):
        a, b = (torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp() for shape in ((M, K), (K, N)))
        size = a.double().abs() @ b.double().abs()
        error = (multiplied(a.to(device), b.to(device), precision, by).cpu().double() - a.double() @ b.double()).abs()
        bound = 2.0**-6 if precision == "bf16" and by != "T" else ERRORS[precision]  # one bfloat16 product, or three of parts
        assert float((error / size).max()) <= bound, (precision, by, M, N, K)
    if precision in ("tf32x3", "ieee"):
        a[3, 5], b[4, 9] = float("inf"), -float("inf")
        b[5, 11] = 0.0
        for nan in NAN[:3]:
            a[7, 1], b[:, 20] = nan, nan
            wanted = a.double() @ b.double()
            found = multiplied(a.to(device), b.to(device), precision).cpu().double()
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.isinf(), wanted.isinf())
            infinite = wanted.isinf()
            assert torch.equal(found[infinite], wanted[infinite])
    for nan in NAN[:3]:
        a, b = torch.ones(64, 64), torch.ones(64, 64)
        a[7, 1], b[3, 20] = nan, nan
        found = multiplied(a.to(device), b.to(device), precision).isnan().cpu()
        assert found[7].all()
        assert found[:, 20].all()
        assert int(found.sum()) == 127


def check_nan(device, precisions):
    """NaN of any bits stays NaN where numbers are rounded in integers, and in sums of parts."""
    x = torch.cat((NAN, torch.tensor([1.5, -2.0, 0.0, 1e30]))).repeat(2)
    for parts in precisions:
        found = torch.empty(3 + C, 16, device=device)
        penstock_test_nan[(1,)](x.to(device), found, torch.ones(C, C, dtype=torch.bfloat16, device=device).tril(), 16, C, parts)
        assert torch.equal(found.isnan().cpu(), x.isnan().expand(3 + C, 16))


def check_parts(device):
    """Three products of parts of 11 significant bits against float64: at most 2^-21 of a product, and no bias."""
    random = torch.Generator().manual_seed(2)
    powers = 2.0 ** torch.randint(-50, 51, (4096,), generator=random)
    a, b = ((1 + torch.rand(4096, generator=random)) * powers**sign for sign in (1, -1))
    a[:2], b[:2] = torch.tensor([1 + 2.0**-11, 2 - 2.0**-23]), 1 + 2.0**-11 - 2.0**-23
    parts = []
    for own, x in enumerate((a, b)):
        found = torch.empty(3, len(x), device=device)
        penstock_test_parts[(1,)](x.to(device), found, len(x), own)
        assert not (found.cpu().view(torch.int32) & 0x1FFF).any()
        parts.append(found.cpu().double())
    wanted = a.double() * b.double()
    errors = ((parts[0] * parts[1]).sum(0) - wanted) / wanted
    assert float(errors.abs().max()) <= 2.0**-21
    assert float(errors.mean().abs()) <= 2.0**-26


def check_inverse(precision, in_place, device):
    """T against float64, with beta or without, of tokens that are equal, and of fewer tokens than a chunk."""
    random = torch.Generator().manual_seed(1)
    keys = torch.nn.functional.normalize(torch.randn(C, 16, generator=random), dim=-1)
    keys[20:40] = keys[20]
    upper = torch.full((C, C), float("nan")).triu()
    N = -(keys @ keys.T).tril(-1)
    for beta, tokens in ((None, C), (torch.rand(C, generator=random) * 2, C), (torch.rand(C, generator=random) * 2, 37)):
        live = torch.arange(C) < tokens
        pairs = N * live[:, None] * live
        strength = torch.ones(C) if beta is None else beta * live
        wanted = torch.linalg.inv(torch.eye(C).double() - strength.double()[:, None] * pairs.double()) - torch.eye(C).double()
        given = pairs if beta is None else beta.to(device)
        found = inverse((pairs + upper).to(device), None if beta is None else given, precision, tokens, in_place).cpu().double()
        bound = (wanted.abs() + torch.eye(C)) @ (strength[:, None] * pairs.abs()).double() @ (wanted.abs() + torch.eye(C))
        assert found.isfinite().all()
        assert float((found - wanted).norm() / bound.norm()) <= ERRORS[precision], (precision, in_place, tokens)
        assert found.triu().count_nonzero() == 0
