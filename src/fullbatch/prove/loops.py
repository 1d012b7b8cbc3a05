"""The wrong loops, each written out; each departs from the right one in its fault alone.

A loop runs over the micro-batches of an epoch. ``use`` (a :class:`Tools`) says of each its right weight
and whether it ends a window, and holds what some loops need beside model, optimizer and loss.
Source of the kinds: reports on widely used trainers, gathered in the project's list of known faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What a loop needs beside model, optimizer and loss.

    Attributes:
        K: Micro-batches of a full window.
        share: Of each micro-batch, its items over the items of its window: the right weight of its mean.
        ends: Of each micro-batch, whether it is the last of its window.
        micro_batches: Of each micro-batch, how many its window has.
        max_norm: To clip to.
        ema: Averaged weights.
    """

    K: int
    share: tuple[float, ...]
    ends: tuple[bool, ...]
    micro_batches: tuple[int, ...]
    max_norm: float
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    ema: nn.Module

    def update_ema(self, model: nn.Module) -> None:
        """Move the averaged weights a tenth of the way to ``model``'s."""
        with torch.no_grad():
            for average, parameter in zip(self.ema.parameters(), model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)


Optimizer = torch.optim.Optimizer
Loss = Callable[[nn.Module, Any], Tensor]
Loop = Callable[[nn.Module, Optimizer, Loss, Iterable[Any], Tools], None]


def right(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()


def missing_division(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        loss(model, micro).backward()
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()


def double_division(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        mean = loss(model, micro) * use.share[i]  # the user divides
        (mean / use.K).backward()  # and the framework does
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()


def unequal_items(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        (loss(model, micro) / use.micro_batches[i]).backward()  # the same weight, however many items
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()


def short_window_weight(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        weight = use.share[i] * use.micro_batches[i] / use.K  # as if every window were full
        (loss(model, micro) * weight).backward()
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()


def lost_gradient(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        optimizer.zero_grad()
        (loss(model, micro) * use.share[i]).backward()
        if use.ends[i]:
            optimizer.step()


def stale_gradient(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
        if use.ends[i]:
            optimizer.step()  # and the gradient stays for the next window


def early_step(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
        optimizer.step()
        optimizer.zero_grad()


def lost_tail(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
        if (i + 1) % use.K == 0:
            optimizer.step()
            optimizer.zero_grad()


def scheduler_rate(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()
        use.scheduler.step()


def ema_rate(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()
        use.update_ema(model)


def partial_clip(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
        clip_grad_norm_(model.parameters(), use.max_norm)
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()


def scaled_clip(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        use.scaler.scale(loss(model, micro) * use.share[i]).backward()
        if use.ends[i]:
            clip_grad_norm_(model.parameters(), use.max_norm)  # the gradient is still scaled
            use.scaler.step(optimizer)
            use.scaler.update()
            optimizer.zero_grad()


def unscale_rate(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    for i, micro in enumerate(micros):
        use.scaler.scale(loss(model, micro) * use.share[i]).backward()
        use.scaler.unscale_(optimizer)  # divides what earlier micro-batches left once more
        use.scaler.update()
        if use.ends[i]:
            optimizer.step()
            optimizer.zero_grad()


def hooked_step(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    def step_in_backward(parameter: Tensor) -> None:
        optimizer.step()  # at every micro-batch, for the parameters whose gradient is there
        optimizer.zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(step_in_backward) for p in model.parameters() if p.requires_grad]
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
    for hook in hooks:
        hook.remove()


def low_precision(model: nn.Module, optimizer: Optimizer, loss: Loss, micros: Iterable[Any], use: Tools) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = [torch.zeros_like(parameter, dtype=torch.bfloat16) for parameter in parameters]
    for i, micro in enumerate(micros):
        (loss(model, micro) * use.share[i]).backward()
        for summed, parameter in zip(total, parameters, strict=True):
            summed += 0 if parameter.grad is None else parameter.grad.bfloat16()
            parameter.grad = None
        if use.ends[i]:
            for summed, parameter in zip(total, parameters, strict=True):
                parameter.grad = summed.to(parameter.dtype)
                summed.zero_()
            optimizer.step()
            optimizer.zero_grad()


WRONG: dict[str, Loop] = {
    loop.__name__.replace("_", "-"): loop
    for loop in (
        missing_division,
        double_division,
        unequal_items,
        short_window_weight,
        lost_gradient,
        stale_gradient,
        early_step,
        lost_tail,
        scheduler_rate,
        ema_rate,
        partial_clip,
        scaled_clip,
        unscale_rate,
        hooked_step,
        low_precision,
    )
}
"""Every wrong loop by its kind."""
