"""Launches of the kernels of decode steps. There are no gradients. All tensors are contiguous.

``early``: the launch may begin while the previous kernel runs. Before it waits, it reads weights, which no earlier kernel still writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.derivatives import count_write
from ...gpu.hopper import modules
from ...gpu.launch import on_device_of
from ...gpu.target import Target, power
from ..token_shift import Shifted
from . import few_rows, launch, product, step
from .rows import write_rows

PARTS = 5
"""The most linear maps, or interpolations with a low-rank part, of one launch."""
MOST = 7
"""The most linear maps of a launch of Hopper's kernel, any of which may have a transposed weight."""
SHIFTS = 6
"""The most interpolations of ``shifted_norm``."""
ROWS = 32
"""The most tokens for which the kernel of one linear map is faster than cuBLAS, whatever the size of the map."""
LONG = 4096
"""The least K for which this holds on Hopper for twice as many tokens: the time to add the parts of K does not depend on K. One NVIDIA
H200, a step of 64 rows of RWKV-6 1.6B: 2.14 ms; 2.19 with cuBLAS for K = 7168, 2.16 with our kernel for K = 2048, too."""
SHARED_ROWS = 128
"""The most tokens of several maps in one launch, which has enough programs for larger tiles. Hopper's kernel has forms for more. One
NVIDIA H200, a step of RWKV-6 1.6B by Triton's kernel: 128 rows 3.54 ms (4.02 by cuBLAS), 256 rows 4.74 ms (4.41)."""
COUNTS = 256
"""The most tiles of a launch that splits K: several multiprocessors compute each tile."""


class Tile(NamedTuple):
    """Sizes of ``penstock_products`` and of ``penstock_quantized_products``."""

    BN: int
    """Rows of a weight per program."""
    BM: int
    """Rows of x per program."""
    BK: int
    """Elements of K per iteration: of each warp with ``apart``, which ``int4`` takes from its groups; else of all warps together."""
    stages: int
    """One more than the blocks of K in flight."""
    apart: int
    """4: each warp sums over its own blocks of K. 0: one row of x of quantized weights, without tensor cores."""
    warps: int = few_rows.WARPS
    registers: int = 0
    """The most registers of a thread; 0: no limit."""


def tile_of(rows: int) -> Tile:
    """The tile for this number of rows. The results for up to 32 rows are bitwise equal."""
    if rows <= 32:
        return Tile(16, launch.multiplied(rows), 64, 6 if rows <= 16 else 5, few_rows.WARPS)
    return Tile(64, 64 if rows <= 64 else 128, 64, 4, 1)


def early_of(x: Tensor, *prefetched: Tensor) -> dict[str, Any]:
    """``launch.early``, if all prefetched tensors are aligned to 16 bytes."""
    return launch.early(x.device) if all(one.data_ptr() % 16 == 0 for one in prefetched) else {}


def on_hopper(device: torch.device, name: str) -> Any:
    """The launching module for Hopper, or None on other GPUs."""
    found = modules(__package__, name) if Target.of(device).arch == "sm_90" else None
    return None if found is None else found[0]


def _hopper(device: torch.device, weights: Sequence[Tensor]) -> Any:
    """The module that launches Hopper's linear maps, if it can read these weights."""
    found = on_hopper(device, "hopper_products_launch")
    return found if found is not None and found.takes(weights) else None


def _form(x: Tensor, weights: Sequence[Tensor], alike: bool) -> Any:
    """The form of Hopper's kernel for products of x [R,K], or None."""
    hopper = _hopper(x.device, weights)
    return None if hopper is None else hopper.form_of(x.shape[0], weights, Target.of(x.device).multiprocessors, alike=alike)


