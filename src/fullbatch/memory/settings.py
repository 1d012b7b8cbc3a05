"""Settings of CUDA's caching allocator, as ``PYTORCH_ALLOC_CONF`` has them.

Source: c10/core/AllocatorConfig.cpp (v2.13).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fullbatch.errors import InvalidArgument, not_one_of
from fullbatch.units import MiB

MIN_BLOCK = 512  # kMinBlockSize: all sizes are rounded to at least this
_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: of sizes between 1 MiB and 64 GiB
_LOG_FIRST = 20


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """How the allocator cuts and keeps memory; the defaults are torch's.

    Attributes:
        expandable_segments: One segment a pool that grows, instead of one for each request that finds no room.
        max_split_size_bytes: Larger blocks are never split. ``None``: all may be.
        max_non_split_rounding_bytes: How much larger than the request a block may be that is not split.
        roundup_power2_divisions: For sizes from 1 MiB, 2 MiB, ...: in how many steps each power of two is divided.
        garbage_collection_threshold: Share of the limit from which old cached blocks go back. 0: never.
        large_segment_size_bytes: Segment of requests between 1 and 10 MiB.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MiB
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    large_segment_size_bytes: int = 20 * MiB

    def round_size(self, size: int) -> int:
        """Bytes of the block that a request for ``size`` > 0 bytes gets (round_size)."""
        interval = min(max(size.bit_length() - 1 - _LOG_FIRST, 0), _INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size > MIN_BLOCK * divisions:  # roundup_power2_next_division
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK


def parse_settings(text: str, argument: str = "--alloc-conf") -> AllocatorSettings:
    """Settings from text such as ``"expandable_segments:True,max_split_size_mb:128"``.

    Args:
        text: In the syntax of ``PYTORCH_ALLOC_CONF``; empty for torch's defaults.
        argument: What the user calls it.

    Raises:
        InvalidArgument: No such setting, or a value that torch refuses.

    >>> parse_settings("max_split_size_mb:128").max_split_size_bytes
    134217728
    """
    settings = AllocatorSettings()
    compact = re.sub(r"\s", "", text)
    for item in re.findall(r"[^,\[]*(?:\[[^\]]*\]?)?[^,\[]*", compact):
        if not item:
            continue
        key, _, value = item.partition(":")
        if key in _WITHOUT_EFFECT:
            continue
        if key not in _KEYS:
            raise not_one_of(f"{argument}:", key, [*_KEYS, *_WITHOUT_EFFECT])
        field, read, rule = _KEYS[key]
        try:
            change = read(value)
        except ValueError:
            raise InvalidArgument(f"{argument}: {key}:{value} {rule}", hint=f"{key}:{_EXAMPLES[key]}") from None
        if field:
            settings = replace(settings, **{field: change})
    if settings.max_split_size_bytes is not None and settings.max_split_size_bytes < settings.large_segment_size_bytes:
        least = settings.large_segment_size_bytes // MiB
        raise InvalidArgument(
            f"{argument}: max_split_size_mb:{settings.max_split_size_bytes // MiB} must be at least {least}",
            hint="the least that torch takes is the large segment size",
        )
    return settings


def _boolean(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(value)
    return value == "True"


def _mebibytes(least: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not value.isdecimal() or len(value) > 9 or int(value) < least:
            raise ValueError(value)
        return int(value) * MiB

    return read


def _fraction(value: str) -> float:
    fraction = float(value)
    if not 0 < fraction < 1:
        raise ValueError(value)
    return fraction


def _power(value: str, zero: bool = False) -> int:
    number = int(value)
    if number < (0 if zero else 1) or number & (number - 1) or number.bit_length() > 16:
        raise ValueError(value)
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """``8``, or ``[256:1,512:2,>:4]`` with boundaries in MiB (parseRoundUpPower2Divisions)."""
    if not value.startswith("["):
        return (_power(value),) * _INTERVALS
    if not value.endswith("]"):
        raise ValueError(value)
    divisions, last, first = [0] * _INTERVALS, 0, True
    for item in value[1:-1].split(","):
        boundary, _, number = item.partition(":")
        divided = _power(number, zero=True)
        if boundary == ">":
            divisions[last:] = [divided] * (_INTERVALS - last)
            continue
        last = min(int(math.log2(_power(boundary))), _INTERVALS - 1)
        if first:
            divisions[:last], first = [divided] * last, False
        divisions[last] = divided
    return tuple(divisions)


def _native(value: str) -> None:
    if value != "native":
        raise ValueError(value)


_KEYS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "expandable_segments": ("expandable_segments", _boolean, "must be True or False"),
    "max_split_size_mb": ("max_split_size_bytes", _mebibytes(20), "must be a whole number of MiB, at least 20"),
    "max_non_split_rounding_mb": (
        "max_non_split_rounding_bytes", _mebibytes(20), "must be a whole number of MiB, at least 20",
    ),
    "roundup_power2_divisions": (
        "roundup_power2_divisions", _divisions, "must be a power of two, or a list of MiB:power and >:power",
    ),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction, "must be between 0 and 1"),
    "large_segment_size_mb": ("large_segment_size_bytes", _mebibytes(2), "must be a whole number of MiB, at least 2"),
    "backend": ("", _native, "cannot be simulated: only torch's own allocator can"),
}  # fmt: skip
_EXAMPLES = {
    "expandable_segments": "True", "max_split_size_mb": "128", "max_non_split_rounding_mb": "64",
    "roundup_power2_divisions": "8 or roundup_power2_divisions:[256:1,512:2,>:4]", "garbage_collection_threshold": "0.8",
    "large_segment_size_mb": "20", "backend": "native",
}  # fmt: skip
_WITHOUT_EFFECT = (
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "pinned_num_register_threads", "pinned_use_background_threads", "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "graph_capture_record_stream_reuse",
)  # fmt: skip
"""Keys of memory on the host, or of speed."""
