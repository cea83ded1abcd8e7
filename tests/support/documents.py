"""The documents of the repository, their links and their blocks of code."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/NOTES.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")


class Block(NamedTuple):
    """A block of code between fences."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages, page=None):
    """The blocks of some languages, of all pages or of one."""
    for one in PAGES if page is None else [page]:
        text = one.read_text("utf-8")
        for found in BLOCK.finditer(text):
            if found[1] in languages:
                yield Block(one, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def links(page):
    """Links within the repository: a path, perhaps empty, and an anchor or None."""
    text = BLOCK.sub("", page.read_text("utf-8"))
    return [(found[1], found[2]) for found in LINK.finditer(re.sub(r"`[^`\n]*`", "", text))]


def anchors(page):
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.strip().lower()).replace(" ", "-") for one in headings}
