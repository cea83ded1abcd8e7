"""What the forms answer for a problem: whether one takes it, which one runs, and why not those before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch

from ...call.implementation import FormVerdict, Listed, Mode
from ...gpu import forms
from ...gpu.forms import Form, Part
from ...tokens.empty import nothing
from ...tokens.gpu_pieces import has_pieces
from ..declaration import Tokens
from . import plan, wide
from .calls import Backward, Call, InPlace, Whole
from .forms.lists import CHUNK_BACKWARD, CHUNK_FORWARD, PIECES, TOKEN_BACKWARD, TOKEN_FORWARD, TOKENS_IN_PLACE
from .forms.states import BESIDE_HOPPER
from .table_file import target

CHUNKWISE: dict[Mode, tuple[Part, ...]] = {"forward": (("forward", CHUNK_FORWARD),), "backward": (("backward", CHUNK_BACKWARD),)}
RECURRENT: dict[Mode, tuple[Part, ...]] = {
    "forward": (("forward", TOKEN_FORWARD),),
    "backward": (("backward", TOKEN_BACKWARD),),
    "advance": (("pieces", PIECES), ("tokens", TOKENS_IN_PLACE)),
}
"""The ordered lists of an implementation, by mode. In place, pieces come first if there are any."""
SUMMARY: dict[Mode, tuple[Part, ...]] = {"forward": BESIDE_HOPPER}
CALLS: dict[Mode, type[Call]] = {"forward": Whole, "backward": Backward, "advance": InPlace}


def refusal(parts: dict[Mode, tuple[Part, ...]], p: Tokens, mode: Mode) -> str | None:
    """Why no form of a list takes a problem, or None."""
    for call in _calls(p, mode):
        for _, among in _asked(parts, call, mode):
            reason = forms.refusal(among, call)
            if reason is not None:
                return reason
    return None


def verdicts(parts: dict[Mode, tuple[Part, ...]], p: Tokens, mode: Mode) -> tuple[FormVerdict, ...]:
    """The answers of the forms of a mode, up to those that run. Nothing runs without tokens."""
    if nothing(p):
        return ()
    found = chain.from_iterable(
        forms.verdicts(part + call.p.partial * f" of {call.K} key channels", among, call, _planned(call, among))
        for call in _calls(p, mode)
        for part, among in _asked(parts, call, mode)
    )
    return tuple(dict.fromkeys(found))


def verdicts_of_summary(p: Tokens) -> tuple[FormVerdict, ...]:
    """The same of a summary, whose heads are no blocks."""
    if nothing(p):
        return ()
    call = Call.of(p, target(p.q.device))
    return tuple(chain.from_iterable(forms.verdicts(part, among, call, ()) for part, among in SUMMARY["forward"]))


def listed(parts: dict[Mode, tuple[Part, ...]]) -> tuple[Listed, ...]:
    """All forms of an implementation."""
    return forms.listed(parts, target)


def _planned(call: Call, among: tuple[Form[Any, Any], ...]) -> list[str]:
    """The forms of the plan of a pass by chunks; those of other plans have no parts."""
    if not any(form.parts for form in among):
        return []
    p: Any = call.p
    if isinstance(call, Backward):
        d_output = torch.empty(p.v.shape, dtype=p.v.dtype, device="meta")
        return plan.chunk_backward_plan(p, d_output, None, call.target).forms
    return plan.chunk_forward_plan(p, call.target).forms if isinstance(call, Whole) else []


def _calls(p: Tokens, mode: Mode) -> Iterator[Call]:
    """The call of a problem or, of heads that are wider than a program, those of its blocks of key channels."""
    at = target(p.q.device)
    problems: Iterable[Any] = [p] if p.sizes["K"] <= wide.WIDTH else {one.sizes["K"]: one for one in wide.blocks(p)}.values()
    for one in problems:
        yield CALLS[mode].of(one, at)


def _asked(parts: dict[Mode, tuple[Part, ...]], call: Call, mode: Mode) -> tuple[tuple[str, tuple[Form[Any, Any], ...]], ...]:
    """The lists that a call asks."""
    if isinstance(call, InPlace) and not has_pieces(call.p):
        return parts[mode][1:]
    return parts[mode]
