"""The accumulation curve has the points that were asked for, and counts what happened."""

import jsonschema
import pytest
import torch

from fullbatch import InvalidArgument
from fullbatch.experiments import named_optimizer, sweep
from fullbatch.experiments.sweep import Point, _flat_at
from fullbatch.tasks import load


def run(**options):
    arguments = {"micro_batch": 4, "accum_grid": [1, 2, 4], "num_steps": 7, "optimizer": named_optimizer("sgd", 0.05)}
    return sweep(load("mlp"), **arguments | options)


def test_every_point_makes_its_updates_with_one_reduction_each(schema):
    seen = []
    curve = run(on_update=lambda accum_steps, update: seen.append((accum_steps, update)))
    assert [(p.effective_batch, p.accum_steps, p.micro_batch) for p in curve.points] == [(4, 1, 4), (8, 2, 4), (16, 4, 4)]
    for point in curve.points:
        mine = [update for accum_steps, update in seen if accum_steps == point.accum_steps]
        assert len(mine) == point.steps == point.sync_calls == 7
        assert all(update.micro_batches == (4,) * point.accum_steps for update in mine)
        assert [update.index for update in mine] == list(range(1, 8))  # warm-up trains another copy
        assert point.avg_loss == pytest.approx(sum(update.loss for update in mine) / 7)
        assert point.samples_per_sec == pytest.approx(sum(u.samples for u in mine) / sum(u.seconds for u in mine))
        assert point.samples_per_sec_low <= point.samples_per_sec <= point.samples_per_sec_high
    jsonschema.validate(curve.to_json(), schema("accum-curve.v1"))


def test_points_are_interleaved_and_every_other_round_is_reversed():
    order = []
    run(num_steps=3, rounds=3, on_update=lambda accum_steps, update: order.append(accum_steps))
    assert order == [1, 2, 4, 4, 2, 1, 1, 2, 4]


def test_losses_are_those_of_plain_training_on_the_same_data():
    task = load("mlp")
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05)
    batches = task.batches(16, torch.Generator().manual_seed(0))
    losses = []
    for _ in range(7):
        loss = task.loss(task.model, next(batches))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert run().points[-1].avg_loss == pytest.approx(sum(losses) / 7, rel=1e-5)


def points(*speeds):
    return [
        Point(
            effective_batch=4 * 2**i,
            accum_steps=2**i,
            micro_batch=4,
            avg_loss=1.0,
            samples_per_sec=speed,
            samples_per_sec_low=speed,
            samples_per_sec_high=speed,
            median_step_ms=1.0,
            sync_calls=1,
            steps=1,
        )
        for i, speed in enumerate(speeds)
    ]


@pytest.mark.parametrize(
    ("speeds", "flat_at"), [((50, 90, 96, 100), 4), ((100, 90, 80), 1), ((50, 60, 90), None), ((50, 95, 100), 2), ((50,), None)]
)
def test_flat_is_the_least_with_95_percent_of_the_best_if_the_grid_goes_on(speeds, flat_at):
    assert _flat_at(points(*speeds)) == flat_at


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"accum_grid": []}, "accum_grid="),
        ({"accum_grid": [0, 1]}, "accum_grid="),
        ({"accum_grid": [2, 2]}, "different numbers"),
        ({"micro_batch": 0}, "micro_batch=0 must be at least 1"),
        ({"num_steps": 0}, "num_steps=0 must be at least 1"),
        ({"rounds": 0}, "rounds=0 must be at least 1"),
    ],
)
def test_wrong_numbers_are_refused(options, told):
    with pytest.raises(InvalidArgument, match=told):
        run(**options)


def test_optimizers_by_name():
    with pytest.raises(InvalidArgument, match=r"(?s)optimizer adamww: must be one of sgd, adamw, .*, task.*did you mean adamw"):
        named_optimizer("adamww", 0.1)
    with pytest.raises(InvalidArgument, match=r"lr=0.0 must be a finite number above 0"):
        named_optimizer("sgd", 0.0)
