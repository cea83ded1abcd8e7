"""A short depthwise causal convolution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..call.functions import applied
from ..call.recompute import again
from .chains import Chain, ChainForm, launches, plain
from .examples import Draw, examples
from .sequences import Sequences, drawn
from .triton import launching, refusal

WIDTH = 8
"""The largest W of the kernels, because each input of a sum takes a register."""


class ShortConvolution(nn.Conv1d):
    r"""Causal depthwise convolution, then silu.

    .. math:: y_{t,c} = silu(b_c + \sum_{j=0}^{W-1} w_{c,j} x_{t-W+1+j,c})

    The state of a sequence is its last W - 1 inputs. Sums run over j in order, so a result depends neither on the other tokens of the
    call nor on where a sequence is cut. On a GPU, each pass is one Triton kernel, which computes in float32 and rounds once.

    hidden_size : int
        C. The weight is [C,1,W], as in ``nn.Conv1d``.
    width : int
        W, at least 1. Above 8, PyTorch computes.
    bias : bool
        Whether there is b.
    """

    def __init__(self, hidden_size: int, width: int, bias: bool, activation: Literal["silu"] | None = "silu") -> None:
        super().__init__(hidden_size, hidden_size, width, groups=hidden_size, bias=bias)
        self.activation = activation

    def initial_state(self, count: int, like: Tensor) -> Tensor:
        """Zeros [count,W-1,C]."""
        return like.new_zeros(count, self.kernel_size[0] - 1, self.in_channels)

    def forward(self, x: Tensor, state: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map x [B,T,C] after the inputs ``state`` [N,W-1,C] to y of the same shape; and the new state.

        In place, ``state`` is a pool [P,W-1,C]. A kernel updates its rows and returns the pool; else the new state is [N,W-1,C].
        """
        return short_convolution(x, state, self.weight.squeeze(1), self.bias, sequences, silu=self.activation is not None)


