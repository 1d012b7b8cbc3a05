"""What Accumulator does at a window's edges, and in which order."""

import dataclasses
import functools
import gc
import math
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from oracle import IGNORED, Recorder, flat_params, full_batch_grads, relative_error, tagger, token_batch, token_loss
from torch import nn
from torch.nn.functional import mse_loss

from fullbatch import Accumulator, MicroBatch, tokens
from fullbatch.accumulate import slices


def regression(samples=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 3, dtype=torch.float64, generator=generator),
        "y": torch.randn(samples, 1, dtype=torch.float64, generator=generator),
    }


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


def square_loss(model, micro):
    return mse_loss(model(micro["x"]), micro["y"])


def test_every_sample_is_counted_once_and_the_scheduler_ticks_once_an_update():
    """All n <= 12, K <= 6 and epochs <= 3; gradient 1/n of each sample's own, seen through one-hot rows."""
    for n in range(1, 13):
        for K in range(1, 7):
            for epochs in range(1, 4):
                model = nn.Linear(n, 1, bias=False).double()
                optimizer = Recorder(model)
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
                step = Accumulator(model, optimizer, lambda m, x: m(x).mean(), micro_batch=1, scheduler=scheduler)
                updates = 0
                for _ in range(epochs):
                    for window in torch.eye(n, dtype=torch.float64).split(K):
                        step(window)
                        updates += 1
                seen = torch.stack(optimizer.grads)
                assert step.updates == updates == len(optimizer.grads) == epochs * math.ceil(n / K)
                assert scheduler.last_epoch == updates
                assert ((seen > 0).sum(dim=0) == epochs).all()
                for at, grad in enumerate(optimizer.grads):
                    size = len(torch.eye(n).split(K)[at % math.ceil(n / K)])
                    torch.testing.assert_close(grad[grad > 0], torch.full((size,), 1 / size, dtype=torch.float64))


@pytest.mark.parametrize(
    ("samples", "micro_batch", "sizes"), [(10, 4, (4, 4, 2)), (3, 8, (3,)), (8, 4, (4, 4)), (5, None, (5,))]
)
def test_the_last_micro_batch_takes_what_is_left(samples, micro_batch, sizes):
    model = linear()
    update = Accumulator(model, Recorder(model), square_loss, micro_batch=micro_batch)(regression(samples))
    assert update.micro_batches == sizes
    assert update.samples == samples


def test_a_micro_batch_without_labels_changes_nothing():
    batch = token_batch(8)
    batch["labels"][2:4] = IGNORED
    model = tagger()
    right = full_batch_grads(model, token_loss, batch)
    optimizer = Recorder(model)
    calls = []

    def loss(model, micro):
        calls.append(len(micro["ids"]))
        return token_loss(model, micro)

    update = Accumulator(model, optimizer, loss, items=tokens("labels"), micro_batch=2, check=False)(batch)
    assert relative_error(optimizer.grads[0], right) <= 1e-12
    assert update.micro_batches == (2, 2, 2, 2)
    assert len(calls) == 3  # it is not even run
    assert math.isfinite(update.loss)


@pytest.mark.parametrize("batch", [token_batch(4, masked=2.0), token_batch(0)], ids=["all masked", "no samples"])
def test_a_window_without_items_makes_no_update_and_says_so(batch):
    model = tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)
    before = flat_params(model)
    step = Accumulator(model, optimizer, token_loss, items=tokens("labels"), micro_batch=2, scheduler=scheduler)
    update = step(batch)
    assert update.skipped == "no items in the window"
    assert math.isnan(update.loss)
    assert (update.index, step.updates, scheduler.last_epoch, update.sync_calls) == (0, 0, 0, 0)
    assert torch.equal(before, flat_params(model))
    assert not optimizer.state
    assert update.to_json()["loss"] is None


def test_an_empty_iterator_makes_no_update():
    model = linear()
    assert Accumulator(model, Recorder(model), square_loss)(iter([])).skipped == "no items in the window"


