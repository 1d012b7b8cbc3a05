"""Measures what a training loop really holds, stage by stage."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import profile, record_function

from fullbatch.errors import InvalidArgument
from fullbatch.evidence import Evidence, measured
from fullbatch.memory.backend import Backend, backend_of, is_out_of_memory
from fullbatch.memory.events import live_bytes, profiled
from fullbatch.memory.loop import Loop, Loss, MakeOptimizer, Settings, named_tensors
from fullbatch.plain import plain

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MARK = "fullbatch stage "


@dataclass(frozen=True, kw_only=True)
class StagePeak:
    """What a stretch of a run held.

    Attributes:
        name: ``model``, ``batch``, ``forward``, ``backward`` or ``update``.
        update: Number of the update, from 1; 0 before the first.
        micro_batch: Number of the micro-batch in its window, from 1; 0 outside of any.
        peak_allocated_bytes: Most bytes in live tensors at once.
        allocated_bytes: Bytes in live tensors at the end.
        peak_reserved_bytes: Most bytes that the caching allocator held; ``None`` where there is none.
        reserved_bytes: Bytes that it held at the end; ``None`` where there is none.
        device_used_bytes: What the driver reports at the end, for all processes; ``None`` where it does not.
    """

    name: str
    update: int
    micro_batch: int
    peak_allocated_bytes: int
    allocated_bytes: int
    peak_reserved_bytes: int | None = None
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A run, stage by stage.

    Attributes:
        stages: In order, without gaps; where memory ran out, up to the stage in which it did.
        evidence: Where it ran.
        out_of_memory: The message of the error that ended the run; ``None`` where it went to its end.
        snapshot: File with the allocator's history, in torch's format.
    """

    stages: tuple[StagePeak, ...]
    evidence: Evidence
    out_of_memory: str | None = None
    snapshot: str | None = None

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes in live tensors at once."""
        return max(stage.peak_allocated_bytes for stage in self.stages)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Most bytes that the caching allocator held; ``None`` where there is none."""
        return max((stage.peak_reserved_bytes for stage in self.stages if stage.peak_reserved_bytes is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the peaks."""
        peaks = {"peak_allocated_bytes": self.peak_allocated_bytes, "peak_reserved_bytes": self.peak_reserved_bytes}
        return {**peaks, **plain(self)}


# On the CPU


def measure_cpu(
    model: nn.Module, loss: Loss, batch: Any, *, optimizer: MakeOptimizer, **settings: Unpack[Settings]
) -> Measurement:
    """Bytes in live CPU tensors while a copy of ``model`` trains, counted by torch's profiler.

    Counted are the run's own tensors (weights, batch, gradients, state, activations) and the buffers that
    kernels take through torch's CPU allocator, as asked for, before any rounding.

    Args:
        model: On the CPU; it is copied, not changed.
        loss: ``loss(model, micro)``: a scalar tensor or a dict of them.
        batch: One micro-batch.
        optimizer: Makes the optimizer from the parameters that require a gradient.
        settings: Of the loop: see :class:`~fullbatch.memory.loop.Loop`.

    Raises:
        InvalidArgument: The model has tensors elsewhere than on the CPU.
    """
    for name, tensor in named_tensors(model):
        if tensor.device.type != "cpu":
            raise InvalidArgument(f"model: {name or 'it'} has a tensor on {tensor.device}, not on the CPU", hint="model.cpu()")
    loop, marks = Loop(loss=loss, optimizer=optimizer, **settings), _Marks()
    with profiled() as profiler:
        marks.stage("model")
        copied = copy.deepcopy(model)
        marks.stage("batch")
        micro = copy.deepcopy(batch)
        alive = loop.run(copied, micro, marks)
        marks.stage("end")
    del alive
    return Measurement(stages=tuple(_stage_peaks(profiler, marks.stages)), evidence=measured(torch.device("cpu")))


class _Marks:
    """Writes the begin of each stage into the profile."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int]] = []

    def stage(self, name: str, update: int = 0, micro_batch: int = 0) -> None:
        with record_function(f"{_MARK}{len(self.stages)}"):
            self.stages.append((name, update, micro_batch))

    def after_backward(self, parameters: Iterable[Tensor]) -> None:
        pass

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def _stage_peaks(profiler: profile, stages: list[tuple[str, int, int]]) -> Iterable[StagePeak]:
    """Peaks of all ``stages`` but the last, which marks the end."""
    peak, number = 0, -1
    for live, begins in live_bytes(profiler, lambda name: name.startswith(_MARK)):
        if begins:
            if number >= 0:
                name, update, micro_batch = stages[number]
                yield StagePeak(
                    name=name, update=update, micro_batch=micro_batch, peak_allocated_bytes=peak, allocated_bytes=live
                )
            number, peak = number + 1, live
        peak = max(peak, live)


# On an accelerator


def measure_device(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: MakeOptimizer,
    device: str | torch.device = "auto",
    backend: Backend | None = None,
    snapshot: str | Path | None = None,
    copied: bool = True,
    empty_cache: bool = True,
    **settings: Unpack[Settings],
) -> Measurement:
    """What the device's allocator and driver report while a copy of ``model`` trains there.

    Counted is all that this process holds on the device: one measurement a process keeps figures apart. Where
    memory runs out, the figures up to there and the error's message are returned.

    Args:
        model: It is copied, and not changed, unless ``copied`` is ``False``.
        loss: ``loss(model, micro)``: a scalar tensor or a dict of them.
        batch: One micro-batch.
        optimizer: Makes the optimizer from the parameters that require a gradient.
        device: ``auto`` (the accelerator that torch finds), or its name.
        backend: Memory of the device; default: that of ``device``.
        snapshot: File for the allocator's history in torch's format; also written where memory ran out.
        copied: ``False``: the model itself is moved to the device and trained.
        empty_cache: What the allocator still holds from before is given back first.
        settings: Of the loop: see :class:`~fullbatch.memory.loop.Loop`.

    Raises:
        InvalidArgument: There is no such device, or it keeps no history for ``snapshot``.
    """
    if backend is None:
        backend = backend_of(device)
    loop, stages = Loop(loss=loss, optimizer=optimizer, **settings), _DeviceStages(backend)
    if snapshot is not None and not backend.record_history(True):
        raise InvalidArgument(f"snapshot={str(snapshot)!r}: {backend.name()} keeps no history of its allocator")
    gc.collect()  # an earlier run's tensors may hang in cycles
    if empty_cache:
        backend.empty_cache()
    message: str | None = None
    alive: Any = None
    try:
        stages.stage("model")
        there = backend.take(copy.deepcopy(model) if copied else model)
        stages.stage("batch")
        micro = backend.take(batch)
        alive = loop.run(there, micro, stages)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = str(error)
    finally:
        if snapshot is not None:
            backend.dump_history(Path(snapshot))
            backend.record_history(False)
    stages.end()
    del alive
    evidence = replace(measured(torch.device("cpu")), device=f"{backend.device} ({backend.name()})")
    return Measurement(
        stages=tuple(stages.peaks),
        evidence=evidence,
        out_of_memory=message,
        snapshot=None if snapshot is None else str(snapshot),
    )


class _DeviceStages:
    """Asks the device at the end of each stage what its peak was."""

    def __init__(self, backend: Backend) -> None:
        self.peaks: list[StagePeak] = []
        self._backend = backend
        self._now: tuple[str, int, int] | None = None

    def stage(self, name: str, update: int = 0, micro_batch: int = 0) -> None:
        self.end()
        self._now = (name, update, micro_batch)

    def end(self) -> None:
        """The stage that runs is over, if there is one."""
        backend = self._backend
        backend.synchronize()
        if self._now is not None:
            name, update, micro_batch = self._now
            allocated, reserved = backend.allocated_bytes(), backend.reserved_bytes()
            peak_allocated, peak_reserved = backend.peak_allocated_bytes(), backend.peak_reserved_bytes()
            self.peaks.append(
                StagePeak(
                    name=name,
                    update=update,
                    micro_batch=micro_batch,
                    peak_allocated_bytes=allocated if peak_allocated is None else peak_allocated,
                    allocated_bytes=allocated,
                    peak_reserved_bytes=reserved if peak_reserved is None else peak_reserved,
                    reserved_bytes=reserved,
                    device_used_bytes=backend.device_used_bytes(),
                )
            )
            self._now = None
        backend.reset_peaks()

    def after_backward(self, parameters: Iterable[Tensor]) -> None:
        pass

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass
