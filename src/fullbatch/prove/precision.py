"""A model, its batch and its optimizer in another precision."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fullbatch.accumulate import map_tensors

_LOWER = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """``batch`` with its floating-point tensors in ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


def copy_in(model: nn.Module, *dtypes: torch.dtype) -> nn.Module:
    """A copy of ``model`` taken through ``dtypes`` in turn: its numbers are those that the first can hold."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.grad = None
    for dtype in dtypes:
        twin = twin.to(dtype)
    return twin


def maker_of(
    optimizer: MakeOptimizer | torch.optim.Optimizer, model: nn.Module
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A function that makes the like of ``optimizer`` for a copy of ``model``, with its state and learning rates.

    Args:
        optimizer: A function from parameters to an optimizer, or an optimizer of ``model``'s.
        model: Whose parameters the optimizer holds.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return lambda twin: optimizer(twin.parameters())
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}

    def make(twin: nn.Module) -> torch.optim.Optimizer:
        twins = dict(zip(map(id, model.parameters()), twin.parameters(), strict=True))
        groups = [
            {"params": [twins.get(id(parameter), parameter) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        made = type(optimizer)(groups, **defaults)
        made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return made

    return make


def loss_in(loss: Callable[[Any, Any], Any], dtype: torch.dtype) -> Callable[[Any, Any], Any]:
    """``loss``; in float64 its new tensors are float64, and casts to less (``x.float()``, ``dtype=torch.float32``) too.

    Language models cast norms and logits to float32; without this their truth would be float32's.
    Other dtypes compute as they are written.
    """
    if dtype != torch.float64:
        return loss

    def in_float64(model: Any, batch: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with _NothingBelowFloat64():
                return loss(model, batch)
        finally:
            torch.set_default_dtype(before)

    return in_float64


class _NothingBelowFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        return func(*map(_not_below, args), **{key: _not_below(value) for key, value in (kwargs or {}).items()})


def _not_below(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER else value