def takes(x: Tensor, weights: Sequence[Tensor], alike: bool) -> bool:
    """Whether ``products`` should compute products of x [R,K]. ``alike``: with ``products_alike``; else where it is the fastest."""
    if alike:
        return _hopper(x.device, weights) is not None
    form, plain = _form(x, weights, False), len(weights) <= PARTS and all(one.is_contiguous() for one in weights[1:])
    if x.shape[0] <= (ROWS if len(weights) == 1 else SHARED_ROWS):
        return plain or form is not None
    if form is None or len(weights) > 1:
        return form is not None and form.SPREAD == 1
    if form.SPREAD > 1:
        return x.shape[0] <= 2 * ROWS and x.shape[1] >= LONG
    one_each = -(-weights[0].shape[0] // form.HEIGHT) <= Target.of(x.device).multiprocessors
    return form.APART > 1 or (x.shape[0] <= SHARED_ROWS and one_each)


def _streamed(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], gate: Tensor | None, relu_squared: bool, fixed: bool,
    counts: Callable[[], Tensor] | None, alike: bool,
) -> list[Tensor] | None:  # fmt: skip
    """``products`` by Hopper's kernel, or None if it has no form for them."""
    x = inputs[0]
    form = _form(x, weights, alike) if x.shape[0] else None
    if form is None:
        return None
    counts = counts or partial(x.new_zeros, COUNTS, dtype=torch.int32)
    found: list[Tensor] = _hopper(x.device, weights).products(
        inputs, weights, gate, relu_squared=relu_squared, form=form, early=fixed, counts=counts
    )
    return found


def kernels_of(x: Tensor, weights: Sequence[Tensor], alike: bool) -> tuple[str, ...]:
    """The kernels of ``products`` of x [R,K], or of ``products_alike``."""
    if x.shape[0] and _form(x, weights, alike) is not None:
        return ("penstock_products_hopper",)
    if not alike:
        return ("penstock_products",)
    split = _hopper(x.device, weights).split_of(weights)
    sums = any(product.in_parts(x, weight, split) for weight in weights)
    return ("penstock_product", "penstock_sum_of_parts") if sums else ("penstock_product",)


