"""Docstrings of public functions whose parts are shared: each of them is complete by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import cleandoc, signature
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
ARGUMENTS = "<arguments>"


def filled(**parts: str) -> Callable[[Function], Function]:
    """A decorator that puts parts in place of their names in a docstring, as in ``<options>``."""

    def fill(function: Function) -> Function:
        text = cleandoc(function.__doc__ or "")
        for name, part in parts.items():
            text = text.replace(f"<{name}>", part)
        function.__doc__ = text
        return function

    return fill


def entries(names: Iterable[str], texts: Mapping[str, str]) -> str:
    """The entries of arguments. A text has the type in its first line and the meaning in the others.

    >>> print(entries(["x"], {"x": "Tensor [B]", "y": "int"}))
    x : Tensor [B]
    """
    return "\n".join(f"{name} : " + texts[name].replace("\n", "\n    ") for name in names)


def described(texts: Mapping[str, str]) -> Callable[[Function], Function]:
    """A decorator that puts the entries of all arguments of a function in place of ``<arguments>``."""

    def describe(function: Function) -> Function:
        return filled(arguments=entries(signature(function).parameters, texts))(function)

    return describe
