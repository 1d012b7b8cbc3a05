"""What an optimizer was given at its step, and what it made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Outcome:
    """One update: each vector holds all parameters of the model, in float64."""

    grads: Tensor  # before the step
    step: Tensor  # parameters after it minus before
    loss: float
    steps: int


class Watch:
    """Sees the gradients at each step of an optimizer, and counts the steps."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.before = flat(self.parameters)
        self.grads: Tensor | None = None
        self.steps = 0

    def before_step(self, *_: Any) -> None:
        # Of several steps the last gradient counts: a second one is a difference by itself.
        self.grads = flat_grads(self.parameters)

    def after_step(self, *_: Any) -> None:
        self.steps += 1

    def outcome(self, loss: float) -> Outcome:
        after = flat(self.parameters)
        grads = torch.zeros_like(after) if self.grads is None else self.grads
        return Outcome(grads, after - self.before, loss, self.steps)


@contextmanager
def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Watch]:
    """Sees each step of ``optimizer``: the gradients that it is given, and how many there are."""
    watch = Watch(model)
    before, after = optimizer.register_step_pre_hook(watch.before_step), optimizer.register_step_post_hook(watch.after_step)
    try:
        yield watch
    finally:
        before.remove()
        after.remove()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All elements of ``tensors`` in one vector, on the CPU in float64."""
    return torch.cat([tensor.detach().to_dense().flatten().to("cpu", torch.float64) for tensor in tensors])


def flat_grads(parameters: Iterable[Tensor]) -> Tensor:
    """All gradients in one vector; zeros where there is none."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
