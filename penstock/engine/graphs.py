"""Steps as CUDA graphs: one launch instead of one per kernel.

A graph has a fixed number of tokens and rows. It is captured when first needed, or by ``StepGraphs.capture_all``. There are two kinds:
steps of decode rows only, and packed steps that also have pieces of prompts or of 64 tokens. The graph of a packed step reads the lengths
of rows from memory, so it serves all steps of up to its number of tokens. Unused rows have a negative slot, which skips them; unused
tokens belong to a skipped row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gpu.target import unavailable
from ..layers.adapted import NONE, chosen
from ..layers.modes import in_graph, rows_alike
from ..models import CausalLM
from .request import CHUNK
from .state_pool import StatePool
from .transfer import fill

WARM_UP = 3
"""Runs before a capture. The first one compiles kernels and looks up block sizes, which cannot be captured."""
MOST_TOKENS = 8192
"""The most tokens of the graph of a packed step. For more, the device takes about as long as Python needs for the launches: 55 ms for 24
layers of RWKV-6 with an H200, which processes 8192 tokens of a model of 1.6 billion parameters in 45 ms."""


@dataclass(frozen=True)
class Batch:
    """The rows of a step, one after another."""

    ids: Items[int]
    """Their tokens."""
    sources: Items[int]
    """For each token, the slot whose last sampled token replaces it, because the host does not know it yet; or -1."""
    ends: Items[int]
    """The begin of the first row, which is 0, and the end of each row."""
    rows: Items[int]
    """Slots of the pool; rows with negative slots are skipped."""
    adapters: Items[int] = ()
    """For each row, the number of its adapter, or ``NONE``. Empty for a model without adapters."""

    def token_adapters(self) -> list[int]:
        """The same for each token."""
        return [one for one, begin, end in zip(self.adapters, self.ends, self.ends[1:]) for _ in range(end - begin)]


@dataclass
class Graph:
    """A captured step, and the memory that it reads."""

    inputs: Tensor
    """int64: ids [T], sources [T], rows [N]; with pieces, ends [N+1]; with adapters, the adapters of tokens [T] and of rows [N]."""
    replay: Callable[[], Tensor]
    """Runs it; returns logits [N,V] in memory that the next run of any graph overwrites."""


class StepGraphs:
    """Graphs of steps over a pool.

    last : Tensor
        int64 [slots], the last sampled token of each slot.
    most_tokens : int
        Larger steps have no graph.
    block : int
        As for ``Runner``. Numbers of tokens and rows are multiples of it.
    adapters : bool
        Whether the model has adapters.
    capture : callable
        Makes a function that repeats what a function does. Default: a CUDA graph.
    """

    def __init__(
        self, model: CausalLM, pool: StatePool, last: Tensor, most_tokens: int = MOST_TOKENS, block: int = 0, adapters: bool = False,
        capture: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] | None = None,
    ) -> None:  # fmt: skip
        self._model, self._pool, self._last, self._block, self._adapters = model, pool, last, block, adapters
        self._most_tokens = self.packed_tokens(min(most_tokens, MOST_TOKENS - (block > 1)))
        self._rows = _rounded(pool.slots + 1, max(8, block))
        """Rows of packed steps. One of them takes the unused tokens."""
        self._capture = capture or self._captured
        self._graphs: dict[tuple[int, int], Graph] = {}
        """Graphs by the number of tokens and, for packed steps, of rows, else 0."""
        self._memory: Any = None

    def run(self, batch: Batch) -> Tensor | None:
        """Logits [N,V] after the last token of each row, overwritten by the next call. None if the step is too large."""
        tokens, count = len(batch.ids), len(batch.rows)
        decode = tokens == count
        T = self.decode_tokens(count) if decode else self.packed_tokens(tokens)
        if not decode and self._most_tokens < T:
            return None
        N = T if decode else self._rows
        values = [*batch.ids, *[0] * (T - tokens), *batch.sources, *[-1] * (T - tokens), *batch.rows, *[-1] * (N - count)]
        if not decode:
            values += [*batch.ends, *[T] * (N - count)]
        if self._adapters:
            values += [*batch.token_adapters(), *[NONE] * (T - tokens), *batch.adapters, *[NONE] * (N - count)]
        graph = self._graph(T, 0 if decode else N)
        fill(graph.inputs, values)
        return graph.replay()[:count]

    def capture_all(self) -> None:
        """Capture the graphs of all steps of this pool."""
        for size in sorted({self.decode_tokens(count) for count in range(1, self._pool.slots + 1)}, reverse=True):
            self._graph(size, 0)
        for size in self._packed_sizes():
            self._graph(size, self._rows)

    def decode_tokens(self, rows: int) -> int:
        """The number of tokens of the graph for decode rows: a power of two up to 16, then a multiple of 16, 32 and so on."""
        if self._block > 1:
            return _close(rows + 1, self._block)  # one more token, which is skipped
        return 1 << (rows - 1).bit_length() if rows <= 16 else _close(rows, 16)

    def packed_tokens(self, tokens: int) -> int:
        """The number of tokens of the graph for a packed step: a multiple of 64, 128 and so on."""
        return _close(tokens + (self._block > 1), CHUNK)

    def _packed_sizes(self) -> Iterator[int]:
        """The sizes of all graphs, the largest first, so that smaller graphs reuse the memory of larger ones."""
        sizes = {self.packed_tokens(tokens) for tokens in range(2, self._most_tokens + 1)}
        return iter(sorted((size for size in sizes if size <= self._most_tokens), reverse=True))

    def _graph(self, T: int, N: int) -> Graph:
        """The graph of T tokens in N rows, or of T decode rows for N = 0."""
        if (T, N) not in self._graphs:
            rows = N or T
            sizes = [T, T, rows, N + 1 if N else 0, *([T, rows] if self._adapters else [])]
            inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=self._pool.memory.device)
            ids, sources, slots, ends, *adapters = inputs.split(sizes)
            for one in (sources, slots, *adapters):
                one.fill_(-1)  # the runs before the capture change no state
            ends[1:] = T

            def step() -> Tensor:
                known = with_sampled(ids, sources, self._last)
                shaped, offsets = (known[None], ends) if N else (known[:, None], None)
                with rows_alike() if self._block else nullcontext(), in_graph(), chosen(*adapters) if adapters else nullcontext():
                    return self._model.advance(shaped, self._pool.state, cu_seqlens=offsets, slots=slots, last_only=True)

            self._graphs[T, N] = Graph(inputs, self._capture(step))
        return self._graphs[T, N]

    def _captured(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with torch.cuda.device(self._pool.memory.device):
            return self._captured_here(step)

    def _captured_here(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture a function on the current device."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):  # other threads may use the device
            logits = step()
        self._memory = graph.pool()  # shared by all graphs: only one runs at a time

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def with_sampled(ids: Tensor, sources: Tensor, last: Tensor) -> Tensor:
    """Tokens [T]. Those with a source are read from ``last``, where ``choosing.NO_TOKEN`` counts as 0."""
    if last.is_cuda and unavailable() is None:
        from .known_kernel import known_tokens

        return known_tokens(ids, sources, last)
    return torch.where(sources < 0, ids, last[sources.clamp(min=0)].clamp(min=0))


def _close(count: int, unit: int) -> int:
    """``count`` units or a little more: a multiple of ``unit``, above 8 units of 2 units, above 16 units of 4 units and so on."""
    return _rounded(count, unit << max((-(-count // unit) - 1).bit_length() - 3, 0))


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
