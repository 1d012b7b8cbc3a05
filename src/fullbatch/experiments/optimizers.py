"""Optimizers by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch

from fullbatch.errors import InvalidArgument

_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def named_optimizer(name: str, lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    """A function from parameters to the optimizer ``name`` with learning rate ``lr`` and torch's other defaults.

    Raises:
        InvalidArgument: There is no such optimizer, or ``lr`` is not above 0.
    """
    make = _BY_NAME.get(name)
    if make is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        raise InvalidArgument(
            f"optimizer={name!r} must be one of {', '.join(_BY_NAME)}", hint=f"did you mean {near[0]!r}?" if near else None
        )
    if not lr > 0:
        raise InvalidArgument(f"lr={lr!r} must be above 0")
    return lambda parameters: make(parameters, lr=lr)
