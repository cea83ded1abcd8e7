"""Pages of the reference that come from objects: commands, and functions with fla's names."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from typer.main import get_command

from penstock.cli import main
from penstock.compat.fla import FUNCTIONS
from website.docstrings import markdown

VALUES = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH", bool: ""}
EXAMPLES = "[bold]Examples[/bold]"


def command_page() -> str:
    """The help of every command."""
    group: Any = get_command(main)
    parts = ["# Commands\n", f"{group.help}\n", "`penstock COMMAND --help` prints the same.\n"]
    for name, command in group.commands.items():
        parts += [f"## penstock {name}\n", _help(command.help or ""), "| | | |\n| --- | --- | --- |"]
        parts += [*(_row(one) for one in command.params if not one.hidden), ""]
    return "\n".join(parts)


def _row(one: Any) -> str:
    """A row of a table: names, values, meaning."""
    option = one.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts)) if option else f"`{one.metavar or one.name.upper()}`"
    values = (one.metavar or VALUES.get(one.type_descriptor.annotation, "")) if option else ""
    shown = one.default is not None and one.default not in (False, "") and not callable(one.default) and "Default" not in (one.help or "")
    return f"| {names} | {_cell(values)} | {_cell((one.help or '') + (f' Default: {one.default}.' if shown else ''))} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;").replace("[", r"\[").replace("\n", " ")


def _help(text: str) -> str:
    """The help of a command, with its examples as code."""
    body, _, shown = inspect.cleandoc(text).partition(EXAMPLES)
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    return body.strip() + "\n" + ("\n```sh\n" + "\n".join(lines) + "\n```\n" if lines else "")


def fla_page() -> str:
    """The functions with fla's names."""
    parts = ["# fla's names\n", "`penstock.compat.fla`. [Names of other projects](../compat.md) says what differs.\n"]
    for name, function in FUNCTIONS.items():
        parts += [f"## {name}\n", f"```python\n{name}(\n{_arguments(function)}\n)\n```\n", markdown(inspect.getdoc(function) or ""), ""]
    return "\n".join(parts)


def _arguments(function: Any) -> str:
    return "\n".join(f"    {one.replace(annotation=inspect.Parameter.empty)}," for one in inspect.signature(function).parameters.values())
