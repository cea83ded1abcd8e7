"""What a walk over chunks on Hopper reads and writes, by the names of a plan: over whole sequences, or over pieces in place."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....gpu.plan import Plan, Size, chunks
from ....tokens.gpu_calls import batch, sequences, tokens
from ..calls import C, Call, Forward, InPlace
from .chunks import State, start


class Walk(NamedTuple):
    """Where a walk begins and what it writes; None: not wanted."""

    number: Size
    """Of sequences, at most."""
    initial: State
    output: str | None = None
    final: str | None = None
    kept: tuple[str, str] | None = None
    """For the backward pass: E, or W of KDA, and the states before chunks."""
    powers: tuple[str, str] | None = None
    """Those of two that value channels of both lack in float16."""
    piece: int = 0
    """Tokens of a piece, if states are updated in place."""
    rows: str = ""
    narrow: bool = False
    """Whether the pool has 16 bits."""

    def constants(self, call: Call) -> dict[str, Any]:
        """Those of the kernels, in their order."""
        wanted = {"INITIAL": self.initial[0] is not None, "OUTPUT": self.output is not None, "KEEP": self.kept is not None}
        return {**wanted, "PACKED": call.packed, "PIECE": self.piece, "ROWS_GIVEN": bool(self.rows), "NARROW": self.narrow}


def keeps(call: Forward) -> bool:
    """Whether the forward pass keeps residuals. Many short sequences have more slots than tokens."""
    return call.keep and chunks(call.T, C, call.N, call.packed) * C <= 2 * call.B * call.T


def over_sequences(plan: Plan, call: Call, output: bool, keep: bool, transposed: bool = True, powers: bool = False) -> Walk:
    """Adds ``output`` and ``final_state`` if ``output``; ``errors`` and ``chunk_states`` [V,K], or [K,V], if ``keep``.

    ``powers``: what is kept has powers of two, ``error_powers`` and ``state_powers``.
    """
    p, H, K, V, slots = call.p, call.H, call.K, call.V, call.chunks(C)
    walk = Walk(sequences, start(call))
    if output:
        made = plan.empty("output", batch, tokens, H, V, dtype=p.v.dtype)
        walk = walk._replace(output=made, final=plan.empty("final_state", sequences, H, K, V))
    if keep:
        state = (V, K) if transposed else (K, V)
        made = plan.empty("errors", slots, H, C, V, dtype=p.q.dtype)
        walk = walk._replace(kept=(made, plan.empty("chunk_states", slots, H, *state, dtype=p.q.dtype)))
    if keep and powers:
        walk = walk._replace(powers=(plan.empty("error_powers", slots, H, V), plan.empty("state_powers", slots, H, V)))
    return walk


def over_pieces(call: InPlace, output: str, piece: int) -> Walk:
    """From and to the rows of the pool. No bit depends on how the kernels are compiled: multiply-adds are not fused."""
    narrow = call.p.state.element_size() < 4
    return Walk(call.with_piece(piece), call.pool, output, piece=piece, rows=call.rows, narrow=narrow)
