"""When gradients are reduced: once a window, in the last backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn


class GradientSync:
    """Holds back a wrapped model's gradient reduction, and counts the backwards that were not held back.

    ``calls`` is the number of backwards that ended with reduced gradients: one a window. A model
    without ``no_sync`` has nothing to reduce, and each of its windows counts as one all the same,
    because its gradients are complete after the last backward and not before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._no_sync = getattr(model, "no_sync", nullcontext)
        self.calls = 0

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Covers forward and backward of one micro-batch: DistributedDataParallel decides in the forward."""
        with nullcontext() if last else self._no_sync():
            yield
        self.calls += last
