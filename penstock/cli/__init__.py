"""The command line: ``penstock check``, ``bench``, ``profile``, ``tune`` and ``demo``. One file per command."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import PenstockError
from .bench import bench
from .check import check
from .demo import demo
from .profile import profile
from .tune import tune


class Commands(TyperGroup):
    """Shows an error that is raised on purpose as its message, without a traceback, and ends with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


main = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    help="Recurrent language model kernels: what runs here, is it right, and how fast is it.",
)
main.command()(check)
main.command()(bench)
main.command()(profile)
main.command()(tune)
main.command()(demo)
