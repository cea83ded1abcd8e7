"""The continuous-batching engine: one packed forward pass a step over a pool of states. See ``docs/engine.md``."""

from .engine import Engine
from .parameters import SamplingParams
from .request import Completion, Event, Result, TokenLogprobs
from .states import SequenceState

__all__ = ["Completion", "Engine", "Event", "Result", "SamplingParams", "SequenceState", "TokenLogprobs"]
