"""Decode steps as CUDA graphs: one launch instead of one for each kernel.

A graph has a fixed number of rows. There is one for each bucket of rows, captured when it is first needed; rows that are not needed are
skipped by a negative slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models import CausalLM
from .state_pool import StatePool

WARM_UP = 3
"""Runs before a capture: kernels are compiled and block sizes are looked up by the first, and none of it can be captured."""


@dataclass
class Graph:
    """A captured step, and the memory that it reads."""

    ids: Tensor
    """int64 [N,1]"""
    rows: Tensor
    """int64 [N]"""
    replay: Callable[[], Tensor]
    """Runs it; returns logits [N,V] in memory that the next run of any graph overwrites."""


class DecodeGraphs:
    """One token for each of some rows of a pool.

    capture : callable
        Makes a function that repeats what a function does. Default: a CUDA graph.
    """

    def __init__(
        self, model: CausalLM, pool: StatePool, capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] | None = None
    ) -> None:  # fmt: skip
        self._model, self._pool = model, pool
        self._capture = capture or self._captured
        self._graphs: dict[int, Graph] = {}
        self._memory: Any = None

    @staticmethod
    def bucket(rows: int) -> int:
        """The number of rows of the graph for ``rows``: a power of two up to 16, then a multiple of 16."""
        return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16

    def run(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Logits [N,V] after tokens [N] of rows [N] of the pool; overwritten by the next call."""
        count = len(ids)
        graph = self._graph(self.bucket(count))
        graph.ids[:count, 0] = ids
        graph.rows[:count] = rows
        graph.rows[count:] = -1
        return graph.replay()[:count]

    def _graph(self, size: int) -> Graph:
        if size not in self._graphs:
            device = self._pool.memory.device
            ids = torch.zeros(size, 1, dtype=torch.int64, device=device)
            rows = torch.full((size,), -1, dtype=torch.int64, device=device)  # so the runs before the capture change no state

            def step() -> Tensor:
                return self._model.advance(ids, self._pool.state, slots=rows, last_only=True)

            self._graphs[size] = Graph(ids, rows, self._capture(step))
        return self._graphs[size]

    def _captured(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = step()
        self._memory = graph.pool()  # of all graphs: only one runs at a time

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
