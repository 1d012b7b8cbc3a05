"""What a device says of its own memory, in one vocabulary for all vendors."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullbatch.device import pick
from fullbatch.errors import InvalidArgument
from fullbatch.torch_private import tree_map
from fullbatch.units import MiB

_PLUGINS = {"musa": "torch_musa", "npu": "torch_npu"}  # device type -> package that brings it
_HOW = {
    "musa": "install torch_musa beside the torch it was built for: https://github.com/MooreThreads/torch_musa",
    "npu": "pip install torch_npu, beside the same version of torch: https://gitcode.com/Ascend/pytorch",
    "cuda": "a build of torch for the device: https://pytorch.org/get-started/locally",
    "xpu": "pip install torch --index-url https://download.pytorch.org/whl/xpu",
    "mps": "a Mac with Apple's chip",
}


class Backend(Protocol):
    """The memory of one device. Sizes are in bytes; ``None`` where the device does not say."""

    device: torch.device

    def name(self) -> str:
        """The device in words."""

    def total_bytes(self) -> int | None:
        """All memory of the device."""

    def take(self, what: Any) -> Any:
        """A module, which is moved, or any nesting of tensors, on the device."""

    def allocated_bytes(self) -> int:
        """In live tensors."""

    def reserved_bytes(self) -> int:
        """Held by the caching allocator."""

    def peak_allocated_bytes(self) -> int | None:
        """Most since :meth:`reset_peaks`."""

    def peak_reserved_bytes(self) -> int | None:
        """Most since :meth:`reset_peaks`."""

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""

    def empty_cache(self) -> None:
        """Give back what no tensor uses."""

    def synchronize(self) -> None:
        """Wait for what was asked of the device."""

    def device_used_bytes(self) -> int | None:
        """What the driver reports, for all processes."""

    def record_history(self, on: bool) -> bool:
        """Start or end the record of the allocator's calls; whether there is such a record."""

    def dump_history(self, path: Path) -> None:
        """Write the record in torch's snapshot format."""


def backend_of(device: str | torch.device = "auto", *, touch: bool = True) -> Backend:
    """The memory of ``device``.

    Args:
        device: ``auto``, ``cuda:1``, ``musa``, ``npu``, ``xpu`` or ``mps``.
        touch: A tensor is made there first. ``False``: torch's word is taken that it is there, and this process opens
            no context on it, which holds memory of its own.

    Raises:
        InvalidArgument: It is not there, or the package that brings it is not.
    """
    kind = str(device).partition(":")[0]
    package = _PLUGINS.get(kind)
    if package is not None:
        if importlib.util.find_spec(package) is None:
            raise InvalidArgument(f"device={str(device)!r}: needs the package {package}", hint=_HOW[kind])
        importlib.import_module(package)
    try:
        place = torch.device(device) if not touch and _is_there(device) else pick(str(device))
    except InvalidArgument as error:
        raise InvalidArgument(error.message, hint=_HOW.get(kind, error.hint)) from None
    if place.type in ("cpu", "meta"):
        raise InvalidArgument(f"device={str(device)!r}: no accelerator", hint="measure_cpu measures on the CPU")
    if place.index is None:
        place = torch.device(place.type, 0 if place.type == "mps" else getattr(torch, place.type).current_device())
    return MpsBackend(place) if place.type == "mps" else TorchBackend(place)


def _is_there(device: str | torch.device) -> bool:
    try:
        place = torch.device(device)
        module = getattr(torch, place.type)
        return bool(module.is_available()) and (place.index or 0) < int(module.device_count())
    except (AttributeError, RuntimeError):  # pick says what is wrong
        return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the device has no more memory.

    CUDA and XPU raise ``torch.OutOfMemoryError``; others a ``RuntimeError`` whose message says so, as
    aten/src/ATen/mps/MPSAllocator.mm ("MPS backend out of memory").
    """
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


class _OnDevice:
    """What moves to a device of torch.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take(self, what: Any) -> Any:
        if isinstance(what, nn.Module):
            return what.to(self.device)
        return tree_map(lambda part: part.to(self.device) if isinstance(part, Tensor) else part, what)


