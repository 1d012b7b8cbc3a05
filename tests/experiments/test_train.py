"""A training run learns, follows its schedule and measures what it says."""

import math
from itertools import pairwise

import jsonschema
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fullbatch import InvalidArgument, Task
from fullbatch.experiments import train
from fullbatch.experiments.schedule import scaled_lr, warmup_cosine, warmup_updates
from fullbatch.tasks import load


def line():
    """Learn y = 2 x from 40 samples, 10 held out."""
    torch.manual_seed(0)
    x = torch.randn(50, 1)
    rows = list(zip(x, 2 * x, strict=True))
    return Task(
        name="line",
        model=nn.Linear(1, 1),
        loss=lambda model, micro: mse_loss(model(micro[0]), micro[1]),
        data=rows[:40],
        held_out=rows[40:],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        unit=("tenths", 10.0),
    )


def test_a_run_learns_and_leaves_the_tasks_model_alone(schema):
    task = line()
    before = task.model.weight.clone()
    run = train(task, effective_batch=16, micro_batch=3, updates=30, warmup_samples=32, eval_every=10)
    assert [point.update for point in run.held_out] == [0, 10, 20, 30]
    assert run.held_out[-1].value < 0.1 * run.held_out[0].value
    assert run.held_out[0].value == pytest.approx(10 * run.held_out[0].loss)
    assert torch.equal(before, task.model.weight)
    assert all(update.micro_batches == (3, 3, 3, 3, 3, 1) for update in run.updates)
    jsonschema.validate(run.to_json(), schema("train.v1"))


def test_the_held_out_loss_is_the_mean_over_all_items():
    task = line()
    run = train(task, effective_batch=8, micro_batch=3, updates=1)  # 10 samples in 3+3+3+1
    x, y = (torch.stack(column) for column in zip(*task.held_out, strict=True))
    with torch.no_grad():
        assert run.held_out[0].loss == pytest.approx(mse_loss(task.model(x), y).item(), rel=1e-6)


def test_the_split_does_not_change_the_run():
    losses = [
        [update.loss for update in train(line(), effective_batch=16, micro_batch=size, updates=8).updates]
        for size in (16, 5, 1)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)


def test_a_task_without_held_out_samples_trains():
    run = train(load("mlp"), effective_batch=32, micro_batch=8, updates=3)
    assert run.held_out == ()
    assert len(run.updates) == 3


def test_the_rate_rises_over_the_same_samples_and_falls_to_a_tenth():
    run = train(line(), effective_batch=8, micro_batch=8, updates=20, warmup_samples=32)
    rates = run.learning_rates
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert max(rates) == pytest.approx(0.1)
    assert all(after <= before for before, after in pairwise(rates[4:]))
    assert warmup_cosine(4, 20)(20) == pytest.approx(0.1)
    assert [warmup_updates(2048, batch) for batch in (8, 256, 3000)] == [256, 8, 1]


def test_scaling_follows_the_effective_batch():
    assert scaled_lr(0.1, "linear", 1024, 256) == pytest.approx(0.4)
    assert scaled_lr(0.1, "sqrt", 1024, 256) == pytest.approx(0.2)
    assert scaled_lr(0.1, "none", 1024, 256) == pytest.approx(0.1)
    run = train(line(), effective_batch=32, micro_batch=8, updates=2, scale_lr="linear", reference_batch=8, lr=0.02)
    assert run.settings["peak_lr"] == pytest.approx(0.08)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"effective_batch": 0}, "effective_batch=0 must be at least 1"),
        ({"updates": 0}, "updates=0 must be at least 1"),
        ({"eval_every": 0}, "eval_every=0 must be at least 1"),
        ({"micro_batch": 0}, "micro_batch=0 must be"),
        ({"scale_lr": "cubic"}, "scale_lr cubic: must be one of none, linear, sqrt"),
        ({"reference_batch": 0}, "reference_batch=0 must be at least 1"),
        ({"warmup_samples": -1}, "warmup_samples=-1 must be at least 0"),
    ],
)
def test_wrong_numbers_are_refused(options, told):
    with pytest.raises(InvalidArgument, match=told):
        train(line(), **{"effective_batch": 8, "micro_batch": 2, "updates": 1} | options)


def test_text_learns_more_than_single_bytes_tell():
    """Real text: 60 updates of 16 bring the held-out loss below the entropy of the held-out bytes' own frequencies."""
    task = load("text")
    task.held_out[:] = task.held_out[::20]
    counts = torch.cat([piece["labels"][piece["labels"] != -100] for piece in task.held_out]).bincount().double()
    frequencies = counts[counts > 0] / counts.sum()
    entropy = -(frequencies * frequencies.log2()).sum().item()
    run = train(task, effective_batch=16, micro_batch=8, updates=60, warmup_samples=256, eval_every=60)
    assert run.held_out[0].value > math.log2(256) - 0.5
    assert run.held_out[-1].value < entropy


def test_measuring_more_often_does_not_change_the_training():
    """With dropout, the random numbers of the training must be its own."""

    def dropping():
        task = line()
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(), nn.Linear(8, 1))
        return Task(model=model, loss=task.loss, data=task.data, held_out=task.held_out, optimizer=task.optimizer)

    losses = [
        [update.loss for update in train(dropping(), effective_batch=8, micro_batch=4, updates=6, eval_every=every).updates]
        for every in (1, 2, 100)
    ]
    assert losses[0] == losses[1] == losses[2]


def test_parts_that_are_frozen_in_eval_mode_stay_so():
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    task = line()
    seen = []

    def loss(model, micro):
        seen.append((model.training, model[1].training))
        return task.loss(model, micro)

    train(
        Task(model=model, loss=loss, data=task.data, held_out=task.held_out),
        effective_batch=8,
        micro_batch=4,
        updates=3,
        eval_every=1,
    )
    assert set(seen) == {(True, False), (False, False)}


def test_a_run_ends_with_the_first_loss_that_is_not_a_number():
    run = train(line(), effective_batch=8, micro_batch=4, updates=50, lr=1e30, max_grad_norm=None, warmup_samples=0)
    assert not run.finite
    assert len(run.updates) < 50
