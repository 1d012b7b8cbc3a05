"""Predicted and measured side by side. Predicted has open marks and broken lines, measured full ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType

from fullbatch.experiments import MeasuredPoint, MeasuredStretch
from fullbatch.memory.compare import Comparison, StagePair
from fullbatch.report.memory import _COLOURS, in_words
from fullbatch.report.plots import _figure, _finish
from fullbatch.report.tables import _Column, _table
from fullbatch.units import MiB, show_bytes

SHOWN = 3
"""Micro-batches of a window that stand in the table; the others are in the JSON."""


def measured_tables(found: Comparison, width: int) -> list[RenderableType]:
    """One row a stage, and what became of the run."""
    rows = [stage for stage in found.stages if stage.micro_batch <= SHOWN or stage is found.stages[-1] or stage is found.peak]
    reserved = [(row.predicted_peak_reserved_bytes, row.measured_peak_reserved_bytes) for row in rows]
    left = max(stage.micro_batch for stage in found.stages) - SHOWN
    shown: list[RenderableType] = [
        _table(
            [
                _Column("stage", [in_words(row.name, row.update, row.micro_batch, row.micro_batch) for row in rows], left=True),
                *_pair("allocated", [(row.predicted_allocated_bytes, row.measured_allocated_bytes) for row in rows], 3),
                *_pair("peak", [(row.predicted_peak_allocated_bytes, row.measured_peak_allocated_bytes) for row in rows], 0),
                _Column("error", [f"{row.error:+.2%}" for row in rows]),
                *_pair("reserved", [(row.predicted_reserved_bytes, row.measured_reserved_bytes) for row in rows], 4),
                *_pair("peak reserved", reserved, 1),
                *_known("driver, measured", [row.device_used_bytes for row in rows], 2),
            ],
            width,
        ),
        "",
    ]
    if left > 0:
        shown.append(f"micro-batches {SHOWN + 1}..{SHOWN + left} of each update are in the JSON")
    peak = found.peak
    shown.append(
        f"peak: predicted {peak.predicted_peak_allocated_bytes:,} bytes allocated, "
        f"measured {peak.measured_peak_allocated_bytes:,} ({peak.error:+.3%})"
    )
    if found.out_of_memory is not None:
        last = found.stages[-1]
        shown.append(f"RAN OUT OF MEMORY in {in_words(last.name, last.update, last.micro_batch, last.micro_batch)}")
        shown.append(f"  {found.out_of_memory.splitlines()[0]}")
    if found.verdict:
        shown.append(f"predicted for this device: {found.verdict}")
    shown += [f"note: {note}" for note in found.notes]
    return [*shown, f"{found.predicted}", f"{found.measured}"]


def measured_stretch_tables(found: MeasuredStretch, width: int) -> list[RenderableType]:
    """One row a length and kind of attention, and where each kind ended."""
    points = found.points
    reserved = [(point.predicted_peak_reserved_bytes, point.measured_peak_reserved_bytes) for point in points]
    shown: list[RenderableType] = [
        _table(
            [
                _Column("attention", [point.attention for point in points], left=True),
                _Column("seq len", [f"{point.seq_len:,}" for point in points]),
                *_pair("peak", [(p.predicted_peak_allocated_bytes, p.measured_peak_allocated_bytes) for p in points], 0),
                _Column("error", [_error(point) for point in points]),
                *_pair("reserved", reserved, 1),
                *_known("driver, measured", [point.device_used_bytes for point in points], 2),
                _Column("", ["ran" if point.fits else f"RAN OUT in {point.ran_out_in}" for point in points], left=True),
            ],
            width,
        ),
        "",
    ]
    for kind in dict.fromkeys(point.attention for point in points):
        ran = [point.seq_len for point in points if point.attention == kind and point.fits]
        shown.append(f"{kind}: " + (f"{max(ran):,} tokens are the longest that ran" if ran else "none of the lengths ran"))
    cache = "emptied between lengths" if found.emptied else "not emptied between lengths: the next length finds what one left"
    return [*shown, f"cache: {cache}", f"{found.predicted}", f"{found.measured}"]


def _error(point: MeasuredPoint) -> str:
    return f"{point.predicted_peak_allocated_bytes / point.measured_peak_allocated_bytes - 1:+.2%}" if point.fits else "-"


def plot_measured_stretch(found: MeasuredStretch, title: str, path: Path) -> None:
    """Peak against the length, one colour a kind of attention; a cross where memory ran out."""
    figure = _figure()
    axes = figure.subplots()
    for kind, colour in zip(dict.fromkeys(point.attention for point in found.points), _COLOURS, strict=False):
        points = [point for point in found.points if point.attention == kind]
        ran = [point for point in points if point.fits]
        for values, at, style, fill, label in (
            ([point.measured_peak_allocated_bytes for point in ran], ran, "-", "full", "measured"),
            ([point.predicted_peak_allocated_bytes for point in points], points, "--", "none", "predicted"),
        ):
            peaks = [value / MiB for value in values]
            lengths = [point.seq_len for point in at]
            axes.plot(lengths, peaks, style, marker="o", fillstyle=fill, color=colour, label=f"{kind}, {label}")
        if not points[-1].fits:
            axes.plot(lengths[-1:], peaks[-1:], "x", color=colour, markersize=14, label=f"{kind}, ran out of memory")
    axes.set_xscale("log", base=2)
    lengths = sorted({point.seq_len for point in found.points})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("peak in live tensors, MiB")
    _finish(figure, [axes], f"Stretch, predicted and measured: {title}", found.measured, path, "upper left")


def _pair(name: str, values: Sequence[tuple[int | None, int | None]], drop: int) -> list[_Column]:
    """Two columns, where the device has such figures."""
    predicted, measured = ([pair[side] for pair in values] for side in (0, 1))
    return [*_known(f"{name}, predicted", predicted, drop), *_known(f"{name}, measured", measured, drop)]


def _known(name: str, values: Sequence[int | None], drop: int) -> list[_Column]:
    if all(value is None for value in values):
        return []
    return [_Column(name, ["-" if value is None else show_bytes(value) for value in values], drop=drop)]


def plot_measured(found: Comparison, title: str, path: Path) -> None:
    """Peak of each stage, predicted and measured, in order."""
    figure = _figure()
    axes = figure.subplots()
    at = range(len(found.stages))
    for values, style, fill, colour, label in (
        ([stage.measured_peak_allocated_bytes for stage in found.stages], "-", "full", "#0072B2", "peak allocated, measured"),
        (
            [stage.predicted_peak_allocated_bytes for stage in found.stages],
            "--",
            "none",
            "#D55E00",
            "peak allocated, predicted",
        ),
    ):
        axes.plot(at, [value / MiB for value in values], linestyle=style, marker="o", fillstyle=fill, color=colour, label=label)
    every = max(1, len(found.stages) // 12)
    axes.set_xticks(at[::every], [_label(stage) for stage in found.stages[::every]], rotation=45, ha="right", fontsize=7)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MiB in live tensors")
    _finish(figure, [axes], f"Predicted and measured: {title}", found.measured, path, "lower right")


def _label(stage: StagePair) -> str:
    number = f" {stage.update}.{stage.micro_batch}" if stage.micro_batch else f" {stage.update}" if stage.update else ""
    return f"{stage.name}{number}"
