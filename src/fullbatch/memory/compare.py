"""A prediction beside the measurement of the same run, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from fullbatch.evidence import Evidence, predicted
from fullbatch.memory.anatomy import anatomy
from fullbatch.memory.backend import Backend
from fullbatch.memory.catalog import Card
from fullbatch.memory.loop import Loss, MakeOptimizer, Settings
from fullbatch.memory.measure import Measurement, measure_cpu, measure_device
from fullbatch.memory.playback import StageMemory
from fullbatch.memory.predict_cpu import predict_cpu
from fullbatch.memory.simulated import SimulatedBackend
from fullbatch.memory.timeline import Timeline
from fullbatch.memory.trace import trace
from fullbatch.plain import plain

if TYPE_CHECKING:
    from typing_extensions import Unpack

SCHEMA = "measured.v1"


@dataclass(frozen=True, kw_only=True)
class StagePair:
    """A stage, predicted and measured, in bytes; ``None`` where the device has no caching allocator or does not say.

    Attributes:
        name: ``model``, ``batch``, ``forward``, ``backward`` or ``update``.
        update: Number of the update, from 1; 0 before the first.
        micro_batch: Number of the micro-batch in its window, from 1; 0 outside of any.
        predicted_allocated_bytes: In live tensors at its end.
        measured_allocated_bytes: The same.
        predicted_peak_allocated_bytes: Most in live tensors during it.
        measured_peak_allocated_bytes: The same.
        predicted_reserved_bytes: Held by the caching allocator at its end.
        measured_reserved_bytes: The same.
        predicted_peak_reserved_bytes: Most held by the caching allocator during it.
        measured_peak_reserved_bytes: The same.
        device_used_bytes: What the driver reports at its end, for all processes.
    """

    name: str
    update: int
    micro_batch: int
    predicted_allocated_bytes: int
    measured_allocated_bytes: int
    predicted_peak_allocated_bytes: int
    measured_peak_allocated_bytes: int
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    predicted_peak_reserved_bytes: int | None = None
    measured_peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None

    @property
    def error(self) -> float:
        """Of the predicted peak allocated, relative to the measured one."""
        return self.predicted_peak_allocated_bytes / max(self.measured_peak_allocated_bytes, 1) - 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run as it was predicted and as it went.

    Attributes:
        stages: In order; where memory ran out, up to the stage in which it did.
        predicted_peak_allocated_bytes: Most in live tensors, of a run that goes to its end.
        predicted_peak_reserved_bytes: Most that the caching allocator holds, of such a run; ``None`` where there is none.
        predicted: How the predicted figures were obtained.
        measured: How the measured ones were.
        verdict: What was predicted of the device that the run was on; empty where there is no limit.
        out_of_memory: The message of the error that ended the run; ``None`` where it went to its end.
        snapshot: File with the allocator's history, in torch's format.
        notes: What the prediction leaves open.
    """

    stages: tuple[StagePair, ...]
    predicted_peak_allocated_bytes: int
    predicted_peak_reserved_bytes: int | None
    predicted: Evidence
    measured: Evidence
    verdict: str = ""
    out_of_memory: str | None = None
    snapshot: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> StagePair:
        """The stage with the most measured bytes in live tensors."""
        return max(self.stages, key=lambda stage: stage.measured_peak_allocated_bytes)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"schema": SCHEMA, **plain(self)}


class _Predicted(NamedTuple):
    allocated: int
    peak_allocated: int
    reserved: int | None = None
    peak_reserved: int | None = None


def compare_cpu(
    model: nn.Module, loss: Loss, batch: Any, *, optimizer: MakeOptimizer, command: str = "", **settings: Unpack[Settings]
) -> Comparison:
    """Predict a run with the CPU's kernels, and measure it by the profiler's memory events.

    Args:
        model: On the CPU; it is copied, not changed.
        loss: ``loss(model, micro)``: a scalar tensor or a dict of them.
        batch: One micro-batch.
        optimizer: Makes the optimizer from the parameters that require a gradient.
        command: What to run to obtain it again.
        settings: Of the loop: see :class:`~fullbatch.memory.loop.Loop`.

    Raises:
        InvalidArgument: The model has tensors elsewhere than on the CPU.
    """
    given: dict[str, Any] = dict(settings)
    timeline = trace(model, loss, batch, optimizer=optimizer, **given)
    measurement = measure_cpu(model, loss, batch, optimizer=optimizer, **settings)
    notes = []
    if torch.backends.mkldnn.enabled:
        notes.append("oneDNN is on: for the size of its buffers, each kind of its kernels was run once by itself")
    return _paired(
        _of_timeline(timeline), measurement, predicted("the kernels of the CPU", command), notes=(*timeline.notes, *notes)
    )


