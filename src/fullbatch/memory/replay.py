"""Plays a recorded history through the allocator's simulator under other settings, or on a device of another size."""

from __future__ import annotations

from dataclasses import dataclass

from fullbatch.memory.allocator import CachingAllocator, OutOfMemory
from fullbatch.memory.blocks import Block, Call
from fullbatch.memory.history import GIVES, TAKES, History
from fullbatch.memory.recorded import Frames
from fullbatch.memory.settings import AllocatorSettings
from fullbatch.units import TiB

_ENDLESS = TiB  # more than any device has: a request for more than that is a fault of the file


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Where a replay ran out of memory.

    Attributes:
        entry: Number of the entry, from 1; 0: among the blocks from before the record.
        requested_bytes: Asked for.
        reserved_bytes: In segments then.
        frames: Of who asked.
    """

    entry: int
    requested_bytes: int
    reserved_bytes: int
    frames: Frames


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A history under other settings.

    Attributes:
        peak_allocated_bytes: Most in live blocks.
        peak_reserved_bytes: Most in segments.
        allocated_bytes: In live blocks at the end.
        reserved_bytes: In segments at the end.
        largest_free_bytes: Largest free block at the end.
        retries: Times that the cache was emptied to make room.
        rescued: Requests that failed in the record and got their memory here.
        shortage: Where memory ran out; the replay ends there.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    largest_free_bytes: int
    retries: int
    rescued: int
    shortage: Shortage | None


def replay(
    history: History, settings: AllocatorSettings, limit_bytes: int | None = None, calls: list[Call] | None = None
) -> Replay:
    """Play ``history`` through an allocator with ``settings``.

    Blocks from before the record come first, by address: in what order they were asked for is not known. Where the
    record emptied the cache for no shortage of ``limit_bytes`` (``torch.cuda.empty_cache()``), so does the replay.

    Args:
        history: What was asked for, and given back.
        settings: Of the allocator.
        limit_bytes: What all segments together may take. ``None``: without end.
        calls: Filled with what the allocator does, where given.
    """
    allocator = CachingAllocator(_ENDLESS if limit_bytes is None else min(limit_bytes, _ENDLESS), settings, calls)
    blocks: dict[int, Block | None] = {}
    emptied = _emptied(history, limit_bytes)
    rescued = number = requested = 0
    frames: Frames = ()
    shortage: Shortage | None = None
    try:
        for address, live in history.before.items():
            requested, frames = live.requested, live.frames or ()
            blocks[address] = allocator.malloc(requested, live.stream)
        for number, entry in enumerate(history.entries, 1):
            if number in emptied:
                allocator.empty_cache()
            if entry.action == "alloc":
                requested, frames = entry.size, entry.frames
                allocator.free(blocks.pop(entry.address, None))
                blocks[entry.address] = allocator.malloc(requested, entry.stream)
            elif entry.action == "free_completed":
                allocator.free(blocks.pop(entry.address, None))
            elif entry.action == "oom":
                requested, frames = entry.size, entry.frames
                allocator.free(allocator.malloc(requested, entry.stream))
                rescued += 1
    except OutOfMemory:
        reserved = allocator.reserved_bytes
        shortage = Shortage(entry=number, requested_bytes=requested, reserved_bytes=reserved, frames=frames)
    return Replay(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        largest_free_bytes=allocator.largest_free_bytes,
        retries=allocator.num_alloc_retries,
        rescued=rescued,
        shortage=shortage,
    )


def recorded_limit(history: History) -> int | None:
    """Bytes that all segments could take, as the first out-of-memory entry tells; ``None`` where there is none.

    What the driver had left, or, where a part of the device was allowed only, one byte less than was lacking.
    """
    for entry, reserved in zip(history.entries, history.reserved_bytes(), strict=False):
        if entry.action == "oom":
            fresh = CachingAllocator(settings=history.settings)
            fresh.malloc(entry.size)
            return reserved + min(entry.address, max(fresh.reserved_bytes - 1, 0))
    return None


def emptied_at(history: History) -> list[int]:
    """Numbers, from 1, of the entries with which the cache begins to go back to the driver."""
    return [
        number
        for number, entry in enumerate(history.entries, 1)
        if entry.action in GIVES and (number == 1 or history.entries[number - 2].action not in GIVES)
    ]


def _emptied(history: History, limit_bytes: int | None) -> set[int]:
    """Entries at which the record emptied the cache, though what came next would have fitted beside it."""
    found: set[int] = set()
    reserved = history.reserved_bytes()
    for number in emptied_at(history):
        after = number
        while after < len(history.entries) and history.entries[after].action in GIVES:
            after += 1
        following = history.entries[after] if after < len(history.entries) else None
        if following is not None and following.action == "oom":
            continue
        more = following.size if following is not None and following.action in TAKES else 0
        if limit_bytes is None or reserved[number - 1] + more <= limit_bytes:
            found.add(number)
    return found
