"""The recorded history of a device, from a start that is rebuilt by undoing it from the final segments.

PyTorch keeps the last entries only, in a ring, and one may begin to record when half of the memory is taken.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fullbatch.memory.allocator import SMALL_SIZE
from fullbatch.memory.recorded import Frames, Snapshot
from fullbatch.memory.settings import AllocatorSettings

TAKES, GIVES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


class Live(NamedTuple):
    """A block that somebody has.

    Attributes:
        size: Bytes.
        requested: Bytes as asked for.
        stream: It is for.
        frames: Of who asked. ``None``: it was asked for before the record begins.
    """

    size: int
    requested: int
    stream: int
    frames: Frames | None


@dataclass
class State:
    """Memory at one moment; a walk changes it in place.

    Attributes:
        live: Blocks by address.
        allocated_bytes: In them.
        reserved_bytes: In segments.
    """

    live: dict[int, Live] = field(default_factory=dict)
    allocated_bytes: int = 0
    reserved_bytes: int = 0


class History:
    """What happened on a device.

    Args:
        snapshot: With a trace of the device.
        device: Its index.

    Attributes:
        entries: Oldest first.
        segments: At the end.
        settings: Of the allocator that was recorded; torch's defaults where the snapshot does not say.
        before: Blocks that were there before the first entry, by address.
        before_reserved_bytes: In segments then.
        contradictions: Entries that cannot be: a block given out twice, or freed into nothing.
    """

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.entries = snapshot.traces[device] if device < len(snapshot.traces) else ()
        self.segments = [segment for segment in snapshot.segments if segment.device == device]
        self.settings = snapshot.settings or AllocatorSettings(
            expandable_segments=any(segment.expandable for segment in self.segments)
        )
        self.contradictions = 0
        self._undo()

    def walk(self) -> Iterator[State]:
        """The state at the start, and after each entry: always the same object."""
        state = State(dict(self.before), sum(block.size for block in self.before.values()), self.before_reserved_bytes)
        ranges, addresses = dict(self._before_ranges), sorted(self.before)
        starts = sorted(ranges)
        yield state
        for entry in self.entries:
            action, address, size = entry.action, entry.address, entry.size
            if action == "alloc":
                if address in state.live:
                    state.allocated_bytes -= state.live.pop(address).size
                else:
                    bisect.insort(addresses, address)
                given = self._size(address, size, addresses, starts, ranges)
                state.live[address] = Live(given, size, entry.stream, entry.frames)
                state.allocated_bytes += given
            elif action == "free_completed":
                if address in state.live:
                    state.allocated_bytes -= state.live.pop(address).size
                    del addresses[bisect.bisect_left(addresses, address)]
            elif action in TAKES:
                state.reserved_bytes += size
                if action == "segment_alloc" and address not in ranges:
                    ranges[address] = size
                    bisect.insort(starts, address)
            elif action in GIVES:
                state.reserved_bytes -= size
                if ranges.pop(address, None) is not None:
                    del starts[bisect.bisect_left(starts, address)]
            yield state

    def reserved_bytes(self) -> list[int]:
        """In segments at the start, and after each entry."""
        reserved = [self.before_reserved_bytes]
        for entry in self.entries:
            sign = (entry.action in TAKES) - (entry.action in GIVES)
            reserved.append(reserved[-1] + sign * entry.size)
        return reserved

    def _undo(self) -> None:
        """From the end backwards."""
        live: dict[int, tuple[int, int, Frames | None]] = {}
        for segment in self.segments:
            for block in segment.blocks:
                if not block.free:
                    live[block.address] = block.requested, segment.stream, block.frames
        ranges = {segment.address: segment.size for segment in self.segments if not segment.expandable}
        self.before_reserved_bytes = sum(segment.size for segment in self.segments)
        for entry in reversed(self.entries):
            action, address = entry.action, entry.address
            if action == "alloc":
                if live.pop(address, None) is None:
                    self.contradictions += 1
            elif action == "free_completed":
                self.contradictions += address in live
                live[address] = entry.size, entry.stream, None
            elif action in TAKES:
                self.before_reserved_bytes -= entry.size
                ranges.pop(address, None)
            elif action in GIVES:
                self.before_reserved_bytes += entry.size
                if action == "segment_free":
                    ranges[address] = entry.size
        if self.before_reserved_bytes < 0:
            self.contradictions, self.before_reserved_bytes = self.contradictions + 1, 0
        self._before_ranges = ranges
        addresses, starts = sorted(live), sorted(ranges)
        self.before = {
            address: Live(self._size(address, requested, addresses, starts, ranges), requested, stream, frames)
            for address, (requested, stream, frames) in sorted(live.items())
        }

    def _size(self, address: int, requested: int, addresses: list[int], starts: list[int], ranges: dict[int, int]) -> int:
        """Of the block at ``address``: what was left of a free block stays with it where it was not split off.

        The free block ended where the next live block begins, or the segment ends: free neighbours always merge.
        """
        rounded = self.settings.round_size(requested) if requested else 0
        at = bisect.bisect_right(starts, address) - 1
        if rounded <= SMALL_SIZE or at < 0 or address >= (end := starts[at] + ranges[starts[at]]):
            return rounded
        following = bisect.bisect_right(addresses, address)
        if following < len(addresses):
            end = min(end, addresses[following])
        room = end - address
        splits = rounded < (self.settings.max_split_size_bytes or room + 1) and room - rounded > SMALL_SIZE
        return rounded if splits or room < rounded else room
