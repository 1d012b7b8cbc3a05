"""Each known mistake, written out as a loop, must fail the comparison that the right loop passes."""

import pytest
import torch

from fullbatch.prove import BROKEN_SAMPLES, WRONG, run_broken
from fullbatch.tasks import load


def run(kind, seed=0):
    task = load("mlp", seed=seed)
    batch = task.batch(BROKEN_SAMPLES, torch.Generator().manual_seed(seed))
    return run_broken(kind, task.model, task.loss, batch, items=task.items, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_the_right_loop_passes(seed):
    result = run("right", seed)
    assert result.equal
    assert max(row.grad_rel_error for row in result.departures) <= 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", WRONG)
def test_every_wrong_loop_fails_under_both_optimizers(kind, seed):
    result = run(kind, seed)
    assert not result.equal
    for optimizer in ("SGD", "AdamW"):
        rows = [row for row in result.departures if row.optimizer == optimizer]
        assert not all(row.equal for row in rows)
        # Far from rounding: no tolerance that float64 needs would hide it.
        worst = max(max(row.grad_rel_error, row.param_rel_diff, abs(row.lr_ratio - 1)) for row in rows)
        assert worst > 1e-3


def first(kind, optimizer="SGD", update=1):
    return next(row for row in run(kind).departures if (row.optimizer, row.update) == (optimizer, update))


def test_the_sizes_of_the_mistakes_are_those_of_arithmetic():
    assert first("double-division").grad_ratio == pytest.approx(1 / 4)
    assert first("short-window-weight", update=2).grad_ratio == pytest.approx(2 / 4)
    assert first("short-window-weight").equal
    assert (first("lost-tail", update=2).steps, first("lost-tail", update=2).grad_ratio) == (0, 0)
    assert first("early-step").steps == 4
    assert first("scaled-clip").grad_ratio == pytest.approx(1 / 1024, rel=1e-3)
    assert first("scheduler-rate").lr_ratio == pytest.approx(0.9**3)
    assert first("stale-gradient").equal


def test_adam_hides_a_missing_division_that_sgd_shows():
    sgd, adamw = first("missing-division"), first("missing-division", "AdamW")
    assert sgd.grad_ratio == adamw.grad_ratio > 3
    assert sgd.param_rel_diff > 3 > 0.5 > adamw.param_rel_diff