def test_a_step_that_the_scaler_skips_ticks_nothing():
    model = linear().float()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = Accumulator(model, optimizer, square_loss, micro_batch=2, scheduler=scheduler, scaler=scaler, max_grad_norm=1.0)
    good = {key: value.float() for key, value in regression(6).items()}
    bad = good | {"x": good["x"].clone().fill_(1e38)}
    before = flat_params(model)
    skipped = step(bad)
    assert "inf or NaN" in skipped.skipped
    assert "1024" in skipped.skipped
    assert (skipped.index, scheduler.last_epoch) == (0, 0)
    assert torch.equal(before, flat_params(model))
    assert scaler.get_scale() == 2.0**9
    assert all(parameter.grad is None for parameter in model.parameters())
    after = step(good)
    assert (after.index, after.skipped, scheduler.last_epoch) == (1, None, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_that_looks_at_found_inf_itself_is_seen_to_skip(fused):
    model = linear().float()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    step = Accumulator(model, optimizer, square_loss, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10), check=False)
    batch = {key: value.float() for key, value in regression(6).items()}
    assert step(batch | {"x": batch["x"] * 1e30}).skipped is not None
    assert step(batch).skipped is None
    assert step.updates == 1


def test_a_scaler_changes_nothing_but_the_scale():
    batch = {key: value.float() for key, value in regression(9).items()}
    weights, norms = [], []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        model = linear().float()
        step = Accumulator(model, Recorder(model), square_loss, micro_batch=2, scaler=scaler, max_grad_norm=0.01)
        norms.append(step(batch).grad_norm)
        weights.append(flat_params(model))
    torch.testing.assert_close(weights[0], weights[1])
    assert norms[0] == pytest.approx(norms[1])


def test_the_windows_gradient_is_clipped_once_after_unscaling():
    batch = regression(12)
    model = linear()
    right = full_batch_grads(model, square_loss, batch)
    optimizer = Recorder(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    update = Accumulator(model, optimizer, square_loss, micro_batch=5, max_grad_norm=0.1, scaler=scaler)(batch)
    assert update.grad_norm == pytest.approx(right.norm().item(), rel=1e-6)
    assert optimizer.grads[0].norm().item() == pytest.approx(0.1, rel=1e-4)
    assert relative_error(optimizer.grads[0] / optimizer.grads[0].norm(), right / right.norm()) < 1e-6


def test_an_infinite_max_grad_norm_measures_and_clips_nothing():
    batch = regression(12)
    model = linear()
    right = full_batch_grads(model, square_loss, batch)
    optimizer = Recorder(model)
    update = Accumulator(model, optimizer, square_loss, micro_batch=5, max_grad_norm=math.inf)(batch)
    assert update.grad_norm == pytest.approx(right.norm().item())
    assert relative_error(optimizer.grads[0], right) <= 1e-12


def test_gradients_that_were_there_before_do_not_enter_the_window():
    batch = regression(6)
    model = linear()
    right = full_batch_grads(model, square_loss, batch)
    square_loss(model, regression(6, seed=9)).backward()
    optimizer = Recorder(model)
    Accumulator(model, optimizer, square_loss, micro_batch=4)(batch)
    assert relative_error(optimizer.grads[0], right) <= 1e-12


def test_an_exception_leaves_no_gradient_and_no_update():
    model = linear()
    calls = []

    def loss(model, micro):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return square_loss(model, micro)

    before = flat_params(model)
    step = Accumulator(model, Recorder(model), loss, micro_batch=4, check=False)
    with pytest.raises(ZeroDivisionError):
        step(regression(10))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert step.updates == 0
    assert torch.equal(before, flat_params(model))
    assert step(regression(10)).index == 1


def test_no_loss_outlives_its_micro_batch():
    model = linear()
    alive, most = weakref.WeakSet(), 0

    def loss(model, micro):
        nonlocal most
        most = max(most, len(alive))
        value = square_loss(model, micro)
        alive.add(value)
        return value

    Accumulator(model, Recorder(model), loss, micro_batch=1, check=False)(regression(6))
    assert most == 0  # none is alive when the next one begins
    assert not alive


def test_micro_batches_are_views_of_the_batch():
    batch = regression(6)
    seen = []

    def loss(model, micro):
        seen.append(micro["x"].untyped_storage().data_ptr())
        return square_loss(model, micro)

    model = linear()
    Accumulator(model, Recorder(model), loss, micro_batch=2, check=False)(batch)
    assert set(seen) == {batch["x"].untyped_storage().data_ptr()}


Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Row:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a flag goes whole to each micro-batch"


class Encoding(dict):
    """As transformers' BatchEncoding: a mapping with attributes."""


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda x, y: (x, y), lambda m: (m[0], m[1])),
        (lambda x, y: [x, y], lambda m: (m[0], m[1])),
        (lambda x, y: {"in": {"x": x}, "y": (y, None)}, lambda m: (m["in"]["x"], m["y"][0])),
        (Pair, lambda m: (m.x, m.y)),
        (Row, lambda m: (m.x, m.y)),
        (lambda x, y: Encoding(x=x, y=y), lambda m: (m["x"], m["y"])),
        (lambda x, y: {"x": x, "y": y, "ids": [f"row {i}" for i in range(len(x))]}, lambda m: (m["x"], m["y"])),
        (lambda x, y: {"x": x.numpy(), "y": y}, lambda m: (torch.as_tensor(m["x"]), m["y"])),
    ],
    ids=["tuple", "list", "nested", "namedtuple", "dataclass", "mapping", "texts beside", "numpy"],
)
def test_a_batch_may_be_any_nesting_of_tensors(make, get):
    rows = regression(7)
    types = set()

    def loss(model, micro):
        types.add(type(micro))
        x, y = get(micro)
        return mse_loss(model(x), y)

    model = linear()
    right = full_batch_grads(model, square_loss, rows)
    optimizer = Recorder(model)
    batch = make(rows["x"], rows["y"])
    Accumulator(model, optimizer, loss, micro_batch=3)(batch)
    assert relative_error(optimizer.grads[0], right) <= 1e-12
    assert types == {type(batch)}


