"""The accumulation curve: throughput and loss against the effective batch."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fullbatch.accumulate import Accumulator, Update, map_tensors
from fullbatch.errors import InvalidArgument
from fullbatch.evidence import Evidence, measured
from fullbatch.plain import plain
from fullbatch.tasks import Task

SCHEMA = "accum-curve.v1"
FLAT_SHARE = 0.95
FLAT_RULE = f"flat from the least accum_steps with at least {FLAT_SHARE:.0%} of the best samples_per_sec, if the grid goes on"
WARM_UP_UPDATES = 3
"""Updates before the clock, on a copy that is thrown away: the first calls of a kernel choose and compile."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One effective batch of the curve.

    Attributes:
        effective_batch: Samples of one update.
        accum_steps: Micro-batches of one update.
        micro_batch: Samples of one micro-batch.
        avg_loss: Mean loss over the updates, each before its step.
        samples_per_sec: All samples over all seconds of updates.
        samples_per_sec_low: Of the slowest round.
        samples_per_sec_high: Of the fastest round.
        median_step_ms: Median time of an update, in milliseconds.
        sync_calls: Backwards that ended with reduced gradients, in all updates.
        steps: Updates.
    """

    effective_batch: int
    accum_steps: int
    micro_batch: int
    avg_loss: float
    samples_per_sec: float
    samples_per_sec_low: float
    samples_per_sec_high: float
    median_step_ms: float
    sync_calls: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The accumulation curve of a task.

    Attributes:
        points: In the order of the grid.
        flat_at: Least ``accum_steps`` from which the curve is flat, by ``flat_rule``; ``None``: it still
            rises where the grid ends.
        settings: Task, optimizer, learning rate, seed and rounds.
        evidence: What it was measured with.
    """

    points: tuple[Point, ...]
    flat_at: int | None
    flat_rule: str = FLAT_RULE
    settings: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence

    @property
    def noise(self) -> float:
        """The fastest round over the slowest, of the point where that is largest: 1 on a quiet machine."""
        return max(point.samples_per_sec_high / point.samples_per_sec_low for point in self.points)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``, as ``docs/accum-curve.md`` describes them."""
        return {"schema": SCHEMA, **plain(self)}


def sweep(
    task: Task,
    *,
    micro_batch: int,
    accum_grid: Sequence[int],
    num_steps: int = 25,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    rounds: int = 5,
    seed: int = 0,
    device: torch.device | None = None,
    on_update: Callable[[int, Update], None] = lambda accum_steps, update: None,
    settings: dict[str, Any] | None = None,
    command: str = "",
) -> Curve:
    """Train a copy of the task for ``num_steps`` updates at each number of micro-batches, and time it.

    The updates of all points are done in ``rounds`` turns, every other turn in reverse order, so that a
    machine that grows slower or warmer does so for all. Data is made, and kernels are warmed up, outside the clock.

    Args:
        task: What to train.
        micro_batch: Samples of one micro-batch.
        accum_grid: Numbers of micro-batches of an update.
        num_steps: Updates at each point.
        optimizer: A function from parameters to an optimizer. Default: the task's.
        rounds: Turns into which the updates are divided.
        seed: Seeds the data.
        device: Where to train. Default: the CPU.
        on_update: Called with ``accum_steps`` and the record after each update.
        settings: Recorded in the curve.
        command: Recorded in the evidence.

    Raises:
        InvalidArgument: A number is below 1, or the grid is empty or has a repeat.
    """
    for name, value in (("micro_batch", micro_batch), ("num_steps", num_steps), ("rounds", rounds)):
        if value < 1:
            raise InvalidArgument(f"{name}={value} must be at least 1")
    if not accum_grid or min(accum_grid) < 1 or len(set(accum_grid)) < len(accum_grid):
        raise InvalidArgument(
            f"accum_grid={list(accum_grid)} must be different numbers of micro-batches, each at least 1",
            hint="accum_grid=[1, 2, 4, 8, 16]",
        )
    device = device or torch.device("cpu")
    runs = [_Run(task, micro_batch, steps, optimizer or task.optimizer, seed, device) for steps in accum_grid]
    rounds = min(rounds, num_steps)
    for number in range(rounds):
        updates = num_steps * (number + 1) // rounds - num_steps * number // rounds
        for run in runs if number % 2 == 0 else reversed(runs):
            for update in run.round(updates):
                on_update(run.accum_steps, update)
    points = tuple(run.point() for run in runs)
    return Curve(
        points=points,
        flat_at=_flat_at(points),
        settings={"task": task.name, "seed": seed, "rounds": rounds, **(settings or {})},
        evidence=measured(device, command),
    )


def _flat_at(points: Sequence[Point]) -> int | None:
    best = max(point.samples_per_sec for point in points)
    least = min(point.accum_steps for point in points if point.samples_per_sec >= FLAT_SHARE * best)
    return least if least < max(point.accum_steps for point in points) else None


class _Run:
    """One point of the grid while it is measured."""

    def __init__(self, task: Task, micro_batch: int, accum_steps: int, optimizer: Any, seed: int, device: torch.device) -> None:
        self.micro_batch, self.accum_steps, self.device = micro_batch, accum_steps, device
        self._batches = task.batches(micro_batch * accum_steps, torch.Generator().manual_seed(seed))
        self._step = self._accumulator(task, optimizer)
        self._rounds: list[list[Update]] = []
        throw_away = self._accumulator(task, optimizer)
        batch = self._next()
        for _ in range(WARM_UP_UPDATES):
            throw_away(batch)
        self._batches = task.batches(micro_batch * accum_steps, torch.Generator().manual_seed(seed))

    def _accumulator(self, task: Task, optimizer: Any) -> Accumulator:
        model = copy.deepcopy(task.model).to(self.device)
        return Accumulator(
            model,
            optimizer(model.parameters()),
            task.loss,
            items=task.items,
            weights=task.weights,
            micro_batch=self.micro_batch,
            check=False,  # it would be inside the clock
        )

    def _next(self) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.device), next(self._batches))

    def round(self, updates: int) -> Iterator[Update]:
        batches = [self._next() for _ in range(updates)]
        done: list[Update] = []
        self._rounds.append(done)
        for batch in batches:
            done.append(self._step(batch))
            yield done[-1]

    def point(self) -> Point:
        updates = [update for done in self._rounds for update in done]
        speeds = [_samples_per_sec(done) for done in self._rounds]
        losses = [update.loss for update in updates if update.skipped is None]
        return Point(
            effective_batch=self.micro_batch * self.accum_steps,
            accum_steps=self.accum_steps,
            micro_batch=self.micro_batch,
            avg_loss=statistics.fmean(losses) if losses else float("nan"),
            samples_per_sec=_samples_per_sec(updates),
            samples_per_sec_low=min(speeds),
            samples_per_sec_high=max(speeds),
            median_step_ms=1000 * statistics.median(update.seconds for update in updates),
            sync_calls=sum(update.sync_calls for update in updates),
            steps=len(updates),
        )


def _samples_per_sec(updates: list[Update]) -> float:
    return sum(update.samples for update in updates) / sum(update.seconds for update in updates)
