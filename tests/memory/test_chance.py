"""The chance to fit against the plain count of published runs, and the needed bytes against trying every size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.chance import chance_to_fit, needed_bytes, published_ratios
from fullbatch.memory.kernels import Kernels
from fullbatch.memory.playback import play
from fullbatch.memory.trace import trace

GiB, MiB = 2**30, 2**20


def test_half_of_runs_that_lie_evenly_about_their_prediction_fit_a_card_of_that_size():
    assert chance_to_fit(10 * GiB, 10 * GiB, [0.98, 1 / 0.98]) == pytest.approx(0.5)


def test_far_between_two_clusters_it_is_the_share_of_runs_below():
    ratios = [1.0, 1.0001, 0.9999] * 30 + [1.5] * 10
    assert chance_to_fit(10 * GiB, 12 * GiB, ratios) == pytest.approx(0.9, abs=0.03)


@given(st.integers(1, 2**45), st.integers(0, 2**45), st.integers(0, 2**45))
def test_more_memory_never_lowers_it_and_it_is_never_sure(needed, one, other):
    less, more = sorted((one, other))
    least = 1 / (len(published_ratios()) + 2)
    assert least <= chance_to_fit(needed, less) <= chance_to_fit(needed, more) <= 1 - least


def test_the_published_runs_are_many_and_near():
    ratios = published_ratios()
    assert len(ratios) >= 30
    assert all(0.8 < ratio < 1.25 for ratio in ratios)  # as far as anatomy looks for the bytes needed


def test_the_needed_bytes_are_the_least_that_hold_of_all_sizes():
    model = nn.Sequential(nn.Linear(2000, 4000), nn.GELU(), nn.Linear(4000, 3000), nn.GELU(), nn.Linear(3000, 2000)).to("meta")
    timeline = trace(
        model,
        lambda model, x: model(x).log_softmax(-1).mean(),
        torch.zeros(512, 2000),
        optimizer=torch.optim.AdamW,
        kernels=Kernels(capability=80),
    )
    free = play(timeline, CachingAllocator(), 1)

    def fits(size):
        return play(timeline, CachingAllocator(size), 1).failure is None

    found = needed_bytes(timeline, free, 1)
    holding = [size for size in range(2 * MiB, free.peak_reserved_bytes + 1, 2 * MiB) if fits(size)]
    assert found == holding[0]
    assert free.peak_allocated_bytes <= found < free.peak_reserved_bytes  # the search had something to find