def test_tokens_counts_as_the_loss_does_with_and_without_shift():
    labels = torch.tensor([[1, IGNORED, 3], [IGNORED, 5, 6]])
    assert tokens("labels")({"labels": labels}) == 4
    assert tokens("labels", shift=True)({"labels": labels}) == 3  # the first label of a row is predicted by nothing
    assert tokens("labels", ignore_index=5)({"labels": labels}) == 5
    assert tokens(1)((None, labels)) == 4
    assert tokens("y")(Pair(None, labels)) == 4


def test_a_causal_model_that_shifts_inside_matches_with_shift():
    def loss(model, micro):
        logits = model(micro["ids"])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), micro["labels"][:, 1:].flatten(), ignore_index=IGNORED)

    batch = token_batch(9)
    model = tagger()
    right = full_batch_grads(model, loss, batch)
    optimizer = Recorder(model)
    Accumulator(model, optimizer, loss, items=tokens("labels", shift=True), micro_batch=2)(batch)
    assert relative_error(optimizer.grads[0], right) <= 1e-12


def test_a_parameter_of_the_optimizer_outside_the_model_is_trained_and_cleared():
    temperature = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    model = linear()
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    step = Accumulator(model, optimizer, lambda m, b: temperature * square_loss(m, b), micro_batch=3)
    step(regression(8))
    assert temperature.item() != 1.0
    assert temperature.grad is None


def test_the_update_record_is_frozen_and_plain():
    model = linear()
    update = Accumulator(model, Recorder(model), square_loss, micro_batch=4)(regression(10))
    with pytest.raises(dataclasses.FrozenInstanceError):
        update.loss = 0.0
    record = update.to_json()
    assert record["micro_batches"] == [4, 4, 2]
    assert record["samples_per_second"] == pytest.approx(10 / update.seconds)
    assert (record["sync_calls"], record["skipped"], record["grad_norm"]) == (1, None, None)


