"""A long window is three traced micro-batches and a repetition: held against the window traced in full."""

import pytest
import torch
from torch import nn

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.anatomy import merged
from fullbatch.memory.kernels import Kernels
from fullbatch.memory.playback import TRACED, play
from fullbatch.memory.settings import parse_settings
from fullbatch.memory.trace import trace

LONG = 7


def _record(micro_batches, **settings):
    model = nn.Sequential(nn.Linear(300, 700), nn.GELU(), nn.Linear(700, 300), nn.Dropout(0.1), nn.Linear(300, 1100))
    return trace(
        model,
        lambda model, x: model(x).log_softmax(-1).mean(),
        torch.zeros(400, 300),
        optimizer=torch.optim.AdamW,
        micro_batches=micro_batches,
        kernels=Kernels(capability=80),
        **settings,
    )


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
@pytest.mark.parametrize("live", ["loss", "micro-batch", "update", "next"])
@pytest.mark.parametrize("keep", [False, True])
def test_repeating_the_last_micro_batch_is_the_whole_window(live, keep, conf):
    settings = {"outputs_live": live, "zero_grad_keep": keep}
    allocator = parse_settings(conf)
    short = play(_record(TRACED, **settings), CachingAllocator(settings=allocator), LONG)
    full = play(_record(LONG, **settings), CachingAllocator(settings=allocator), TRACED)  # nothing is repeated
    assert merged(short.stages) == merged(full.stages)
    assert short.peak_live == full.peak_live
    assert short.peak_reserved_bytes == full.peak_reserved_bytes


def test_the_cost_does_not_grow_with_the_number_of_micro_batches():
    timeline = _record(TRACED)
    few, many = (play(timeline, CachingAllocator(), number) for number in (100, 1_000_000))
    assert len(few.stages) == len(many.stages) < 40
    assert few.peak_reserved_bytes == many.peak_reserved_bytes


def test_at_its_own_peak_a_run_fits_and_below_its_peak_allocated_it_does_not():
    timeline = _record(TRACED)
    free = play(timeline, CachingAllocator(), LONG)
    assert play(timeline, CachingAllocator(free.peak_reserved_bytes), LONG).failure is None
    failure = play(timeline, CachingAllocator(free.peak_allocated_bytes - 1), LONG).failure
    assert failure is not None
    assert failure.stage in ("forward", "backward", "update")
    assert sum(failure.live.values()) < free.peak_allocated_bytes
