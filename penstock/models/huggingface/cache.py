"""The state of sequences as a cache of transformers' ``generate``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...errors import Complaints, DtypeError, RangeError
from ...layers.arguments import mapped
from ..backbone import State

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the state in results of this version of transformers: ``cache`` since 5.24."""


class StateCache:
    """The state of B sequences, as ``past_key_values`` of ``generate``. A call of the model changes it."""

    is_compileable = False
    is_croppable = False
    is_linear = (False,)
    """``generate`` then passes only the tokens after those of the cache, as for layers of attention."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens so far, with padding."""
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row n by row ``beam_idx[n]``."""
        self.state = mapped(self.state, lambda x: x.index_select(0, beam_idx.to(x.device)))

    def activate_past_recording(self) -> None:
        """Called by ``generate``. States cannot go back, and are not asked to."""


def cache_of(name: str, past: Any, cache: Any) -> StateCache | None:
    """The state by either of its names."""
    complaints = Complaints(name)
    for argument, given in (("past_key_values", past), ("cache", cache)):
        if given is not None and not isinstance(given, StateCache):
            complaints.add(DtypeError, argument, "a StateCache", type(given).__name__, "Pass what the model returned.")
    if past is not None and cache is not None and past is not cache:
        complaints.add(RangeError, "cache", "None with past_key_values", "both", "They are names of one argument.")
    complaints.raise_any()
    found: StateCache | None = cache if past is None else past
    return found
