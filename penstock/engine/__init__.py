"""The continuous-batching engine: one packed forward pass a step over a pool of states. See ``docs/engine.md``."""

from .engine import Engine
from .request import Completion, Event, Result, SamplingParams, TokenLogprobs
from .states import SequenceState

__all__ = ["Completion", "Engine", "Event", "Result", "SamplingParams", "SequenceState", "TokenLogprobs"]
