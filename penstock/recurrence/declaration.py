"""The declaration of the recurrence for the frame (``penstock.call``): two operators, over sequences and in place, a signature per variant.

B batch, T tokens, H heads, G heads of q and k, K key channels and V value channels of a head, N sequences (N = B unless packed), P rows of
a pool of states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from ..call.declaration import INDICES, Argument, Option, Result, Signature, Sizes, Wrong
from ..call.problem import Problem
from ..call.validation import finite, offsets, one_row
from ..errors import Complaints, ShapeError
from .variants import VARIANTS, Variant

if TYPE_CHECKING:
    from ..call.memory import Seen
    from ..call.operator import Operator


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of final states and of sums over time: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Tokens(Problem):
    """The problem that both operators share."""

    q: Tensor  # [B, T, G, K], [B, T, H, K] in a whole problem
    k: Tensor  # as q
    v: Tensor  # [B, T, H, V]
    g: Tensor | None  # log decay, natural logarithm, axes as variant.decay says
    u: Tensor | None  # [H, K]
    cu_seqlens: Tensor | None  # [N + 1], packed with B = 1
    scale: float
    partial: bool = False
    """Whether this is a block of the key channels of a call. Its output, and gradients shared by blocks, are then float32."""
    groups: int = 0
    """The number of heads of q and k in the call, if heads share them. Gradients of q and k may be those of groups."""

    @property
    def whole(self) -> Self:
        """The problem with q and k repeated for every head."""
        G, H = self.sizes["G"], self.sizes["H"]
        if G == H:
            return self
        whole = self.with_tensors({"q": repeated(self.q, H), "k": repeated(self.k, H)})
        whole.sizes, whole.groups = {**self.sizes, "G": H}, G
        seen: Seen | None = self.__dict__.get("seen")
        if seen is not None:
            if seen.whole is None:
                seen.whole = whole.seen
            whole.__dict__["seen"] = seen.whole
        return whole

    def shared(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of q and k summed over the heads of each group. The given ones may be per head, per part of a group, or per group."""
        G, H = self.sizes["G"], self.sizes["H"]
        if G == H:
            return gradients
        return *(None if x is None else _over_groups(x, G, self.q.dtype) for x in gradients[:2]), *gradients[2:]

    def summand(self, x: Tensor) -> torch.dtype:
        """The dtype of a result that is like x and a sum over key channels."""
        return torch.float32 if self.partial else x.dtype

    @property
    def shown(self) -> Mapping[str, int]:
        """The sizes in messages: G only where heads share q and k."""
        sizes = self.sizes
        return {axis: sizes[axis] for axis in "BTGHKVNP" if axis in sizes and (axis != "G" or sizes["G"] != sizes["H"])}

    @property
    def variant(self) -> Variant:
        """The row of the table."""
        return self.signature.about  # type: ignore[no-any-return]

    @property
    def gate(self) -> Tensor | None:
        """The decay as a view [B or 1, T or 1, H, K or 1]."""
        if self.g is None:
            return None
        axes = self.variant.decay
        if axes == "BTHK":
            return self.g
        return self.g[tuple(slice(None) if axis in axes else None for axis in "BTHK")]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[N, H, K, V]"""
        N, H, K, V = (self.sizes[axis] for axis in "NHKV")
        return N, H, K, V

    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each sequence on the token axis, on the host. Waits for the device if packed."""
        if self.cu_seqlens is None:
            return [(0, self.sizes["T"])] * self.sizes["B"]
        return list(pairwise(self.cu_seqlens.tolist()))


