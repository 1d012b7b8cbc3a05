"""What a memory snapshot holds, as records.

Source of the format: torch/csrc/cuda/memory_snapshot.cpp (v2.13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fullbatch.memory.settings import AllocatorSettings

STATES = ("active_allocated", "active_awaiting_free", "active_pending_free", "inactive")


class Frame(NamedTuple):
    """A line of a stack.

    Attributes:
        name: Function.
        filename: Source file.
        line: Line in it; 0 where it is not known.
    """

    name: str
    filename: str
    line: int


Frames = tuple[Frame, ...]
"""A stack, innermost first."""


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """A piece of a segment.

    Attributes:
        address: Of its first byte.
        size: Bytes.
        requested: Bytes as asked for; 0 where it is free.
        state: One of :data:`STATES`.
        frames: Of who asked.
    """

    address: int
    size: int
    requested: int
    state: str
    frames: Frames

    @property
    def free(self) -> bool:
        """Nobody has it."""
        return self.state == "inactive"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of memory from the driver.

    Attributes:
        device: Index of its device.
        address: Of its first byte.
        size: Bytes.
        stream: That its blocks are for.
        expandable: It grows.
        private: It belongs to a pool of its own, as CUDA graphs have.
        blocks: From the first byte to the last, without gaps.
    """

    device: int
    address: int
    size: int
    stream: int
    expandable: bool
    private: bool
    blocks: tuple[SnapshotBlock, ...]


class Entry(NamedTuple):
    """An event of the history.

    Attributes:
        action: ``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``,
            ``segment_unmap``, ``oom``, or one that counts no memory.
        address: Where; of ``oom`` the bytes that were free on the device.
        size: Bytes.
        stream: Of the block.
        frames: Of who called.
    """

    action: str
    address: int
    size: int
    stream: int
    frames: Frames


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a file holds.

    Attributes:
        segments: At the moment of the snapshot, by device and address.
        traces: History of each device, oldest entry first; empty where none was recorded.
        settings: Of the allocator, where the file says.
    """

    segments: tuple[Segment, ...]
    traces: tuple[tuple[Entry, ...], ...]
    settings: AllocatorSettings | None

    @property
    def devices(self) -> list[int]:
        """Indices of devices of which it holds anything."""
        return sorted({segment.device for segment in self.segments} | {n for n, trace in enumerate(self.traces) if trace})
