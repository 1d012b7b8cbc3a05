"""Optimizers by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullbatch.errors import InvalidArgument, OptimizerError, not_one_of

Make = Callable[..., torch.optim.Optimizer]
"""``make(parameters, ...)`` is an optimizer."""

# bitsandbytes >= 0.45, optim/optimizer.py: Optimizer8bit, and Optimizer2State.init_state and its min_8bit_size.
BLOCK = 256
MIN_8BIT_SIZE = 4096
QMAP = 256


class AdamW8bitStates(torch.optim.Optimizer):
    """The optimizer state of bitsandbytes' AdamW8bit, without its arithmetic: for tensors without data.

    A parameter of 4,096 elements or more has ``state1`` and ``state2`` in uint8 with one float32 maximum for each
    256 elements; a smaller one has both in float32. Two float32 tables of 256 are shared by all. The step changes
    no weight and, as the real one is a single kernel for each parameter, needs nothing beside the state.

    Args:
        params: Parameters or groups of them, on the meta device or fake.
        lr: Learning rate; not used.

    Raises:
        OptimizerError: A parameter has data, which this would not train.

    Source: bitsandbytes/optim/optimizer.py, ``Optimizer2State.init_state``.
    """

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        if not all(map(_without_data, _tensors(self.param_groups))):
            raise OptimizerError("AdamW8bitStates trains nothing: its parameters must be without data", hint=_INSTALL_8BIT)
        self._qmaps: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make the state of the parameters that have a gradient and none yet.

        Args:
            closure: Computes the loss anew, as torch's optimizers have it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in _tensors(self.param_groups):
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter] = self._state(parameter)
        return loss

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        if parameter.numel() < MIN_8BIT_SIZE:
            return {"step": 0} | {key: torch.zeros_like(parameter, dtype=torch.float32) for key in ("state1", "state2")}
        if self._qmaps is None:
            self._qmaps = (parameter.new_zeros(QMAP, dtype=torch.float32), parameter.new_zeros(QMAP, dtype=torch.float32))
        state: dict[str, Any] = {"step": 0}
        for number, qmap in enumerate(self._qmaps, start=1):
            state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"qmap{number}"] = qmap
            state[f"absmax{number}"] = parameter.new_zeros(math.ceil(parameter.numel() / BLOCK), dtype=torch.float32)
        return state


_INSTALL_8BIT = "pip install bitsandbytes (or torchao)"


def _adamw_8bit(parameters: Iterable[Any], lr: float = 1e-3) -> torch.optim.Optimizer:
    """Bitsandbytes' or torchao's; on tensors without data their state alone."""
    parameters = list(parameters)
    groups = parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
    if all(map(_without_data, _tensors(groups))):
        return AdamW8bitStates(parameters, lr=lr)
    for module, name in (("bitsandbytes.optim", "AdamW8bit"), ("torchao.optim", "AdamW8bit")):
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            made: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(parameters, lr=lr)
            return made
    raise InvalidArgument("optimizer adamw-8bit: neither bitsandbytes nor torchao is installed", hint=_INSTALL_8BIT)


def _adafactor(parameters: Iterable[Any], lr: float = 1e-2, foreach: bool | None = None) -> torch.optim.Optimizer:
    """torch's, whose default learning rate is 1e-2."""
    if not hasattr(torch.optim, "Adafactor"):
        raise InvalidArgument(f"optimizer adafactor: torch {torch.__version__} has none", hint="pip install 'torch>=2.5'")
    return torch.optim.Adafactor(parameters, lr=lr, foreach=foreach)


OPTIMIZERS: dict[str, Make] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adamw-8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "adam": torch.optim.Adam,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def check_lr(lr: float) -> None:
    """A finite number above 0.

    Raises:
        InvalidArgument: It is not.
    """
    if not (math.isfinite(lr) and lr > 0):
        raise InvalidArgument(f"lr={lr!r} must be a finite number above 0")


def named_optimizer(name: str, lr: float | None = None, *, foreach: bool | None = None, fused: bool = False) -> Make:
    """A function from parameters to the optimizer ``name`` with torch's defaults for the rest.

    Args:
        name: One of :data:`OPTIMIZERS`.
        lr: Learning rate. ``None``: the optimizer's own default.
        foreach: Step all parameters together, at the cost of temporaries. ``None``: as the optimizer chooses.
        fused: Step in one kernel.

    Raises:
        InvalidArgument: There is no such optimizer, it has no such kernel, or ``lr`` is not above 0.
    """
    make = OPTIMIZERS.get(name)
    if make is None:
        raise not_one_of("optimizer", name, [*OPTIMIZERS, "task"])
    asked: dict[str, Any] = {} if lr is None else {"lr": lr}
    if lr is not None:
        check_lr(lr)
    for option, value in kernel_options(foreach, fused).items():
        if option not in inspect.signature(make).parameters:
            raise _no_kernel(option, value, f"optimizer {name}")
        asked[option] = value
    return partial(make, **asked)


def kernel_options(foreach: bool | None, fused: bool) -> dict[str, bool]:
    """What an optimizer is to be told: the options that are not left to it.

    Args:
        foreach: As of :func:`named_optimizer`.
        fused: As of :func:`named_optimizer`.
    """
    return ({} if foreach is None else {"foreach": foreach}) | ({"fused": True} if fused else {})


def with_kernel(
    make: Callable[[Any], torch.optim.Optimizer], options: dict[str, bool]
) -> Callable[[Any], torch.optim.Optimizer]:
    """``make``, its optimizer made again with ``options``; InvalidArgument at that moment, where it takes none.

    Args:
        make: A function from parameters to an optimizer.
        options: Of :func:`kernel_options`.
    """

    def made(parameters: Any) -> torch.optim.Optimizer:
        plain = make(parameters)
        accepted = inspect.signature(type(plain)).parameters
        for option, value in options.items():
            if option not in accepted:
                raise _no_kernel(option, value, type(plain).__name__)
        defaults = {key: value for key, value in plain.defaults.items() if key in accepted}
        return type(plain)([group | options for group in plain.param_groups], **(defaults | options))

    return made


def _no_kernel(option: str, value: bool, who: str) -> InvalidArgument:
    return InvalidArgument(f"{option}={value}: {who} does not take it", hint=f"leave {option} out, or optimizer='adamw'")


def _tensors(groups: Iterable[dict[str, Any]]) -> Iterable[Tensor]:
    for group in groups:
        for entry in [group["params"]] if isinstance(group["params"], Tensor) else group["params"]:
            yield entry[1] if isinstance(entry, tuple) else entry


def _without_data(tensor: Tensor) -> bool:
    from fullbatch.memory.fake import FakeTensor  # here, as it takes a while to load

    return tensor.is_meta or isinstance(tensor, FakeTensor)
