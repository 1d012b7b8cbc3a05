"""A window: the micro-batches of one update, each with its samples and items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fullbatch.accumulate.batch import batch_size, slices
from fullbatch.accumulate.items import Counter, count, samples
from fullbatch.errors import BatchError, InvalidArgument


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The samples of one forward and backward.

    Args:
        data: What ``loss(model, data)`` receives.
        samples: Number of samples in ``data``. Counted from dimension 0 in a
            batch that fullbatch splits; say it for data that has no common
            dimension 0 (lists of images, packed sequences).
    """

    data: Any
    samples: int

    def __post_init__(self) -> None:
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 0:
            raise InvalidArgument(f"MicroBatch(samples={self.samples!r}) must be a whole number of samples, at least 0")


@dataclass(frozen=True, eq=False)
class Window:
    """The micro-batches of one update, the items of each and of them all, by term of the loss."""

    micro_batches: tuple[MicroBatch, ...]
    counts: tuple[Mapping[str, int | float], ...]
    items: Mapping[str, int | float]

    @classmethod
    def of(cls, batch: Any, micro_batch: int | None, counters: Mapping[str, Counter]) -> Window:
        """Split ``batch`` (or take the ready micro-batches of an iterator) and count every item.

        Args:
            batch: A nesting of tensors, or an iterator of such nestings or of :class:`MicroBatch`.
            micro_batch: Samples of a micro-batch; the last one may be smaller. ``None``: one
                micro-batch holds all. Ready micro-batches may not be larger.
            counters: Counter of items of each term of the loss.
        """
        parts = [_ready(micro, micro_batch) for micro in batch] if isinstance(batch, Iterator) else split(batch, micro_batch)
        # A micro-batch that says its samples is not asked for them again.
        others = {term: counter for term, counter in counters.items() if counter is not samples}
        counted = count(others, [part.data for part in parts])
        counts = tuple(
            {term: row.get(term, part.samples) for term in counters} for part, row in zip(parts, counted, strict=True)
        )
        return cls(tuple(parts), counts, {term: sum(row[term] for row in counts) for term in counters})

    @property
    def samples(self) -> int:
        """Number of samples in the window."""
        return sum(micro.samples for micro in self.micro_batches)

    @property
    def with_items(self) -> list[tuple[MicroBatch, Mapping[str, int | float]]]:
        """The micro-batches that hold an item of any term, with their items; the others need no forward."""
        pairs = zip(self.micro_batches, self.counts, strict=True)
        return [(micro, counted) for micro, counted in pairs if any(counted.values())]


def split(batch: Any, micro_batch: int | None) -> list[MicroBatch]:
    """Consecutive slices of ``batch``, ``micro_batch`` samples each (views); the last may be smaller."""
    total = batch_size(batch)
    size = max(total, 1) if micro_batch is None else micro_batch
    sizes = [min(size, total - start) for start in range(0, total, size)]
    return [MicroBatch(data, samples) for data, samples in zip(slices(batch, sizes), sizes, strict=True)]


def _ready(micro: Any, limit: int | None) -> MicroBatch:
    ready = micro if isinstance(micro, MicroBatch) else _counted(micro)
    if limit is not None and ready.samples > limit:
        raise BatchError(
            f"a ready micro-batch has {ready.samples} samples, more than micro_batch={limit}",
            hint="one batch a call is cut for you: for batch in loader: step(batch). "
            "For micro-batches of your own sizes leave micro_batch out",
        )
    return ready


def _counted(micro: Any) -> MicroBatch:
    try:
        return MicroBatch(micro, batch_size(micro))
    except BatchError as error:
        raise BatchError(
            error.message.replace("batch", "micro-batch", 1),
            hint="say its size: step(iter([MicroBatch(data, samples=n), ...]))",
        ) from None
