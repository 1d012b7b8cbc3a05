"""How far a wrong loop's updates are from the full batch's."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.accumulate import ONLY_TERM, Counter, Loss, slices
from fullbatch.accumulate.items import count
from fullbatch.accumulate.rng import same_rng_after
from fullbatch.errors import InvalidArgument, not_one_of
from fullbatch.evidence import Evidence, measured
from fullbatch.plain import plain
from fullbatch.prove.loops import WRONG, Loop, Tools, right
from fullbatch.prove.precision import backward_in, copy_in, in_dtype, loss_in
from fullbatch.prove.reference import full_batch_backward
from fullbatch.prove.watch import Watch, flat, flat_grads, watched

SCHEMA = "broken-loop.v1"
MICRO_BATCH, K, SHORT = 4, 4, 2
"""Samples of a micro-batch; micro-batches of the first window, and of the second, which ends the epoch."""
SAMPLES = MICRO_BATCH * (K + SHORT)
_ROUNDING = 1e-9  # float64 stays below this; the least of the faults here is above 1e-4
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """One update of a loop against the full batch's.

    Attributes:
        optimizer: ``SGD`` (learning rate 0.1) or ``AdamW`` (1e-3).
        update: 1 for the full window, 2 for the short one at the end of the epoch.
        steps: Optimizer steps that the loop made in the window; 1 is right.
        grad_ratio: 2-norm of the gradient at the window's last step over that of the full batch; 0 without a step.
        grad_rel_error: 2-norm of their difference over that of the full batch.
        param_max_abs_diff: Largest absolute difference of a parameter after the window (of an averaged
            weight, for ``ema-rate``).
        param_rel_diff: 2-norm of that difference over the way that the right weights went since the start.
        lr_ratio: Learning rate after the window over the right one.
    """

    optimizer: str
    update: int
    steps: int
    grad_ratio: float
    grad_rel_error: float
    param_max_abs_diff: float
    param_rel_diff: float
    lr_ratio: float

    @property
    def equal(self) -> bool:
        """Whether gradient, weights, learning rate and number of steps are the full batch's."""
        close = max(self.grad_rel_error, self.param_rel_diff, abs(self.lr_ratio - 1)) <= _ROUNDING
        return close and self.steps == 1


@dataclass(frozen=True, kw_only=True)
class BrokenLoop:
    """What a loop of a known kind of fault does to a task.

    Attributes:
        kind: Name of the fault.
        source: The loop as Python text.
        departures: One for each optimizer and update.
        evidence: What it was measured with.
    """

    kind: str
    source: str
    departures: tuple[Departure, ...]
    evidence: Evidence

    @property
    def equal(self) -> bool:
        """Whether the loop, in spite of its fault, makes the full batch's updates on this data."""
        return all(departure.equal for departure in self.departures)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``, as ``docs/proof.md`` describes them."""
        return {"schema": SCHEMA, "equal": self.equal, **plain(self)}


def run_broken(
    kind: str,
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    items: Counter | Mapping[str, Counter],
    seed: int = 0,
    command: str = "",
) -> BrokenLoop:
    """Train a copy of ``model`` for an epoch with the wrong loop ``kind``, in float64, and compare each update.

    Args:
        kind: One of :data:`fullbatch.prove.loops.WRONG`, or ``right`` for the loop without a fault.
        model: Left untouched.
        loss: As for :class:`fullbatch.Accumulator`, with one term.
        batch: 24 samples: a window of 4 micro-batches of 4 and a short one of 2.
        items: What the loss is a mean over.
        seed: Seeds each run in the same way.
        command: Recorded in the evidence.

    Raises:
        InvalidArgument: There is no such kind.
    """
    loop = {"right": right, **WRONG}.get(kind)
    if loop is None:
        raise not_one_of("--break", kind, WRONG)
    if not callable(items):
        raise InvalidArgument(
            f"items counts the terms {sorted(items)}: the wrong loops are written for a loss of one term",
            hint="prove without --break takes several",
        )
    batch, loss = in_dtype(batch, torch.float64), loss_in(loss, torch.float64)
    departures: list[Departure] = []
    with same_rng_after(model), warnings.catch_warnings(), backward_in(torch.float64):
        warnings.simplefilter("ignore")  # torch warns of some of these faults; the figures say it
        for name, make in _OPTIMIZERS.items():
            full, found = (_epoch(run, kind, model, loss, batch, items, make, seed) for run in (None, loop))
            start = full[0].weights
            departures += [
                _departure(name, number, start, full[number], found[number], averaged=kind == "ema-rate") for number in (1, 2)
            ]
    return BrokenLoop(
        kind=kind,
        source=inspect.getsource(loop),
        departures=tuple(departures),
        evidence=measured(next(model.parameters()).device, command),
    )


@dataclass(frozen=True)
class _State:
    """After a window (or before the first): the last step's gradient, weights, averaged weights, learning rate."""

    grads: Tensor
    weights: Tensor
    averaged: Tensor
    lr: float
    steps: int


