"""When gradients are reduced: once a window, in the last backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn


class GradientSync:
    """Holds back a wrapped model's gradient reduction, and counts the backwards that were not held back.

    ``calls`` is the number of backwards that end with reduced gradients: one a window. A model
    without ``no_sync`` has nothing to reduce, and each of its windows counts as one all the same,
    because its gradients are complete after the last backward and not before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._no_sync = getattr(model, "no_sync", nullcontext)
        self.calls = 0

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """To cover forward and backward of one micro-batch: DistributedDataParallel decides in the forward."""
        if not last:
            held_back: AbstractContextManager[None] = self._no_sync()
            return held_back
        self.calls += 1
        return nullcontext()
