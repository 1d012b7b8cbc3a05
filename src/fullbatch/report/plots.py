"""Figures as PNG. Measured points are filled and joined."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullbatch.evidence import Evidence
from fullbatch.experiments import Curve, Run
from fullbatch.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito 2008: told apart by colour-blind readers


def plot_curve(curve: Curve, path: Path) -> None:
    """Throughput with the spread of its rounds, and loss, against the effective batch."""
    figure = _figure()
    speed = figure.subplots()
    batches = [point.effective_batch for point in curve.points]
    speeds = [point.samples_per_sec for point in curve.points]
    below = [max(0.0, point.samples_per_sec - point.samples_per_sec_low) for point in curve.points]
    above = [max(0.0, point.samples_per_sec_high - point.samples_per_sec) for point in curve.points]
    speed.errorbar(batches, speeds, yerr=[below, above], color=_BLUE, marker="o", capsize=4, label="throughput")
    speed.set_xscale("log", base=2)
    speed.set_xticks(batches, [str(batch) for batch in batches])
    speed.set_ylim(bottom=0)
    speed.set_xlabel(f"effective batch (micro-batch {curve.points[0].micro_batch} x accum steps)")
    speed.set_ylabel("samples/s (bar: slowest to fastest round)")
    for point in curve.points:
        if point.accum_steps == curve.flat_at:
            speed.axvline(point.effective_batch, color=_GREY, linestyle=":", label=f"flat from {point.effective_batch}")
    loss = speed.twinx()
    loss.plot(
        batches, [point.avg_loss for point in curve.points], color=_ORANGE, marker="s", linestyle="--", label="average loss"
    )
    loss.set_ylabel(f"average loss over {curve.points[0].steps} updates")
    losses = [point.avg_loss for point in curve.points if math.isfinite(point.avg_loss)]
    loss.set_ylim(min([0.0, *losses]), 1.2 * max([*losses, 1e-9]))
    _finish(
        figure,
        [speed, loss],
        "Accumulation curve: " + ", ".join(str(curve.settings[key]) for key in ("task", "optimizer") if key in curve.settings),
        curve.evidence,
        path,
        "lower right",
    )


def plot_run(run: Run, path: Path) -> None:
    """Training loss of each update and held-out loss, in the held-out loss's unit."""
    figure = _figure()
    axes = figure.subplots()
    unit, factor = run.settings["task_unit"]
    shown = [(number, update.loss * factor) for number, update in enumerate(run.updates, 1) if update.skipped is None]
    axes.plot(*zip(*shown, strict=True), color=_BLUE, label="training, before each update")
    axes.plot(
        [point.update for point in run.held_out],
        [point.value for point in run.held_out],
        color=_ORANGE,
        marker="s",
        linestyle="--",
        label="held out",
    )
    axes.set_xlabel(f"updates of {run.settings['effective_batch']} samples")
    axes.set_ylabel(unit)
    rate = axes.twinx()
    rate.plot(range(1, len(run.learning_rates) + 1), run.learning_rates, color=_GREY, linestyle=":", label="learning rate")
    rate.set_ylim(bottom=0)
    rate.set_ylabel("learning rate")
    _finish(figure, [axes, rate], f"Training: {run.settings['task']}", run.evidence, path, "upper right")


def _figure() -> Figure:
    from matplotlib.figure import Figure  # half a second: only where a picture is made

    return Figure(figsize=(8, 5), layout="constrained")


def _finish(figure: Figure, sides: list[Any], title: str, evidence: Evidence, path: Path, legend: str) -> None:
    handles = [handle for side in sides for handle in side.get_legend_handles_labels()[0]]
    labels = [label for side in sides for label in side.get_legend_handles_labels()[1]]
    axes = sides[0]
    axes.legend(handles, labels, loc=legend)
    axes.grid(alpha=0.3)
    figure.suptitle(title, parse_math=False)
    figure.supxlabel(f"{evidence}\n{evidence.command}", fontsize=7, color=_GREY, parse_math=False)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=144, format="png")