def short_convolution(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, sequences: Sequences, *, silu: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``ShortConvolution`` with these parameters, the weight as [C,W]."""
    y, after = CONVOLUTION(_Convolution(x, sequences.entering(x, state), weight, bias, sequences.here, silu))
    return y, sequences.ending(after, state)


def convolved(
    convolutions: Sequence[nn.Module], parts: Sequence[Tensor], tails: Tensor, sequences: Sequences
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Convolutions, each of its own x [B,T,C_n] after its own inputs in ``tails`` [N,W-1,sum of C_n]: all y, and the new tails."""
    before = tails.split([part.shape[-1] for part in parts], -1)
    pairs = [one(part, tail, sequences) for one, part, tail in zip(convolutions, parts, before)]
    after = tuple(tail for _, tail in pairs)
    if any(one is other for one, other in zip(after, before)):  # in place: a kernel may have updated only some of them
        sequences.write(before, after)
    else:
        tails = torch.cat(after, -1)
    return [part for part, _ in pairs], tails


class _Convolution(NamedTuple):
    """The arguments of a ``ShortConvolution``, with its weight as [C,W]."""

    x: Tensor
    state: Tensor
    weight: Tensor
    bias: Tensor | None
    sequences: Sequences
    silu: bool


def _refuses(c: _Convolution) -> str | None:
    C, W = c.weight.shape
    if W > WIDTH:
        return f"it takes widths of at most {WIDTH}, got {W}"
    return refusal(c.x, c.state, c.weight, c.bias) if c.x.shape[-1] == C else f"its weight has {C} channels, x has {c.x.shape[-1]}"


def _refuses_in_place(c: _Convolution) -> str | None:
    if torch.is_grad_enabled():
        return "gradients are on"
    if not c.sequences.in_place:
        return "states are not updated in place"
    state = c.state
    if not state.shape[0] or state.dtype != c.x.dtype or state.stride(-1) != 1:
        return f"it takes a pool of the inputs' dtype with contiguous channels, got {state.dtype} with stride {state.stride(-1)}"
    return _refuses(c)


def _in_place(c: _Convolution) -> tuple[Tensor, Tensor]:
    launch, sequences, state = launching("convolution_launch"), c.sequences, c.state
    rows, weight, bias = launch.rows_of(c.x), c.weight.contiguous(), None if c.bias is None else c.bias.contiguous()
    slots = None if sequences.slots is None else sequences.slots.contiguous()
    if sequences.single:
        y: Tensor = launch.step(rows, state, slots, weight, bias, silu=c.silu)
    else:
        y = launch.convolved(rows, state, sequences.starts, slots, weight, bias, silu=c.silu)
        launch.tails(rows, state, sequences.bounds, slots, in_place=True)
    return y.view(c.x.shape), state


def _whole(c: _Convolution) -> tuple[Tensor, Tensor]:
    launch, sequences, silu = launching("convolution_launch"), c.sequences, c.silu
    weight, bias = c.weight.contiguous(), None if c.bias is None else c.bias.contiguous()
    formula = partial(convolution_formula, sequences=sequences, silu=silu)
    tail = launch.with_contiguous_channels(sequences.read(c.state).to(c.x.dtype))
    y, after = applied(launch.Convolution, c.x, tail, sequences.starts, sequences.bounds, weight, bias, silu, formula)

    def function(x: Tensor, tail: Tensor, starts: Tensor, *learned: Tensor | None) -> Tensor:
        found: Tensor = launch.convolved(launch.rows_of(x), tail, starts, None, *learned, silu=silu)
        return found

    return again(y, function, c.x, tail, sequences.starts, weight, bias), after


def _by_formula(c: _Convolution) -> tuple[Tensor, Tensor]:
    sequences = c.sequences
    return convolution_formula(c.x, sequences.read(c.state), c.weight, c.bias, sequences=sequences, silu=c.silu)


def _in_place_kernels(c: _Convolution) -> tuple[str, ...]:
    return ("penstock_convolution_step",) if c.sequences.single else _kernels(c)


def _kernels(c: _Convolution) -> tuple[str, ...]:
    tails = ("penstock_convolution_tails",) if c.weight.shape[1] > 1 else ()
    return launches("penstock_convolution_fwd", *tails, backward=("penstock_convolution_bwd",))(c)


def _draw(draw: Draw, pooled: bool = False, single: bool = False) -> _Convolution:
    C = draw.size(72, 4352)
    x, ends = draw("x", *((3, 1) if single else (1, 19)), C), [] if single else [0, 7, 7, 19]
    sequences = drawn(draw, x, ends, [4, 0, 2] if pooled else [], in_place=pooled)
    state = draw("state", 5 if pooled else 3, 3, C, fixed=True)
    return _Convolution(x, state, draw("weight", C, 4), draw("bias", C), sequences, True)


def _written(c: _Convolution, returned: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The result and the state, without its gradient; in place, the pool."""
    y, state = returned
    if c.sequences.in_place and state is not c.state:
        c.sequences.write((c.state,), (state,))
    return y, c.state if c.sequences.in_place else state.detach()


CONVOLUTION: Chain[_Convolution, tuple[Tensor, Tensor]] = Chain(
    "convolution",
    ChainForm(
        "convolution_in_place", _in_place, _refuses_in_place, _in_place_kernels,
        (
            *examples(partial(_draw, pooled=True), gradients=False),
            *examples(partial(_draw, pooled=True, single=True), gradients=False),
        ),
    ),
    ChainForm("convolution", _whole, _refuses, _kernels, examples(_draw)),
    plain("formula", _by_formula),
    results=_written,
)  # fmt: skip


def convolution_formula(
    x: Tensor, tail: Tensor, weight: Tensor, bias: Tensor | None, *, sequences: Sequences, silu: bool
) -> tuple[Tensor, Tensor]:
    """``ShortConvolution`` of x [B,T,C] or [B*T,C]: y of the same shape and the new tail, for ``tail`` [N,W-1,C] and a weight [C,W]."""
    W, shape = weight.shape[1], x.shape
    rows, windows, tail = sequences.extended(x.view(sequences.batch, sequences.tokens, shape[-1]), tail)
    T, weight = rows.shape[1] - W + 1, weight.to(x.dtype)
    y = rows[:, :T] * weight[:, 0] if bias is None else torch.addcmul(bias.to(x.dtype), rows[:, :T], weight[:, 0])
    for j in range(1, W):
        y = torch.addcmul(y, rows[:, j : j + T], weight[:, j])
    y = windows(y).view(shape)
    return nn.functional.silu(y) if silu else y, tail
