"""A device of a chosen size, on which the way through out-of-memory can be tried."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullbatch.device import pick
from fullbatch.errors import InvalidArgument
from fullbatch.memory.allocator import CachingAllocator, OutOfMemory
from fullbatch.memory.blocks import Block
from fullbatch.memory.cpu_kernels import CpuKernels
from fullbatch.torch_private import TorchDispatchMode, storage_key, tree_leaves
from fullbatch.units import GiB, MiB, parse_bytes, show_bytes

OutOfMemoryError: type[RuntimeError] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)  # torch 2.4: cuda's
_KERNELS = CpuKernels(onednn=False)
_PLAIN = (Tensor, nn.Parameter)  # a subclass wraps plain tensors, and these are seen themselves


class LimitedDevice(Protocol):
    """What a limited device says of its memory."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes in live tensors, rounded as the allocator rounds."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the caching allocator holds."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Most allocated bytes since the begin or the last :meth:`reset_peaks`."""

    @property
    def peak_reserved_bytes(self) -> int:
        """Most reserved bytes since the begin or the last :meth:`reset_peaks`."""

    @property
    def num_alloc_retries(self) -> int:
        """How often the cache had to be emptied for a request."""

    def empty_cache(self) -> None:
        """Give back what the allocator holds and no tensor uses."""

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""


@contextmanager
def limit(size: str | int, *, device: str = "auto", holding: Any = ()) -> Iterator[LimitedDevice]:
    """Inside, the device has ``size`` bytes, and what does not fit raises ``torch.OutOfMemoryError``.

    On an accelerator the allocator's own limit for the process is set, and restored at the end. On the CPU all
    plain CPU tensors of this thread and of its backwards are counted as if they lived on a device of that size with
    CUDA's caching allocator: results of operators as they are made, before they are handed out, and tensors that were
    there before when an operator first takes them; of buffers inside kernels, those that
    :class:`~fullbatch.memory.cpu_kernels.CpuKernels` knows.

    Args:
        size: ``"2GiB"``, or bytes.
        device: ``auto`` (the accelerator that torch finds, or the CPU), or its name.
        holding: What is on the device from the start, on the CPU: a module, an optimizer, tensors, or any nesting
            of them. An accelerator knows by itself.

    Raises:
        InvalidArgument: ``size`` is no size above 0, or more than the device has; or the device has no such limit.

    >>> with limit("40MiB", device="cpu") as memory:
    ...     x = torch.zeros(4 * 2**20)  # 16 MiB
    ...     memory.allocated_bytes
    16777216
    """
    wanted = _size(size)
    place = pick(device)
    if place.type != "cpu":
        with _accelerator_limit(wanted, place) as accelerator:
            yield accelerator
        return
    simulated = SimulatedDevice(wanted)
    simulated.hold(holding)
    with simulated:
        yield simulated


def _size(size: str | int) -> int:
    if isinstance(size, str):
        return parse_bytes(size)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidArgument(f"size {size!r}: must be a size above 0 with its unit, or bytes", hint="'512MiB', 2 * 1024**3")
    return size


# On the CPU


