"""The contexts in which linear maps and decode steps run: in a CUDA graph, and with bits that do not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..call import private


class Mode(NamedTuple):
    """The context in which linear maps run."""

    alike: bool = False
    """Inside ``rows_alike``."""
    graph: bool = False
    """Inside ``in_graph``."""


PLAIN = Mode()
MODE: ContextVar[Mode] = ContextVar("penstock_linear", default=PLAIN)
"""The context of eager calls."""
_counts: ContextVar[dict[tuple[object, ...], Tensor] | None] = ContextVar("penstock_counts", default=None)
"""Zeros that the launches of one context share. They run on one stream, one after another."""


@contextmanager
def _entered(**changed: bool) -> Iterator[None]:
    counts = None if changed.get("graph") else _counts.get()
    tokens = MODE.set(MODE.get()._replace(**changed)), _counts.set({} if counts is None else counts)
    try:
        yield
    finally:
        MODE.reset(tokens[0])
        _counts.reset(tokens[1])


def rows_alike() -> AbstractContextManager[None]:
    """Linear maps in this block compute each token independently of the number of tokens, to the bit, where our kernels run.

    They run without gradients: on a CPU the native kernel for any number of tokens, on a GPU a Triton kernel.
    """
    return _entered(alike=True)


def in_graph() -> AbstractContextManager[None]:
    """Launches in this block are captured in a CUDA graph, so launch overhead does not matter: few tokens take a Triton kernel.

    Enter it once per graph: memory that its launches share is allocated inside and belongs to the graph.
    """
    return _entered(graph=True)


def mode() -> Mode:
    """The current context; ``PLAIN`` in compiled graphs."""
    return PLAIN if torch.compiler.is_compiling() else MODE.get()


def refuses_graph(where: Mode) -> str | None:
    """Why a call is not in a CUDA graph whose bits may depend on the number of tokens, or None."""
    if where.alike:
        return "the call is inside rows_alike"
    return None if where.graph else "the call is not in a CUDA graph"


def ready(parameters: Sequence[Tensor | None], read: Sequence[Tensor | None]) -> bool:
    """Whether a kernel may read these tensors, made of ``parameters``, before the previous kernel ends.

    No kernel of a graph writes parameters. Outside graphs the previous kernel may update them. A copy or a cast may be its result.
    """
    if not mode().graph:
        return False
    pairs = [(one, other) for one, other in zip(parameters, read) if one is not None and other is not None]
    return all(isinstance(one, nn.Parameter) and one.data_ptr() == other.data_ptr() for one, other in pairs)


def zeros(device: torch.device, size: int) -> Tensor:
    """Zeros that all launches of the current context share; new ones outside of contexts."""
    kept, cuda = _counts.get(), device.type == "cuda"
    key = (device, private.raw_stream(device.index), torch.cuda.is_current_stream_capturing()) if cuda else (device,)
    found = None if kept is None else kept.get(key)
    if found is None:
        found = torch.zeros(size, dtype=torch.int32, device=device)
        if kept is not None:
            kept[key] = found
    return found
