"""The parameters of a window: which they are, what dtype their gradients have, who may change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fullbatch.errors import DtypeNotSupported, HookedStep, InvalidArgument


def trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Every parameter that a window gives a gradient: the optimizer's and the model's, each once."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(dict.fromkeys([*held, *model.parameters()]))


@contextmanager
def grads_in(dtype: torch.dtype | None, parameters: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Gradients accumulate in ``dtype`` inside; the yielded function rounds them for the step.

    Args:
        dtype: ``None`` leaves every gradient in its parameter's dtype.
        parameters: Those whose dtype differs are changed (torch's ``Tensor.grad_dtype``) and
            changed back at the end.

    Raises:
        InvalidArgument: ``dtype`` is no floating-point dtype.
        DtypeNotSupported: This torch cannot do it.
    """
    if dtype is None:
        yield lambda: None
        return
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidArgument(f"accumulate_in={dtype!r} must be a floating-point dtype", hint="accumulate_in=torch.float32")
    others = [parameter for parameter in parameters if parameter.requires_grad and parameter.dtype != dtype]
    if others and not hasattr(Tensor, "grad_dtype"):
        raise DtypeNotSupported(
            f"accumulate_in={dtype} needs Tensor.grad_dtype, which torch {torch.__version__} lacks",
            hint="pip install 'torch>=2.10', or keep the weights in float32 and use autocast",
        )

    def round_grads() -> None:
        for parameter in others:  # one by one: never both copies of all gradients
            grad, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if grad is None else grad.to(parameter.dtype)

    for parameter in others:
        parameter.grad = None
        parameter.grad_dtype = dtype
    try:
        yield round_grads
    finally:
        for parameter in others:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype


@contextmanager
def no_hooked_step(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Raise if a parameter is changed inside: an optimizer in a backward hook steps at every micro-batch.

    ``Tensor._version`` counts in-place changes. torch keeps it private; the test
    ``test_an_optimizer_in_a_backward_hook_is_refused`` tells when it goes.
    """
    before = [parameter._version for parameter in parameters]
    yield
    if before != [parameter._version for parameter in parameters]:
        raise HookedStep(
            "weights changed in the first of several micro-batches: something steps in a hook or in the loss, "
            "at every micro-batch (the change has happened)",
            hint="remove the optimizer from register_post_accumulate_grad_hook: Accumulator steps once a window",
        )
