"""The record of one window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullbatch.plain import plain


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one window did.

    Attributes:
        index: Updates made so far, this one included: 1 for the first. Unchanged by a window
            that made none.
        loss: Mean over the window's items; with several terms their weighted sum. NaN where
            nothing was counted.
        terms: Mean of each term over its own items; ``{"loss": ...}`` for a loss of one term.
        items: Items of each term in the window.
        samples: Samples of the window: the effective batch.
        micro_batches: Samples of each micro-batch, in the order in which they ran.
        grad_norm: Total 2-norm of the window's gradient before clipping, after unscaling;
            ``None`` unless ``max_grad_norm`` is set (``math.inf`` measures without clipping).
        skipped: Why no update was made; ``None`` for a real update.
        sync_calls: Backwards that ended with reduced gradients: 1 a window.
        seconds: Wall time of the window, splitting and optimizer step included.
    """

    index: int
    loss: float
    terms: Mapping[str, float]
    items: Mapping[str, int | float]
    samples: int
    micro_batches: tuple[int, ...]
    grad_norm: float | None
    skipped: str | None
    sync_calls: int
    seconds: float

    @property
    def samples_per_second(self) -> float:
        """Samples of the window over its seconds."""
        return self.samples / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``; numbers that are not finite become ``None``."""
        return {**plain(self), "samples_per_second": self.samples_per_second}