def compare_device(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: MakeOptimizer,
    backend: Backend,
    snapshot: str | Path | None = None,
    empty_cache: bool = True,
    command: str = "",
    **settings: Unpack[Settings],
) -> Comparison:
    """Predict a run on the device of ``backend``, and measure it there.

    Args:
        model: It is moved to the device and trained, not copied.
        loss: ``loss(model, micro)``: a scalar tensor or a dict of them.
        batch: One micro-batch.
        optimizer: Makes the optimizer from the parameters that require a gradient.
        backend: The device's memory.
        snapshot: File for the allocator's history; also written where memory ran out.
        empty_cache: What the allocator still holds from before is given back first.
        command: What to run to obtain it again.
        settings: Of the loop: see :class:`~fullbatch.memory.loop.Loop`.

    Raises:
        InvalidArgument: The device keeps no history for ``snapshot``.
    """
    verdict = ""
    notes: tuple[str, ...] = ()
    if backend.device.type == "cpu":
        stages = predict_cpu(model, loss, batch, optimizer=optimizer, **settings).stages
        evidence = predicted("the kernels of the CPU under CUDA's allocator", command)
    else:
        found = anatomy(model, loss, batch, optimizer=optimizer, card=card_of(backend), command=command, **settings)
        stages, evidence, verdict, notes = found.stages, found.evidence, str(found.verdict), tuple(found.notes)
    with backend if isinstance(backend, SimulatedBackend) else nullcontext():
        measurement = measure_device(
            model, loss, batch, optimizer=optimizer, backend=backend, snapshot=snapshot, copied=False, empty_cache=empty_cache,
            **settings,
        )  # fmt: skip
    return _paired(_of_stages(stages), measurement, evidence, verdict=verdict, notes=notes)


def card_of(backend: Backend) -> Card:
    """The device of ``backend``, all of whose free memory is usable; one that is not NVIDIA's takes the rules of 8.0."""
    total = backend.total_bytes() or 0
    used = backend.device_used_bytes() or 0
    nvidia = backend.device.type == "cuda" and torch.version.hip is None
    major, minor = torch.cuda.get_device_capability(backend.device) if nvidia else (8, 0)
    return Card(
        name=str(backend.device),
        title=backend.name(),
        total_bytes=total,
        context_bytes=min(max(used - backend.reserved_bytes(), 0), total),
        capability=10 * major + minor,
        hip=torch.version.hip is not None,
        source="torch and the driver",
        how="measured",
    )


def _paired(
    stages: list[_Predicted],
    measurement: Measurement,
    evidence: Evidence,
    *,
    verdict: str = "",
    notes: tuple[str, ...] = (),
) -> Comparison:
    reserved = [stage.peak_reserved for stage in stages if stage.peak_reserved is not None]
    pairs = tuple(
        StagePair(
            name=seen.name,
            update=seen.update,
            micro_batch=seen.micro_batch,
            predicted_allocated_bytes=stage.allocated,
            measured_allocated_bytes=seen.allocated_bytes,
            predicted_peak_allocated_bytes=stage.peak_allocated,
            measured_peak_allocated_bytes=seen.peak_allocated_bytes,
            predicted_reserved_bytes=stage.reserved,
            measured_reserved_bytes=seen.reserved_bytes,
            predicted_peak_reserved_bytes=stage.peak_reserved,
            measured_peak_reserved_bytes=seen.peak_reserved_bytes,
            device_used_bytes=seen.device_used_bytes,
        )
        for stage, seen in zip(stages, measurement.stages, strict=False)  # a run that fails has fewer
    )
    return Comparison(
        stages=pairs,
        predicted_peak_allocated_bytes=max(stage.peak_allocated for stage in stages),
        predicted_peak_reserved_bytes=max(reserved, default=None),
        predicted=evidence,
        measured=replace(measurement.evidence, command=evidence.command),
        verdict=verdict,
        out_of_memory=measurement.out_of_memory,
        snapshot=measurement.snapshot,
        notes=notes,
    )


def _of_timeline(timeline: Timeline) -> list[_Predicted]:
    live = [0, *timeline.live_bytes()]
    return [_Predicted(live[one.end], peak) for one, peak in zip(timeline.stages, timeline.stage_peaks(), strict=True)]


def _of_stages(stages: Sequence[StageMemory]) -> list[_Predicted]:
    """In the order of the run: what stands for several micro-batches comes once for each."""
    every = [(stage, number) for stage in stages for number in range(stage.micro_batch, stage.last_micro_batch + 1)]
    every.sort(key=lambda one: (one[0].update, one[0].name == "update", one[1]))  # forward stays before backward
    return [
        _Predicted(stage.allocated_bytes, stage.peak_allocated_bytes, stage.reserved_bytes, stage.peak_reserved_bytes)
        for stage, _ in every
    ]