def test_the_first_window_leaves_modes_buffers_and_random_numbers_to_the_training():
    """The check of the loss runs the model, and must not be seen."""
    batch = {key: value.float() for key, value in regression(8).items()}
    outcomes = []
    for check in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        model[2].eval()
        Accumulator(model, Recorder(model), square_loss, check=check)(batch)
        outcomes.append((flat_params(model), model[1].running_mean, model[1].num_batches_tracked, torch.rand(1)))
        assert [module.training for module in model] == [True, True, False, True]
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_ready_micro_batches_may_come_from_a_generator_that_is_read_once():
    rows = regression(9)
    model = linear()
    right = full_batch_grads(model, square_loss, rows)
    optimizer = Recorder(model)
    stream = ({key: value[i : i + 3] for key, value in rows.items()} for i in range(0, 9, 3))
    assert Accumulator(model, optimizer, square_loss)(stream).micro_batches == (3, 3, 3)
    assert relative_error(optimizer.grads[0], right) <= 1e-12


def test_a_ready_micro_batch_without_samples_is_skipped():
    rows = regression(4)
    empty = {key: value[:0] for key, value in rows.items()}
    model = linear()
    update = Accumulator(model, Recorder(model), square_loss)(iter([MicroBatch(empty, samples=0), rows]))
    assert update.micro_batches == (0, 4)
    assert math.isfinite(update.loss)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("optimizer_class", ["AdamW", "SGD", "Adafactor"])
def test_optimizers_step_bfloat16_weights_on_gradients_accumulated_in_float32(optimizer_class):
    model = tagger(dtype=torch.bfloat16)
    optimizer = getattr(torch.optim, optimizer_class)(model.parameters(), lr=0.1)
    step = Accumulator(
        model, optimizer, token_loss, items=tokens("labels"), micro_batch=1, accumulate_in=torch.float32, max_grad_norm=1.0
    )
    before = flat_params(model)
    assert step(token_batch(6)).skipped is None
    assert not torch.equal(before, flat_params(model))
    token_loss(model, token_batch(2)).backward()  # outside, gradients are what they were
    assert model.mix.weight.grad.dtype == torch.bfloat16


def test_a_loss_that_writes_into_its_micro_batch_changes_neither_the_check_nor_the_batch_object():
    batch = regression(8)
    right_model = linear()
    halved = {"x": batch["x"] / 2, "y": batch["y"]}
    right = full_batch_grads(right_model, square_loss, halved)

    def rebinds(model, micro):
        micro["x"] = micro["x"] / 2
        return mse_loss(model(micro["x"]), micro.pop("y"))

    model = linear()
    optimizer = Recorder(model)
    Accumulator(model, optimizer, rebinds, micro_batch=4)(batch)
    assert relative_error(optimizer.grads[0], right) <= 1e-12
    assert set(batch) == {"x", "y"}


def test_the_check_leaves_the_tensors_of_the_batch_alone():
    batch = regression(8)
    seen = []

    def in_place(model, micro):
        seen.append(micro["x"].clone())
        micro["x"].mul_(2)
        return square_loss(model, micro)

    model = linear()
    original = batch["x"].clone()
    Accumulator(model, Recorder(model), in_place, micro_batch=4)(batch)
    assert torch.equal(seen[3], original[:4])  # the first real micro-batch, after the check's three


def test_a_dataclass_with_cached_and_derived_values_derives_them_for_each_micro_batch():
    @dataclasses.dataclass
    class Rows:
        x: torch.Tensor
        y: torch.Tensor
        n: int = dataclasses.field(init=False)

        def __post_init__(self):
            self.n = len(self.x)

        @functools.cached_property
        def size(self):
            return len(self.x)

    rows = regression(9)
    batch = Rows(rows["x"], rows["y"])
    assert batch.size == 9  # cached now

    def loss(model, micro):
        assert micro.n == micro.size == len(micro.x)
        return (model(micro.x) - micro.y).square().sum() / micro.size

    model = linear()
    right = full_batch_grads(model, square_loss, rows)
    optimizer = Recorder(model)
    Accumulator(model, optimizer, loss, micro_batch=2)(batch)
    assert relative_error(optimizer.grads[0], right) <= 1e-12


