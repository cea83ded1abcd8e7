"""Chains of element-wise operations of RWKV-7 before its recurrence: one Triton kernel per chain on a GPU, as in ``fused``."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..call.functions import applied
from ..call.recompute import again
from ..tokens.dtypes import state_dtype
from .activations import sigmoid
from .chains import Chain, ChainForm, launches, plain
from .examples import Draw, examples
from .triton import launching, refusal

LARGEST = 1024
"""The most channels of a head of the kernel."""


class Learned(NamedTuple):
    """The parameters of ``recurrence_inputs``, of H*N elements each."""

    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    """[H,N]"""
    w0: Tensor
    a0: Tensor


class Mixed(NamedTuple):
    """Values that are mixed with those of layer 0."""

    v: Tensor
    """[B,T,H*N], as the others, the values of this layer."""
    mix: Tensor
    """The logits of the weights, without v0."""
    first: Tensor
    """The values of layer 0."""
    v0: Tensor
    """A parameter of H*N elements."""


class RecurrenceInputs(NamedTuple):
    """The inputs of RWKV-7's recurrence, [B,T,H,N], and what is added to its output."""

    r: Tensor
    raw: Tensor
    """The raw decay, float32 (float64 for float64 r)."""
    k: Tensor
    a: Tensor
    b: Tensor
    share: Tensor
    """[B,T,H], the sums of r k r_k, as raw."""
    v: Tensor
    values: Tensor
    """v for its other use: the backward kernel adds the gradients of both."""


def recurrence_inputs(r: Tensor, k: Tensor, w: Tensor, rate: Tensor, learned: Learned, v: Tensor | Mixed) -> RecurrenceInputs:
    r"""What RWKV-7 computes between its linear maps and its recurrence.

    .. math::
        raw = w_0 + w, \qquad l = \sigma(a_0 + rate), \qquad \kappa = normalised_H(k \cdot k\_k), \qquad a = -\kappa, \qquad b = \kappa l

        \tilde{k} = k (1 + (l - 1) k\_a), \qquad share = \langle r, \tilde{k} r\_k \rangle_H, \qquad
        \tilde{v} = v + (first - v) \cdot \sigma(v_0 + mix)

    r, k, w, rate : Tensor [B,T,H*N]
    v : Tensor [B,T,H*N] or Mixed
        A tensor is returned.

    The caller uses the r that is returned: the backward kernel adds its gradient.
    """
    H, N = learned.r_k.shape
    found = INPUTS(RecurrenceCall(r, k, w, rate, learned, v if isinstance(v, Mixed) else None))
    return RecurrenceInputs(*found, *(() if isinstance(v, Mixed) else [v.unflatten(-1, (H, N))] * 2))


