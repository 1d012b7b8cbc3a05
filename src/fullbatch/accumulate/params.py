"""The parameters of a window: which they are, what dtype their gradients have, who may change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullbatch.errors import DtypeNotSupported, HookedStep, InvalidArgument


def trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every parameter that a window gives a gradient: the optimizer's and the model's, each once."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(dict.fromkeys([*held, *model.parameters()]))


def check_grad_dtype(dtype: torch.dtype | None, parameters: Sequence[Tensor]) -> None:
    """Whether gradients of ``parameters`` can be summed in ``dtype``; ``None`` is their own.

    Raises:
        InvalidArgument: ``dtype`` is no floating-point dtype, is narrower than a parameter's, or as wide and another.
        DtypeNotSupported: This torch cannot do it.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidArgument(f"accumulate_in={dtype!r} must be a floating-point dtype", hint="accumulate_in=torch.float32")
    for parameter in parameters:
        if not parameter.is_floating_point() or parameter.dtype == dtype:
            continue
        if torch.finfo(parameter.dtype).bits >= torch.finfo(dtype).bits:
            relation = "narrower" if torch.finfo(parameter.dtype).bits > torch.finfo(dtype).bits else "no wider"
            raise InvalidArgument(
                f"accumulate_in={dtype} is {relation} than the weights, which have {parameter.dtype}",
                hint="it is there to sum in more precision than the weights have: accumulate_in=torch.float32 under bfloat16",
            )
    if _narrower(parameters, dtype) and not hasattr(Tensor, "grad_dtype"):
        raise DtypeNotSupported(
            f"accumulate_in={dtype} needs Tensor.grad_dtype, which torch {torch.__version__} lacks",
            hint="pip install 'torch>=2.10', or keep the weights in float32 and use autocast",
        )


@contextmanager
def grads_in(dtype: torch.dtype | None, parameters: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Gradients accumulate in ``dtype`` inside; the yielded function rounds them for the step.

    Args:
        dtype: ``None`` leaves every gradient in its parameter's dtype.
        parameters: Those that are narrower are changed (torch's ``Tensor.grad_dtype``) and changed back at the end.
    """
    narrower = [] if dtype is None else _narrower(parameters, dtype)
    before = [parameter.grad_dtype for parameter in narrower]

    def round_grads() -> None:
        for parameter in narrower:  # one by one: never both copies of all gradients
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if grad is None else grad.to(parameter.dtype)

    try:
        for parameter in narrower:
            parameter.grad = None
            parameter.grad_dtype = dtype
        yield round_grads
    finally:
        for parameter, own in zip(narrower, before, strict=True):
            parameter.grad = None
            parameter.grad_dtype = own


def _narrower(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad and p.is_floating_point() and p.dtype != dtype]


@contextmanager
def no_hooked_step(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, no optimizer may step one of ``parameters``: in a backward hook or in the loss it would step too often.

    Raises:
        HookedStep: One is about to; its step is not made.
    """
    ours = set(map(id, parameters))

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise HookedStep(
                f"{type(optimizer).__name__} steps inside the window, in a hook or in the loss: at every micro-batch",
                hint="Accumulator steps once a window: take the step out of the loss, or the optimizer out of "
                "register_post_accumulate_grad_hook",
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
