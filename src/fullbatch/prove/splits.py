"""Ways to cut a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from fullbatch.errors import InvalidArgument

Split = "str | Sequence[int]"


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
    try:
        sizes = _parse(split) if isinstance(split, str) else tuple(split)
    except ValueError:
        sizes = ()
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    if not sizes or not whole:
        raise InvalidArgument(
            f"splits: {split!r} must be MICRO-BATCHxMICRO-BATCHES or a sum of sizes, each at least 1",
            hint='"4x4" is 4 micro-batches of 4 samples; "5+5+5+1" is a ragged split',
        )
    if sum(sizes) != samples:
        raise InvalidArgument(
            f"splits: {split!r} holds {sum(sizes)} samples, but the batch has {samples}",
            hint=f"the sizes must sum to {samples}: {'+'.join(map(str, _by_size(samples, max(samples // 2, 1))))}",
        )
    return sizes


def _parse(split: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for part in split.split("+"):
        size, times, count = part.partition("x")
        sizes += [int(size)] * (int(count) if times else 1)
    return tuple(sizes)


def _by_size(samples: int, size: int) -> tuple[int, ...]:
    full, rest = divmod(samples, size)
    return (size,) * full + ((rest,) if rest else ())