class Recurrence(Tokens):
    """A call over whole sequences."""

    initial_state: Tensor | None  # [N, H, K, V]
    reverse: bool
    output_final_state: bool
    flipped: bool = False
    """Set by ``forward_in_time``."""

    def forward_in_time(self) -> Recurrence:
        """The same problem with ``reverse`` undone by flipping the token axis (and, if packed, the order of sequences)."""
        if not self.reverse:
            return self
        packed, state = self.cu_seqlens is not None, self.initial_state
        flipped = self.with_tensors(
            {
                "q": self.q.flip(1),
                "k": self.k.flip(1),
                "v": self.v.flip(1),
                "g": self.g.flip(1) if self.g is not None and "T" in self.variant.decay else self.g,
                "initial_state": state.flip(0) if packed and state is not None else state,
                "cu_seqlens": self.sizes["T"] - self.cu_seqlens.flip(0) if self.cu_seqlens is not None else None,
            }
        )
        flipped.reverse, flipped.flipped = False, True
        return flipped

    def back_in_time(self, output: Tensor, final_state: Tensor) -> tuple[Tensor, Tensor]:
        """Undo ``forward_in_time`` on the results."""
        if not self.flipped:
            return output, final_state
        return output.flip(1), final_state.flip(0) if self.cu_seqlens is not None else final_state


class Advance(Tokens):
    """A call that updates states in place: sequence n starts from row ``slots[n]`` of a pool."""

    state: Tensor  # [P, H, K, V], written
    slots: Tensor | None  # [N]; None: sequence n is row n. Negative: skipped
    reverse = False
    sequences: ClassVar[Operator[Recurrence]]
    """The operator over whole sequences, whose passes update states in plain PyTorch. ``operators.py`` sets it."""


def repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of x [B,T,G,K] for the heads that share it: [B,T,heads,K]. A single head is expanded with stride 0."""
    G = x.shape[2]
    if heads == G:
        return x
    return x.expand(-1, -1, heads, -1) if G == 1 else x.repeat_interleave(heads // G, 2)


def _over_groups(x: Tensor, G: int, dtype: torch.dtype) -> Tensor:
    """The sums over consecutive heads of x [B,T,heads,K]: [B,T,G,K]."""
    return x if x.shape[2] == G else x.unflatten(2, (G, -1)).sum(3).to(dtype)


def log_decay(g: Tensor, sizes: Sizes) -> Wrong | None:
    """The rule for values of a decay."""
    g = g[tuple([slice(None) if stride else slice(1) for stride in g.stride()])]  # expanded axes repeat their values
    if not g.numel() or float(g.amax()) <= 0:  # False for NaN, which amax propagates
        return None
    missing, largest = int(g.isnan().sum()), float(g.nan_to_num(nan=-torch.inf, posinf=torch.inf).amax())
    found = [f"a largest value of {largest:g}"] * (largest > 0) + [f"{missing} times NaN"] * (missing > 0)
    remedy = "Pass log(decay): for RWKV checkpoints -exp(w), for GLA logsigmoid(x) / 16."
    return Wrong("a log decay, natural logarithm, nowhere above 0 or NaN", " and ".join(found), remedy)


def rows(slots: Tensor, sizes: Sizes) -> Wrong | None:
    """The rule for values of slots."""
    taken, count = [slot for slot in slots.tolist() if slot >= 0], sizes.get("P")
    if count is not None and any(slot >= count for slot in taken):
        return Wrong(f"below the {count} rows of state", str(max(taken)), "A negative slot skips a sequence.")
    if len(set(taken)) < len(taken):
        twice = sorted({slot for slot in taken if taken.count(slot) > 1})
        return Wrong("different for every sequence", f"{twice} more than once", "Two sequences cannot share a state.")
    return None


def _tokens(row: Variant, query: str, gate: str, nullable: bool) -> tuple[Argument, ...]:
    """The arguments that both operators share."""
    decay = " ".join(row.decay)
    return (
        Argument("q", "B T G K", label=query, gradient=True, hint="Tokens come before heads."),
        Argument(
            "k", "B T G K", like="q", gradient=True,
            hint=f"k has as many heads as {query or 'q'}; k.repeat_interleave(n, 2) repeats each of its heads n times.",
        ),
        Argument("v", "B T H V", like="q", gradient=True, hint="Tokens come before heads."),
        Argument(
            "g", decay, label=gate, nullable=nullable, gradient=True, values=log_decay, draw=F.logsigmoid, derived=row.name == "retention",
            absent="" if decay else "this variant has no decay", hint=lambda x: _other_variants(row, x.dim()),
        ),
        Argument(
            "u", "H K" if row.bonus else "", nullable=nullable, gradient=True, absent="" if row.bonus else "this variant has no bonus",
            hint="A bonus has the heads of v.",
        ),
        Argument(
            "cu_seqlens", "N+1", INDICES, required=False, values=offsets("T"), otherwise=("N", "B"), hint="N sequences have N + 1 offsets.",
        ),
    )  # fmt: skip


def _other_variants(row: Variant, axes: int) -> str:
    """A hint for a decay of a wrong shape, whose axes may fit another variant."""
    if axes == len(row.decay):
        return "A decay has the heads of v."
    others = [other.name for other in VARIANTS.values() if other.read == row.read and len(other.decay) == axes and other is not row]
    return f"A decay of {axes} axes belongs to {' or '.join(others)}." if others else ""


def _groups(query: str) -> Callable[[Complaints, Mapping[str, Tensor | None], Sizes], None]:
    """The rule that each head of q (named ``query``) and k is shared by the same number of heads of v."""

    def rule(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
        if {"q", "k", "v"} <= tensors.keys() and sizes["G"] and sizes["H"] % sizes["G"]:
            wanted = f"of shape [B,T,H,V] with H a multiple of the G = {sizes['G']} heads of {query} and k"
            shape = [sizes[axis] for axis in "BTHV"]
            remedy = f"Each head of {query} and k serves as many heads of v: give them a divisor of H, or one for every head of v."
            complaints.add(ShapeError, "v", wanted, shape, remedy)

    return rule


def _own_row(complaints: Complaints, tensors: Mapping[str, Tensor | None], sizes: Sizes) -> None:
    """The rule that without slots, sequence n is row n of a pool of N rows."""
    state = tensors.get("state")
    if tensors.get("slots", state) is None and state is not None and "N" in sizes and sizes["P"] != sizes["N"]:
        rule = f"of shape [N,H,K,V] = [{', '.join(str(sizes.get(axis, '*')) for axis in 'NHKV')}]"
        complaints.add(ShapeError, "state", rule, list(state.shape), "Pass slots= to address rows of a larger pool.")


SHARED: dict[str, Any] = {"nonempty": "G H K V", "counts": "B T N", "folded": "G H"}


def over_sequences(row: Variant) -> Signature:
    """The signature of a variant's function over whole sequences."""
    state = Argument("initial_state", "N H K V", required=False, gradient=True, hint="A state has the heads of v.")
    arguments, rules = (*_tokens(row, row.query, row.gate, False), state), (one_row, _groups(row.query))
    return Signature(row.name, arguments, row, rules=rules, layout=("T", "H"), **SHARED)


def in_place(row: Variant, function: str) -> Signature:
    """The signature of ``advance`` or ``decode_step`` for a variant."""
    slots = Argument("slots", "N", INDICES, required=False, values=rows)
    state = Argument("state", "P H K V", written=True, hint="A state has the heads of v.")
    arguments = (*_tokens(row, "", "", True), slots, state)
    return Signature(f"{function}({row.name!r})", arguments, row, rules=(one_row, _groups("q"), _own_row), **SHARED)


def _scale(value: Any, sizes: Sizes, row: Variant) -> Any:
    if value is None:
        return row.scale if row.scale is not None else sizes["K"] ** -0.5
    return value


OPTIONS = (
    Option("scale", "float", optional=True, values=finite, resolve=_scale),
    Option("reverse", "bool"),
    Option("output_final_state", "bool"),
)
ADVANCE_OPTIONS = OPTIONS[:1]
RESULTS = (Result("output", "B T H V"), Result("final_state", "N H K V", dtype=state_dtype, wanted="output_final_state"))