class SimulatedDevice(TorchDispatchMode):
    """While entered, counts the storages of CPU tensors in a simulator of CUDA's allocator.

    Args:
        limit_bytes: Size of the device.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = limit_bytes
        self._allocator = CachingAllocator(limit_bytes=limit_bytes)
        self._blocks: dict[int, tuple[int, Block | None, Any]] = {}  # storage -> bytes, block, weak reference

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._enter(args)
        if kwargs:
            self._enter(kwargs.values())
        if func is torch.ops.aten.resize_.default:
            self._room(args[0], _bytes_of(args[0], args[1]))
        out = func(*args, **kwargs)
        try:
            self._enter((out,))
            self._pass(size for _, size in _KERNELS.temporaries(func, args, out))
        except BaseException:
            del out  # a traceback that is kept does not keep the result
            raise
        return out

    @property
    def allocated_bytes(self) -> int:
        return self._allocator.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        return self._allocator.reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        return self._allocator.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._allocator.peak_reserved_bytes

    @property
    def num_alloc_retries(self) -> int:
        return self._allocator.num_alloc_retries

    def empty_cache(self) -> None:
        """Give back the segments that no tensor uses."""
        self._allocator.empty_cache()

    def reset_peaks(self) -> None:
        """Peaks start again from what is there now."""
        self._allocator.reset_peaks()

    def hold(self, what: Any) -> None:
        """Enter what is there already."""
        for leaf in tree_leaves(what):
            if isinstance(leaf, nn.Module):
                members = [*leaf.parameters(), *leaf.buffers()]
                self._enter([*members, *(member.grad for member in members if member.is_leaf)])
            elif isinstance(leaf, torch.optim.Optimizer):
                self._enter(tree_leaves([group["params"] for group in leaf.param_groups]))
                self._enter(tree_leaves(list(leaf.state.values())))
            else:
                self._enter((leaf,))

    def _enter(self, values: Iterable[Any]) -> None:
        """Count the storages of plain CPU tensors in ``values`` that are new or have another size than before."""
        for value in values:
            if type(value) in _PLAIN:
                if value.device.type == "cpu" and value.layout is torch.strided:
                    storage = value.untyped_storage()
                    known = self._blocks.get(storage_key(storage))
                    if known is None or known[0] != storage.nbytes():
                        self._count(storage, storage.nbytes())
            elif isinstance(value, (list, tuple)):
                self._enter(value)

    def _pass(self, sizes: Iterable[int]) -> None:
        """Take ``sizes`` together and give them back: what a kernel has while it runs."""
        blocks: list[Block | None] = []
        try:
            for size in sizes:
                blocks.append(self._malloc(size))
        finally:
            for block in blocks:
                self._allocator.free(block)

    def _room(self, tensor: Tensor, size: int) -> None:
        """Storage of ``tensor`` grows to ``size`` bytes, if it has less: the old one goes when the new one is there."""
        if type(tensor) in _PLAIN and tensor.device.type == "cpu" and size > tensor.untyped_storage().nbytes():
            self._count(tensor.untyped_storage(), size)

    def _count(self, storage: Any, size: int) -> None:
        block = self._malloc(size)
        blocks, allocator, key = self._blocks, self._allocator, storage_key(storage)

        def gone(_: Any) -> None:
            allocator.free(blocks.pop(key)[1])

        before = blocks.get(key)
        blocks[key] = (size, block, weakref.ref(storage, gone) if before is None else before[2])
        if before is not None:
            allocator.free(before[1])

    def _malloc(self, size: int) -> Block | None:
        allocator = self._allocator
        try:
            return allocator.malloc(size)
        except OutOfMemory:
            pass  # raised below, where it does not drag this error's frames along
        unused = allocator.reserved_bytes - allocator.allocated_bytes
        raise OutOfMemoryError(
            f"Simulated device out of memory. Tried to allocate {_show(size)}. The device (fullbatch.memory.limit, on the CPU)"
            f" has a total capacity of {_show(self._limit)} of which {_show(self._limit - allocator.reserved_bytes)} is free."
            f" Of the allocated memory {_show(allocator.allocated_bytes)} is allocated by PyTorch, and {_show(unused)} is"
            " reserved by PyTorch but unallocated."
        )


def _bytes_of(tensor: Tensor, shape: Iterable[int]) -> int:
    """What the storage of a contiguous ``tensor`` of ``shape`` needs."""
    return (int(tensor.storage_offset()) + math.prod(shape)) * tensor.element_size()


def _show(size: int) -> str:
    """As c10/cuda/CUDACachingAllocator.cpp, format_size, writes it."""
    return f"{size / GiB:.2f} GiB" if size >= GiB else f"{size / MiB:.2f} MiB"


# On an accelerator


class _Accelerator:
    """The same face over ``torch.cuda`` and its like."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._retries = self._all_retries()

    @property
    def allocated_bytes(self) -> int:
        return int(self._module.memory_allocated(self._device))

    @property
    def reserved_bytes(self) -> int:
        return int(self._module.memory_reserved(self._device))

    @property
    def peak_allocated_bytes(self) -> int:
        return int(self._module.max_memory_allocated(self._device))

    @property
    def peak_reserved_bytes(self) -> int:
        return int(self._module.max_memory_reserved(self._device))

    @property
    def num_alloc_retries(self) -> int:
        return self._all_retries() - self._retries

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def reset_peaks(self) -> None:
        self._module.reset_peak_memory_stats(self._device)

    def _all_retries(self) -> int:
        return int(self._module.memory_stats(self._device).get("num_alloc_retries", 0))


@contextmanager
def _accelerator_limit(size: int, device: torch.device) -> Iterator[_Accelerator]:
    module = getattr(torch, device.type)
    if device.type == "mps" or not hasattr(module, "set_per_process_memory_fraction"):
        raise InvalidArgument(f"device={str(device)!r}: torch cannot limit its memory", hint="device='cpu' simulates one")
    if device.index is None:  # which the fraction does not take
        device = torch.device(device.type, module.current_device())
    total = int(module.get_device_properties(device).total_memory)
    if size > total:
        raise InvalidArgument(
            f"size {show_bytes(size)}: {device} has {show_bytes(total)}", hint=f"limit({show_bytes(total // 2)!r})"
        )
    read = getattr(module, "get_per_process_memory_fraction", None)  # torch >= 2.6
    before = float(read(device)) if read is not None else 1.0
    module.empty_cache()
    module.set_per_process_memory_fraction(size / total, device)
    try:
        limited = _Accelerator(module, device)
        limited.reset_peaks()
        yield limited
    finally:
        module.set_per_process_memory_fraction(before, device)
