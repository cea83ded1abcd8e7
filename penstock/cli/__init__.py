"""The command line. One file per command."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..cores import default_threads
from ..errors import PenstockError, PenstockWarning
from ..files import escape_unwritable
from ..verify.machine import using_threads
from .bench import bench
from .bench_serve import bench_serve
from .check import check
from .convert import convert
from .demo import demo
from .doctor import doctor
from .eval import evaluate
from .generate import generate
from .profile import profile
from .serve import serve
from .train import train
from .tune import tune


@contextmanager
def short_warnings() -> Iterator[None]:
    """Show warnings of this package as one line, without the place in the code."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, PenstockWarning):
            typer.secho(f"Warning: {message}", fg="yellow", err=True)
        else:
            before(message, category, *rest, **named)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


class Commands(TyperGroup):
    """Prints the message of a PenstockError or OSError without a traceback and ends with exit code 2.

    ``penstock bench serve`` is ``penstock bench-serve``.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the program."""
        escape_unwritable()
        with short_warnings(), using_threads(default_threads()):
            return super().main(*args, **options)

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
    "doctor": doctor,
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
