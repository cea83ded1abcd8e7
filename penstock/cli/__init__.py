"""The command line. One file per command."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import PenstockError
from .bench import bench
from .bench_serve import bench_serve
from .check import check
from .convert import convert
from .demo import demo
from .eval import evaluate
from .generate import generate
from .profile import profile
from .serve import serve
from .train import train
from .tune import tune


class Commands(TyperGroup):
    """Prints the message of a PenstockError or OSError without a traceback and ends with exit code 2.

    ``penstock bench serve`` is ``penstock bench-serve``.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first words name."""
        return super().resolve_command(ctx, ["bench-serve", *args[2:]] if args[:2] == ["bench", "serve"] else args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (PenstockError, OSError) as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


main = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    help="Check, time, profile and tune the kernels of recurrent language models; train, evaluate and serve models, and generate text.",
)


def show_version(requested: bool) -> None:
    """Print the version and stop."""
    if requested:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@main.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and stop.")] = False,
) -> None:
    """Options of the program itself."""


COMMANDS: dict[str, Callable[..., None]] = {
    "check": check,
    "bench": bench,
    "profile": profile,
    "tune": tune,
    "train": train,
    "generate": generate,
    "serve": serve,
    "bench-serve": bench_serve,
    "eval": evaluate,
    "convert": convert,
    "demo": demo,
}
for name, command in COMMANDS.items():
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    # each paragraph is one line, and the terminal wraps it
    main.command(name, help="\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs))(command)
