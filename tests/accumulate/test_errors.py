"""Wrong use names the argument, the value, the rule and a fix."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from oracle import tagger, token_batch, token_loss
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from fullbatch import (
    Accumulator,
    BatchError,
    FullbatchError,
    HookedStep,
    InvalidArgument,
    LossError,
    MicroBatch,
    OptimizerError,
    samples,
    tokens,
)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def square_loss(model, micro):
    return mse_loss(model(micro["x"]), micro["y"])


def rows(samples=8):
    return {"x": torch.randn(samples, 3), "y": torch.randn(samples, 1)}


def make(loss=square_loss, model=None, optimizer=None, **options):
    model = model or linear()
    return Accumulator(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), loss, **options)


@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True])
def test_micro_batch_must_be_a_whole_number_of_samples(value):
    with pytest.raises(InvalidArgument) as caught:
        make(micro_batch=value)
    assert str(caught.value).splitlines() == [
        f"micro_batch={value!r} must be a whole number of samples, at least 1",
        "hint: micro_batch=1 needs the least memory; leave it out to run the batch in one piece",
    ]
    assert isinstance(caught.value, ValueError)


def test_tensors_of_different_lengths_are_named():
    with pytest.raises(
        BatchError, match=r"batch\['x'\] has 8 samples and batch\['y'\] has 7: all tensors of a batch must have"
    ):
        make(micro_batch=2)({"x": torch.zeros(8, 3), "y": torch.zeros(7, 1)})


@pytest.mark.parametrize("batch", [{}, None, 3, "text", [], {"flag": torch.tensor(1)}])
def test_a_batch_without_tensors_is_refused(batch):
    with pytest.raises(BatchError, match="holds no tensor with a dimension 0 to split"):
        make()(batch)


def test_a_list_of_micro_batches_is_told_from_one_batch():
    with pytest.raises(BatchError, match=r"(?s)one nested batch or a list of micro-batches.*iter"):
        make()([rows(4), rows(4)])
    assert make()(iter([rows(4), rows(3)])).micro_batches == (4, 3)


def test_a_ready_micro_batch_without_a_common_length_is_told_how_to_say_it():
    with pytest.raises(BatchError, match=r"(?s)micro-batch.*MicroBatch\(data, samples=n\)"):
        make()(iter([{"x": torch.zeros(3, 3), "y": torch.zeros(2, 1)}]))


@pytest.mark.parametrize("samples_", [-1, 1.5, True])
def test_a_micro_batchs_samples_must_be_a_whole_number(samples_):
    with pytest.raises(InvalidArgument, match="must be a whole number of samples, at least 0"):
        MicroBatch(rows(), samples=samples_)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda m, b: mse_loss(m(b["x"]), b["y"], reduction="none"), r"a tensor of shape \(8, 1\), torch.float32"),
        (lambda m, b: square_loss(m, b).item(), "float"),
        (lambda m, b: None, "NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss, told):
    with pytest.raises(LossError, match=f"the loss returned {told}: it must be a scalar floating-point tensor, the mean over"):
        make(loss)(rows())


def test_a_detached_loss_is_refused():
    with pytest.raises(LossError, match="without a graph"):
        make(lambda m, b: square_loss(m, b).detach())(rows())


@pytest.mark.parametrize("micro_batch", [None, 1, 4])
def test_a_sum_is_told_from_a_mean_on_the_first_window_before_any_update(micro_batch):
    model = linear()
    before = model.weight.clone()
    step = make(lambda m, b: mse_loss(m(b["x"]), b["y"], reduction="sum"), model, micro_batch=micro_batch)
    with pytest.raises(LossError, match=r"(?s)is a sum: .* must be the mean over the items.*reduction='mean'"):
        step(rows())
    assert torch.equal(before, model.weight)


def test_a_sum_over_tokens_is_told_from_a_mean():
    model = tagger()

    def loss(model, micro):
        return cross_entropy(model(micro["ids"]).flatten(0, 1), micro["labels"].flatten(), reduction="sum")

    with pytest.raises(LossError, match="is a sum"):
        make(loss, model, items=tokens("labels"), micro_batch=4)(token_batch(16))


def test_a_mean_over_other_items_than_counted_is_warned_of():
    batch = token_batch(8)
    batch["labels"][:4, 1:] = -100
    model = tagger()
    with pytest.warns(UserWarning, match=r'mean over other items \(items=tokens\("labels"\)\?\)'):
        make(token_loss, model, micro_batch=8)(batch)


def test_a_right_loss_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float32, torch.bfloat16):
            model = tagger(dtype=dtype)
            make(token_loss, model, items=tokens("labels"), micro_batch=8)(token_batch(16))


def test_the_loss_is_checked_once_and_not_at_all_with_check_false():
    calls = []

    def loss(model, micro):
        calls.append(torch.is_grad_enabled())
        return square_loss(model, micro)

    step = make(loss, micro_batch=4)
    step(rows())
    assert calls == [False, False, False, True, True]
    step(rows())
    assert len(calls) == 7
    calls.clear()
    make(loss, micro_batch=4, check=False)(rows())
    assert calls == [True, True]


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (
            lambda model: torch.optim.SGD(linear().parameters()),
            "optimizer holds none of the model's 2 trainable parameters; it lacks",
        ),
        (
            lambda model: torch.optim.SGD([model.weight]),
            "optimizer holds 1 of the model's 2 trainable parameters; it lacks bias",
        ),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (lambda model: "adamw", "optimizer is str: it must be a torch.optim.Optimizer"),
    ],
)
def test_the_optimizer_must_hold_the_models_parameters_and_step_once(optimizer, told):
    model = linear()
    with pytest.raises(OptimizerError, match=told):
        make(model=model, optimizer=optimizer(model))


def test_a_model_without_trainable_parameters_is_refused():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters())
    model.requires_grad_(False)
    with pytest.raises(OptimizerError, match="no trainable parameter"):
        make(model=model, optimizer=optimizer)


def test_frozen_parameters_may_be_missing_from_the_optimizer():
    model = linear()
    model.weight.requires_grad_(False)
    before = model.weight.clone()
    assert make(model=model, optimizer=torch.optim.SGD([model.bias], lr=0.1), micro_batch=3)(rows()).index == 1
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize("value", [0, -1.0, "1"])
def test_max_grad_norm_must_be_above_zero(value):
    with pytest.raises(InvalidArgument, match=r"max_grad_norm=.* must be a number above 0"):
        make(max_grad_norm=value)


def test_schedulers_that_cannot_tick_by_update_are_refused():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InvalidArgument, match="ReduceLROnPlateau"):
        make(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    other = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(linear().parameters()), lambda done: 1.0)
    with pytest.raises(InvalidArgument, match="belongs to another optimizer"):
        make(model=model, optimizer=optimizer, scheduler=other)
    with pytest.raises(InvalidArgument, match=r"must have a step\(\) method"):
        make(model=model, optimizer=optimizer, scheduler=3)


@pytest.mark.parametrize("value", ["float32", torch.int64])
def test_accumulate_in_must_be_a_floating_point_dtype(value):
    with pytest.raises(InvalidArgument, match="must be a floating-point dtype"):
        make(accumulate_in=value)


@pytest.mark.skipif(hasattr(torch.Tensor, "grad_dtype"), reason="this torch has Tensor.grad_dtype")
def test_accumulate_in_says_which_torch_it_needs():
    with pytest.raises(InvalidArgument, match=r"(?s)needs Tensor.grad_dtype.*torch>=2.10"):
        make(model=tagger(dtype=torch.bfloat16), loss=token_loss, accumulate_in=torch.float32)


@pytest.mark.parametrize("micro_batch", [2, 8])
def test_an_optimizer_in_a_backward_hook_is_refused_before_it_steps(micro_batch):
    model = linear()
    before = model.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_and_clear(parameter):
        optimizer.step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_clear)
    with pytest.raises(HookedStep, match=r"(?s)SGD steps inside the window.*register_post_accumulate_grad_hook"):
        make(model=model, optimizer=optimizer, micro_batch=micro_batch, check=False)(rows())
    assert torch.equal(before, model.weight)


def test_a_hook_that_takes_the_gradients_is_refused():
    model = linear()

    def update_by_hand(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update_by_hand)
    with pytest.raises(HookedStep, match="no parameter has a gradient after backward"):
        make(model=model, micro_batch=2)(rows())


def test_a_step_in_the_loss_is_refused():
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, micro):
        optimizer.step()
        return square_loss(model, micro)

    with pytest.raises(HookedStep, match="steps inside the window"):
        make(loss, model, optimizer, micro_batch=2, check=False)(rows())


def test_another_models_step_inside_the_window_is_its_own_affair():
    other = linear()
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)

    def loss(model, micro):
        theirs.step()
        return square_loss(model, micro)

    assert make(loss, micro_batch=2)(rows()).index == 1


def test_a_model_that_renormalises_its_embedding_in_the_forward_is_not_taken_for_a_hooked_step():
    model = nn.Embedding(5, 3, max_norm=0.5)
    make(lambda m, b: m(b).square().mean(), model, micro_batch=2)(torch.arange(5))


def test_a_loss_that_runs_backward_itself_is_told():
    def loss(model, micro):
        value = square_loss(model, micro)
        value.backward(retain_graph=True)
        return value

    with pytest.raises(LossError, match="ran backward itself"):
        make(loss, micro_batch=2, check=False)(rows())


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (nn.MSELoss(), r"loss is MSELoss, which takes outputs and targets: it must be loss\(model, micro\)"),
        ("mse", "loss is str: it must be a function"),
        (lambda model: None, r"loss cannot be called as loss\(model, micro\)"),
        (
            lambda model, micro, extra: None,
            r"loss cannot be called as loss\(model, micro\): missing a required argument: 'extra'",
        ),
    ],
)
def test_the_loss_must_be_a_function_of_model_and_micro_batch(loss, told):
    with pytest.raises(InvalidArgument, match=told):
        make(loss)


def test_a_layer_added_later_must_be_the_optimizers_too_and_is_then_trained_rightly():
    model = nn.Sequential(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = make(lambda m, b: m(b["x"]).square().mean(), model, optimizer, micro_batch=3, max_grad_norm=float("inf"))
    batch = rows()
    step(batch)
    model.append(nn.Linear(1, 1))
    with pytest.raises(OptimizerError, match=r"it lacks 1\.weight"):
        step(batch)
    optimizer.add_param_group({"params": model[1].parameters()})
    norms = [step(batch).grad_norm for _ in range(3)]
    assert norms[0] == norms[1] == norms[2]  # nothing is left from the window before


def test_a_data_loader_is_told_to_be_looped_over():
    loader = torch.utils.data.DataLoader([torch.zeros(3)] * 8, batch_size=4)
    with pytest.raises(
        BatchError, match=r"(?s)batch is a DataLoader: a call makes one update.*for batch in loader: step\(batch\)"
    ):
        make()(loader)


def test_a_ready_micro_batch_larger_than_asked_for_is_refused():
    with pytest.raises(BatchError, match="a ready micro-batch has 8 samples, more than micro_batch=4"):
        make(micro_batch=4)(iter([rows(8)]))


def test_an_object_that_hides_tensors_is_refused_rather_than_given_whole():
    with pytest.raises(BatchError, match=r"batch\['extra'\] is a SimpleNamespace, which holds tensors but cannot be split"):
        make()(rows() | {"extra": SimpleNamespace(t=torch.zeros(8))})


@pytest.mark.parametrize("weights", [{"loss": float("nan")}, {"loss": "2"}, {"loss": torch.tensor(1.0)}, 2.0])
def test_weights_must_be_finite_numbers(weights):
    with pytest.raises(InvalidArgument, match="weights"):
        make(weights=weights)


def test_items_without_labels_is_told():
    with pytest.raises(InvalidArgument, match=r'(?s)items=tokens names no labels.*items=tokens\("labels"\)'):
        make(items=tokens)


def test_a_scaler_must_be_one():
    with pytest.raises(InvalidArgument, match=r"scaler is bool, which has no scale\(\)"):
        make(scaler=True)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
def test_accumulating_in_less_than_the_weights_have_is_refused():
    with pytest.raises(
        InvalidArgument, match=r"accumulate_in=torch\.bfloat16 is narrower than the weights, which have torch\.float32"
    ):
        make(accumulate_in=torch.bfloat16)


@pytest.mark.parametrize(("weights", "dtype"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_accumulating_in_another_dtype_of_the_same_width_is_refused(weights, dtype):
    """bfloat16 has fewer digits than float16, and float16 a smaller range than bfloat16."""
    with pytest.raises(InvalidArgument, match="is no wider than the weights"):
        make(model=tagger(dtype=weights), loss=token_loss, accumulate_in=dtype)


@pytest.mark.parametrize(
    ("items", "told"),
    [
        (lambda micro: micro["x"], r"returned a tensor of shape \(2, 3\): a counter must return one number"),
        (lambda micro: None, "returned None: a counter must return one number"),
        (lambda micro: -1, "counted -1 in a micro-batch: a count must be finite and at least 0"),
        (lambda micro: float("nan"), "counted nan"),
        (lambda micro: torch.tensor(float("inf")), "counted inf"),
    ],
)
def test_a_counter_must_return_one_number(items, told):
    with pytest.raises(InvalidArgument, match=told):
        make(items=items, micro_batch=2)(rows())


@pytest.mark.parametrize("items", [3, {}, {"a": 3}])
def test_items_must_be_counters(items):
    with pytest.raises(InvalidArgument, match="items"):
        make(items=items)


def test_tokens_names_the_labels_that_are_missing():
    with pytest.raises(
        BatchError, match=r"items=tokens\('labels'\): the micro-batch has no 'labels'; it is a dict with \['x', 'y'\]"
    ):
        make(items=tokens("labels"))(rows())


def test_terms_must_be_those_that_items_counts():
    two = {"a": samples, "b": samples}
    with pytest.raises(LossError, match=r"the loss returned one tensor, but items counts \['a', 'b'\]"):
        make(items=two, check=False)(rows())
    with pytest.raises(LossError, match=r"the loss returned the terms \['a', 'c'\], but items counts"):
        make(lambda m, b: {"a": square_loss(m, b), "c": square_loss(m, b)}, items=two, check=False)(rows())
    with pytest.raises(InvalidArgument, match=r"weights names \['c'\], which items does not"):
        make(items=two, weights={"c": 1.0})


def test_batch_norm_in_train_mode_is_warned_of_once():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    step = make(model=model, micro_batch=4)
    with pytest.warns(UserWarning, match="BatchNorm in train mode"):
        step(rows())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(rows())
        model.eval()
        make(model=model, micro_batch=4)(rows())


def test_every_error_is_a_fullbatch_error_with_a_hint_on_its_own_line():
    error = InvalidArgument("x=1 must be 2", hint="x=2")
    assert str(error) == "x=1 must be 2\nhint: x=2"
    assert isinstance(error, FullbatchError)
    assert (error.message, error.hint) == ("x=1 must be 2", "x=2")
