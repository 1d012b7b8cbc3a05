"""Optimizers by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fullbatch.errors import InvalidArgument, not_one_of

_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def check_lr(lr: float) -> None:
    """A finite number above 0.

    Raises:
        InvalidArgument: It is not.
    """
    if not (math.isfinite(lr) and lr > 0):
        raise InvalidArgument(f"lr={lr!r} must be a finite number above 0")


def named_optimizer(name: str, lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    """A function from parameters to the optimizer ``name`` with learning rate ``lr`` and torch's other defaults.

    Raises:
        InvalidArgument: There is no such optimizer, or ``lr`` is not above 0.
    """
    make = _BY_NAME.get(name)
    if make is None:
        raise not_one_of("optimizer", name, [*_BY_NAME, "task"])
    check_lr(lr)
    return lambda parameters: make(parameters, lr=lr)