def test_a_size_goes_whole_to_every_micro_batch_and_texts_are_split():
    seen = []

    def loss(model, micro):
        seen.append((micro["size"], micro["names"]))
        return square_loss(model, micro)

    model = linear()
    batch = regression(2) | {"size": (224, 224), "names": ("a", "b")}
    Accumulator(model, Recorder(model), loss, micro_batch=1, check=False)(batch)
    assert seen == [((224, 224), ("a",)), ((224, 224), ("b",))]


def test_a_list_of_texts_is_looked_through_once_however_many_micro_batches_there_are():
    class Texts(list):
        walks = 0

        def __iter__(self):
            Texts.walks += 1
            return super().__iter__()

    walks = []
    for micro_batch in (200, 1):
        Texts.walks = 0
        parts = slices({"x": torch.zeros(200), "texts": Texts(["a"] * 200)}, [micro_batch] * (200 // micro_batch))
        walks.append(Texts.walks)
        assert [len(part["texts"]) for part in parts] == [micro_batch] * (200 // micro_batch)
    assert walks[0] == walks[1]


def test_a_micro_batch_whose_loss_is_a_constant_counts_with_gradient_zero():
    batch = regression(6)
    batch["positive"] = torch.tensor([0, 0, 1, 1, 1, 1], dtype=torch.bool)

    def loss(model, micro):
        if not micro["positive"].any():
            return torch.zeros((), dtype=torch.float64)
        return (model(micro["x"]) * micro["positive"][:, None]).square().mean()

    model = linear()
    right = full_batch_grads(model, loss, batch)
    optimizer = Recorder(model)
    Accumulator(model, optimizer, loss, micro_batch=2, check=False)(batch)
    assert relative_error(optimizer.grads[0], right) <= 1e-12


def test_a_loss_that_is_a_parameter_is_reported_as_before_the_step():
    model = nn.Module()
    model.t = nn.Parameter(torch.tensor(1.0))
    step = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m.t, check=False)
    assert step(torch.zeros(3)).loss == 1.0


def test_an_error_at_the_step_does_not_leave_the_scaler_stuck():
    model = linear().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = Accumulator(model, optimizer, square_loss, micro_batch=2, scaler=scaler, max_grad_norm=1.0)
    batch = {key: value.float() for key, value in regression(6).items()}

    def fail(*_):
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step(batch)
    hook.remove()
    assert step(batch).skipped is None
    assert scaler.get_scale() == 2.0**10


def test_nothing_stays_on_the_optimizer():
    model = linear().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = Accumulator(model, optimizer, square_loss, micro_batch=2, scaler=scaler)
    step({key: value.float() for key, value in regression(6).items()})
    gone = weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None


def test_the_check_does_not_run_a_modules_own_eval():
    """As LoRA layers do, which merge their weights on eval."""

    class Merges(nn.Linear):
        def train(self, mode=True):
            raise AssertionError("train() was called")

    model = Merges(3, 1).double()
    Accumulator(model, Recorder(model), square_loss, micro_batch=2)(regression(6))
    assert model.training


def test_buffers_that_the_model_replaces_are_as_before_the_check():
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n = self.n + 1
            return super().forward(x)

    model = Counts().double()
    Accumulator(model, Recorder(model), square_loss, micro_batch=2)(regression(6))
    assert model.n == 3


@pytest.mark.parametrize("counter", [lambda micro: np.int64(2), lambda micro: np.float32(2), lambda micro: np.array(2)])
def test_counters_may_return_numpy_numbers(counter):
    model = linear()
    assert Accumulator(model, Recorder(model), square_loss, items=counter, micro_batch=2, check=False)(regression(6)).items == {
        "loss": 6
    }
