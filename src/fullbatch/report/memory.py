"""Memory as tables and pictures. Predicted is drawn hatched and with broken lines, never like measured."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from fullbatch.experiments import Stretch
from fullbatch.memory import Anatomy, Card, Share, Verdict
from fullbatch.memory.chance import published_ratios
from fullbatch.memory.playback import StageMemory
from fullbatch.memory.timeline import PARTS
from fullbatch.report.plots import _figure, _finish
from fullbatch.report.tables import _Column, _table
from fullbatch.units import GiB, show_bytes

_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#999999")  # Okabe and Ito 2008


def cards_table(cards: Sequence[Card], width: int) -> Table:
    """One row a device."""
    return _table(
        [
            _Column("--device", [card.name for card in cards], left=True),
            _Column("card", [card.title for card in cards], drop=3, left=True),
            _Column("total GiB", [f"{card.total_bytes / GiB:.2f}" for card in cards]),
            _Column("usable GiB", [f"{card.usable_bytes / GiB:.2f}" for card in cards]),
            _Column("GB/s", [f"{card.bandwidth / 1e9:.0f}" if card.bandwidth else "-" for card in cards]),
            *[
                _Column(f"{dtype} Tflop/s", [_tflops(card, dtype) for card in cards], drop=2)
                for dtype in ("fp32", "fp16", "bf16")
            ],
            _Column("figures are", [card.how for card in cards], drop=1, left=True),
            _Column("source", [card.source for card in cards], drop=4, left=True),
        ],
        width,
    )


def _tflops(card: Card, dtype: str) -> str:
    return f"{card.flops[dtype] / 1e12:g}" if card.flops and dtype in card.flops else "-"


def anatomy_tables(found: Anatomy, width: int, top: int) -> list[RenderableType]:
    """Stages, parts of the peak, its largest owners, the verdict."""
    parts = [(part, size) for part, size in found.parts.items() if size]
    shown: list[RenderableType] = [
        _stages_table(found.stages, width),
        "",
        f"peak: {show_bytes(found.peak_reserved_bytes)} reserved ({found.peak_reserved_bytes:,} bytes), "
        f"{show_bytes(found.peak_allocated_bytes)} of it allocated in {stage_name(found.peak_stage)}",
        *_range_lines(found),
        "",
        _table(
            [
                _Column("part of the peak", [part for part, _ in parts], left=True),
                _Column("bytes", [f"{size:,}" for _, size in parts]),
                _Column("", [show_bytes(size) for _, size in parts]),
                _Column("share", [_percent(size, found.peak_reserved_bytes) for _, size in parts], drop=1),
            ],
            width,
        ),
        "",
        owners_table(found.shares, found.peak_allocated_bytes, width, top),
        "",
    ]
    if (verdict := found.verdict) is not None:
        shown.append(str(verdict))
        if (failure := verdict.failure) is not None:
            largest = max(found.parts.items(), key=lambda part: part[1])
            where = ", ".join(part for part in (failure.owner.module, failure.owner.line) if part)
            shown.append(
                f"runs out in {in_words(failure.stage, failure.update, failure.micro_batch, failure.micro_batch)}: "
                f"{failure.owner.operator} asks for {show_bytes(failure.requested_bytes)}{f' ({where})' if where else ''}"
            )
            shown.append(f"largest part: {largest[0]}, {show_bytes(largest[1])}")
        shown.append(_chance_line(verdict))
    shown += [f"note: {note}" for note in found.notes]
    shown.append(f"task {found.settings.get('task', '')}; {found.evidence}")
    return shown


def _chance_line(verdict: Verdict) -> str:
    ratios = published_ratios()
    most = 1 - 1 / (len(ratios) + 2)
    if verdict.chance >= most:
        chance = f"over {math.floor(100 * most)}%"
    elif verdict.chance <= 1 - most:
        chance = f"under {math.ceil(100 * (1 - most))}%"
    else:
        chance = f"{verdict.chance:.0%}"
    needed = "" if verdict.needed_bytes is None else f", {show_bytes(verdict.needed_bytes)} are needed"
    return (
        f"chance that it fits: {chance}{needed}; {len(ratios)} published runs peaked "
        f"{1 - min(ratios):.1%} below to {max(ratios) - 1:.1%} above their prediction"
    )


def _range_lines(found: Anatomy) -> list[str]:
    if (ends := found.workspace_range) is None:
        return []
    return [
        f"range, as cuDNN's workspaces are not in it: {show_bytes(ends.reserved_least_bytes)} to "
        f"{show_bytes(ends.reserved_most_bytes)} reserved, {show_bytes(ends.allocated_least_bytes)} to "
        f"{show_bytes(ends.allocated_most_bytes)} allocated"
    ]


def owners_table(shares: Sequence[Share], whole: int, width: int, top: int) -> Table:
    """The largest owners; modules of one name in numbered layers stand in one row."""
    sums: Counter[tuple[str, str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for share in shares:
        key = share.part, re.sub(r"\b\d+(?=\.)", "*", share.module) or "-", share.operator, share.line or "-"
        sums[key] += share.bytes
        counts[key] += 1
    rows = sums.most_common(top)
    return _table(
        [
            _Column("owner: part", [key[0] for key, _ in rows], left=True),
            _Column("module", [key[1] + (f" ({counts[key]})" if counts[key] > 1 else "") for key, _ in rows], left=True),
            _Column("operator", [key[2] for key, _ in rows], drop=1, left=True),
            _Column("line", [key[3] for key, _ in rows], drop=2, left=True),
            _Column("size", [show_bytes(size) for _, size in rows]),
            _Column("of allocated", [_percent(size, whole) for _, size in rows], drop=3),
        ],
        width,
    )


def _percent(size: int, whole: int) -> str:
    return f"{size / max(whole, 1):.1%}"


def _stages_table(stages: Sequence[StageMemory], width: int) -> Table:
    return _table(
        [
            _Column("stage", [stage_name(stage) for stage in stages], left=True),
            _Column("allocated", [show_bytes(stage.allocated_bytes) for stage in stages]),
            _Column("reserved", [show_bytes(stage.reserved_bytes) for stage in stages]),
            _Column("peak allocated", [show_bytes(stage.peak_allocated_bytes) for stage in stages]),
            _Column("peak reserved", [show_bytes(stage.peak_reserved_bytes) for stage in stages], drop=1),
        ],
        width,
    )


def stage_name(stage: StageMemory) -> str:
    """``update 1, micro-batches 2..4 forward``."""
    return in_words(stage.name, stage.update, stage.micro_batch, stage.last_micro_batch)


def in_words(name: str, update: int, first: int, last: int) -> str:
    """A stage of micro-batches ``first`` to ``last``: ``update 1, micro-batches 2..4 forward``."""
    if not update:
        return {"model": "model loaded", "batch": "batch loaded"}.get(name, name)
    if not first:
        return f"update {update}, step" if name == "update" else f"update {update}, {name}"
    return f"update {update}, micro-batch{f'es {first}..{last}' if last > first else f' {first}'} {name}"


def plot_anatomy(found: Anatomy, path: Path) -> None:
    """Live bytes by part over the events of the traced updates, with the usable bytes of the card."""
    timeline = found.timeline
    live: dict[str, int] = dict.fromkeys(PARTS, 0)
    sizes: dict[int, int] = {}
    series: dict[str, list[float]] = {part: [] for part in PARTS}
    every = max(1, len(timeline.events) // 4000)
    at: list[int] = []
    best: tuple[int, dict[str, int]] = (-1, dict(live))  # most within each stretch of events: no peak is drawn away
    for number, (block, size) in enumerate(timeline.events, 1):
        part = timeline.owners[block].part
        if size < 0:
            live[part] -= sizes.pop(block)
        else:
            sizes[block] = size
            live[part] += size
        if (total := sum(live.values())) > best[0]:
            best = total, dict(live)
        if number % every == 0 or number == len(timeline.events):
            at.append(number)
            for name, value in best[1].items():
                series[name].append(value / GiB)
            best = -1, {}
    figure = _figure()
    axes = figure.subplots()
    areas = axes.stackplot(at, *series.values(), labels=PARTS, colors=_COLOURS, alpha=0.45, step="post")
    for area in areas:
        area.set(hatch="//", linestyle="--", edgecolor="white")
    for stage in timeline.stages:
        if stage.name == "update":
            axes.axvspan(stage.start, stage.end, color="#666666", alpha=0.15, linewidth=0)
    axes.axhline(found.peak_reserved_bytes / GiB, color="black", linestyle=":", label="peak reserved (predicted)")
    if found.verdict is not None and found.verdict.usable_bytes < 3 * found.peak_reserved_bytes:
        axes.axhline(found.verdict.usable_bytes / GiB, color="#D55E00", label=f"usable, {found.verdict.card}")
    axes.set_xlim(0, max(1, len(timeline.events)))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("allocations and releases, in order (grey: optimizer step)")
    axes.set_ylabel("predicted live memory, GiB")
    _finish(figure, [axes], f"Anatomy (predicted): {found.settings.get('task', '')}", found.evidence, path, "upper left")


def stretch_tables(found: Stretch, width: int) -> list[RenderableType]:
    """One row a length and kind of attention, and how each kind grows."""
    points = found.points
    shown: list[RenderableType] = [
        _table(
            [
                _Column("attention", [point.attention for point in points], left=True),
                _Column("seq len", [f"{point.seq_len:,}" for point in points]),
                _Column("peak allocated", [show_bytes(point.peak_allocated_bytes) for point in points]),
                _Column("peak reserved", [show_bytes(point.peak_reserved_bytes) for point in points]),
                _Column("unusable", [show_bytes(point.unusable_bytes) for point in points], drop=1),
                _Column("largest free block", [show_bytes(point.largest_free_bytes) for point in points], drop=2),
                _Column("room", [show_bytes(point.room_bytes) for point in points]),
                _Column("", [_fits(point.fits, point.retries) for point in points], left=True),
            ],
            width,
        ),
        "",
    ]
    for growth in found.growth:
        longest = "none of the lengths fits" if growth.longest_that_fits is None else f"{growth.longest_that_fits:,} tokens fit"
        share = "" if growth.order == "unknown" else f" ({growth.quadratic_share:.0%} of the growth is quadratic)"
        shown.append(f"{growth.attention}: growth {growth.order}{share}; {longest} on {found.card}")
    return [*shown, f"task {found.settings.get('task', '')}; {found.evidence}"]


def _fits(fits: bool, retries: int) -> str:
    return ("fits" if not retries else f"fits, cache emptied {retries}x") if fits else "DOES NOT FIT"


def plot_stretch(found: Stretch, path: Path) -> None:
    """Peak reserved against the length, one broken line a kind of attention, and the card."""
    figure = _figure()
    axes = figure.subplots()
    for growth, colour in zip(found.growth, _COLOURS, strict=False):
        points = [point for point in found.points if point.attention == growth.attention]
        lengths = [point.seq_len for point in points]
        label = f"{growth.attention}, {growth.order}"
        for values, style, name in (
            ([point.peak_reserved_bytes for point in points], "--", f"reserved ({label}, predicted)"),
            ([point.peak_allocated_bytes for point in points], ":", f"allocated ({growth.attention}, predicted)"),
        ):
            axes.plot(
                lengths,
                [value / GiB for value in values],
                linestyle=style,
                marker="o",
                fillstyle="none",
                color=colour,
                label=name,
            )
    axes.axhline(found.usable_bytes / GiB, color="#D55E00", label=f"usable, {found.card}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    lengths = sorted({point.seq_len for point in found.points})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("predicted peak, GiB")
    _finish(figure, [axes], f"Stretch (predicted): {found.settings.get('task', '')}", found.evidence, path, "upper left")
