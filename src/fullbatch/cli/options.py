"""Options that several verbs share, and what goes to stdout and stderr."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, RenderableType

from fullbatch.errors import InvalidArgument, TaskError
from fullbatch.experiments import named_optimizer
from fullbatch.report import write_json

Task = Annotated[str, typer.Option("--task", help="mlp, text, or file.py:function that returns a fullbatch.Task.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of weights, data and dropout.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the files that are written.")]
Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH", help="Write the JSON here too; - for stdout (the table goes to stderr).")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, mps, xpu, ...")]

_WIDTH = 200  # of tables where there is no terminal to fit in; they take what they need


class Output:
    """Results to stdout, talk and progress to stderr.

    Inside the context, what a task of the user's prints goes to stderr too, so that stdout is data alone.

    Args:
        json_path: Where ``--json`` says the JSON goes; with ``-`` it has stdout for itself.
    """

    def __init__(self, json_path: str | None) -> None:
        if json_path == "":
            raise InvalidArgument("--json '': must be a path, or - for stdout")
        self._json_path = json_path
        self._stdout = sys.stdout
        self._redirected = redirect_stdout(sys.stderr)
        stream = sys.stderr if json_path == "-" else sys.stdout
        self._data = Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH)
        self.talk = Console(stderr=True, highlight=False)

    def __enter__(self) -> Output:
        self._redirected.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._redirected.__exit__(kind, error, trace)
        if isinstance(error, SystemExit):
            raise TaskError(f"the task's code called sys.exit({error.code!r})") from error

    @property
    def width(self) -> int:
        """Characters that a line of a table may have."""
        return self._data.width

    def show(self, *results: RenderableType) -> None:
        """Print tables, and lines of text as they are."""
        for result in results:
            self._data.print(result, soft_wrap=isinstance(result, str), markup=False)

    def wrote(self, *paths: Path) -> None:
        """Say which files were written."""
        self.talk.print("wrote " + ", ".join(map(str, paths)), soft_wrap=True, markup=False)

    def json(self, value: dict[str, Any]) -> None:
        """Write ``value`` where ``--json`` says."""
        if self._json_path == "-":
            self._stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
        elif self._json_path is not None:
            write_json(Path(self._json_path), value)


def command() -> str:
    """This process's command line, ready to paste."""
    return shlex.join(["fullbatch", *sys.argv[1:]])


def optimizer(name: str, lr: float | None, default_lr: float) -> Callable[[Any], torch.optim.Optimizer] | None:
    """What ``--optimizer`` and ``--lr`` ask for; ``None`` for the task's own.

    Raises:
        InvalidArgument: No such optimizer, or a learning rate for the task's own.
    """
    if name != "task":
        return named_optimizer(name, default_lr if lr is None else lr)
    if lr is not None:
        raise InvalidArgument(f"--lr {lr}: the task's own optimizer has its own", hint="--optimizer sgd or adamw takes it")
    return None


def whole_numbers(text: str, option: str) -> list[int]:
    """``"1,2,4"`` as numbers.

    Raises:
        InvalidArgument: Something between the commas is no whole number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgument(f"{option} {text}: must be whole numbers with commas between", hint=f"{option} 1,2,4,8") from None
