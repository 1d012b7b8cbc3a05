"""What a memory snapshot tells: what is held, who held the peak, and what other settings would have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullbatch.evidence import Evidence, predicted
from fullbatch.memory.catalog import Card
from fullbatch.memory.history import History, Live
from fullbatch.memory.holders import Holding, holders_of, source_line
from fullbatch.memory.recorded import Segment, Snapshot
from fullbatch.memory.replay import Replay, emptied_at, recorded_limit, replay
from fullbatch.memory.settings import AllocatorSettings, parse_settings
from fullbatch.plain import plain

SCHEMA = "snapshot.v1"
COMPARED = ("expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:8")
"""What a history is replayed under where nothing else was asked for, beside the settings of the record."""
_MAX_SHORTAGES = 10


@dataclass(frozen=True, kw_only=True)
class RanOut:
    """An out-of-memory error in the record.

    Attributes:
        entry: Number of the entry, from 1.
        requested_bytes: Asked for.
        device_free_bytes: What the driver had left.
        allocated_bytes: In live blocks then.
        reserved_bytes: In segments then.
        line: Who asked.
        holders: Who held memory then, largest first.
    """

    entry: int
    requested_bytes: int
    device_free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    line: str
    holders: list[Holding]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The history under some settings, predicted.

    Attributes:
        settings: In the syntax of ``PYTORCH_ALLOC_CONF``, or ``as recorded``.
        replay: What happened.
        failed_at: Source line of the request that ran out of memory; ``""`` where none did.
    """

    settings: str
    replay: Replay
    failed_at: str


