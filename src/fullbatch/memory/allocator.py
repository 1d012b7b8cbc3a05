"""A simulator of CUDA's caching allocator.

Source of every rule: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (v2.10).

One thing is not in them: at which address the driver puts a segment, which decides between free blocks
of equal size and so what can merge later. Here every segment lies below the one before, as ranges do that
Linux's mmap hands out. With it four published peaks of eager attention that were 6 to 9 % low come out
within 0.2 %, three of them to the byte (benchmarks/prediction.py, rows A10, A18, A22, A26).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Any

from fullbatch.memory.blocks import Action, Block, Call, Pool
from fullbatch.memory.settings import MIN_BLOCK, AllocatorSettings
from fullbatch.units import MiB, TiB

SMALL_SIZE = MiB  # kSmallSize: up to it, a request goes to the small pool
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer
MIN_LARGE_ALLOC = 10 * MiB  # kMinLargeAlloc: below it, a large request takes a segment of large_segment_size
ROUND_LARGE = 2 * MiB  # kRoundLarge: above, the segment is rounded up to this
ADDRESS_SPACE = 2 * TiB  # of an expandable segment: never the limit
TOP = 128 * TiB  # of the addresses


class OutOfMemory(Exception):
    """No segment of ``segment_bytes`` more fits on the device, even after the cache was emptied."""

    def __init__(self, segment_bytes: int) -> None:
        super().__init__(f"a segment of {segment_bytes} bytes does not fit")
        self.segment_bytes = segment_bytes


class CachingAllocator:
    """Allocated and reserved bytes as CUDA's allocator would count them.

    Args:
        limit_bytes: What all segments together may take. ``None``: without end.
        settings: How it works. ``None``: torch's defaults.
        history: Filled with every call, where given.
    """

    def __init__(
        self, limit_bytes: int | None = None, settings: AllocatorSettings | None = None, history: list[Call] | None = None
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self._limit = limit_bytes
        self._history = history
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._segments: dict[int, int] = {}  # address -> bytes, in order of time: from above to below
        self._address = TOP
        self._collects = limit_bytes is not None and self.settings.garbage_collection_threshold > 0
        self._split_limit = self.settings.max_split_size_bytes or float("inf")
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0

    def malloc(self, size: int, stream: int = 0, tag: Any = None) -> Block | None:
        """A block for ``size`` bytes; ``None`` for 0 bytes, which take nothing.

        Raises:
            OutOfMemory: The limit is reached; the cache is empty then.
        """
        if size == 0:
            return None
        rounded = self.settings.round_size(size)
        pool = self._pool(stream, rounded <= SMALL_SIZE)
        block = self._find(pool, rounded) or self._grow(pool, rounded)
        block.free, block.requested, block.tag = False, size, tag
        rest = block.size - rounded
        if self._splits(pool, rounded, rest):
            pool.insert(block.split(rounded))
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        if self._history is not None:
            self._history.append(Call("alloc", block.address, size, stream, tag))
        return block

    def free(self, block: Block | None) -> None:
        """Give ``block`` back to its pool, merged with free neighbours."""
        if block is None:
            return
        assert not block.free, "freed twice"
        self.allocated_bytes -= block.size
        if self._history is not None:
            self._history.append(Call("free_completed", block.address, block.requested, block.pool.stream, block.tag))
        block.free, block.tag = True, None
        block.merge()
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give back the segments that are one free block, and free granules (release_cached_blocks)."""
        for small in (False, True):
            for pool in [pool for _, pool in sorted(self._pools.items()) if pool.small is small]:
                for _, _, block in list(pool.blocks):
                    if self.settings.expandable_segments:
                        self._unmap(block)
                    elif block.previous is None and block.next is None:
                        self._release(block)

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Of the largest free block."""
        return max((pool.blocks[-1][0] for pool in self._pools.values() if pool.blocks), default=0)

    def free_blocks(self) -> Iterator[Block]:
        """Every cached block."""
        for pool in self._pools.values():
            yield from (block for _, _, block in pool.blocks)

    def segments(self, live: Iterable[Block]) -> list[list[Block]]:
        """Mapped blocks by segment, both by address; of an expandable segment every stretch that is mapped.

        Args:
            live: All blocks that were given out and not freed.
        """
        rows: list[list[Block]] = []
        for block in sorted([*self.free_blocks(), *live], key=lambda block: block.address):
            if block.previous is not None and block.previous.mapped:
                rows[-1].append(block)
            else:
                rows.append([block])
        return rows

    def state_key(self, live: Iterable[Block] = ()) -> Any:
        """Equal in two states from which equal calls lead to equal states.

        Args:
            live: Blocks that will be freed by their place in a sequence.
        """
        rank = {address: number for number, address in enumerate(self._segments)}

        def place(block: Block) -> tuple[int, ...]:
            age = block.pool.searches - block.since if self._collects and block.free else 0
            return rank[block.segment], block.address - block.segment, block.size, age

        pools = tuple((key, tuple(place(entry[2]) for entry in pool.blocks)) for key, pool in sorted(self._pools.items()))
        return tuple(self._segments.values()), self.reserved_bytes, pools, tuple(place(block) for block in live)

    # Where a block comes from

    def _pool(self, stream: int, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(stream, small)
        return pool

    def _find(self, pool: Pool, size: int) -> Block | None:
        """The first free block that is not smaller, unless it is too large to be used up (get_free_block)."""
        pool.searches += 1
        blocks, at = pool.blocks, bisect.bisect_left(pool.blocks, (size, -1))
        if at == len(blocks):
            return None
        if self.settings.expandable_segments:
            while at + 1 < len(blocks) and _can_be(blocks[at + 1][2]) < _can_be(blocks[at][2]):
                at += 1
        block = blocks[at][2]
        if size < self._split_limit <= block.size:
            return None
        if size >= self._split_limit and block.size >= size + self.settings.max_non_split_rounding_bytes:
            return None
        del blocks[at]
        return block

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        """Whether ``rest`` bytes go back to the pool (should_split)."""
        if pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        return size < self._split_limit and rest > SMALL_SIZE

    def _grow(self, pool: Pool, size: int) -> Block:
        """A block from the driver; before it is refused, ever more of the cache goes back (malloc)."""
        if self._collects:
            self._collect()
        segment = self._segment_size(pool, size)
        block = self._alloc(pool, size, segment)
        if block is None and self._release_oversize(pool, size):
            block = self._alloc(pool, size, segment)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._alloc(pool, size, segment)
        if block is None:
            if self._history is not None:
                self._history.append(Call("oom", (self._limit or 0) - self.reserved_bytes, size, pool.stream, None))
            raise OutOfMemory(segment)
        return block

    def _segment_size(self, pool: Pool, size: int) -> int:
        """get_allocation_size."""
        if pool.small:
            return SMALL_SEGMENT
        if size < MIN_LARGE_ALLOC:
            return self.settings.large_segment_size_bytes
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def _alloc(self, pool: Pool, size: int, segment: int) -> Block | None:
        """alloc_block."""
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        if not self._takes("segment_alloc", self._address - segment, segment, pool):
            return None
        address = self._below(segment)
        return Block(address, segment, pool, address)

    def _below(self, size: int) -> int:
        """The address of a new segment."""
        self._address -= size
        self._segments[self._address] = size
        return self._address

    def _takes(self, action: Action, address: int, size: int, pool: Pool) -> bool:
        """``size`` bytes from the driver, if it has them."""
        if self._limit is not None and self.reserved_bytes + size > self._limit:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if self._history is not None:
            self._history.append(Call(action, address, size, pool.stream, None))
        return True

    def _gives(self, action: Action, address: int, size: int, pool: Pool) -> None:
        self.reserved_bytes -= size
        if self._history is not None:
            self._history.append(Call(action, address, size, pool.stream, None))

    # Where a block goes back to the driver

    def _release(self, block: Block) -> None:
        """release_block."""
        block.pool.remove(block)
        del self._segments[block.segment]
        self._gives("segment_free", block.address, block.size, block.pool)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Blocks that are never split: the one that is enough, or the largest together (release_available_cached_blocks)."""
        if self.settings.max_split_size_bytes is None or self.settings.expandable_segments:
            return False
        wanted = max(size, self.settings.max_split_size_bytes)
        at = bisect.bisect_left(pool.blocks, (wanted, -1))
        if at < len(pool.blocks):
            self._release(pool.blocks[at][2])
            return True
        released = 0
        while pool.blocks and released < wanted and pool.blocks[-1][0] >= self._split_limit:
            released += pool.blocks[-1][0]
            self._release(pool.blocks[-1][2])
        return released >= wanted

    def _collect(self) -> None:
        """Old cached blocks go back above the threshold (garbage_collect_cached_blocks)."""
        assert self._limit is not None
        target = self.reserved_bytes - int(self.settings.garbage_collection_threshold * self._limit)
        ages = {
            block: pool.searches - block.since
            for _, pool in sorted(self._pools.items())
            if not pool.small
            for _, _, block in pool.blocks
            if block.previous is None and block.next is None
        }
        reclaimed = 0
        while ages and reclaimed < target:
            threshold = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= threshold]:
                reclaimed += block.size
                del ages[block]
                self._release(block)

    # Expandable segments

    def _granule(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self.settings.large_segment_size_bytes

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """A free block of the expandable segment, made large enough (try_allocate_expandable_block)."""
        block = self._expandable(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        pool.remove(block)
        return block

    def _expandable(self, pool: Pool, size: int) -> Block:
        """Where ``size`` bytes of free and unmapped blocks begin, at the lowest address (find_expandable_block)."""
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            start = before if before is not None and before.free else unmapped
            room = 0
            block: Block | None = start
            while block is not None and block.free and room < size:
                room, block = room + block.size, block.next
            if room >= size:
                return start
        address = self._below(ADDRESS_SPACE)
        start = Block(address, ADDRESS_SPACE, pool, address, free=True, mapped=False)
        pool.insert(start)
        return start

    def _map(self, block: Block, size: int) -> bool:
        """Whole granules of the unmapped ``block``, for ``size`` bytes; it is in the pool then (map_block)."""
        pool, granule = block.pool, self._granule(block.pool)
        mapped = -(-size // granule) * granule
        if not self._takes("segment_map", block.address, mapped, pool):
            return False
        pool.remove(block)
        if mapped < block.size:
            pool.insert(block.split(mapped))
        block.mapped = True
        block.merge()
        pool.insert(block)
        return True

    def _unmap(self, block: Block) -> None:
        """The whole granules in a free block go back (unmap_block)."""
        pool, granule = block.pool, self._granule(block.pool)
        start = block.segment + -(-(block.address - block.segment) // granule) * granule
        end = block.segment + (block.address + block.size - block.segment) // granule * granule
        if end <= start:
            return
        pool.remove(block)
        if start > block.address:
            block, before = block.split(start - block.address), block
            pool.insert(before)
        if block.size > end - start:
            pool.insert(block.split(end - start))
        block.mapped = False
        block.merge()
        pool.insert(block)
        self._gives("segment_unmap", start, end - start, pool)


def _can_be(block: Block) -> int:
    """Size up to which a block of an expandable segment can grow in place."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)
