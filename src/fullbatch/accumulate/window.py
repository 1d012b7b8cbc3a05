"""A window: the micro-batches of one update, each with its samples and items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
    items: Mapping[str, int | float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.samples, bool) or not isinstance(self.samples, int) or self.samples < 0:
            raise InvalidArgument(f"MicroBatch(samples={self.samples!r}) must be a whole number of samples, at least 0")


@dataclass(frozen=True, eq=False)
class Window:
    """The micro-batches of one update and the items of them all, by term of the loss."""

    micro_batches: tuple[MicroBatch, ...]
    items: Mapping[str, int | float]

    @classmethod
    def of(cls, batch: Any, micro_batch: int | None, counters: Mapping[str, Counter]) -> Window:
        """Split ``batch`` (or take the ready micro-batches of an iterator) and count every item.

        Args:
            batch: A nesting of tensors, or an iterator of such nestings or of :class:`MicroBatch`.
            micro_batch: Samples of a micro-batch; the last one may be smaller. ``None``: one
                micro-batch holds all. Not used for ready micro-batches.
            counters: Counter of items of each term of the loss.
        """
        parts = [_ready(micro) for micro in batch] if isinstance(batch, Iterator) else split(batch, micro_batch)
        counted: list[dict[str, int | float]] = [{} for _ in parts]
        # A micro-batch that says its samples is not asked for them again.
        for row, part in zip(counted, parts, strict=True):
            row.update({term: part.samples for term, counter in counters.items() if counter is samples})
        others = {term: counter for term, counter in counters.items() if counter is not samples}
        for row, numbers in zip(counted, count(others, [part.data for part in parts]), strict=True):
            row.update(numbers)
        micro_batches = tuple(
            MicroBatch(part.data, part.samples, {term: row[term] for term in counters})
            for part, row in zip(parts, counted, strict=True)
        )
        return cls(micro_batches, {term: sum(micro.items[term] for micro in micro_batches) for term in counters})

    @property
    def samples(self) -> int:
        """Number of samples in the window."""
        return sum(micro.samples for micro in self.micro_batches)

    @property
    def with_items(self) -> list[MicroBatch]:
        """The micro-batches that hold an item of any term; the others need no forward."""
        return [micro for micro in self.micro_batches if any(micro.items.values())]


def split(batch: Any, micro_batch: int | None) -> list[MicroBatch]:
    """Consecutive slices of ``batch``, ``micro_batch`` samples each (views); the last may be smaller."""
    total = batch_size(batch)
    size = max(total, 1) if micro_batch is None else micro_batch
    sizes = [min(size, total - start) for start in range(0, total, size)]
    return [MicroBatch(data, samples) for data, samples in zip(slices(batch, sizes), sizes, strict=True)]


def _ready(micro: Any) -> MicroBatch:
    if isinstance(micro, MicroBatch):
        return micro
    try:
        return MicroBatch(micro, batch_size(micro))
    except BatchError as error:
        raise BatchError(
            error.message.replace("batch", "micro-batch", 1),
            hint="say its size: step(iter([MicroBatch(data, samples=n), ...]))",
        ) from None
