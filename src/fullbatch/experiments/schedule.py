"""Learning rate when the effective batch changes, warm-up and decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fullbatch.errors import InvalidArgument, not_one_of


@dataclass(frozen=True)
class Scaling:
    """How the learning rate follows the effective batch: ``rate * (batch / reference) ** power``."""

    power: float
    source: str


SCALINGS = {
    "none": Scaling(0.0, "the rate is kept"),
    "linear": Scaling(1.0, "Goyal et al. 2017, arXiv:1706.02677, section 2.1 (SGD)"),
    "sqrt": Scaling(0.5, "Krizhevsky 2014, arXiv:1404.5997; for Adam: Malladi et al. 2022, arXiv:2205.10343"),
}
WARM_UP_SOURCE = "gradual warm-up: Goyal et al. 2017, arXiv:1706.02677, section 2.2"
FINAL_SHARE = 0.1
"""The cosine ends at this share of the peak rate (Hoffmann et al. 2022, arXiv:2203.15556, appendix B: a factor of 10)."""


def scaled_lr(lr: float, scaling: str, effective_batch: int, reference_batch: int) -> float:
    """``lr``, which was found at ``reference_batch``, for ``effective_batch``.

    Raises:
        InvalidArgument: There is no such scaling, or a batch is below 1.
    """
    if scaling not in SCALINGS:
        raise not_one_of("scale_lr", scaling, SCALINGS)
    if reference_batch < 1:
        raise InvalidArgument(f"reference_batch={reference_batch} must be at least 1")
    return lr * math.pow(effective_batch / reference_batch, SCALINGS[scaling].power)


def warmup_updates(warmup_samples: int, effective_batch: int) -> int:
    """Updates in which ``warmup_samples`` are seen: the warm-up stays as long in data when the batch changes."""
    if warmup_samples < 0:
        raise InvalidArgument(f"warmup_samples={warmup_samples} must be at least 0")
    return math.ceil(warmup_samples / effective_batch)


def warmup_cosine(warmup: int, updates: int) -> Callable[[int], float]:
    """Share of the peak rate at update 0, 1, ...: a line up over ``warmup``, then a cosine down to a tenth."""

    def share(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        progress = min(1.0, (done - warmup) / max(1, updates - warmup))
        return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))

    return share