@dataclass(frozen=True, kw_only=True)
class Past:
    """What the history of a device tells.

    Attributes:
        entries: Their number.
        peak_allocated_bytes: Most in live blocks, those included that wait for another stream.
        peak_requested_bytes: Of them as asked for, at that moment.
        peak_reserved_bytes: Most in segments.
        peak_entry: Number of the entry with the most allocated; 0: the start.
        holders: Who held memory then, largest first.
        emptied: Times that cached segments went back to the driver.
        ran_out: The first out-of-memory errors.
        num_ran_out: Number of all.
        limit_bytes: What the segments could take in the replays. ``None``: no end is known.
        alternatives: The replays.
        reserved: Bytes at the start and after each entry.
        allocated: Bytes at the start and after each entry.
    """

    entries: int
    peak_allocated_bytes: int
    peak_requested_bytes: int
    peak_reserved_bytes: int
    peak_entry: int
    holders: list[Holding]
    emptied: int
    ran_out: list[RanOut]
    num_ran_out: int
    limit_bytes: int | None
    alternatives: list[Alternative]
    reserved: list[int] = field(repr=False)
    allocated: list[int] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one device.

    Attributes:
        device: Its index.
        reserved_bytes: In segments.
        allocated_bytes: In live blocks, those included that wait for another stream.
        requested_bytes: Of them as asked for.
        rounding_bytes: Allocated less requested.
        unusable_bytes: Reserved less allocated: cached, and in pieces.
        inactive_split_bytes: Of it, in segments that hold a live block too, so that no driver gets it back.
        largest_free_bytes: Largest piece of it.
        segments: Their number.
        blocks: Number of live blocks.
        holders: Who holds memory, largest first.
        past: Its history. ``None``: none was recorded.
        notes: What the figures leave open.
    """

    device: int
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    rounding_bytes: int
    unusable_bytes: int
    inactive_split_bytes: int
    largest_free_bytes: int
    segments: int
    blocks: int
    holders: list[Holding]
    past: Past | None
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Dissection:
    """A memory snapshot, taken apart.

    Attributes:
        file: Where it came from.
        devices: By index.
        settings: What was asked for.
        evidence: Of the replays; other figures are the file's.
    """

    file: str
    devices: list[DeviceMemory]
    settings: dict[str, Any]
    evidence: Evidence

    def to_json(self) -> dict[str, Any]:
        """Everything but the series, as plain values."""
        values: dict[str, Any] = {"schema": SCHEMA, **plain(self)}
        for device in values["devices"]:
            if device["past"] is not None:
                del device["past"]["reserved"], device["past"]["allocated"]
        return values


def dissect(
    snapshot: Snapshot,
    *,
    file: str,
    alloc_confs: Sequence[str] = (),
    card: Card | None = None,
    settings: Mapping[str, Any] | None = None,
    command: str = "",
) -> Dissection:
    """Take a snapshot apart.

    Args:
        snapshot: As read.
        file: Its name.
        alloc_confs: Settings of the allocator to replay the history under, as ``PYTORCH_ALLOC_CONF`` has them.
            None: :data:`COMPARED`.
        card: A device to replay it on. ``None``: as much memory as the record's first out-of-memory error tells,
            and without end where there is none.
        settings: What was asked for, for the record.
        command: What to run to obtain it again.

    Raises:
        InvalidArgument: A setting that torch refuses.
    """
    compared = {conf: parse_settings(conf) for conf in alloc_confs or COMPARED}
    return Dissection(
        file=file,
        devices=[_device(snapshot, device, compared, card) for device in snapshot.devices],
        settings=dict(settings or {}),
        evidence=predicted(card.title if card is not None else "the device of the record", command),
    )


def _device(snapshot: Snapshot, device: int, compared: Mapping[str, AllocatorSettings], card: Card | None) -> DeviceMemory:
    segments = [segment for segment in snapshot.segments if segment.device == device]
    blocks = [block for segment in segments for block in segment.blocks]
    live = [block for block in blocks if not block.free]
    history = History(snapshot, device)
    reserved = sum(segment.size for segment in segments)
    allocated, requested = sum(block.size for block in live), sum(block.requested for block in live)
    return DeviceMemory(
        device=device,
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        requested_bytes=requested,
        rounding_bytes=allocated - requested,
        unusable_bytes=reserved - allocated,
        inactive_split_bytes=sum(_split(segment) for segment in segments),
        largest_free_bytes=max((block.size for block in blocks if block.free), default=0),
        segments=len(segments),
        blocks=len(live),
        holders=holders_of(Live(block.size, block.requested, 0, block.frames) for block in live),
        past=_past(history, compared, card) if history.entries else None,
        notes=_notes(history, segments),
    )


def _split(segment: Segment) -> int:
    free = sum(block.size for block in segment.blocks if block.free)
    return free if free < segment.size else 0


def _past(history: History, compared: Mapping[str, AllocatorSettings], card: Card | None) -> Past:
    allocated = [state.allocated_bytes for state in history.walk()]
    reserved = history.reserved_bytes()
    peak = max(range(len(allocated)), key=allocated.__getitem__)
    failures = [number for number, entry in enumerate(history.entries, 1) if entry.action == "oom"]
    ran_out: list[RanOut] = []
    holders: list[Holding] = []
    requested = 0
    for number, state in enumerate(history.walk()):
        if number == peak:
            holders, requested = holders_of(state.live.values()), sum(block.requested for block in state.live.values())
        if number in failures[:_MAX_SHORTAGES]:
            entry = history.entries[number - 1]
            ran_out.append(
                RanOut(
                    entry=number,
                    requested_bytes=entry.size,
                    device_free_bytes=entry.address,
                    allocated_bytes=state.allocated_bytes,
                    reserved_bytes=reserved[number],
                    line=source_line(entry.frames),
                    holders=holders_of(state.live.values()),
                )
            )
    limit = card.usable_bytes if card is not None else recorded_limit(history)
    tried = {"as recorded": history.settings, **compared}
    return Past(
        entries=len(history.entries),
        peak_allocated_bytes=allocated[peak],
        peak_requested_bytes=requested,
        peak_reserved_bytes=max(reserved),
        peak_entry=peak,
        holders=holders,
        emptied=len(emptied_at(history)),
        ran_out=ran_out,
        num_ran_out=len(failures),
        limit_bytes=limit,
        alternatives=[_alternative(name, replay(history, settings, limit)) for name, settings in tried.items()],
        reserved=reserved,
        allocated=allocated,
    )


def _alternative(name: str, played: Replay) -> Alternative:
    return Alternative(
        settings=name, replay=played, failed_at="" if played.shortage is None else source_line(played.shortage.frames)
    )


def _notes(history: History, segments: list[Segment]) -> list[str]:
    notes: list[str] = []
    if not history.entries:
        notes.append("no history: call torch.cuda.memory._record_memory_history() before the run to see its peak")
    elif history.before:
        held = sum(block.size for block in history.before.values())
        notes.append(
            f"{len(history.before):,} blocks ({held:,} bytes) were asked for before the record begins: its oldest entries were "
            "dropped (max_entries), or it was begun late; a peak before it is not seen, and replays place them anew"
        )
    if history.contradictions:
        one = "1 entry contradicts" if history.contradictions == 1 else f"{history.contradictions:,} entries contradict"
        notes.append(f"{one} the segments: recording ended before the snapshot was taken")
    if any(segment.private for segment in segments):
        notes.append("there are private pools, as CUDA graphs have: replays keep them in the common one")
    return notes
