"""A real training run at an effective batch."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fullbatch.accumulate import Accumulator, Update, map_tensors
from fullbatch.accumulate.items import count
from fullbatch.accumulate.terms import as_terms, counters_by_term, weights_by_term
from fullbatch.errors import InvalidArgument
from fullbatch.evidence import Evidence, measured
from fullbatch.experiments.schedule import scaled_lr, warmup_cosine, warmup_updates
from fullbatch.plain import plain
from fullbatch.tasks import Task
from fullbatch.tasks.optimizers import check_lr

SCHEMA = "train.v1"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Loss on the held-out samples.

    Attributes:
        update: Updates made before.
        loss: Mean over all held-out items (weighted sum of the terms' means).
        value: The same in ``unit``.
        unit: As the task names it.
    """

    update: int
    loss: float
    value: float
    unit: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run.

    Attributes:
        updates: Records of all windows.
        learning_rates: Learning rate of each, that of the first parameter group.
        held_out: Before the first update, between, and after the last.
        seconds: Wall time of the run, evaluation included.
        settings: What was asked for, and what followed from it.
        evidence: What it was measured with.
    """

    updates: tuple[Update, ...]
    learning_rates: tuple[float, ...]
    held_out: tuple[HeldOut, ...]
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence

    @property
    def samples_per_second(self) -> float:
        """Samples over the seconds of the updates."""
        return sum(update.samples for update in self.updates) / sum(update.seconds for update in self.updates)

    @property
    def finite(self) -> bool:
        """Whether every loss was a number; a run ends with the first that is not."""
        return all(math.isfinite(update.loss) for update in self.updates if update.skipped is None)

    def to_json(self) -> dict[str, Any]:
        """A summary of plain values for ``json.dumps``; the updates stand in the JSON lines beside it."""
        summary = {
            "schema": SCHEMA,
            "finite": self.finite,
            "updates": sum(update.skipped is None for update in self.updates),
            "skipped": sum(update.skipped is not None for update in self.updates),
            "samples": sum(update.samples for update in self.updates),
            "sync_calls": sum(update.sync_calls for update in self.updates),
            "first_loss": self.updates[0].loss,
            "last_loss": self.updates[-1].loss,
            "held_out": self.held_out,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "settings": self.settings,
            "evidence": self.evidence,
        }
        return {key: plain(value) for key, value in summary.items()}


def train(
    task: Task,
    *,
    effective_batch: int = 256,
    micro_batch: int = 16,
    updates: int = 60,
    lr: float | None = None,
    scale_lr: str = "none",
    reference_batch: int = 256,
    warmup_samples: int = 2048,
    max_grad_norm: float | None = 1.0,
    eval_every: int = 20,
    seed: int = 0,
    device: torch.device | None = None,
    on_update: Callable[[Update, float], None] = lambda update, lr: None,
    on_held_out: Callable[[HeldOut], None] = lambda point: None,
    command: str = "",
) -> Run:
    """Train a copy of the task's model and measure the loss on its held-out samples.

    Args:
        task: What to train.
        effective_batch: Samples of one update.
        micro_batch: Samples of one forward and backward.
        updates: Updates to make.
        lr: Peak learning rate at ``reference_batch``. Default: that of the task's optimizer.
        scale_lr: ``none``, ``linear`` or ``sqrt``: how the rate follows the effective batch; see
            :data:`fullbatch.experiments.schedule.SCALINGS` for the sources.
        reference_batch: Effective batch at which ``lr`` was found.
        warmup_samples: Samples over which the rate rises, whatever the effective batch.
        max_grad_norm: Clip the window's gradient to this 2-norm.
        eval_every: Updates between two measurements on the held-out samples.
        seed: Seeds data and dropout.
        device: Where to train; micro-batches are moved there one at a time. Default: the CPU.
        on_update: Called with the record and the learning rate after each update.
        on_held_out: Called after each measurement.
        command: Recorded in the evidence.

    Raises:
        InvalidArgument: A number is below its least value.
    """
    for name, value in (("effective_batch", effective_batch), ("updates", updates), ("eval_every", eval_every)):
        if value < 1:
            raise InvalidArgument(f"{name}={value} must be at least 1")
    if lr is not None:
        check_lr(lr)
    device = device or torch.device("cpu")
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = copy.deepcopy(task.model).to(device)
    optimizer = task.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = scaled_lr(group["lr"] if lr is None else lr, scale_lr, effective_batch, reference_batch)
    peak = optimizer.param_groups[0]["lr"]
    warmup = min(warmup_updates(warmup_samples, effective_batch), updates)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(warmup, updates))

    def loss(model: nn.Module, micro: Any) -> Any:
        return task.loss(model, map_tensors(lambda tensor: tensor.to(device, non_blocking=True), micro))

    step = Accumulator(
        model,
        optimizer,
        loss,
        items=task.items,
        weights=task.weights,
        micro_batch=micro_batch,
        max_grad_norm=max_grad_norm,
        scheduler=scheduler,
    )
    records: list[Update] = []
    rates: list[float] = []
    points: list[HeldOut] = []

    def measure() -> None:
        point = evaluate(task, model, loss, micro_batch, step.updates)
        if point is not None:
            points.append(point)
            on_held_out(point)

    measure()
    batches = task.batches(effective_batch, torch.Generator().manual_seed(seed))
    for number in range(1, updates + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        records.append(step(next(batches)))
        on_update(records[-1], rates[-1])
        if records[-1].skipped is None and not math.isfinite(records[-1].loss):
            break  # nothing good comes after that
        if number % eval_every == 0 or number == updates:
            measure()
    return Run(
        updates=tuple(records),
        learning_rates=tuple(rates),
        held_out=tuple(points),
        seconds=time.perf_counter() - started,
        settings={
            "task": task.name,
            "task_unit": task.unit,
            "effective_batch": effective_batch,
            "micro_batch": min(micro_batch, effective_batch),
            "updates": updates,
            "optimizer": type(optimizer).__name__,
            "peak_lr": peak,
            "scale_lr": scale_lr,
            "reference_batch": reference_batch,
            "warmup_updates": warmup,
            "max_grad_norm": max_grad_norm,
            "seed": seed,
        },
        evidence=measured(device, command),
    )


def evaluate(task: Task, model: nn.Module, loss: Any, samples: int, update: int) -> HeldOut | None:
    """Mean loss over the items of the task's held-out samples, ``samples`` at a time; ``None`` if it has none."""
    if task.held_out is None:
        return None
    counters = counters_by_term(task.items)
    weights = weights_by_term(task.weights, counters)
    sums, items = dict.fromkeys(counters, 0.0), dict.fromkeys(counters, 0.0)
    with _evaluating(model), torch.no_grad():
        for batch in task.held_out_batches(samples):
            counted = count(counters, [batch])[0]
            values = as_terms(loss(model, batch), counters)
            for term in counters:
                if counted[term]:
                    sums[term] += values[term].item() * counted[term]
                    items[term] += counted[term]
    total = (
        sum(weights[term] * sums[term] / items[term] for term in counters if items[term]) if any(items.values()) else math.nan
    )
    unit, factor = task.unit
    return HeldOut(update=update, loss=total, value=total * factor, unit=unit)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents first: a frozen part stays frozen
            module.train(training)
