"""What the loss is a mean over, and how many of them a micro-batch holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullbatch.accumulate.batch import batch_size
from fullbatch.errors import BatchError, InvalidArgument

Counter = Callable[[Any], "int | float | Tensor"]
"""``counter(micro)`` is the number of items in ``micro``, at least 0: an int, a float (weights
of weighted items) or a tensor with one element. It must not change ``micro``."""


def samples(micro: Any) -> int:
    """Number of samples in ``micro``: each is one item. The default."""
    return batch_size(micro)


@dataclass(frozen=True)
class LabelledTokens:
    """The counter that :func:`tokens` makes."""

    key: str | int
    ignore_index: int = -100
    shift: bool = False

    def __call__(self, micro: Any) -> Tensor:
        """Number of labelled tokens in ``micro``: a 0-dimensional int64 tensor on the labels' device."""
        labels = self._labels(micro)
        if self.shift:
            labels = labels[..., 1:]
        return (labels != self.ignore_index).sum()

    def _labels(self, micro: Any) -> Tensor:
        try:
            labels = micro[self.key] if isinstance(self.key, int) or isinstance(micro, Mapping) else getattr(micro, self.key)
        except (KeyError, IndexError, AttributeError, TypeError):
            raise BatchError(
                f"items=tokens({self.key!r}): the micro-batch has no {self.key!r}; it is a {type(micro).__name__}"
                + (f" with {sorted(map(str, micro))}" if isinstance(micro, Mapping) else ""),
                hint="name the labels: a mapping's key, an attribute, or the index in a tuple",
            ) from None
        if not isinstance(labels, Tensor) or labels.ndim == 0:
            raise BatchError(
                f"items=tokens({self.key!r}) must name a tensor of labels [samples, ...], got {type(labels).__name__}",
                hint="for another layout give your own counter: items=lambda micro: ...",
            )
        return labels


def tokens(key: str | int, *, ignore_index: int = -100, shift: bool = False) -> LabelledTokens:
    """A counter of labelled tokens: the elements of ``micro[key]`` that are not ``ignore_index``.

    Args:
        key: Where the labels [samples, ...] are: a mapping's key, an attribute's name or a
            tuple's index.
        ignore_index: The label that the loss leaves out (torch's ``cross_entropy``: -100).
        shift: Whether the loss itself compares position t with label t + 1, as causal models
            of transformers do with ``labels=input_ids``. The first label of a row is then
            predicted by nothing and is not counted. ``False``: the labels are aligned
            with the outputs already, and all are counted.

    Example:
        >>> import torch
        >>> micro = {"labels": torch.tensor([[5, 6, 7], [5, -100, -100]])}
        >>> int(tokens("labels")(micro)), int(tokens("labels", shift=True)(micro))
        (4, 2)
    """
    return LabelledTokens(key, ignore_index=ignore_index, shift=shift)


def count(counters: Mapping[str, Counter], micro_batches: list[Any]) -> list[dict[str, int | float]]:
    """Items of each micro-batch, by term, on the host: one device synchronisation at most a number type.

    Raises:
        InvalidArgument: A counter returned something other than one finite number >= 0.
    """
    raw = [{term: _one_number(term, counter(micro)) for term, counter in counters.items()} for micro in micro_batches]
    for integral in (True, False):
        waiting = [
            (row, term, value)
            for row in raw
            for term, value in row.items()
            if isinstance(value, Tensor) and (not value.is_floating_point()) == integral
        ]
        if waiting:
            device = waiting[0][2].device
            flat = [value.detach().reshape(()).to(device) for _, _, value in waiting]
            numbers = torch.stack([v.to(torch.int64) for v in flat] if integral else flat).tolist()
            for (row, term, _), number in zip(waiting, numbers, strict=True):
                row[term] = number
    for row in raw:
        for term, value in row.items():
            if not (math.isfinite(value) and value >= 0):
                raise InvalidArgument(f"items ({term}) counted {value} in a micro-batch: a count must be finite and at least 0")
    return raw  # type: ignore[return-value]  # no tensor is left


def _one_number(term: str, value: Any) -> int | float | Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool:
        return value.item() if value.is_cpu else value  # others wait, to be fetched together
    if getattr(value, "shape", None) == () and not isinstance(value, Tensor):
        value = value.item()  # NumPy's scalars and 0-dimensional arrays
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise InvalidArgument(
        f"items ({term}) returned {shown}: a counter must return one number",
        hint="sum the mask: items=lambda micro: micro['mask'].sum()",
    )
