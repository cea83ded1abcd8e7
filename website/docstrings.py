"""Docstrings as Markdown, for the reference.

They have plain text, ``name : type`` with an indented meaning for arguments, ``.. math::`` and examples with ``>>>``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

ENTRY = re.compile(r"(\**\w[\w*]*(?:, [\w*]+)*) : (.+)")
MATH = re.compile(r"\.\. math::(.*)")
FORMULA = re.compile(r":math:`([^`]+)`")
WORDS = "diag|scale|softplus|silu|relu|norm|clamp|loss|label|step|lse"
CODE = re.compile(r"``(.+?)``", re.DOTALL)


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    lines, written = inspect.cleandoc(text).split("\n"), []
    while lines:
        line = lines.pop(0)
        if line.startswith(">>> "):
            written += ["```pycon", line, *_until(lines, lambda one: not one), "```"]
        elif found := MATH.fullmatch(line):
            formula = found[1] or " ".join(map(str.strip, _indented(lines)))
            written += ["", *_mathml(formula), ""]
        elif found := ENTRY.fullmatch(line):
            meaning = [one[4:] for one in _indented(lines)] or ["-"]
            written += ["", f"`{found[1]}` *{_escaped(found[2])}*", *_definition(meaning)]
        elif line.endswith("::"):
            written += ["", line[:-1], "", *_indented(lines, skip=True), ""]
        else:
            written.append(line if line.startswith("    ") else _inline(line))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(written)).strip()


def _until(lines: list[str], ends: Any) -> list[str]:
    found = []
    while lines and not ends(lines[0]):
        found.append(lines.pop(0))
    return found


def _indented(lines: list[str], skip: bool = False) -> list[str]:
    """The next lines that are indented, with blank lines between them if ``skip``."""
    found = []
    while lines and (lines[0].startswith("    ") or (not lines[0] and any(skip and one.startswith("    ") for one in lines[:2]))):
        found.append(lines.pop(0))
    return found


def _definition(lines: list[str]) -> list[str]:
    text = _inline("\n".join(lines)).split("\n")
    return [f":   {text[0]}", *(f"    {line}" for line in text[1:]), ""]


def _inline(text: str) -> str:
    """Formulas and code within lines."""
    return CODE.sub(r"`\1`", FORMULA.sub(lambda found: convert(_named(found[1])), text))


def _escaped(text: str) -> str:
    return CODE.sub(r"`\1`", text.replace("*", r"\*"))


def _mathml(formula: str) -> list[str]:
    """A line of MathML for each part of a formula, which browsers show without scripts."""
    return [f'<div class="formula">{convert(part.strip().rstrip(","))}</div>' for part in _named(formula).split(r"\qquad")]


def _named(formula: str) -> str:
    """Names of more than one letter upright."""
    return re.sub(rf"(?<![\\\w])({WORDS})(?![a-z])", r"\\mathrm{\1}", formula)


class Docstrings(griffe.Extension):
    """Docstrings as they are at run time, where decorators have put parts in, as Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change every docstring of a loaded package."""
        self._visit(pkg)

    def _visit(self, one: griffe.Object | griffe.Alias) -> None:
        if one.is_alias:
            return
        if one.docstring is not None:
            if re.search(r"<\w+>", one.docstring.value) and one.is_function:
                one.docstring.value = inspect.getdoc(_runtime(one.path)) or one.docstring.value
            one.docstring.value = markdown(one.docstring.value)
        for member in one.members.values():
            self._visit(member)


def _runtime(path: str) -> Any:
    """The object of a dotted path."""
    names = path.split(".")
    for count in range(len(names) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:count]))
        except ImportError:
            continue
        for name in names[count:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)
