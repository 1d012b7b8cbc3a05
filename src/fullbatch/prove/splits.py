"""Ways to cut a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fullbatch.errors import InvalidArgument


def default_splits(samples: int) -> list[tuple[int, ...]]:
    """For 16 samples: 16x1, 4x4, 2x8, 1x16 and the ragged 5+5+5+1; the like for other numbers."""
    third = samples // 3
    ragged = next((size for size in (*range(third, 1, -1), *range(third + 1, samples)) if size and samples % size), 1)
    sizes = dict.fromkeys([samples, max(samples // 4, 1), min(2, samples), 1, ragged])
    return [_by_size(samples, size) for size in sizes]


def parse_split(split: str | Sequence[int], samples: int) -> tuple[int, ...]:
    """``"4x4"`` (micro-batch x micro-batches), ``"5+5+5+1"`` or ``[5, 5, 5, 1]`` as sizes.

    Raises:
        InvalidArgument: Not of this form, a size below 1, or another sum than ``samples``.
    """
    runs = _runs(split) if isinstance(split, str) else [(size, 1) for size in split]
    whole = all(type(number) is int and number >= 1 for run in runs for number in run)
    if not runs or not whole:
        raise InvalidArgument(
            f"splits: {split!r} must be MICRO-BATCHxMICRO-BATCHES or a sum of sizes, each at least 1",
            hint='"4x4" is 4 micro-batches of 4 samples; "5+5+5+1" is a ragged split',
        )
    total = sum(size * count for size, count in runs)
    if total != samples:  # before the sizes are written out, which may be billions
        raise InvalidArgument(
            f"splits: {split!r} holds {total} samples, but the batch has {samples}",
            hint=f"the sizes must sum to {samples}: {'+'.join(map(str, _by_size(samples, max(samples // 2, 1))))}",
        )
    return tuple(size for size, count in runs for _ in range(count))


def parse_splits(splits: Any, samples: int) -> list[tuple[int, ...]]:
    """Each of ``splits`` by :func:`parse_split`; one alone (``"4x4"``, ``[5, 5, 5, 1]``) is taken as one."""
    if splits is None:
        return default_splits(samples)
    if not isinstance(splits, (str, Sequence)) or not splits:
        raise InvalidArgument(f"splits={splits!r} must be a list of splits", hint='splits=["4x4", "5+5+5+1"]')
    alone = isinstance(splits, str) or all(isinstance(part, int) for part in splits)
    return [parse_split(split, samples) for split in ([splits] if alone else splits)]


def _runs(split: str) -> list[tuple[int, int]]:
    runs = []
    for part in split.split("+"):
        size, times, count = part.partition("x")
        try:
            runs.append((int(size), int(count) if times else 1))
        except ValueError:
            return []
    return runs


def _by_size(samples: int, size: int) -> tuple[int, ...]:
    full, rest = divmod(samples, size)
    return (size,) * full + ((rest,) if rest else ())
