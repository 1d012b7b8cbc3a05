"""Options that several verbs share, and what goes to stdout and stderr."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fullbatch.errors import InvalidArgument
from fullbatch.report import write_json

Task = Annotated[str, typer.Option("--task", help="mlp, text, or file.py:function that returns a fullbatch.Task.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, data and dropout.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the files that are written.")]
Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write the JSON here too; - for stdout (the table goes to stderr).")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, mps, xpu, ...")]

_WIDTH = 132  # of tables where there is no terminal to fit in


def talk() -> Console:
    """The console for progress and remarks: stderr."""
    return Console(stderr=True, highlight=False)


def data(json_path: str | None) -> Console:
    """The console for results: stdout, unless the JSON goes there."""
    stream = sys.stderr if json_path == "-" else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH)


def emit_json(value: dict[str, Any], json_path: str | None) -> None:
    """Write ``value`` where ``--json`` says."""
    if json_path == "-":
        sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    elif json_path is not None:
        write_json(Path(json_path), value)


def command() -> str:
    """This process's command line, ready to paste."""
    return shlex.join(["fullbatch", *sys.argv[1:]])


def whole_numbers(text: str, option: str) -> list[int]:
    """``"1,2,4"`` as numbers.

    Raises:
        InvalidArgument: Something between the commas is no whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"{option} {text}: must be whole numbers with commas between", hint=f"{option} 1,2,4,8") from None
