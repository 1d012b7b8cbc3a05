"""What a watched command held, as lines and as a picture."""

from __future__ import annotations

import shlex
from pathlib import Path

from fullbatch.memory.watch import Watched
from fullbatch.report.plots import _BLUE, _GREY, _ORANGE, _figure, _finish
from fullbatch.units import MiB, show_bytes


def watched_lines(found: Watched) -> list[str]:
    """The peak, what was there before, how the command ended, and where."""
    peak = found.peak
    of = "" if found.total_bytes is None else f" of {show_bytes(found.total_bytes)}"
    lines = [
        f"peak: {show_bytes(peak.used_bytes)}{of}, {found.what}",
        f"  at {peak.seconds:.1f} s of {found.seconds:.1f} s; one sample each {found.every_seconds:g} s, "
        f"{len(found.samples)} in all",
    ]
    if found.baseline_bytes:
        above = show_bytes(peak.used_bytes - found.baseline_bytes)
        lines.append(f"before the start: {show_bytes(found.baseline_bytes)}; the peak is {above} above it")
    if found.largest_process_bytes is not None:
        lines.append(f"largest process: {show_bytes(found.largest_process_bytes)} resident, by the kernel's count")
    ended = f"exit code {found.exit_code}"
    if found.ended_by is not None:
        ended += f": ended by {found.ended_by}"
    if found.ended_by == "SIGKILL":
        ended += ", as the kernel does when the host's memory runs out"
    return [*lines, ended, str(found.evidence)]


def watched_csv(found: Watched) -> str:
    """``seconds,used_bytes``, one line a sample."""
    rows = (f"{sample.seconds},{sample.used_bytes}" for sample in found.samples)
    return "\n".join(["seconds,used_bytes", *rows]) + "\n"


def plot_watched(found: Watched, path: Path) -> None:
    """Used memory against time, with its peak and what was there before."""
    figure = _figure()
    axes = figure.subplots()
    peak = found.peak
    axes.plot(
        [sample.seconds for sample in found.samples],
        [sample.used_bytes / MiB for sample in found.samples],
        color=_BLUE, marker="o", markersize=3, label="measured",
    )  # fmt: skip
    axes.plot(
        [peak.seconds], [peak.used_bytes / MiB], "o", color=_ORANGE, markersize=8, label=f"peak, {show_bytes(peak.used_bytes)}"
    )
    if found.baseline_bytes:
        axes.axhline(found.baseline_bytes / MiB, color=_GREY, linestyle=":", label="before the start")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel(f"MiB {found.what}")
    command = shlex.join(found.watched).replace("\n", " ")
    _finish(figure, [axes], command if len(command) < 80 else command[:77] + "...", found.evidence, path, "lower right")