def products_alike(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], gate: Tensor | None = None, *, relu_squared: bool = False, fixed: bool = False,
    counts: Callable[[], Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """``products`` of any number of rows. To the bit, a row does not depend on the other rows."""
    found = _streamed(inputs, weights, gate, relu_squared, fixed, counts, True)
    if found is not None:
        return found
    split = _hopper(inputs[0].device, weights).split_of(weights)
    first = product.multiply(inputs[0], weights[0], split, relu_squared=relu_squared, gate=gate)
    return [first, *(product.multiply(x, weight, split) for x, weight in zip(inputs[1:], weights[1:]))]


def products(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], gate: Tensor | None = None, *, relu_squared: bool = False,
    tile: Tile | None = None, fixed: bool = False, counts: Callable[[], Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """x_i W_i^T of x_i [R,K] and W_i [N,K], rounded once. The first weight may be the transpose of a contiguous tensor.

    With ``relu_squared`` the first result y becomes relu(y)^2, with ``gate`` [R,N] y sigmoid(gate). ``fixed``: no earlier kernel still
    writes the weights, so they may be read early. ``counts`` returns COUNTS int32 zeros, which the launch resets to 0.
    """
    (R, K), x = inputs[0].shape, inputs[0]
    if tile is None and (found := _streamed(inputs, weights, gate, relu_squared, fixed, counts, False)) is not None:
        return found
    tile = tile or tile_of(R)
    results = [one.new_empty(R, weight.shape[0]) for one, weight in zip(inputs, weights)]
    rows = [weight.shape[0] for weight in weights]
    begins = [sum(-(-N // tile.BN) for N in rows[:part]) for part in range(len(rows) + 1)]
    pdl, more = early_of(x, *weights), PARTS - len(weights)
    if R:
        on_device_of(x, few_rows.penstock_products)[begins.pop(), -(-R // tile.BM)](
            *inputs, *[x] * more, *weights, *[weights[0]] * more, *results, *[results[0]] * more, x if gate is None else gate,
            *rows, *[0] * more, *begins[1:], *[2**31 - 1] * more, R, K=K, PARTS=len(weights), RELU_SQUARED=relu_squared,
            COLUMNS=weights[0].stride(0) == 1 < weights[0].shape[1], GATE=gate is not None, BN=tile.BN, BM=tile.BM,
            BK=tile.BK, STAGES=tile.stages, APART=tile.apart, WARPS=tile.warps, PDL=bool(pdl), num_warps=tile.warps, **pdl,
        )  # fmt: skip
    return results


def low_rank(hidden: Tensor, up: Tensor, mu: list[Tensor], x: Tensor, before: Tensor, *, early: bool = False) -> tuple[Tensor, ...]:
    """x + (before - x) m_i of x and before [R,C], m_i = mu_i + tanh(hidden_i) up_i: mu_i [C], hidden [R,n,M], up [n,M,C]."""
    y = x.new_empty(len(mu), *x.shape)
    _low_rank(hidden, up, mu, x, before, y, decay=False, early=early)
    return y.unbind()


def low_rank_decay(hidden: Tensor, up: Tensor, bias: Tensor, *, early: bool = False) -> Tensor:
    """-exp(bias + tanh(hidden) up) in float32: hidden [R,M], up [M,C], bias [C]."""
    w = hidden.new_empty(hidden.shape[0], up.shape[1], dtype=torch.float32)
    _low_rank(hidden, up, [bias], hidden, hidden, w, decay=True, early=early)
    return w


def _low_rank(hidden: Tensor, up: Tensor, mu: list[Tensor], x: Tensor, before: Tensor, y: Tensor, *, decay: bool, early: bool) -> None:
    n, R, (M, C) = len(mu), hidden.shape[0], up.shape[-2:]
    BR, BC, pdl = 64, 64, launch.early(hidden.device) if early else {}
    if y.numel():
        on_device_of(hidden, few_rows.penstock_low_rank)[-(-C // BC), n, -(-R // BR)](
            hidden, up, *mu, *mu[:1] * (PARTS - n), x, before, y, R, C, PARTS=n, M=M, DECAY=decay, BM=power(M, 16), BR=BR, BC=BC,
            PRECISION=launch.precision(hidden), PDL=bool(pdl), num_warps=few_rows.WARPS, **pdl,
        )  # fmt: skip


class Lasts(NamedTuple):
    """A row of a pool of shift states that a later launch replaces, after all launches that read it. One token."""

    normed: Tensor
    """[1,C], the new row."""
    pool: Tensor
    """[P,C], contiguous rows."""
    slots: Tensor
    """[1]. A negative slot is skipped."""

    def write(self) -> None:
        """Replace the row in a launch of its own."""
        write_rows(self.normed, self.pool, self.slots)


def norm_warps(C: int) -> int:
    """Warps of ``shifted_norm``, whatever the number of rows, because bits depend on it."""
    return min(max(power(C, 16) // 512, 1), 16)


def shifted_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, pool: Tensor, slots: Tensor | None, mu: list[Tensor],
    spans: tuple[Tensor, Tensor] | None = None, *, centre: bool, complement: bool, kept: bool, early: bool = False,
) -> Shifted:  # fmt: skip
    """The norm of x + y (x if there is no y), of x and y [R,C], and its interpolations with the norm of the previous token.

    For the first token of a sequence, the previous norm is its row of the pool. The norm of the last token replaces that row.

    pool [P,C] has contiguous rows; slots [N], without them sequence n has row n. ``spans``: the index of the sequence that begins at each
    token, or -1, int32 [R]; and the first token of each sequence, and the end, int64 [N+1]. Without them each token is a sequence.
    ``complement``: m_i = 1 - mu_i, else mu_i [C].
    """
    R, C = x.shape
    total = x if y is None else torch.empty_like(x)
    normed, before = (torch.empty_like(x), torch.empty_like(x)) if kept else (x, x)
    mixed, pdl = x.new_empty(len(mu), R, C), launch.early(x.device) if early else {}
    starts, ends = spans or (x, x)
    if x.numel():
        on_device_of(x, few_rows.penstock_shifted_norm)[(R,)](
            x, x if y is None else y, total, weight, weight if bias is None else bias, pool, x if slots is None else slots, starts, ends,
            normed, before, *mu, *mu[:1] * (SHIFTS - len(mu)), mixed, R, C, pool.stride(0), eps, ADD=y is not None, CENTRE=centre,
            BIAS=bias is not None, SLOTS=slots is not None, SINGLE=spans is None, COUNT=len(mu), COMPLEMENT=complement, KEPT=kept,
            BC=power(C, 16), PDL=bool(pdl), num_warps=norm_warps(C), **pdl,
        )  # fmt: skip
        count_write(pool)
    return Shifted(total, normed, before, mixed.unbind())


REGISTERS = 168
"""The most registers of a thread that holds 64 float32 of a state, as in the kernel of updates in place."""


def step_warps(rows: int, heads: int, multiprocessors: int, size: int) -> int:
    """Warps per program of ``penstock_rwkv_step`` for tiles of ``size`` elements: few, so that sums stay within a warp.

    One warp for a head of 64: a thread then holds 128 elements of the state and 64 of ``up``. Two warps if there are no more programs than
    multiprocessors.
    """
    least = power(-(-size // 6144), 1)
    more = 2 if rows * heads <= multiprocessors else 1
    return min(least * more, 16)


def rwkv_step(
    r: Tensor, k: Tensor, v: Tensor, gate: Tensor, u: Tensor, bias: Tensor, low: Tensor | None, up: Tensor | None, pool: Tensor,
    slots: Tensor | None, weight: Tensor, shift: Tensor, eps: float, warps: int | None = None, lasts: Lasts | None = None,
) -> Tensor:  # fmt: skip
    """y [R,H,V] of a step of RWKV-6: r and k [R,H,K], v and gate [R,H,V], low [R,M], up [M,H*K], weight and shift of the norm [H*V].

    u and bias of the decay [H,K] and the pool [P,H,K,V] may have any strides; the pool is updated in place. slots [R]; without them token
    r has row r. Without low and up, the decay is -exp(bias), that of RWKV-5. ``lasts``: the row of a shift
    state to replace, of the same slot; there is one token then.
    """
    (R, H, K), V, M = r.shape, v.shape[-1], 0 if up is None else up.shape[0]
    y, BK, BV, BM, pdl = torch.empty_like(v), power(K), power(V), power(M), launch.early(v.device)
    given = low is not None
    low, up = (r, r) if low is None or up is None else (low, up)
    warps = warps or step_warps(R, H, Target.of(v.device).multiprocessors, BK * BV + given * BM * BK // 2)
    size, cuda = pool.element_size(), Target.of(v.device).nvidia
    lines = pool.data_ptr() % 16 == 0 == pool.stride(0) * size % 16 and pool.stride(1) * size % 16 == 0
    dense = lines and pool.stride()[2:] == (V, 1) and K * V * size % (16 * warps) == 0
    limit = {"maxnreg": REGISTERS} if cuda and warps <= 4 and BK * BV // (32 * warps) <= 64 else {}
    normed, old = (r, r) if lasts is None else lasts[:2]
    C, l_p = (0, 0) if lasts is None else (normed.shape[1], old.stride(0))
    if v.numel():
        on_device_of(low, step.penstock_rwkv_step)[(R * H,)](
            low, up, bias, u, r, k, v, gate, pool, r if slots is None else slots, weight, shift, y, normed, old, pool.shape[0], H,
            *bias.stride(), *u.stride(), *pool.stride(), l_p, C, eps, K=K, V=V, M=M, BK=BK, BV=BV, BM=BM, LOW_RANK=given,
            SLOTS=slots is not None, LASTS=lasts is not None, BC=power(-(-C // H)), DENSE=dense, WARPS=warps, PDL=bool(pdl), CUDA=cuda,
            num_warps=warps, enable_fp_fusion=False, **limit, **pdl,
        )  # fmt: skip
        count_write(pool)
        if lasts is not None:
            count_write(old)
    return y
