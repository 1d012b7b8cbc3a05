"""Settings of the allocator: syntax of c10/core/AllocatorConfig.cpp, and each rule of CUDACachingAllocator.cpp they change."""

import pytest

from fullbatch.errors import InvalidArgument
from fullbatch.memory.allocator import CachingAllocator, OutOfMemory
from fullbatch.memory.settings import AllocatorSettings, parse_settings
from fullbatch.units import MiB


def test_torchs_syntax_is_read_with_lists_and_spaces():
    settings = parse_settings(
        "expandable_segments:True, max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,1024:4,>:8],"
        "garbage_collection_threshold:0.8,backend:native,pinned_use_background_threads:True"
    )
    assert settings.expandable_segments
    assert settings.max_split_size_bytes == 128 * MiB
    assert settings.garbage_collection_threshold == 0.8
    # intervals from 1 MiB: the first divisor holds below its boundary too, ">" from the last boundary on
    assert settings.roundup_power2_divisions == (*[1] * 9, 2, *[8] * 6)[:16]


def test_nothing_is_torchs_defaults():
    assert parse_settings("") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_split_size:128", "did you mean max_split_size_mb?"),
        ("max_split_size_mb:x", "must be a whole number of MiB"),
        ("max_split_size_mb:1", "at least 20"),
        ("expandable_segments:yes", "must be True or False"),
        ("garbage_collection_threshold:1", "must be between 0 and 1"),
        ("garbage_collection_threshold:nan", "must be between 0 and 1"),
        ("roundup_power2_divisions:3", "must be a power of two"),
        ("roundup_power2_divisions:[256:1", "must be a power of two"),
        ("roundup_power2_divisions:[0:1]", "must be a power of two"),
        ("backend:cudaMallocAsync", "only torch's own allocator can"),
        ("nonsense", "must be one of"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_rule(text, told):
    with pytest.raises(InvalidArgument, match="--alloc-conf") as caught:
        parse_settings(text)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        (4, 5000, 5120),  # roundup_power2_next_division: steps of a quarter of 4096
        (4, 1200, 1536),  # below 512 x divisions the plain rule holds (round_size)
        (8, 33 * MiB, 36 * MiB),
        (1, 33 * MiB + 1, 33 * MiB + 512),
    ],
)
def test_roundup_power2_divisions(divisions, size, rounded):
    assert parse_settings(f"roundup_power2_divisions:{divisions}").round_size(size) == rounded


def test_max_split_size_keeps_large_blocks_for_large_requests():  # get_free_block, should_split
    allocator = CachingAllocator(settings=parse_settings("max_split_size_mb:32"))
    allocator.free(allocator.malloc(64 * MiB))
    allocator.malloc(8 * MiB)  # would be cut from the 64 MiB by default
    assert allocator.reserved_bytes == 84 * MiB
    block = allocator.malloc(48 * MiB)  # may have it whole: it is less than 20 MiB larger
    assert (block.size, allocator.reserved_bytes) == (64 * MiB, 84 * MiB)


def test_a_large_cached_block_goes_back_before_the_whole_cache():  # release_available_cached_blocks
    allocator = CachingAllocator(160 * MiB, settings=parse_settings("max_split_size_mb:32"))
    allocator.free(allocator.malloc(12 * MiB))
    allocator.free(allocator.malloc(100 * MiB))
    allocator.malloc(60 * MiB)
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (72 * MiB, 0)


def test_garbage_is_collected_above_the_threshold_only():  # garbage_collect_cached_blocks
    allocator = CachingAllocator(100 * MiB, settings=parse_settings("garbage_collection_threshold:0.5"))
    allocator.free(allocator.malloc(30 * MiB))
    allocator.malloc(32 * MiB)  # 30 of 100 reserved: nothing is collected
    assert allocator.reserved_bytes == 62 * MiB
    allocator.malloc(34 * MiB)  # 62 of 100: 12 MiB are wanted back, the 30 MiB block is the only one
    assert allocator.reserved_bytes == 66 * MiB


def test_an_expandable_segment_grows_by_granules_in_place():  # map_block
    allocator = CachingAllocator(settings=parse_settings("expandable_segments:True"))
    first = allocator.malloc(30 * MiB)
    assert allocator.reserved_bytes == 40 * MiB  # two granules of 20 MiB
    second = allocator.malloc(15 * MiB)  # the last 10 MiB and one granule more
    assert (second.address - first.address, allocator.reserved_bytes) == (30 * MiB, 60 * MiB)


def test_expandable_segments_mend_what_defaults_cannot_use():
    def run(text):
        allocator = CachingAllocator(100 * MiB, settings=parse_settings(text))
        blocks = [allocator.malloc(9 * MiB) for _ in range(10)]  # by default two in each segment of 20 MiB
        allocator.free(blocks[1])
        allocator.free(blocks[2])
        return allocator.malloc(18 * MiB)

    assert run("expandable_segments:True").size == 18 * MiB  # two neighbours are one block there
    with pytest.raises(OutOfMemory):
        run("")


def test_unmapping_gives_whole_granules_back():  # unmap_block
    allocator = CachingAllocator(settings=parse_settings("expandable_segments:True"))
    keep = allocator.malloc(30 * MiB)
    allocator.free(allocator.malloc(70 * MiB))
    allocator.empty_cache()
    assert (keep.size, allocator.reserved_bytes) == (30 * MiB, 40 * MiB)
