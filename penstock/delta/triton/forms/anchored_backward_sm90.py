"""The backward pass of RWKV-7 on Hopper where a chunk has one anchor: the tiles of ``forms/anchored_sm90.py``, the portable walks, then one
launch for all gradients but dv.
"""

from __future__ import annotations

from collections.abc import Callable

from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan
from ....tokens.gpu_calls import sequences, tokens
from ..calls import Backward, C
from . import anchored_sm90, chunks, segments

WARPS = 8


def refuses(call: Backward) -> str | None:
    """Such calls as the forward pass takes, with values of 64 channels."""
    return anchored_sm90.refuses_values(call, d_output=call.d_output)


def _gradients(plan: Plan, call: Backward) -> None:
    """Add the launch of the gradients that are left after both walks, one program a chunk and head."""
    from ..sm90 import anchored_gradients

    p, K = call.p, call.K
    assert p.g is not None
    made = tuple([chunks.gradient(plan, call, name, K, dtype=p.q.dtype) for name in ("dq", "dk", "da", "db")])
    dg = chunks.gradient(plan, call, "dg", K, dtype=p.g.dtype)
    token, slot = Tile(C, K), Tile(C, K, 3)
    plan.launch(
        anchored_gradients.penstock_rwkv7_gradients_sm90, call.programs(call.chunks(C), 1),
        ("q", "k", "v", "a", "b", "x", "z", "d_output", "chunk_states", "d_chunk_states", *made, "g", "solved", "total", *made, dg,
         "cu_seqlens"),
        (p.scale, sequences, tokens, call.H, *call.strides("g")), WARPS,
        (*[token] * 5, slot, slot, token, slot, slot, *[token] * 4),
        K=K, PACKED=call.packed,
    )  # fmt: skip


def _backward(call: Backward) -> Plan:
    """The gradients of ``forms/chunks.py``, by segments where these fill the GPU."""
    by = segments.backward if segments.avoids(call) is None else chunks.backward
    return by(call, _gradients, anchored_sm90.tiles)


EXAMPLES = anchored_sm90.EXAMPLES[:1]
BACKWARD: Form[Backward, Callable[[Backward], Plan]] = Form("rwkv7_bwd_sm90", _backward, absent, refuses, examples=EXAMPLES)
