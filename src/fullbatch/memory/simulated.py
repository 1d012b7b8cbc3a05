"""A limited device on the CPU with the face of a real one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fullbatch.memory.limit import SimulatedDevice
from fullbatch.units import show_bytes


class SimulatedBackend:
    """The memory of a device that :func:`~fullbatch.memory.limit.limit` would make; it counts while it is entered.

    What its allocator holds stays from one ``with`` to the next.

    Args:
        limit_bytes: Size of the device.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.device = torch.device("cpu")
        self._memory = SimulatedDevice(limit_bytes)
        self._limit = limit_bytes

    def __enter__(self) -> SimulatedBackend:
        self._memory.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._memory.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def name(self) -> str:
        return f"limited to {show_bytes(self._limit)}, CUDA's allocator simulated"

    def total_bytes(self) -> int | None:
        return self._limit

    def take(self, what: Any) -> Any:
        self._memory.hold(what)
        return what

    def allocated_bytes(self) -> int:
        return self._memory.allocated_bytes

    def reserved_bytes(self) -> int:
        return self._memory.reserved_bytes

    def peak_allocated_bytes(self) -> int | None:
        return self._memory.peak_allocated_bytes

    def peak_reserved_bytes(self) -> int | None:
        return self._memory.peak_reserved_bytes

    def reset_peaks(self) -> None:
        self._memory.reset_peaks()

    def empty_cache(self) -> None:
        self._memory.empty_cache()

    def synchronize(self) -> None:
        pass

    def device_used_bytes(self) -> int | None:
        return None

    def record_history(self, on: bool) -> bool:
        return False

    def dump_history(self, path: Path) -> None:
        raise NotImplementedError
