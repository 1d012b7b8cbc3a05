"""Blocks of memory and the pools that free ones wait in, as CUDA's caching allocator has them.

Source: c10/cuda/CUDACachingAllocator.cpp (v2.10), struct Block and struct BlockPool.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Action = Literal["alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"]


class Call(NamedTuple):
    """An entry of the history, as torch's snapshots have them.

    Attributes:
        action: What happened.
        address: Where; for ``oom`` the bytes that were left on the device.
        size: Bytes: of ``alloc`` and ``free_completed`` as asked for.
        stream: Of the block.
        tag: Of who asked.
    """

    action: Action
    address: int
    size: int
    stream: int
    tag: Any


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment.

    Attributes:
        address: Of its first byte.
        size: Bytes.
        pool: Where it returns to.
        segment: Address of its segment.
        free: In the pool.
        mapped: Backed by memory; only an expandable segment has blocks that are not.
        previous: Neighbour in the segment.
        next: Neighbour in the segment.
        requested: Bytes as asked for.
        tag: Of who asked.
        since: Searches in its pool when it was freed.
    """

    address: int
    size: int
    pool: Pool
    segment: int
    free: bool = False
    mapped: bool = True
    previous: Block | None = None
    next: Block | None = None
    requested: int = 0
    tag: Any = None
    since: int = 0

    def split(self, size: int) -> Block:
        """Keep the first ``size`` bytes; the rest is a free block of its own, in no pool yet."""
        rest = Block(self.address + size, self.size - size, self.pool, self.segment, True, self.mapped, self, self.next)
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def merge(self) -> None:
        """Take free neighbours in; this block is free, and in no pool (try_merge_blocks)."""
        before, after = self.previous, self.next
        if before is not None and before.free and before.mapped is self.mapped:
            self.pool.remove(before)
            self.address, self.size, self.previous = before.address, before.size + self.size, before.previous
            if self.previous is not None:
                self.previous.next = self
        if after is not None and after.free and after.mapped is self.mapped:
            self.pool.remove(after)
            self.size, self.next = self.size + after.size, after.next
            if self.next is not None:
                self.next.previous = self


@dataclass(eq=False, slots=True)
class Pool:
    """Free blocks of one stream, by (size, address), and the unmapped ones of its expandable segment, by address."""

    stream: int
    small: bool
    blocks: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)
    searches: int = 0

    def insert(self, block: Block) -> None:
        """Take ``block`` in."""
        if block.mapped:
            block.since = self.searches
            bisect.insort(self.blocks, (block.size, block.address, block))
        else:
            bisect.insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Give ``block`` out."""
        if block.mapped:
            del self.blocks[bisect.bisect_left(self.blocks, (block.size, block.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (block.address,))]
