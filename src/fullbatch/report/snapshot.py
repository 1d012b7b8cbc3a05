"""A memory snapshot as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from fullbatch.memory.dissection import Alternative, DeviceMemory, Dissection, Past
from fullbatch.memory.holders import Holding
from fullbatch.report.plots import _figure, _finish
from fullbatch.report.tables import _Column, _table
from fullbatch.units import GiB, show_bytes

_POINTS = 4000
_MAX_LINE = 100  # characters of a source line in a table; its end tells more than its beginning


def snapshot_tables(found: Dissection, width: int, top: int) -> list[RenderableType]:
    """What is held at the end, who held the peak, shortages, and what other settings would have done."""
    shown: list[RenderableType] = [_devices_table(found.devices, width), ""]
    for device in found.devices:
        past = device.past
        if past is None:
            shown += [
                f"device {device.device}, at the end",
                _holders_table(device.holders, device.allocated_bytes, width, top),
                "",
            ]
        else:
            shown += _past(device.device, past, width, top)
        shown += [f"note: {note}" for note in device.notes]
    if not found.devices:
        shown.append("no memory of any device: nothing was allocated, nothing recorded")
    shown.append(f"{found.file}: recorded figures are the file's; replays: {found.evidence}")
    return shown


def _past(device: int, past: Past, width: int, top: int) -> list[RenderableType]:
    shown: list[RenderableType] = [
        f"device {device}, peak: {show_bytes(past.peak_allocated_bytes)} allocated ({past.peak_allocated_bytes:,} bytes; "
        f"{show_bytes(past.peak_requested_bytes)} asked for) at entry {past.peak_entry:,} of {past.entries:,}; "
        f"{show_bytes(past.peak_reserved_bytes)} reserved at most; cache given back {past.emptied}x",
        _holders_table(past.holders, past.peak_allocated_bytes, width, top),
        "",
    ]
    for event in past.ran_out:
        shown += [
            f"device {device}, OUT OF MEMORY at entry {event.entry:,}: {event.line} asks for "
            f"{show_bytes(event.requested_bytes)}; "
            f"{show_bytes(event.device_free_bytes)} free on the device, {show_bytes(event.reserved_bytes)} reserved, "
            f"{show_bytes(event.reserved_bytes - event.allocated_bytes)} of it cached",
            _holders_table(event.holders, event.allocated_bytes, width, top),
            "",
        ]
    if past.num_ran_out > len(past.ran_out):
        shown.append(f"{past.num_ran_out - len(past.ran_out):,} more out-of-memory errors")
    limit = "without end" if past.limit_bytes is None else f"of {show_bytes(past.limit_bytes)}"
    shown += [f"device {device}, replayed on a device {limit} (predicted)", _alternatives_table(past, width), ""]
    return shown


def _devices_table(devices: Sequence[DeviceMemory], width: int) -> Table:
    return _table(
        [
            _Column("device", [str(device.device) for device in devices]),
            _Column("reserved", [show_bytes(device.reserved_bytes) for device in devices]),
            _Column("allocated", [show_bytes(device.allocated_bytes) for device in devices]),
            _Column("asked for", [show_bytes(device.requested_bytes) for device in devices], drop=2),
            _Column("rounding", [show_bytes(device.rounding_bytes) for device in devices], drop=3),
            _Column("unusable", [show_bytes(device.unusable_bytes) for device in devices]),
            _Column("in split segments", [show_bytes(device.inactive_split_bytes) for device in devices], drop=4),
            _Column("largest free block", [show_bytes(device.largest_free_bytes) for device in devices], drop=1),
            _Column("segments", [f"{device.segments:,}" for device in devices], drop=5),
            _Column("blocks", [f"{device.blocks:,}" for device in devices], drop=6),
        ],
        width,
    )


def _holders_table(holders: Sequence[Holding], whole: int, width: int, top: int) -> Table:
    rows = holders[:top]
    return _table(
        [
            _Column("held by", [_short(row.line) for row in rows], left=True),
            _Column("blocks", [f"{row.blocks:,}" for row in rows], drop=1),
            _Column("size", [show_bytes(row.bytes) for row in rows]),
            _Column("of allocated", [f"{row.bytes / max(whole, 1):.1%}" for row in rows], drop=2),
        ],
        width,
    )


def _alternatives_table(past: Past, width: int) -> Table:
    rows = past.alternatives
    return _table(
        [
            _Column("settings", ["(the record itself)", *(row.settings for row in rows)], left=True),
            _Column("peak reserved", _sizes(past.peak_reserved_bytes, [row.replay.peak_reserved_bytes for row in rows])),
            _Column("", ["", *(_change(row.replay.peak_reserved_bytes, past.peak_reserved_bytes) for row in rows)]),
            _Column(
                "peak allocated",
                _sizes(past.peak_allocated_bytes, [row.replay.peak_allocated_bytes for row in rows]),
                drop=2,
            ),
            _Column("reserved at the end", _sizes(past.reserved[-1], [row.replay.reserved_bytes for row in rows]), drop=1),
            _Column("cache emptied", ["-", *(f"{row.replay.retries}x" for row in rows)], drop=3),
            _Column("", [_recorded(past), *(_outcome(row, past) for row in rows)], left=True),
        ],
        width,
    )


def _sizes(first: int, others: Sequence[int]) -> list[str]:
    return [show_bytes(size) for size in (first, *others)]


def _change(size: int, recorded: int) -> str:
    return f"{size / max(recorded, 1) - 1:+.1%}"


def _recorded(past: Past) -> str:
    return f"RAN OUT {past.num_ran_out}x" if past.num_ran_out else "did not run out"


def _outcome(row: Alternative, past: Past) -> str:
    shortage = row.replay.shortage
    if shortage is not None:
        return f"RUNS OUT at entry {shortage.entry:,}: {_short(row.failed_at)} asks for {show_bytes(shortage.requested_bytes)}"
    return "would NOT have run out" if past.num_ran_out else "does not run out"


def _short(line: str) -> str:
    return line if len(line) <= _MAX_LINE else "..." + line[3 - _MAX_LINE :]


def plot_snapshot(found: Dissection, path: Path) -> None:
    """Allocated and reserved bytes over each history that was recorded, with its out-of-memory errors."""
    devices = [device for device in found.devices if device.past is not None]
    origin = replace(found.evidence, how="claimed", device=f"the device that wrote {Path(found.file).name}")
    figure = _figure()
    sides = list(figure.subplots(len(devices), squeeze=False)[:, 0])
    for axes, device in zip(sides, devices, strict=True):
        past = device.past
        assert past is not None
        at, allocated = _most(past.allocated)
        axes.fill_between(at, allocated, color="#0072B2", alpha=0.45, step="post", label="allocated")
        axes.step(*_most(past.reserved), color="black", where="post", label="reserved")
        for number, event in enumerate(past.ran_out):
            axes.axvline(event.entry, color="#D55E00", label=None if number else "out of memory")
        if past.limit_bytes is not None and past.limit_bytes < 3 * past.peak_reserved_bytes:
            axes.axhline(past.limit_bytes / GiB, color="#D55E00", linestyle=":", label="limit of the replays")
        axes.set_xlim(0, past.entries)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"device {device.device}, GiB")
    sides[-1].set_xlabel("entries of the history, in order")
    _finish(figure, sides[:1], f"Snapshot (recorded): {Path(found.file).name}", origin, path, "upper left")


def _most(series: Sequence[int]) -> tuple[list[int], list[float]]:
    """The most within each stretch of ``series``, in GiB: no peak is drawn away."""
    every = -(-len(series) // _POINTS)
    starts = range(0, len(series), every)
    return list(starts), [max(series[start : start + every]) / GiB for start in starts]
