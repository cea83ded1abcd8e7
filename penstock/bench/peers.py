"""Peers by name: the token loop, flash-linear-attention's operators and the rungs of the CUDA ladder."""

from __future__ import annotations

from ..errors import Complaints, ImplementationRefused, RangeError
from ..verify.inputs import Inputs
from . import fla, ladder
from .candidates import Candidate, Mode, loop
from .softmax import FUNCTION

PEERS = ("loop", "fla", "fla_recurrent")
"""Peers of every variant of the recurrence. The rungs of the ladder are peers of rwkv6 only."""


def peer_names(variant: str) -> tuple[str, ...]:
    """Names of the peers of a variant of the recurrence, or of softmax attention. The first is the default."""
    return ("sdpa",) if variant == FUNCTION else (*PEERS, *ladder.RUNGS)


def peer(name: str, inputs: Inputs, mode: Mode) -> Candidate:
    """The peer of this name. Raises RangeError for an unknown name, ImplementationRefused if the peer cannot run here."""
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
