"""What we are compared with, by name: the token loop, fla's operators, the rungs of the ladder."""

from __future__ import annotations

from ..errors import Complaints, ImplementationRefused, RangeError
from ..verify.inputs import Inputs
from . import fla, ladder
from .candidates import Candidate, Mode, loop

PEERS = ("loop", "fla", "fla_recurrent")
"""Beside the rungs, which have names of their own."""


def peer(name: str, inputs: Inputs, mode: Mode) -> Candidate:
    """Take the peer of this name, or raise an error that says why it cannot be had."""
    if name in ladder.RUNGS:
        return ladder.rung(name, inputs, mode)
    if name == "loop":
        return loop(inputs)
    if name not in PEERS:
        complaints = Complaints("bench")
        complaints.add(RangeError, "peer", f"one of {', '.join(PEERS)}", repr(name))
        complaints.raise_any()
    reason = fla.unavailable(inputs.q.device)
    if reason is not None:
        raise ImplementationRefused(f"bench: peer {name} cannot be timed here: {reason}.")
    return fla.candidate(recurrent=name == "fla_recurrent")
