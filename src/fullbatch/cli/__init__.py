"""The command line: one file a verb."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from fullbatch.cli import anatomy, devices, prove, recipe, snapshot, stretch, sweep, train
from fullbatch.errors import FullbatchError, TaskError
from fullbatch.version import __version__

app = typer.Typer(
    name="fullbatch",
    help="Train at the batch you want on the memory you have, and prove that nothing changed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("prove")(prove.command)
app.command("sweep")(sweep.command)
app.command("train")(train.command)
app.command("recipe")(recipe.command)
app.command("anatomy")(anatomy.command)
app.command("stretch")(stretch.command)
app.command("snapshot")(snapshot.command)
app.command("devices")(devices.command)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fullbatch {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Whatever goes wrong goes to stderr with exit code 2: 1 is a verdict."""
    try:
        app()
    except FullbatchError as error:
        if isinstance(error, TaskError) and error.__cause__ is not None:  # the user's own code: show where
            traceback.print_exception(error.__cause__)
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(2)
