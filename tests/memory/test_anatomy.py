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


def _convolutions(limit=None, **kernel):
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    card = None if limit is None else Card(name="x", title="x", total_bytes=limit, context_bytes=0, **kernel)
    return anatomy(
        model,
        lambda model, x: model(x).square().mean(),
        torch.zeros(8, 64, 64, 64, device="meta"),
        optimizer=torch.optim.SGD,
        card=card,
    )


def test_convolutions_give_a_range_and_the_verdict_is_for_its_upper_end():
    found = _convolutions()
    ends = found.workspace_range
    copies = (2 * 8 * 64 * 64 * 64 + 64 * 64 * 9) * 4
    assert ends.reserved_least_bytes == ends.allocated_least_bytes < ends.allocated_most_bytes <= ends.reserved_most_bytes
    assert ends.allocated_most_bytes - ends.allocated_least_bytes >= copies
    fits = _convolutions(ends.reserved_most_bytes).verdict
    assert (fits.fits, fits.room_bytes, fits.fits_without_workspace) == (True, 0, True)
    assert "to spare" in str(fits)
    may = _convolutions(found.peak_reserved_bytes).verdict
    assert (may.fits, may.fits_without_workspace) == (False, True)
    assert str(may).startswith("MAY NOT FIT: ")
    assert may.failure.owner.operator == "cuDNN workspace"
    lacks = _convolutions(ends.allocated_least_bytes - 1024).verdict
    assert (lacks.fits, lacks.fits_without_workspace) == (False, False)
    assert str(lacks).startswith("DOES NOT FIT: ")


def test_the_parts_are_those_without_workspaces():
    found = _convolutions()
    assert sum(found.parts.values()) == found.peak_reserved_bytes
    assert "cuDNN workspace" not in found.by("operator")
    assert any("rules that are not public" in note for note in found.notes)


def test_without_a_convolution_there_is_no_range():
    found = _anatomy(2**34)
    assert (found.workspace_range, found.verdict.fits_without_workspace, found.notes) == (None, None, [])


def test_what_is_not_known_of_other_libraries_is_said():
    assert _convolutions(2**34, hip=True).notes == ["MIOpen's workspaces of convolutions are not in the figures"]
    with torch.device("meta"):
        model = nn.LSTM(16, 16)
    found = anatomy(model, lambda model, x: model(x)[0].sum(), torch.zeros(4, 2, 16, device="meta"), optimizer=torch.optim.SGD)
    assert found.notes == ["the reserve in which cuDNN keeps what a recurrent layer's backward needs is not in the figures"]