class _Windows:
    """An iterable of micro-batches that notes the state whenever a window is over."""

    def __init__(self, micros: Sequence[Any], ends: Sequence[bool], watch: Watch, optimizer: Any, ema: nn.Module) -> None:
        self.micros, self.ends, self.watch, self.optimizer, self.ema = micros, ends, watch, optimizer, ema
        self.states: list[_State] = []

    def note(self) -> None:
        weights, lr = flat(self.watch.parameters), self.optimizer.param_groups[0]["lr"]
        grads = torch.zeros_like(weights) if self.watch.grads is None else self.watch.grads
        self.states.append(_State(grads, weights, flat(self.ema.parameters()), lr, self.watch.steps))
        self.watch.grads, self.watch.steps = None, 0

    def __iter__(self) -> Iterator[Any]:
        for micro, end in zip(self.micros, self.ends, strict=True):
            yield micro
            if end:
                self.note()  # the loop asks for the next one: it is done with this window


def _epoch(
    loop: Loop | None,
    kind: str,
    model: nn.Module,
    loss: Any,
    batch: Any,
    items: Counter,
    make: Callable[[Any], torch.optim.Optimizer],
    seed: int,
) -> list[_State]:
    """The states before and after each window: of ``loop``, or of the full batch where it is ``None``."""
    windows = slices(batch, [MICRO_BATCH * K, MICRO_BATCH * SHORT])
    micros = slices(batch, [MICRO_BATCH] * (K + SHORT))
    counts = [row[ONLY_TERM] for row in count({ONLY_TERM: items}, micros)]
    per_window = [sum(counts[:K])] * K + [sum(counts[K:])] * SHORT
    if not all(per_window):
        raise InvalidArgument(
            "a window of the batch has no items: the wrong loops need labels to differ", hint="another --seed"
        )
    model = copy_in(model, torch.float64)
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    use = Tools(
        K=K,
        share=tuple(n / total for n, total in zip(counts, per_window, strict=True)),
        ends=tuple(i in (K - 1, K + SHORT - 1) for i in range(K + SHORT)),
        micro_batches=(K,) * K + (SHORT,) * SHORT,
        max_norm=_max_norm(model, loss, windows[0]),
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9 if kind == "scheduler-rate" else 1.0),
        scaler=torch.amp.GradScaler(next(model.parameters()).device.type, init_scale=1024.0),
        ema=copy.deepcopy(model),
    )
    torch.manual_seed(seed)
    parts, ends = (windows, [True, True]) if loop is None else (micros, use.ends)
    with watched(model, optimizer) as watch:
        noted = _Windows(parts, ends, watch, optimizer, use.ema)
        noted.note()
        if loop is not None:
            loop(model, optimizer, loss, noted, use)
            return noted.states
        for window in noted:
            full_batch_backward(model, loss, window, None, use.max_norm if kind in ("partial-clip", "scaled-clip") else None)
            optimizer.step()
            optimizer.zero_grad()
            use.scheduler.step()
            use.update_ema(model)
        return noted.states


def _max_norm(model: nn.Module, loss: Any, window: Any) -> float:
    """Half of the gradient norm of ``window``: a clipping that is felt."""
    twin = copy.deepcopy(model)
    full_batch_backward(twin, loss, window, None, None)
    return 0.5 * float(flat_grads(twin.parameters()).norm())


def _departure(name: str, number: int, start: Tensor, full: _State, found: _State, *, averaged: bool) -> Departure:
    wrong, right_ = (found.averaged, full.averaged) if averaged else (found.weights, full.weights)
    return Departure(
        optimizer=name,
        update=number,
        steps=found.steps,
        grad_ratio=(found.grads.norm() / full.grads.norm()).item(),
        grad_rel_error=((found.grads - full.grads).norm() / full.grads.norm()).item(),
        param_max_abs_diff=(wrong - right_).abs().max().item(),
        param_rel_diff=((wrong - right_).norm() / (right_ - start).norm()).item(),
        lr_ratio=found.lr / full.lr,
    )