class TorchBackend(_OnDevice):
    """A device that keeps statistics as CUDA does.

    They come from ``torch.accelerator``, or before torch 2.9 from ``torch.cuda`` and its like.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module: Any = getattr(torch, device.type)
        accelerator = getattr(torch, "accelerator", None)
        self._memory: Any = accelerator if hasattr(accelerator, "max_memory_allocated") else self._module

    def name(self) -> str:
        return str(self._module.get_device_name(self.device))

    def total_bytes(self) -> int | None:
        return int(self._module.get_device_properties(self.device).total_memory)

    def allocated_bytes(self) -> int:
        return int(self._memory.memory_allocated(self.device))

    def reserved_bytes(self) -> int:
        return int(self._memory.memory_reserved(self.device))

    def peak_allocated_bytes(self) -> int | None:
        return int(self._memory.max_memory_allocated(self.device))

    def peak_reserved_bytes(self) -> int | None:
        return int(self._memory.max_memory_reserved(self.device))

    def reset_peaks(self) -> None:
        self._memory.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        self._memory.empty_cache()

    def synchronize(self) -> None:
        self._module.synchronize(self.device)

    def device_used_bytes(self) -> int | None:
        if self.device.type == "cuda" and torch.version.hip is None:
            used = _nvidia_used_bytes(str(self._module.get_device_properties(self.device).uuid))
            if used is not None:
                return used
        if self.device.type == "musa":
            return _musa_used_bytes(self.device.index)
        if hasattr(self._module, "mem_get_info"):
            free, total = self._module.mem_get_info(self.device)
            return int(total - free)
        return None

    def record_history(self, on: bool) -> bool:
        record = getattr(self._history(), "_record_memory_history", None)
        if record is not None:
            record(enabled="all" if on else None)
        return record is not None

    def dump_history(self, path: Path) -> None:
        self._history()._dump_snapshot(str(path))

    def _history(self) -> Any:
        """``torch.cuda.memory``, or where the vendor has it at the top: ``torch.npu``, ``torch.musa``."""
        memory = getattr(self._module, "memory", None)
        return memory if hasattr(memory, "_record_memory_history") else self._module


class MpsBackend(_OnDevice):
    """Apple's GPU: no peaks, so those are ``None``, and no history.

    Args:
        device: ``mps:0``.
    """

    def name(self) -> str:
        return "Apple GPU"

    def total_bytes(self) -> int | None:
        return int(torch.mps.recommended_max_memory())

    def allocated_bytes(self) -> int:
        return int(torch.mps.current_allocated_memory())

    def reserved_bytes(self) -> int:
        return int(torch.mps.driver_allocated_memory())

    def peak_allocated_bytes(self) -> int | None:
        return None

    def peak_reserved_bytes(self) -> int | None:
        return None

    def reset_peaks(self) -> None:
        pass

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def device_used_bytes(self) -> int | None:
        return int(torch.mps.driver_allocated_memory())

    def record_history(self, on: bool) -> bool:
        return False

    def dump_history(self, path: Path) -> None:
        raise NotImplementedError


def _nvidia_used_bytes(uuid: str) -> int | None:
    """By UUID: indices of the driver and of torch differ under ``CUDA_VISIBLE_DEVICES``. ``None`` without nvidia-ml-py."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _musa_used_bytes(index: int) -> int | None:
    """From ``mthreads-gmi``; ``None`` where it is not there or says something else."""
    try:
        done = subprocess.run(["mthreads-gmi", "-q", "-i", str(index)], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_mthreads_gmi(done.stdout)


def parse_mthreads_gmi(text: str) -> int | None:
    r"""Used bytes from the output of ``mthreads-gmi -q``; ``None`` where it has none.

    >>> parse_mthreads_gmi("FB Memory Usage\n    Total : 49152MiB\n    Used : 1024MiB\n") // 2**20
    1024
    """
    found = re.search(r"Used\s*:\s*(\d+)\s*MiB", text)
    return int(found[1]) * MiB if found else None
