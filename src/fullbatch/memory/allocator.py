"""A simulator of CUDA's caching allocator at its default settings.

Source of every rule: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (v2.10).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from fullbatch.units import MiB

MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = MiB  # kSmallSize: up to it, a request goes to the small pool
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer
LARGE_SEGMENT = 20 * MiB  # kLargeBuffer
MIN_LARGE_ALLOC = 10 * MiB  # kMinLargeAlloc: below it, a large request takes a LARGE_SEGMENT
ROUND_LARGE = 2 * MiB  # kRoundLarge: above, the segment is rounded up to this


@dataclass(eq=False)
class Block:
    """A piece of a segment: ``size`` bytes at ``address``, with its neighbours in the segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    previous: Block | None = None
    next: Block | None = None


class OutOfMemory(Exception):
    """No segment of ``segment_bytes`` more fits on the device, even after the cache was emptied."""

    def __init__(self, segment_bytes: int) -> None:
        super().__init__(f"a segment of {segment_bytes} bytes does not fit")
        self.segment_bytes = segment_bytes


class CachingAllocator:
    """Allocated and reserved bytes as CUDA's allocator would count them, on one stream.

    Args:
        limit_bytes: What all segments together may take. ``None``: without end.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._pools: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by (size, address)
        self._address = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0

    def malloc(self, size: int) -> Block | None:
        """A block for ``size`` bytes; ``None`` for 0 bytes, which take nothing.

        Raises:
            OutOfMemory: The limit is reached; the cache is empty then.
        """
        if size == 0:
            return None
        size = -(-size // MIN_BLOCK) * MIN_BLOCK  # round_size
        small = size <= SMALL_SIZE
        pool = self._pools[small]
        at = bisect.bisect_left(pool, (size, -1))  # get_free_block: the first that is not smaller
        block = pool.pop(at)[2] if at < len(pool) else self._new_segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL_SIZE:  # should_split
            tail = Block(block.address + size, rest, small, True, block, block.next)
            if block.next is not None:
                block.next.previous = tail
            block.next, block.size = tail, size
            self._insert(tail)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """Give ``block`` back to its pool, merged with free neighbours (try_merge_blocks)."""
        if block is None:
            return
        assert not block.free, "freed twice"
        self.allocated_bytes -= block.size
        before, after = block.previous, block.next
        if before is not None and before.free:
            self._remove(before)
            block.address, block.size = before.address, block.size + before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.free:
            self._remove(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        block.free = True
        self._insert(block)

    def empty_cache(self) -> None:
        """Give back the segments that are one free block (release_cached_blocks)."""
        for small, pool in self._pools.items():
            whole = [entry for entry in pool if entry[2].previous is None and entry[2].next is None]
            self.reserved_bytes -= sum(size for size, _, _ in whole)
            self._pools[small] = [entry for entry in pool if entry[2].previous is not None or entry[2].next is not None]

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def _new_segment(self, size: int, small: bool) -> Block:
        if small:  # get_allocation_size
            segment = SMALL_SEGMENT
        elif size < MIN_LARGE_ALLOC:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if self._limit is not None and self.reserved_bytes + segment > self._limit:
            self.num_alloc_retries += 1
            self.empty_cache()
            if self.reserved_bytes + segment > self._limit:
                raise OutOfMemory(segment)
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = Block(self._address, segment, small)
        self._address += segment
        return block

    def _insert(self, block: Block) -> None:
        bisect.insort(self._pools[block.small], (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        pool = self._pools[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]
