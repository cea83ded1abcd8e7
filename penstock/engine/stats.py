"""Counts of an engine, for its users and for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from .state_cache import CacheCounts
from .steps import Steps


@dataclass(frozen=True)
class Stats:
    """Current and cumulative counts of an engine."""

    running: int
    waiting: int
    slots: int
    steps: int
    prompt_tokens: int
    """Computed tokens of prompts. Those from the cache do not count."""
    generated_tokens: int
    cache_bytes: int
    cache_entries: int
    cache: CacheCounts
    prompt_budget: int
    """The most tokens of prompts in a step that also has tokens of streams."""
    pages: int = 0
    """The pages of a model with softmax attention."""
    free_pages: int = 0
    """Those that are free. Kept prefixes give way to sequences that need theirs."""

    @classmethod
    def of(cls, steps: Steps, waiting: int) -> Stats:
        """The counts after the last step."""
        pool, cache, pages = steps.pool, steps.cache, steps.pool.pages
        return cls(
            len(steps.scheduler.running), waiting, pool.slots, steps.steps, steps.prompt_tokens, steps.generated_tokens, cache.bytes,
            len(cache), cache.counts, steps.scheduler.prompt_budget if steps.pace is None else steps.pace.budget,
            *((0, 0) if pages is None else (pages.count, pages.free)),
        )  # fmt: skip
