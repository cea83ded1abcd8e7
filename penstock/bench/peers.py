"""Peers by name: the token loop, flash-linear-attention's operators, kernels of the delta rule and the rungs of the CUDA ladder."""

from __future__ import annotations

from ..call.families import functions
from ..errors import Complaints, ImplementationRefused, RangeError
from ..verify.inputs import Inputs
from . import delta_peers, fla, ladder
from .candidates import Candidate, Mode, loop
from .softmax import FUNCTION

PEERS = ("loop", "fla", "fla_recurrent")
"""Peers of every variant of the recurrence and of the delta rule. The rungs of the ladder are peers of rwkv6 only."""


def peer_names(variant: str) -> tuple[str, ...]:
    """Names of the peers of a variant, or of softmax attention. The first is the default."""
    if variant == FUNCTION:
        return ("sdpa",)
    if functions()[variant].name == "delta":
        return (*PEERS, *(("fla_bounded",) if variant in fla.BOUNDED else ()), *delta_peers.names(variant))
    return (*PEERS, *ladder.RUNGS)


def peer(name: str, inputs: Inputs, mode: Mode) -> Candidate:
    """The peer of this name. Raises RangeError for an unknown name, ImplementationRefused if the peer cannot run here.

    A peer of the delta rule that cannot run here is a candidate that refuses every call.
    """
    if name in ladder.RUNGS:
        return ladder.rung(name, inputs, mode)
    if name == "loop":
        return loop(inputs)
    known = peer_names(inputs.variant)
    if name not in known:
        complaints = Complaints("bench")
        complaints.add(RangeError, "peer", f"one of {', '.join(known)}", repr(name))
        complaints.raise_any()
    if name in delta_peers.PACKAGES:
        return delta_peers.candidate(name, inputs, mode)
    reason = fla.unavailable(inputs.q.device)
    if reason is not None and inputs.family.name == "delta":
        return delta_peers.refusing(name, reason)
    if reason is not None:
        raise ImplementationRefused(f"bench: peer {name} cannot be timed here: {reason}.")
    return fla.candidate(recurrent=name == "fla_recurrent", bounded=name == "fla_bounded")
