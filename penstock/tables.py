"""Tables of numbers for the terminal. Numbers are never cut off: columns that do not fit are folded into further tables below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

BETWEEN, EDGES = 2, 2
"""Characters between columns, and at both ends of a row."""


class Row(NamedTuple):
    """A row: its name, and a cell for each column, or none for a heading."""

    name: Text
    cells: list[Text]
    style: str
    ends: bool
    """Whether a section ends after it."""


class Numbers:
    """A table whose first column names its rows; the others are numbers, or words that belong to them.

    >>> table = Numbers("load", ["requests", "tokens/s"])
    >>> table.add("8 clients", "64", "1234")
    >>> table.print(Console(width=22, color_system=None))  # doctest: +NORMALIZE_WHITESPACE
     load       requests
     ───────────────────
     8 clients        64
    <BLANKLINE>
     load       tokens/s
     ───────────────────
     8 clients      1234
    """

    def __init__(self, first: str, columns: Sequence[str], *, title: str = "", left: Sequence[str] = ()) -> None:
        """``left``: columns of words."""
        self.first, self.columns, self.title, self.left = first, list(columns), title, left
        self.rows: list[Row] = []

    def add(self, name: str | Text, *cells: str | Text, style: str = "", ends: bool = False) -> None:
        """Add a row."""
        texts = [Text(one) if isinstance(one, str) else one for one in (name, *cells)]
        self.rows.append(Row(texts[0], texts[1:], style, ends))

    def print(self, console: Console) -> None:
        """Print as few tables as the width of the console allows."""
        for n, part in enumerate(self.parts(console.width)):
            title = self.title if n == 0 and self.title else None
            table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, padding=(0, BETWEEN - 1, 0, 0))
            table.add_column(self.first, overflow="fold", vertical="bottom")
            for column in part:
                name = self.columns[column]
                table.add_column(name, justify="left" if name in self.left else "right", overflow="fold", vertical="bottom")
            for row in self.rows:
                cells = [row.cells[column] if column < len(row.cells) else Text() for column in part]
                table.add_row(row.name, *cells, style=row.style, end_section=row.ends)
            console.print(table)

    def parts(self, width: int) -> list[list[int]]:
        """Indices of the columns of each table."""
        names = _width([Text(self.first), *(row.name for row in self.rows)])
        parts: list[list[int]] = [[]]
        taken = names
        for column, name in enumerate(self.columns):
            needed = BETWEEN + _width([Text(name), *(row.cells[column] for row in self.rows if column < len(row.cells))])
            if parts[-1] and taken + needed + EDGES > width:
                parts.append([])
                taken = names
            parts[-1].append(column)
            taken += needed
        return parts


def _width(texts: Sequence[Text]) -> int:
    return max((line.cell_len for text in texts for line in text.split("\n", allow_blank=True)), default=0)
