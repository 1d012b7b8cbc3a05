"""Devices that a task names, ``.cuda()``, ``device="cuda"``, ``autocast("cuda")``: the trace's tensors are there already.

torch's functions are replaced while a trace runs, not only watched by a mode: modes are off where a backward computes
something again. What makes a new tensor is redirected in :class:`fullbatch.memory.fake.FakeMode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

ACCELERATORS = frozenset(("cuda", "hip", "musa", "npu", "xpu", "mps", "hpu", "mlu"))
_MOVES = ("cuda", "xpu", "npu", "musa", "mlu", "hpu")  # methods, where the vendor's package adds them


def here(device: Any) -> Any:
    """``device``, or the trace's own where it is an accelerator: a name, a ``torch.device`` or a number."""
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] in ACCELERATORS else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type in ACCELERATORS else device
    return "cpu" if type(device) is int else device


@contextmanager
def accelerators_are_here() -> Iterator[None]:
    """Inside, what is moved to an accelerator stays where the trace's tensors are, and its autocast is theirs."""
    to, module_to = Tensor.to, nn.Module.to
    autocast, as_tensor = torch.autocast.__init__, torch.as_tensor

    def to_here(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *map(here, args[:1]), *args[1:], **_device_here(kwargs))

    def module_to_here(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not kwargs and len(args) == 1 and isinstance(args[0], (str, torch.device)):
            return self  # torch swaps each parameter with itself, which it cannot do with fakes
        return module_to(self, *args, **kwargs)

    def tensor_here(*args: Any, **kwargs: Any) -> Tensor:
        return as_tensor(*args, **_device_here(kwargs))

    def autocast_here(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type in ACCELERATORS:
            device_type, dtype = "cpu", dtype or torch.float16  # torch.get_autocast_dtype("cuda")
        autocast(self, device_type, dtype, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "to", to_here))
        stack.enter_context(mock.patch.object(torch, "as_tensor", tensor_here))
        stack.enter_context(mock.patch.object(torch.autocast, "__init__", autocast_here))
        stack.enter_context(mock.patch.object(nn.Module, "to", module_to_here))
        for kind in (Tensor, nn.Module):
            for move in _MOVES:
                if hasattr(kind, move):
                    stack.enter_context(mock.patch.object(kind, move, _itself))
        yield


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _device_here(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": here(kwargs["device"])} if "device" in kwargs else kwargs
