"""What the forms answer for a problem: whether one takes it, which one runs, and why not those before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from ...call.implementation import FormVerdict, Listed, Mode
from ...call.memory import exact
from ...gpu import forms, launch
from ...gpu.forms import Form, Part
from ...gpu.target import Target
from ...tokens.empty import nothing
from ...tokens.gpu_pieces import has_pieces
from ..declaration import DeltaTokens
from .calls import Backward, C, Call, Forward, InPlace
from .forms import anchored_sm90, chunks, segments
from .forms.lists import CHUNK_BACKWARD, CHUNK_FORWARD, PIECES, TOKEN_FORWARD, TOKENS_IN_PLACE

BACKWARD: tuple[Part, ...] = (("backward", CHUNK_BACKWARD),)
CHUNKWISE: dict[Mode, tuple[Part, ...]] = {"forward": (("forward", CHUNK_FORWARD),), "backward": BACKWARD}
RECURRENT: dict[Mode, tuple[Part, ...]] = {
    "forward": (("forward", TOKEN_FORWARD),),
    "backward": BACKWARD,
    "advance": (("pieces", PIECES), ("tokens", TOKENS_IN_PLACE)),
}
"""The ordered lists of an implementation, by mode. In place, pieces come first if there are any."""
PORTABLE = (
    chunks.FORWARD, chunks.BACKWARD, chunks.PIECES, segments.FORWARD, segments.BACKWARD, anchored_sm90.FORWARD,
    anchored_sm90.BACKWARD,
)  # fmt: skip
"""Forms whose pairs follow the bound of the decays: ``Call.low``, or one anchor in a chunk."""
READS_RAW = (anchored_sm90.FORWARD, anchored_sm90.BACKWARD)
"""Forms that compute log decays from raw gates themselves."""
CALLS: dict[Mode, type[Call]] = {"forward": Forward, "backward": Backward, "advance": InPlace}


def _asked(parts: dict[Mode, tuple[Part, ...]], p: DeltaTokens, mode: Mode) -> tuple[Part, ...]:
    """The lists that a problem asks."""
    return parts[mode][1:] if mode == "advance" and not has_pieces(p) else parts[mode]


def refusal(parts: dict[Mode, tuple[Part, ...]], p: DeltaTokens, mode: Mode) -> str | None:
    """Why no form of a list takes a problem, or None."""
    call = CALLS[mode].of(p, Target.of(p.q.device))
    return next((reason for _, among in _asked(parts, p, mode) if (reason := forms.refusal(among, call)) is not None), None)


def take_groups(parts: dict[Mode, tuple[Part, ...]], p: DeltaTokens, mode: Mode, d_output: Tensor | None) -> bool:
    """Whether a form of each list computes heads of q and k that groups share as they are. Equal calls share the answer."""
    if mode not in parts:
        return False
    seen = p.__dict__.get("seen")
    target, trial = launch.tried(Target.of(p.q.device))
    key = "groups", id(parts), mode, exact((d_output,)), trial
    if seen is not None and key in seen.bound:
        return bool(seen.bound[key])
    more = {"d_output": d_output} if mode == "backward" else {}
    call = CALLS[mode].of(p, target, **more)
    found = all(forms.found(among, call) is not None for _, among in _asked(parts, p, mode))
    if seen is not None:
        seen.bound[key] = found
    return found


def take_raw(parts: dict[Mode, tuple[Part, ...]], p: DeltaTokens, mode: Mode, d_output: Tensor | None) -> bool:
    """Whether the form that computes a pass of chunks reads raw gates. Equal calls share the answer."""
    if mode not in parts or p.variant.raw != "sigmoid" or p.sizes["G"] != p.sizes["H"] or p.sizes["J"] != p.sizes["H"]:
        return False
    seen = p.__dict__.get("seen")
    target, trial = launch.tried(Target.of(p.q.device))
    key = "raw", id(parts), mode, exact((d_output,)), trial
    if seen is not None and key in seen.bound:
        return bool(seen.bound[key])
    more = {"d_output": d_output} if mode == "backward" else {}
    ((_, among),) = parts[mode]
    call = CALLS[mode].of(p, target, **more)
    others = target.forms & {one.name for one in among if one not in READS_RAW}  # tried forms take log decays
    found = not others and forms.found([one for one in among if one in READS_RAW], call) is not None
    if seen is not None:
        seen.bound[key] = found
    return found


def verdicts(parts: dict[Mode, tuple[Part, ...]], p: DeltaTokens, mode: Mode) -> tuple[FormVerdict, ...]:
    """The answers of the forms of a mode, up to those that run. Nothing runs without tokens."""
    if nothing(p):
        return ()
    call = CALLS[mode].of(p, Target.of(p.q.device))
    return tuple(chain.from_iterable(_walk(part, among, call) for part, among in _asked(parts, p, mode)))


def _walk(part: str, among: Sequence[Form[Any, Any]], call: Call) -> Iterator[FormVerdict]:
    """The answers of a list, and how the portable chunk kernels compute pairs."""
    yield from forms.verdicts(part, among, call, ())
    taken = forms.first(among, call)
    pairs = chunks.pairs(call, C if taken in READS_RAW else call.low)
    if pairs is not None and taken in PORTABLE:
        yield FormVerdict("pairs", pairs, None)


def listed(parts: dict[Mode, tuple[Part, ...]]) -> tuple[Listed, ...]:
    """All forms of an implementation."""
    return forms.listed(parts, Target.of)
