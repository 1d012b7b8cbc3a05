"""``fullbatch anatomy --watch``: live memory while another command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fullbatch.cli import options
from fullbatch.cli.bottom_line import BottomLine
from fullbatch.errors import InvalidArgument
from fullbatch.memory.watch import Sample, gauge_of, watch
from fullbatch.report import plot_watched, watched_csv, watched_lines, write_json, write_text
from fullbatch.units import show_bytes

Watch = Annotated[bool, typer.Option("--watch", help="Run the command after -- instead, and show what it holds meanwhile.")]
On = Annotated[
    str, typer.Option("--on", help="Where --measure runs and --watch looks: auto, cpu, cuda, musa, npu, xpu or mps.")
]
Every = Annotated[float | None, typer.Option("--every", min=0.01, help="Seconds between samples of --watch. Default: 0.5.")]
Watched = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- COMMAND...]", help="With --watch: a program and its arguments.", show_default=False),
]

EVERY_SECONDS = 0.5
_OWN = ("watch", "every", "on", "out", "json_path", "watched")
_HINT = "fullbatch anatomy --watch -- python train.py"


def check(context: typer.Context, watching: bool, every: float | None, watched: list[str] | None) -> None:
    """Refuse what does not go together.

    Raises:
        InvalidArgument: A command and no ``--watch``, ``--watch`` and no command, or an option of the other's.
    """
    if not watching:
        if watched:
            raise InvalidArgument(
                f"{watched[0]}: only --watch takes a command", hint=f"fullbatch anatomy --watch -- {watched[0]} ..."
            )
        if every is not None:
            raise InvalidArgument(f"--every {every:g}: only --watch takes it", hint=_HINT)
        return
    if not watched:
        raise InvalidArgument("--watch: needs a command to run", hint=_HINT)
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in _OWN and source is not None and source.name == "COMMANDLINE":
            raise InvalidArgument(
                f"{parameter.opts[0]}: --watch does not take it: it runs a command as it is",
                hint=f"leave it out, or put it after -- if it is the command's: {_HINT}",
            )


def run(watched: list[str], every: float | None, on: str, out: Path, json_path: str | None) -> None:
    """Run ``watched`` and exit as it does. All talk goes to stderr: stdout is the command's."""
    if json_path == "-":
        raise InvalidArgument("--json -: stdout is the watched command's", hint="--json watch.json")
    if json_path == "":
        raise InvalidArgument("--json '': must be a path")
    gauge = gauge_of(on)
    total = gauge.total_bytes()
    of = "" if total is None else f" of {show_bytes(total)}"
    with BottomLine() as line:

        def show(now: Sample, peak: Sample) -> None:
            line.show(
                f"{now.seconds:.0f} s: {show_bytes(now.used_bytes)}{of}, "
                f"peak {show_bytes(peak.used_bytes)} at {peak.seconds:.0f} s ({gauge.what})"
            )

        every_seconds = EVERY_SECONDS if every is None else every
        found = watch(watched, gauge, every_seconds=every_seconds, show=show, typed=options.command())
    talk = Console(stderr=True, highlight=False)
    for text in watched_lines(found):
        talk.print(text, soft_wrap=True, markup=False)
    written = found.to_json()
    paths = [out / f"watch.{kind}" for kind in ("json", "csv", "png")]
    write_json(paths[0], written)
    write_text(paths[1], watched_csv(found))
    plot_watched(found, paths[2])
    if json_path is not None:
        paths.append(Path(json_path))
        write_json(paths[-1], written)
    talk.print("wrote " + ", ".join(map(str, paths)), soft_wrap=True, markup=False)
    raise typer.Exit(found.exit_code)
