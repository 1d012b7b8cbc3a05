"""The anatomy adds up, and its verdict is what the allocator does under the card's limit."""

import pytest
import torch
from torch import nn

from fullbatch.errors import InvalidArgument
from fullbatch.memory import anatomy
from fullbatch.memory.catalog import Card

WIDTH = 1024
WEIGHT = WIDTH * WIDTH * 4


def _anatomy(limit=None, **settings):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    card = None if limit is None else Card(name="x", title="x", total_bytes=limit, context_bytes=0)
    return anatomy(
        model,
        lambda model, x: model(x).square().mean(),
        torch.zeros(64, WIDTH, device="meta"),
        optimizer=torch.optim.AdamW,
        card=card,
        **settings,
    )


def test_the_parts_sum_to_the_peak_and_are_what_arithmetic_says():
    found = _anatomy(foreach=True)
    assert sum(found.parts.values()) == found.peak_reserved_bytes
    assert sum(share.bytes for share in found.shares) == found.peak_allocated_bytes
    assert found.parts["weights"] == found.parts["gradients"] == 4 * WEIGHT
    assert found.parts["optimizer state"] == 8 * WEIGHT
    # AdamW's foreach step makes one temporary of the weights' size; cuBLAS keeps a workspace for each thread
    assert found.parts["workspace"] == 4 * WEIGHT + 2 * (4096 * 2 + 16 * 8) * 1024
    assert found.by("module")["2"] == 4 * WEIGHT


def test_without_foreach_the_temporaries_are_of_three_weights():
    # root, quotient, and the quotient of the weight before, which its variable still holds
    assert _anatomy(foreach=False).parts["workspace"] == 3 * WEIGHT + 2 * (4096 * 2 + 16 * 8) * 1024


def test_the_verdict_turns_at_the_limit():
    peak = _anatomy().peak_reserved_bytes
    fits = _anatomy(peak).verdict
    assert (fits.fits, fits.room_bytes, fits.num_alloc_retries, fits.failure) == (True, 0, 0, None)
    lacks = _anatomy(_anatomy().peak_allocated_bytes - 512).verdict
    assert not lacks.fits
    assert lacks.failure.stage == "update"
    assert "DOES NOT FIT" in str(lacks)


def test_accumulation_keeps_weights_and_state_and_costs_resident_gradients():
    plain, accumulated = (_anatomy(micro_batches=number) for number in (1, 100))
    forward = [
        next(stage for stage in found.stages[::-1] if stage.name == "forward").peak_allocated_bytes
        for found in (plain, accumulated)
    ]
    assert forward[1] - forward[0] == 4 * WEIGHT


@pytest.mark.parametrize("number", [0, -1])
def test_no_micro_batches_are_refused(number):
    with pytest.raises(InvalidArgument, match=f"micro_batches={number} must be at least 1"):
        _anatomy(micro_batches=number)
