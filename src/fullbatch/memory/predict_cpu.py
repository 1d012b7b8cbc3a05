"""The memory of a run on the CPU, or on a device that :func:`~fullbatch.memory.limit.limit` makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.loop import Loss, MakeOptimizer, Settings
from fullbatch.memory.onednn import not_asked
from fullbatch.memory.playback import TRACED, Played, play
from fullbatch.memory.trace import trace

if TYPE_CHECKING:
    from typing_extensions import Unpack


def predict_cpu(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: MakeOptimizer,
    limit_bytes: int | None = None,
    **settings: Unpack[Settings],
) -> Played:
    """Memory that a run with the CPU's kernels takes of a caching allocator, stage by stage.

    That is what a device made by :func:`~fullbatch.memory.limit.limit` has. Beside its figures, a
    prediction for CUDA knows CUDA's kernels: see :func:`~fullbatch.memory.anatomy.anatomy`.

    Args:
        model: Its tensors may be on the meta device; it is not changed.
        loss: ``loss(model, micro)``: a scalar tensor or a dict of them.
        batch: One micro-batch; only shapes and dtypes matter.
        optimizer: Makes the optimizer from the parameters that require a gradient.
        limit_bytes: Size of the device. ``None``: without end.
        settings: Of the loop: see :class:`~fullbatch.memory.loop.Loop`.

    Returns:
        Stages and peaks in bytes; ``failure`` says where memory runs out.
    """
    micro_batches = settings.pop("micro_batches", 1)
    given: dict[str, Any] = dict(settings)
    with not_asked():  # as the limit, which does not see oneDNN's buffers
        timeline = trace(model, loss, batch, optimizer=optimizer, micro_batches=min(micro_batches, TRACED), **given)
    return play(timeline, CachingAllocator(limit_bytes), micro_batches)
