"""The sequences of one call: where their tokens are in x, and which rows of the state pools belong to them.

All index tensors are computed on the device of x and cached, so a model computes them once for all of its layers. The host never waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Indices
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..call.validation import known_values
from ..delta import functional as delta
from ..delta.variants import VARIANTS
from ..errors import Complaints, ShapeError, described
from ..recurrence import functional
from . import pool_rows
from .chains import operated
from .examples import Draw

State = TypeVar("State", bound=tuple[Any, ...])
Kept = TypeVar("Kept")


class LastTokens(NamedTuple):
    """A new state that ``Sequences.write`` reads from packed tokens: the last token of each sequence."""

    x: Tensor
    """[1,T,C]"""
    before: Callable[[], Tensor]
    """Makes the states of empty sequences, [N,C]."""


class Sequences:
    """N sequences in x [B,T,C]: the B rows, or with ``cu_seqlens`` [N+1] pieces of one row (B = 1).

    ``in_place``: states are rows of pools and updated in place; sequence n is row ``slots[n]``, without slots row n. A negative slot
    skips its sequence: no row changes, and its output is undefined.
    """

    halves: bool = False
    """Whether the model divides its residual stream in this call, see ``halving``."""
    halvings: int = 0
    """How many times the residual stream has been divided by 2 at the current layer. Layers set it."""

    def __init__(self, x: Tensor, cu_seqlens: Tensor | None = None, slots: Tensor | None = None, *, in_place: bool = False) -> None:
        self.batch, self.tokens = x.shape[:2]
        self.device = x.device
        self.cu_seqlens, self.slots, self.in_place = cu_seqlens, slots, in_place
        self.count = self.batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self._kept: dict[Any, Any] = {}

    def _once(self, name: Any, make: Callable[[], Kept]) -> Kept:
        """The result of ``make``, cached at the first use, except in compiled graphs: ``checkpoint`` allows no writes to it there."""
        if torch.compiler.is_compiling():
            return make()
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]  # type: ignore[no-any-return]

    @property
    def here(self) -> Sequences:
        """The sequences whose tokens are in x: these, unless other ranks have some of their tokens (``SlicedSequences``)."""
        return self

    @property
    def ends(self) -> Tensor:
        """``cu_seqlens`` as int64."""
        assert self.cu_seqlens is not None
        return self._once("ends", lambda: self.cu_seqlens.long().contiguous())  # type: ignore[union-attr]

    @property
    def owner(self) -> Tensor:
        """The sequence of each token of a packed row: int64 [T]."""
        return self._once("owner", lambda: torch.searchsorted(self.ends[1:], self._range(self.tokens), right=True))

    @property
    def single(self) -> bool:
        """Whether each row of x is a sequence of one token."""
        return self.cu_seqlens is None and self.tokens == 1

    @property
    def starts(self) -> Tensor:
        """For each token of x, row after row, the sequence that begins with it, or -1: int32 [B*T]."""

        def make() -> Tensor:
            if self.cu_seqlens is not None:
                return torch.where(self._range(self.tokens) == self.ends[self.owner], self.owner, -1).int()
            token = self._range(self.batch * self.tokens)
            return torch.where(token % self.tokens == 0, token // self.tokens, -1).int() if self.tokens else token.int()

        return self._once("starts", make)

    @property
    def bounds(self) -> Tensor:
        """The first token of each sequence among those of x, row after row, and the end: int64 [N+1]."""
        if self.cu_seqlens is not None:
            return self.ends
        return self._once("bounds", lambda: self._range(self.count + 1) * self.tokens)

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence in this call: int64 [N]."""
        if self.cu_seqlens is None:
            return self._once("lengths", lambda: torch.full((self.count,), self.tokens, dtype=torch.int64, device=self.device))
        return self._once("lengths", self.ends.diff)

    def positions(self, before: Tensor) -> Tensor:
        """The position of each token [B,T], for sequences with ``before`` [N] earlier tokens."""
        if self.cu_seqlens is None:
            return before[:, None] + self._range(self.tokens)
        return ((before - self.ends[:-1])[self.owner] + self._range(self.tokens))[None]

    def last(self, x: Tensor) -> Tensor:
        """The last token [N,C] of each sequence of x [B,T,C]. For an empty sequence: any token, or zeros if there are none."""
        if self.tokens == 0:
            return x.new_zeros(self.count, x.shape[-1])
        if self.cu_seqlens is None:
            return x[:, -1]
        return x[0].index_select(0, self._once("last", lambda: (self.ends[1:] - 1).clamp(min=0)))

    def entering(self, x: Tensor, tails: Tensor) -> Tensor:
        """The W rows before the first token in x [B,T,C] of each sequence ``here``. ``tails`` [N,W,C]: the rows before all sequences."""
        return tails

    def ending(self, after: Tensor, before: Tensor) -> Tensor:
        """The new states of all sequences, from those of the sequences ``here``. ``before``: the states that were given."""
        return after

    def extended(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
        """Put the ``tail`` [N,W,C] of each sequence before its tokens.

        Returns the tokens with their tails [B,T',C]; a function that selects from [B,T'-W,C], one element per window of W + 1 tokens, the
        windows that end at a token of x, [B,T,C]; and the new tail [N,W,C].
        """
        W, tail = tail.shape[1], tail.to(x.dtype)
        if self.cu_seqlens is None:
            rows = torch.cat([tail, x], 1)
            return rows, lambda windows: windows, rows[:, self.tokens :].clone()  # a view would keep all tokens in memory
        source, windows, tails = self._layout(W)
        rows = torch.cat([tail.flatten(0, 1), x[0]]).index_select(0, source)
        return rows[None], lambda given: given.index_select(1, windows), rows.index_select(0, tails).view(tail.shape)

    def _layout(self, W: int) -> tuple[Tensor, Tensor, Tensor]:
        """For packed sequences: sequence n has rows ``ends[n] + n W`` to ``ends[n+1] + (n+1) W``, its tail first."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            N, T = self.ends.shape[0] - 1, self.tokens
            windows = self._range(T) + self.owner * W  # of token t: its row minus W
            shift = self._range(N) * W
            tail_rows = ((self.ends[:-1] + shift)[:, None] + self._range(W)).flatten()
            rows = torch.cat([tail_rows, windows + W])
            source = torch.empty_like(rows).scatter_(0, rows, self._range(N * W + T))
            return source, windows, ((self.ends[1:] + shift)[:, None] + self._range(W)).flatten()

        return self._once(W, make)

    def shifted(self, x: Tensor, last: Tensor) -> tuple[Any, Any]:
        """The token before each sequence [N,C], from the states ``last``; and the last tokens, which are the new states [N,C]."""
        if self.in_place and self.slots is not None and self.tokens and pool_rows.reads_rows(x, last):
            rows = pool_rows.PoolRows(last, self.slots.contiguous(), lambda: self.read(last))
            return rows, x[:, -1] if self.cu_seqlens is None else LastTokens(x, rows.read)
        read = self.read(last).to(x.dtype)
        if self.tokens == 0:
            return read, read
        if self.cu_seqlens is None:
            return read, x[:, -1] if self.in_place else x[:, -1].clone()  # a view would keep all tokens in memory
        return read, self._last_or(x, read)

    def _last_or(self, x: Tensor, last: Tensor) -> Tensor:
        """The last token of each sequence; for an empty one, its row of ``last`` [N,C]."""
        return torch.where(self._once("given", lambda: (self.lengths > 0)[:, None]), self.last(x), last)

    def recur(
        self, variant: str, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, state: Tensor, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence ``variant`` from ``state``: the output [B,T,H,V], and the new state or, in place, the same pool."""
        # Layers compute valid decays, except for NaN, which propagates: a NaN in one sequence does not fail the other sequences of a call.
        options: dict[str, Any] = {"scale": scale}
        with nullcontext() if torch.compiler.is_compiling() else known_values("g"):
            if self.in_place:
                g, u = (*gates, None, None)[:2]
                options |= {"state": state, "slots": self.slots, "cu_seqlens": self.cu_seqlens}
                return operated(functional.advance, variant, q, k, v, g, u, **options), state
            if variant == "retention" and gates:
                options["g"], gates = gates[0], ()
            output, after = operated(getattr(functional, variant), q, k, v, *gates, **options, **self._from(state))
            return output, state if after is None else after

    def delta_rule(
        self, variant: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, state: Tensor, **inputs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the delta rule ``variant`` from ``state``: the output [B,T,H,V], and the new state or, in place, the same pool.

        ``g`` is the log decay or the raw gate. ``inputs`` are the other arguments of the variant's function, by name.
        """
        with nullcontext() if torch.compiler.is_compiling() else known_values("g"):
            if self.in_place:
                inputs |= {"state": state, "slots": self.slots, "cu_seqlens": self.cu_seqlens}
                return operated(delta.advance, variant, q, k, v, g, **inputs), state
            row = VARIANTS[variant]
            inputs |= {row.query: q, "k": k, "v": v} | ({row.gate: g} if row.gate else {})
            output, after = operated(getattr(delta, variant), **inputs, **self._from(state))
            return output, state if after is None else after

    def _from(self, state: Tensor) -> dict[str, Any]:
        """The options of a recurrence from these states."""
        return {"cu_seqlens": self.cu_seqlens, "initial_state": state, "output_final_state": True}

    def read(self, pool: Tensor) -> Tensor:
        """The rows [N,...] of the sequences. A skipped sequence gets another sequence's row, or zeros if the pool has no rows."""
        if self.slots is None:
            return pool
        return pool.index_select(0, self._rows) if pool.shape[0] else pool.new_zeros(self.count, *pool.shape[1:])

    def write(self, pools: State, states: State) -> None:
        """Write new states [N,...] to rows of their pools. If the new state is the pool itself, a kernel has written it."""
        for pool, state in zip(pools, states):
            if isinstance(pool, tuple):  # a part with parts of its own
                self.write(pool, state)
                continue
            if isinstance(state, LastTokens):
                assert self.slots is not None
                if pool_rows.write_rows(state.x[0], pool, self.slots, self.ends):
                    continue
                state = self._last_or(state.x, state.before().to(state.x.dtype))
            if state is pool or state.numel() == 0 or pool.numel() == 0:
                continue
            if self.slots is None:
                pool.copy_(state)
                continue
            if pool_rows.write_rows(state, pool, self.slots):
                continue
            # A skipped sequence writes the same values to the same row as the sequence with the highest slot. If all are skipped,
            # they write the values of row 0 back.
            state = torch.where(self.slots.amax() >= 0, state.to(pool.dtype), self.read(pool))
            pool.index_copy_(0, self._rows, state.index_select(0, self._writers))

    @property
    def places(self) -> Tensor | None:
        """``slots`` as contiguous int64."""
        slots = self.slots
        return None if slots is None else self._once("places", lambda: slots.long().contiguous())

    @property
    def _rows(self) -> Tensor:
        """The row that each sequence reads and writes."""
        assert self.slots is not None
        slots = self.slots.long()
        return self._once("rows", lambda: torch.where(slots < 0, slots.amax().clamp(min=0), slots) if self.count else slots)

    @property
    def _writers(self) -> Tensor:
        """The sequence whose state each sequence writes."""
        slots = self.slots
        assert slots is not None
        return self._once("writers", lambda: torch.where(slots < 0, slots.argmax(), self._range(self.count)))

    def _range(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)


def drawn(draw: Draw, x: Tensor, ends: Indices[int] = (), slots: Indices[int] = (), *, in_place: bool = False) -> Sequences:
    """The sequences of tokens x in an example."""
    made = [draw.whole(given) if given else None for given in (ends, slots)]
    return Sequences(x, *made, in_place=in_place)


def adopt(pool: Any, returned: Any) -> None:
    """Write the state that a module returned to its pool, if it is not the pool itself: a hook or wrapper may return another tensor."""
    if returned is pool:
        return
    if isinstance(pool, tuple) and isinstance(returned, tuple) and len(pool) == len(returned):
        for one, other in zip(pool, returned):
            adopt(one, other)
    elif isinstance(pool, Tensor) and isinstance(returned, Tensor) and pool.shape == returned.shape:
        pool.copy_(returned)
    else:
        complaints, rule = Complaints("advance"), "the pool that the module was called with, or one of its shape"
        found = list(returned.shape) if isinstance(returned, Tensor) else described(returned)
        complaints.add(ShapeError, "the state that a hook or wrapper returns", rule, found, "Return what the wrapped module returned.")
        complaints.raise_any()
