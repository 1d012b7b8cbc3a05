"""A model, its batch and its optimizer in another precision."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fullbatch.accumulate import map_tensors
from fullbatch.accumulate.arguments import check_optimizer
from fullbatch.errors import OptimizerError

_LOWER = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def in_dtype(batch: Any, *dtypes: torch.dtype) -> Any:
    """A copy of ``batch``, its floating-point tensors taken through ``dtypes`` in turn."""

    def taken(tensor: Tensor) -> Tensor:
        copied = tensor.detach().clone()
        for dtype in dtypes:
            copied = copied.to(dtype) if copied.is_floating_point() else copied
        return copied.requires_grad_(tensor.requires_grad)

    return map_tensors(taken, batch)


def copy_in(model: nn.Module, *dtypes: torch.dtype) -> nn.Module:
    """A copy of ``model`` taken through ``dtypes`` in turn: its numbers are those that the first can hold.

    Complex tensors, which ``Module.to(dtype)`` would make real, stay as they are; gradient hooks come along.
    """
    twin = copy.deepcopy(model)
    for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.grad = None
        for hook in gradient_hooks(original):  # a deepcopy leaves them out
            parameter.register_hook(hook)
    for dtype in dtypes:
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for module in twin.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))
    return twin


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], Any]]:
    """The hooks that ``parameter.register_hook`` was given.

    torch keeps the list private; ``test_a_gradient_hook_that_clips_each_micro_batch_is_found`` tells when it goes.
    """
    return list((parameter._backward_hooks or {}).values())


def maker_of(
    optimizer: MakeOptimizer | torch.optim.Optimizer, model: nn.Module
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """A function that makes the like of ``optimizer`` for a copy of ``model``, with its state and learning rates.

    Args:
        optimizer: A function from parameters to an optimizer, or an optimizer of ``model``'s.
        model: Whose parameters the optimizer holds.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return lambda twin: _checked(optimizer(twin.parameters()), twin)
    ours = set(map(id, model.parameters()))
    if any(id(parameter) not in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise OptimizerError(
            "optimizer holds parameters that are not the model's: a proof works on copies, and copies the model alone",
            hint="put them into one module with the model (self.temperature = nn.Parameter(...))",
        )
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}

    def make(twin: nn.Module) -> torch.optim.Optimizer:
        twins = dict(zip(map(id, model.parameters()), twin.parameters(), strict=True))
        groups = [{"params": [twins[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups]
        try:
            made = type(optimizer)(groups, **defaults)
        except TypeError as error:
            raise OptimizerError(
                f"optimizer is {type(optimizer).__name__}, which cannot be made again from its settings ({error})",
                hint="give a function: optimizer=lambda parameters: MyOptimizer(parameters, ...)",
            ) from None
        made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return made

    return make


def _checked(made: Any, twin: nn.Module) -> torch.optim.Optimizer:
    if not isinstance(made, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer returned {type(made).__name__}: it must return a torch.optim.Optimizer",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    check_optimizer(twin, made)  # before anything moves
    return made


def loss_in(loss: Callable[[Any, Any], Any], dtype: torch.dtype) -> Callable[[Any, Any], Any]:
    """``loss``; in float64 its new tensors are float64, and casts to less (``x.float()``, ``dtype=torch.float32``) too.

    Language models cast norms and logits to float32; without this their truth would be float32's.
    Other dtypes compute as they are written.
    """
    if dtype != torch.float64:
        return loss

    def in_float64(model: Any, batch: Any) -> Any:
        with _float64():
            return loss(model, batch)

    return in_float64


def backward_in(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """While it lasts, ``backward`` computes as :func:`loss_in` does: checkpointing runs parts of the forward again there."""
    return _BackwardInFloat64() if dtype == torch.float64 else nullcontext()


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _NothingBelowFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


class _BackwardInFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.backward:
            return func(*args, **(kwargs or {}))
        settings = dict(kwargs)  # Tensor.backward names them all
        gradient = settings.pop("gradient")
        with ExitStack() as running:

            def gradients() -> Any:
                # torch asks for these right before its engine runs, under the modes of that moment. Any earlier,
                # torch.autograd.backward would hand itself to the mode, which is off inside of its own call.
                running.enter_context(_float64())
                yield gradient

            return torch.autograd.backward(args[0], gradients(), **settings)


class _NothingBelowFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS or (func is Tensor.type and len(args) > 1 and "Float" in str(args[1])):
            return args[0].double()
        if func is Tensor.type_as or (func is Tensor.to and len(args) > 1 and isinstance(args[1], Tensor)):
            here, other = args[0], args[1]
            if here.is_floating_point() and other.dtype in _LOWER:
                return here.to(other.device, torch.float64)
        return func(*map(_not_below, args), **{key: _not_below(value) for key, value in (kwargs or {}).items()})


def _not_below(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER else value
