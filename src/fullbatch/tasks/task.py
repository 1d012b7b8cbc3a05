"""What to train: a model, its loss, its items, its data and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from fullbatch.accumulate import Counter, Loss, samples
from fullbatch.errors import TaskError


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """AdamW with learning rate 1e-3: the optimizer of a task that names none."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A model with everything that its training needs.

    Attributes:
        model: The module to train. Copied before it is trained.
        loss: ``loss(model, micro)``: the mean over the items, or a dict of means by term.
        data: Samples: an object with ``len(data)`` and ``data[i]``. Either this or
        make_batch: ``make_batch(samples, generator)`` draws a batch of so many samples.
        collate: Makes a batch from a list of ``data[i]``. Default: torch's, which stacks.
        items: What the mean is over; see :class:`fullbatch.Accumulator`.
        weights: Weight of each term.
        optimizer: ``optimizer(parameters)`` returns a ``torch.optim.Optimizer``.
        held_out: Samples, as ``data``, that are not trained on. ``None``: none are held out.
        unit: Name and factor of the unit in which a held-out loss is shown:
            ``("bits per byte", 1 / math.log(2))``. Default: ``("loss", 1.0)``.
        name: Shown in output.

    Raises:
        TaskError: A part is missing or is not what it must be.

    Example: see ``docs/tasks.md``.
    """

    model: nn.Module
    loss: Loss
    data: Any = None
    make_batch: Callable[[int, torch.Generator], Any] | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    items: Counter | Mapping[str, Counter] = samples
    weights: Mapping[str, float] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    held_out: Any = None
    unit: tuple[str, float] = ("loss", 1.0)
    name: str = "task"

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TaskError(f"Task(model=...) is {type(self.model).__name__}: it must be a torch.nn.Module")
        for part in ("loss", "optimizer", "collate"):
            if not callable(getattr(self, part)):
                raise TaskError(f"Task({part}=...) is {type(getattr(self, part)).__name__}: it must be a function")
        if (self.data is None) == (self.make_batch is None):
            raise TaskError(
                f"Task has {'neither data nor' if self.data is None else 'both data and'} make_batch: it needs one of the two",
                hint="data=dataset (with len(data) and data[i]), or make_batch=lambda samples, generator: {...}",
            )
        for part in ("data", "held_out"):
            value = getattr(self, part)
            if value is None:
                continue
            if not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
                raise TaskError(
                    f"Task({part}=...) is {type(value).__name__}: it must have len({part}) and {part}[i]",
                    hint="give a map-style dataset or a list of samples; a stream goes through make_batch",
                )
            if len(value) == 0:
                raise TaskError(f"Task({part}=...) is empty: it must hold at least one sample")

    def batches(self, samples: int, generator: torch.Generator) -> Iterator[Any]:
        """Batches of ``samples`` samples without end; ``data`` is shuffled anew in each epoch."""
        if self.make_batch is not None:
            while True:
                yield self.make_batch(samples, generator)
        rows: list[int] = []
        while True:
            while len(rows) < samples:
                rows += torch.randperm(len(self.data), generator=generator).tolist()
            yield self.collate([self.data[i] for i in rows[:samples]])
            rows = rows[samples:]

    def batch(self, samples: int, generator: torch.Generator) -> Any:
        """The first of :meth:`batches`."""
        return next(self.batches(samples, generator))

    def held_out_batches(self, samples: int) -> Iterator[Any]:
        """The held-out samples in order, ``samples`` at a time; the last batch may be smaller."""
        if self.held_out is not None:
            loader = DataLoader(
                self.held_out,
                batch_size=samples,
                collate_fn=self.collate,
                generator=torch.Generator(),  # its seed is drawn from here, and not from the training's random numbers
            )
            yield from loader
