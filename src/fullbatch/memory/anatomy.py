"""Where a run's memory goes, stage by stage and owner by owner, and whether a card has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fullbatch.errors import InvalidArgument
from fullbatch.evidence import Evidence, predicted
from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.catalog import Card
from fullbatch.memory.chance import chance_to_fit, needed_bytes
from fullbatch.memory.cudnn import WORKSPACE
from fullbatch.memory.kernels import Kernels
from fullbatch.memory.playback import TRACED, Failure, Played, StageMemory, play
from fullbatch.memory.settings import AllocatorSettings
from fullbatch.memory.timeline import PARTS, Owner, Timeline
from fullbatch.memory.trace import trace
from fullbatch.plain import plain
from fullbatch.units import show_bytes

SCHEMA = "anatomy.v1"
_NEAR = 1.25  # no published run was that far from its prediction


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one owner has of the peak.

    Attributes:
        part: Part of the peak.
        module: Name of the module in the model, ``""`` outside of any.
        operator: What made it.
        line: Source line that called for it.
        bytes: In live blocks, as the allocator rounds.
    """

    part: str
    module: str
    operator: str
    line: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class WorkspaceRange:
    """Peaks between no workspace for cuDNN's convolutions and the largest that one of its algorithms needs.

    The allocator's cache depends on every size that was asked for. Below, it is bounded by the peak allocated; above,
    it is the most of the runs with 0, 1/4, 1/2, 3/4 and all of the largest workspaces.

    Attributes:
        allocated_least_bytes: Least peak in live blocks.
        allocated_most_bytes: Most.
        reserved_least_bytes: Least peak in the allocator's segments.
        reserved_most_bytes: Most.
    """

    allocated_least_bytes: int
    allocated_most_bytes: int
    reserved_least_bytes: int
    reserved_most_bytes: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a card has the memory; where there is a range, at its upper end.

    Attributes:
        card: Its name.
        total_bytes: Of the card.
        usable_bytes: Without what driver and libraries take.
        fits: The run ends without running out of memory.
        room_bytes: Usable minus the peak reserved; below 0 where it is missing.
        num_alloc_retries: Times that the allocator had to empty its cache to go on.
        failure: Where it ran out.
        needed_bytes: Least usable bytes on which it is predicted to end, where need be by emptying the cache.
            ``None``: the card is far from that, on either side.
        chance: That it fits, between 0 and 1, by how far published runs were from their prediction.
        fits_without_workspace: It fits where cuDNN takes no workspace. ``None``: there is no range.
    """

    card: str
    total_bytes: int
    usable_bytes: int
    fits: bool
    room_bytes: int
    num_alloc_retries: int
    failure: Failure | None
    needed_bytes: int | None
    chance: float
    fits_without_workspace: bool | None = None

    def __str__(self) -> str:
        usable = f"{show_bytes(self.usable_bytes)} usable of {show_bytes(self.total_bytes)} on {self.card}"
        if self.fits_without_workspace is not None:
            usable += ", at the upper end of the range"
        if self.failure is not None:
            if self.fits_without_workspace:
                return f"MAY NOT FIT: {show_bytes(-self.room_bytes)} more than the {usable}; without workspaces it fits"
            return f"DOES NOT FIT: {show_bytes(-self.room_bytes)} more than the {usable}"
        if self.num_alloc_retries:
            times = f"{self.num_alloc_retries} time{'s' if self.num_alloc_retries > 1 else ''}"
            return f"fits, but only by emptying the cache {times}: {usable}, {show_bytes(-self.room_bytes)} short without that"
        return f"fits: {show_bytes(self.room_bytes)} to spare of the {usable}"


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Predicted memory of a training run.

    Attributes:
        stages: In order; alike micro-batches stand in one row.
        peak_allocated_bytes: Most in live blocks.
        peak_reserved_bytes: Most in the allocator's segments, on a card without end.
        peak_stage: Stage of the most allocated.
        parts: Bytes of each part at the peak of allocated; with ``unusable`` they sum to the peak reserved.
        shares: The same by module, operator and line, largest first.
        largest_free_bytes: Largest free block at the end.
        workspace_range: Of the peaks, whose figures here are without workspaces of cuDNN. ``None``: it runs nothing.
        verdict: For the card asked about.
        settings: How the run was set up.
        notes: What the figures leave open.
        evidence: How they were obtained.
    """

    stages: list[StageMemory]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_stage: StageMemory
    parts: dict[str, int]
    shares: list[Share]
    largest_free_bytes: int
    workspace_range: WorkspaceRange | None
    verdict: Verdict | None
    settings: dict[str, Any]
    notes: list[str]
    evidence: Evidence
    timeline: Timeline = field(repr=False)

    def by(self, key: str) -> dict[str, int]:
        """Bytes of the peak by ``part``, ``module``, ``operator`` or ``line``, largest first."""
        sums: Counter[str] = Counter()
        for share in self.shares:
            sums[getattr(share, key)] += share.bytes
        return dict(sums.most_common())

    def to_json(self) -> dict[str, Any]:
        """Everything but the timeline, as plain values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "timeline"}
        if self.verdict is not None and (failure := self.verdict.failure) is not None:
            values["verdict"] = {**vars(self.verdict), "failure": {**vars(failure), "live": shares(failure.live)}}
        return {"schema": SCHEMA, **plain(values)}


def anatomy(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    micro_batches: int = 1,
    card: Card | None = None,
    allocator: AllocatorSettings | None = None,
    attention: str = "auto",
    settings: Mapping[str, Any] | None = None,
    command: str = "",
    **loop: Any,
) -> Anatomy:
    """Predict the memory of training ``model``, without a GPU and without its weights.

    Args:
        model: Its tensors may be on the meta device; it is not changed.
        loss: ``loss(model, micro)``: a scalar tensor or a dict of them.
        batch: One micro-batch; only shapes and dtypes matter.
        optimizer: Makes the optimizer from the parameters that require a gradient.
        micro_batches: Micro-batches of an update.
        card: Whose kernels run, and whose memory the verdict is about. ``None``: a CUDA device
            of capability 8.0 without end, and no verdict.
        allocator: Settings of the caching allocator. ``None``: its defaults.
        attention: ``auto`` (what torch would choose), ``flash``, ``efficient`` or ``math``.
        settings: Kept in the result.
        command: What to run to obtain it again.
        loop: Further arguments of :func:`trace`.

    Raises:
        InvalidArgument: ``micro_batches`` is below 1.
    """
    if micro_batches < 1:
        raise InvalidArgument(f"micro_batches={micro_batches} must be at least 1")
    kernels = Kernels(
        capability=card.capability if card is not None else 80,
        hip=card is not None and card.hip,
        convolution_workspace="most",
        cudnn_benchmark=torch.backends.cudnn.benchmark,
    )
    most = trace(
        model, loss, batch, optimizer=optimizer, micro_batches=min(micro_batches, TRACED), kernels=kernels,
        attention=attention, **loop,
    )  # fmt: skip
    timeline = most.resized(WORKSPACE, 0)
    endless = CachingAllocator(settings=allocator)
    free = play(timeline, endless, micro_batches)
    workspace_range, upper = _workspace_range(most, timeline, free, micro_batches, allocator)
    return Anatomy(
        stages=merged(free.stages),
        peak_allocated_bytes=free.peak_allocated_bytes,
        peak_reserved_bytes=free.peak_reserved_bytes,
        peak_stage=free.peak_stage,
        parts=_parts(free),
        shares=shares(free.peak_live),
        largest_free_bytes=endless.largest_free_bytes,
        workspace_range=workspace_range,
        verdict=_verdict(card, (timeline, free), upper, micro_batches, allocator) if card is not None else None,
        settings=dict(settings or {}),
        notes=[*timeline.notes, *_notes(model, timeline, kernels, workspace_range)],
        evidence=predicted(card.title if card is not None else "a CUDA device of capability 8.0", command),
        timeline=timeline,
    )


def verdict(
    timeline: Timeline, card: Card, free: Played, micro_batches: int, allocator: AllocatorSettings | None = None
) -> Verdict:
    """Whether ``card`` has the memory for ``timeline``.

    Args:
        timeline: The run.
        card: The device.
        free: The same run on a device without end.
        micro_batches: Of an update.
        allocator: Settings of the caching allocator.
    """
    tight = free
    if free.peak_reserved_bytes > card.usable_bytes:
        tight = play(timeline, CachingAllocator(card.usable_bytes, settings=allocator), micro_batches)
    needed = None
    if free.peak_allocated_bytes / _NEAR < card.usable_bytes < free.peak_reserved_bytes * _NEAR:
        needed = needed_bytes(timeline, free, micro_batches, allocator)
    likely = free.peak_reserved_bytes if needed is None else needed
    return Verdict(
        card=card.title,
        total_bytes=card.total_bytes,
        usable_bytes=card.usable_bytes,
        fits=tight.failure is None,
        room_bytes=card.usable_bytes - free.peak_reserved_bytes,
        num_alloc_retries=tight.num_alloc_retries,
        failure=tight.failure,
        needed_bytes=needed,
        chance=chance_to_fit(likely, card.usable_bytes),
    )


def _workspace_range(
    most: Timeline, least: Timeline, free: Played, micro_batches: int, allocator: AllocatorSettings | None
) -> tuple[WorkspaceRange | None, tuple[Timeline, Played]]:
    """The range, and the run with the most reserved; ``free`` plays ``least``."""
    if not any(owner.operator == WORKSPACE for owner in most.owners):
        return None, (least, free)
    runs = [(least, free)]
    for share in (0.25, 0.5, 0.75, 1):
        timeline = most.resized(WORKSPACE, share)
        runs.append((timeline, play(timeline, CachingAllocator(settings=allocator), micro_batches)))
    upper = max(runs, key=lambda run: run[1].peak_reserved_bytes)
    allocated = [played.peak_allocated_bytes for _, played in runs]
    return WorkspaceRange(
        allocated_least_bytes=min(allocated),
        allocated_most_bytes=max(allocated),
        reserved_least_bytes=min(allocated),
        reserved_most_bytes=upper[1].peak_reserved_bytes,
    ), upper


def _verdict(
    card: Card,
    lower: tuple[Timeline, Played],
    upper: tuple[Timeline, Played],
    micro_batches: int,
    allocator: AllocatorSettings | None,
) -> Verdict:
    found = verdict(upper[0], card, upper[1], micro_batches, allocator)
    if upper[0] is lower[0]:
        return found
    without = found.fits or verdict(lower[0], card, lower[1], micro_batches, allocator).fits
    return replace(found, fits_without_workspace=without)


def _notes(model: nn.Module, timeline: Timeline, kernels: Kernels, workspace_range: WorkspaceRange | None) -> list[str]:
    notes = []
    if workspace_range is not None:
        notes.append(
            "cuDNN chooses the algorithm of a convolution, and its workspace, by rules that are not public: the range is from "
            "no workspace to the largest of converted copies and of Winograd's transforms"
            + (" and spectra, as cudnn.benchmark is on" if kernels.cudnn_benchmark else "")
        )
    if kernels.hip and any(owner.operator == "aten.convolution" for owner in timeline.owners):
        notes.append("MIOpen's workspaces of convolutions are not in the figures")
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        notes.append("the reserve in which cuDNN keeps what a recurrent layer's backward needs is not in the figures")
    return notes


def shares(live: Mapping[Owner, int]) -> list[Share]:
    """Live bytes by owner, largest first."""
    return [
        Share(part=owner.part, module=owner.module, operator=owner.operator, line=owner.line, bytes=size)
        for owner, size in sorted(live.items(), key=lambda item: (-item[1], item[0]))
    ]


def merged(stages: list[StageMemory]) -> list[StageMemory]:
    """Micro-batches next to each other whose figures are alike become one row each of forward and backward."""
    rows: list[list[StageMemory]] = []  # stages of one micro-batch
    for stage in stages:
        if rows and stage.micro_batch and (stage.update, stage.micro_batch) == (rows[-1][0].update, rows[-1][0].micro_batch):
            rows[-1].append(stage)
        else:
            rows.append([stage])
    kept: list[list[StageMemory]] = []
    for row in rows:
        if kept and row[0].micro_batch > 1 and kept[-1][0].update == row[0].update and _figures(kept[-1]) == _figures(row):
            kept[-1] = [replace(stage, last_micro_batch=row[0].last_micro_batch) for stage in kept[-1]]
        else:
            kept.append(row)
    return [stage for row in kept for stage in row]


def _figures(row: list[StageMemory]) -> list[tuple[Any, ...]]:
    return [
        (one.name, one.allocated_bytes, one.reserved_bytes, one.peak_allocated_bytes, one.peak_reserved_bytes) for one in row
    ]


def _parts(played: Played) -> dict[str, int]:
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for owner, size in played.peak_live.items():
        parts[owner.part] += size
    parts["unusable"] = played.peak_reserved_bytes - played.peak_allocated_bytes
    return parts
