"""States outside of slots: kept prefixes, and those of waiting sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .pages import PagePool, SharedPages, pages_of

OBJECTS = 2048
"""Bytes of the Python objects of a state in the cache: about thirty, 1.9 KB. Small models have states of less than that."""


@dataclass(eq=False)
class KeptState:
    """A row of the pool, and the logits after its last token if they are known."""

    row: Tensor
    """[1,W], or [2,W]: the live and the aligned row."""
    logits: Tensor | None = None
    """[vocab_size]"""
    pages: SharedPages | Tensor | None = None
    """With softmax attention: references to pages of the pool, or a copy [n,W] on the host, of the tokens of the first row."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with those of the objects that hold it, and without those of the pool."""
        pages = self.pages.nbytes if isinstance(self.pages, Tensor) else 0
        return OBJECTS + self.row.nbytes + pages + (0 if self.logits is None else self.logits.nbytes)

    def to_host(self) -> KeptState:
        """A copy on the host."""
        logits = None if self.logits is None else self.logits.cpu()
        return KeptState(self.row.cpu(), logits, self._on_host())

    def to(self, device: torch.device, pool: PagePool | None) -> KeptState | None:
        """A copy on a device. None if the pool has too few pages."""
        pages = self.pages
        if pool is not None and isinstance(pages, Tensor):
            pages = pool.returned(pages)
            if pages is None:
                return None
        return KeptState(self.row.to(device), None if self.logits is None else self.logits.to(device), pages)

    def with_pages_on_host(self) -> KeptState:
        """The same with a copy of its pages."""
        return replace(self, pages=self._on_host())

    def first_pages(self, tokens: int, first: int) -> Tensor | None:
        """A copy of the pages of the first ``first`` of ``tokens`` tokens, a multiple of 64."""
        pages = self._on_host()
        return pages if pages is None else pages[: len(pages) - (pages_of(tokens) - pages_of(first))]

    def _on_host(self) -> Tensor | None:
        return self.pages.copied().cpu() if isinstance(self.pages, SharedPages) else self.pages
