"""Forms of states before segments and chunks: ``segments.py`` for every call, ``segments.py`` beside chunk kernels for Hopper."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ....call.implementation import Example
from ....gpu.forms import Form
from ....gpu.hopper import Tile, absent
from ....gpu.plan import Plan, Size, Sizes
from ....tokens.gpu_calls import sequences, tokens
from ..calls import Call
from ..heads import MEDIUM, SMALL
from ..portable import segments
from ..states import StatesForm, Terms
from . import sm90


class Plain:
    """The launches of ``segments.py``."""

    EARLY = False

    @staticmethod
    def parts(call: Call) -> int:
        """Other launches have the same segments."""
        return 1

    @staticmethod
    def programs(call: Call) -> tuple[int, int]:
        """Programs of a head, and of a multiprocessor."""
        b = call.config("states")
        return math.ceil(call.K / b.BK) * math.ceil(call.V / b.BV), b.programs_per_sm

    @staticmethod
    def sums(plan: Plan, call: Call, terms: Terms, C: int, L: Size, sums: str, decays: str) -> None:
        """Of segments or chunks."""
        b = call.config("states")
        plan.launch(
            segments.penstock_segment_sums, call.programs(call.chunks(L), Plain.programs(call)[0]),
            (terms.x, terms.y, "g", sums, decays, "cu_seqlens"),
            (terms.scale, sequences, tokens, L, call.H, *terms.steps, *call.gate), b.warps, **Plain.flags(call, terms), BK=b.BK, BV=b.BV,
            C=C, STAGES=1 if L == C else b.stages, writes=(sums, decays) if call.decay else (sums,),
        )  # fmt: skip

    @staticmethod
    def walk(plan: Plan, call: Call, terms: Terms, C: int, L: Callable[[Sizes], int] | None, places: tuple[str, ...], rows: int) -> None:
        """Over sequences or segments."""
        b, owners, length = call.config("states"), call.chunks(L) if L is not None else sequences, L if L is not None else 0
        plan.launch(
            segments.penstock_chunk_states, call.programs(owners, Plain.programs(call)[0]), (terms.x, terms.y, "g", *places),
            (terms.scale, sequences, tokens, length, call.H, *terms.steps, *call.gate, *terms.start[1]), b.warps,
            **Plain.flags(call, terms), **terms.ends, SEGMENTS=L is not None, IN_ROWS=rows, BK=b.BK, BV=b.BV, C=C, STAGES=b.stages,
        )  # fmt: skip

    @staticmethod
    def flags(call: Call, terms: Terms) -> dict[str, Any]:
        """The constants that both launches share."""
        flags = {"ADJOINT": terms.adjoint, "PREVIOUS": call.previous, "REVERSE": terms.reverse}
        return call.flags | flags | ({"PRECISION": "f16"} if call.half else {})


KEYS = {SMALL.value: (4, 2), MEDIUM.value: (8, 1)}
"""By K: warps of ``segments``, and programs that fit on a multiprocessor."""
STAGES = 3
"""Of tiles that ``segments`` loads ahead. At K = 64, two programs fit on a multiprocessor."""


class Hopper:
    """The launches of ``segments.py``."""

    EARLY = True

    @staticmethod
    def parts(call: Call) -> int:
        """Programs for sums have 128 value channels where these divide V, others 64: there are twice as many segments for the sums."""
        return 1 if call.V % (2 * sm90.BV) else 2

    @staticmethod
    def programs(call: Call) -> tuple[int, int]:
        """Programs of a head, and of a multiprocessor."""
        return call.V // sm90.BV, KEYS[call.K][1]

    @staticmethod
    def sums(plan: Plan, call: Call, terms: Terms, C: int, L: Size, sums: str, decays: str) -> None:
        """Of segments; of chunks, a program computes those of a longer segment."""
        from ..sm90 import segments

        W, (warps, programs_per_sm) = Hopper.parts(call) * sm90.BV, KEYS[call.K]
        span = L
        if L == C:
            span = call.segment(C, call.V // W, programs_per_sm) or (lambda s: max(math.ceil(s["T"] / C), 1) * C)
        plan.launch(
            segments.penstock_segment_sums_sm90, call.programs(call.chunks(span), call.V // W),
            (terms.x, terms.y, *Hopper.decays(call, terms), sums, decays, "cu_seqlens"),
            (terms.scale, sequences, tokens, span, call.H, *call.gate), warps, Hopper.tiles(call, W), writes=(sums, decays), CHUNKS=L == C,
            **Hopper.flags(call, terms), STAGES=STAGES if W <= call.K else STAGES - 1,
        )  # fmt: skip

    @staticmethod
    def walk(plan: Plan, call: Call, terms: Terms, C: int, L: Callable[[Sizes], int] | None, places: tuple[str, ...], rows: int) -> None:
        """Over sequences or segments."""
        from ..sm90 import segments

        owners, length = call.chunks(L) if L is not None else sequences, L if L is not None else 0
        plan.launch(
            segments.penstock_chunk_states_sm90, call.programs(owners, call.V // sm90.BV),
            (terms.x, terms.y, *Hopper.decays(call, terms), *places),
            (terms.scale, sequences, tokens, length, call.H, *call.gate, *terms.start[1]), KEYS[call.K][0],
            Hopper.tiles(call, sm90.BV), **Hopper.flags(call, terms), **terms.ends, SEGMENTS=L is not None, IN_ROWS=rows, STAGES=STAGES,
        )  # fmt: skip

    @staticmethod
    def decays(call: Call, terms: Terms) -> tuple[str, str]:
        """The names of decays for TMA and for loads."""
        return "g" if sm90.decays_in_tiles(call.p) else terms.x, "g"

    @staticmethod
    def tiles(call: Call, W: int) -> tuple[Tile, ...]:
        """The tiles of x, W channels of y, and decays."""
        return Tile(sm90.C, call.K), Tile(sm90.C, W), Tile(sm90.C, call.K)

    @staticmethod
    def flags(call: Call, terms: Terms) -> dict[str, Any]:
        """The constants that both launches share."""
        constants = {"K": call.K, "V": call.V, "TILED": sm90.decays_in_tiles(call.p), "STATIC": "T" not in call.p.variant.decay}
        return constants | {"ADJOINT": terms.adjoint, "PREVIOUS": call.previous, "PACKED": call.packed}


def _refuses(call: Call) -> str | None:
    if sm90.parts(call.p):
        return "it takes 16 bits, these are float32"
    return sm90.other_decays(call) or sm90.size("K", call.K, tuple(KEYS)) or sm90.multiple("V", call.V, sm90.BV) or sm90.not_copied(call)


SIZES = {"B": 1, "N": 1, "T": 200, "H": 1, "G": 1}
HOPPER: StatesForm = Form(
    "segment_sums_sm90",
    Hopper,
    absent,
    _refuses,
    examples=tuple(Example("gla", torch.bfloat16, SIZES | {"K": K, "V": K}) for K in KEYS),
)
PLAIN: StatesForm = Form(
    "segment_sums", Plain, examples=(Example("simple_gla", torch.float16, SIZES | {"K": 32, "V": 32}),)
)  # fmt: skip
BESIDE_PLAIN = (("states", (PLAIN,)),)
"""The ordered list of the states where the chunk kernel is plain or has no decays per channel: their chunks may have other lengths."""
BESIDE_HOPPER = (("states", (HOPPER, PLAIN)),)
"""The same where it is a Hopper kernel for decays per channel, whose chunks have 64 tokens."""
