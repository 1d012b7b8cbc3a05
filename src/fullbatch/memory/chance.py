"""The chance that a run fits a card, from how far predictions were off where runs were measured."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import cache
from importlib import resources

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.playback import Played, play
from fullbatch.memory.settings import AllocatorSettings
from fullbatch.memory.timeline import Timeline
from fullbatch.units import MiB


def chance_to_fit(needed_bytes: int, usable_bytes: int, ratios: Sequence[float] | None = None) -> float:
    """How likely a run that is predicted to need ``needed_bytes`` gets by with ``usable_bytes``.

    The ratio of measured to predicted peaks is taken to be spread as in the published runs: a normal curve on
    the logarithm of each ratio, as wide as Silverman says (Density Estimation, 1986, 3.4.1). So few runs bear
    no claim beyond ``1 / (runs + 2)`` on either side (Laplace's rule of succession).

    Args:
        needed_bytes: Least bytes on which the run is predicted to fit.
        usable_bytes: Of the card.
        ratios: Measured over predicted, of two runs or more. ``None``: of the published runs.

    Returns:
        Between 0 and 1.
    """
    logs = [math.log(ratio) for ratio in (published_ratios() if ratios is None else ratios)]
    least = 1 / (len(logs) + 2)
    if needed_bytes <= 0:
        return 1 - least
    if usable_bytes <= 0:
        return least
    width = max(1.06 * statistics.stdev(logs) * len(logs) ** -0.2, 1e-6)
    room = math.log(usable_bytes / needed_bytes)
    mean = statistics.fmean(statistics.NormalDist(log, width).cdf(room) for log in logs)
    return min(max(mean, least), 1 - least)


@cache
def published_ratios() -> tuple[float, ...]:
    """Measured over predicted peak reserved of the published runs that could be rebuilt (``docs/prediction.md``)."""
    text = resources.files("fullbatch.memory").joinpath("published.json").read_text()
    return tuple(row["measured_mib"] / row["predicted_mib"] for row in json.loads(text)["rows"])


def needed_bytes(timeline: Timeline, free: Played, micro_batches: int, allocator: AllocatorSettings | None = None) -> int:
    """Least memory on which the run is predicted to end, where need be by emptying the cache; to 2 MiB.

    Args:
        timeline: The run.
        free: The same run on a device without end.
        micro_batches: Of an update.
        allocator: Settings of the caching allocator.
    """
    step = 2 * MiB
    short, enough = free.peak_allocated_bytes // step, -(-free.peak_reserved_bytes // step)
    while enough - short > 1:
        middle = (short + enough) // 2
        if play(timeline, CachingAllocator(middle * step, settings=allocator), micro_batches).failure is None:
            enough = middle
        else:
            short = middle
    return min(enough * step, free.peak_reserved_bytes)