class RecurrenceCall(NamedTuple):
    """The arguments of ``recurrence_inputs``."""

    r: Tensor
    k: Tensor
    w: Tensor
    rate: Tensor
    learned: Learned
    mixed: Mixed | None

    @property
    def tokens(self) -> list[Tensor]:
        """The tensors of tokens."""
        return [*self[:4], *([] if self.mixed is None else self.mixed[:3])]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters."""
        return [*self.learned, *([] if self.mixed is None else [self.mixed.v0])]

    @property
    def fits(self) -> bool:
        """Whether tokens and parameters have the sizes of their heads."""
        size = self.learned.r_k.numel()
        shape = (*self.r.shape[:-1], size)
        return all(one.shape == shape for one in self.tokens) and all(one.numel() == size for one in self.parameters)

    @property
    def tensors(self) -> list[Tensor | None]:
        """All tensors: tokens as [B,T,H,N], parameters as [H,N]."""
        return self._shaped(*self.r.shape[:2])

    @property
    def rows(self) -> list[Tensor | None]:
        """All tensors: tokens as [B*T,H,N], parameters as [H,N]."""
        return self._shaped(self.r.shape[0] * self.r.shape[1])

    def _shaped(self, *tokens: int) -> list[Tensor | None]:
        head, (*mixed, v0) = self.learned.r_k.shape, self.mixed or (None,) * 4

        def shaped(shape: tuple[int, ...], *given: Tensor | None) -> list[Tensor | None]:
            return [None if x is None else x.reshape(shape).contiguous() for x in given]

        each = (*tokens, *head)
        return [*shaped(each, *self[:4]), *shaped(head, *self.learned), *shaped(each, *mixed), *shaped(head, v0)]


def _refuses(c: RecurrenceCall) -> str | None:
    if (N := c.learned.r_k.shape[1]) > LARGEST:
        return f"it takes heads of at most {LARGEST} channels, got {N}"
    if not c.fits:
        return "sizes differ"
    if (why := refusal(*c.tokens, *c.parameters)) is not None:
        return why
    return None if all(one.dtype == c.r.dtype for one in c.tokens) else "all tokens must have one dtype"


def _by_kernel(c: RecurrenceCall) -> tuple[Tensor, ...]:
    given = [*c[:4], *c.learned, *(c.mixed or (None,) * 4)]
    function = partial(applied, launching("rwkv7_launch").Inputs, inputs_formula)
    return again(function(*given), function, *given)


def _by_formula(c: RecurrenceCall) -> tuple[Tensor, ...]:
    given: Any = c.tensors
    return again(inputs_formula(*given), inputs_formula, *given)


def drawn_inputs(draw: Draw, mixed: bool = True, single: bool = False) -> RecurrenceCall:
    """An example. ``single``: three sequences of one token."""
    (H, N), shape = (draw.size(3, 32), draw.size(24, 64)), (3, 1) if single else (1, 19)
    r, k, w, rate = (draw(name, *shape, H * N) for name in ("r", "k", "w", "rate"))
    learned = Learned(*(draw.learned(name, H, N) for name in Learned._fields))
    if not mixed:
        return RecurrenceCall(r, k, w, rate, learned, None)
    v, mix, first = (draw(name, *shape, H * N) for name in ("v", "mix", "first"))
    return RecurrenceCall(r, k, w, rate, learned, Mixed(v, mix, first, draw.learned("v0", H, N)))


INPUTS: Chain[RecurrenceCall, tuple[Tensor, ...]] = Chain(
    "rwkv7_inputs",
    ChainForm(
        "rwkv7_inputs", _by_kernel, _refuses, launches("penstock_rwkv7_inputs_fwd", backward=("penstock_rwkv7_inputs_bwd",)),
        (*examples(drawn_inputs), *examples(partial(drawn_inputs, mixed=False)), *examples(drawn_inputs, gradients=False)),
    ),
    plain("formula", _by_formula),
)  # fmt: skip


def inputs_formula(
    r: Tensor, k: Tensor, w: Tensor, rate: Tensor, k_k: Tensor, k_a: Tensor, r_k: Tensor, w0: Tensor, a0: Tensor, v: Tensor | None,
    mix: Tensor | None, first: Tensor | None, v0: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``recurrence_inputs`` of tokens [...,H,N] and parameters [H,N]: r, raw, k, a, b and share; v twice, if values are mixed."""
    narrow, wide = r.dtype, state_dtype(r.dtype)
    keys, logits = k.to(wide), rate.to(wide) + a0.to(wide)
    removed, lr = F.normalize(keys * k_k.to(wide), dim=-1), sigmoid(logits)
    keys = keys * (1 - sigmoid(-logits) * k_a.to(wide))
    share = (r.to(wide) * keys * r_k.to(wide)).sum(-1)
    found = r, w.to(wide) + w0.to(wide), keys.to(narrow), -removed.to(narrow), (removed * lr).to(narrow), share
    if v is None or mix is None or first is None or v0 is None:
        return found
    values = torch.lerp(v.to(wide), first.to(wide), sigmoid(mix.to(wide) + v0.to(wide))).to(narrow)
    return *found, values, values
