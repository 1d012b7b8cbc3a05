"""A training loop is recorded without data: what it asks of the allocator is what arithmetic says."""

import torch
from torch import nn

from fullbatch.memory.trace import trace

WIDTH, SAMPLES = 256, 8
WEIGHT = WIDTH * WIDTH * 4  # bytes


def _record(**settings):
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    return trace(
        model,
        lambda model, x: model(x).sum(),
        torch.zeros(SAMPLES, WIDTH),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        **settings,
    )


def test_the_model_stage_holds_the_weights_to_the_byte():
    timeline = _record()
    model = timeline.stages[0]
    assert (model.name, [event.size for event in timeline.events[model.start : model.end]]) == ("model", [WEIGHT])


def test_between_updates_weights_state_and_batch_are_left():
    timeline = _record()
    live = list(timeline.live_bytes())
    assert live[timeline.stages[-1].end - 1] == 3 * WEIGHT + SAMPLES * WIDTH * 4  # weights, two moments; the batch


def test_accumulation_keeps_the_gradient_through_the_next_forward():
    timeline = _record(micro_batches=2)
    second = next(stage for stage in timeline.stages if (stage.name, stage.update, stage.micro_batch) == ("forward", 1, 2))
    assert list(timeline.live_bytes())[second.start - 1] == 2 * WEIGHT + SAMPLES * WIDTH * 4


def test_the_model_that_is_traced_is_left_as_it_was():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    trace(model, lambda model, x: model(x).sum(), torch.zeros(2, 4), optimizer=torch.optim.SGD)
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)
