"""Rules of c10/cuda/CUDACachingAllocator.cpp, one by one, and invariants on any sequence of requests."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbatch.memory.allocator import CachingAllocator, OutOfMemory
from fullbatch.units import MiB


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
    ],
)
def test_a_first_request_takes_the_segment_of_its_size(size, allocated, reserved):
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_a_large_block_is_split_only_where_more_than_1_mib_is_left():
    allocator = CachingAllocator()
    allocator.malloc(11 * MiB)  # of a segment of 12 MiB: 1 MiB left
    assert allocator.allocated_bytes == 12 * MiB
    allocator.malloc(13 * MiB - 512)  # of a segment of 14 MiB: 512 bytes more than 1 MiB left
    assert allocator.allocated_bytes == 25 * MiB - 512


def test_out_of_memory_comes_after_a_retry_with_an_empty_cache():
    allocator = CachingAllocator(limit_bytes=30 * MiB)
    allocator.free(allocator.malloc(20 * MiB))
    allocator.malloc(24 * MiB)  # fits once the 20 MiB went back
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (24 * MiB, 1)
    with pytest.raises(OutOfMemory):
        allocator.malloc(10 * MiB)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40 * MiB), st.integers(0, 99)), max_size=60))
def test_blocks_never_overlap_and_all_bytes_come_back(calls):
    allocator = CachingAllocator()
    live = []
    for takes, size, which in calls:
        if takes or not live:
            live.append(allocator.malloc(size))
        else:
            allocator.free(live.pop(which % len(live)))
        blocks = sorted((b.address, b.size) for b in live if b is not None)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(blocks))
        assert allocator.allocated_bytes == sum(n for _, n in blocks) <= allocator.reserved_bytes
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
