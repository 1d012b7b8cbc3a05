"""A proof is right about equal and unequal updates, and says where they part."""

import dataclasses
import json

import jsonschema
import pytest
import torch
from oracle import flat_params, full_batch_grads, tagger, token_batch, token_loss
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from fullbatch import InvalidArgument, LossError, OptimizerError, prove, tokens
from fullbatch.accumulate import samples
from fullbatch.prove import BROKEN_SAMPLES, run_broken, split_name
from fullbatch.prove.splits import default_splits, parse_split

EXACT = (torch.float64,)


def square_loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def rows(samples=16, features=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, features, generator=generator), torch.randn(samples, 1, generator=generator)


def net(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 1))


def test_a_right_model_is_equal_in_every_dtype_and_default_split():
    proof = prove(tagger(dtype=torch.float32), token_loss, token_batch(16), items=tokens("labels"))
    assert proof.equal
    assert [split_name(row.split) for row in proof.comparisons[:5]] == ["16x1", "4x4", "2x8", "1x16", "5+5+5+1"]
    ran = {row.dtype for row in proof.comparisons}
    assert ran | set(proof.not_run) == {"float64", "float32", "bfloat16"}
    for row in proof.comparisons:
        assert row.steps == 1
        if row.dtype == "float64":
            assert row.grad_rel_diff == row.grad_error <= row.bound == 1e-12
            assert row.full_batch_error == 0
        else:
            floor = torch.finfo(getattr(torch, row.dtype)).eps / 2
            assert row.grad_error <= row.bound == 2 * max(row.full_batch_error, floor)
    assert "equal: 16x1, 4x4" in str(proof)


def test_the_figures_are_those_of_plain_autograd():
    """Samples counted where tokens are meant: the proof's gradient difference is that of the mean of means."""
    batch = token_batch(16)
    model = tagger()
    right = full_batch_grads(model, token_loss, batch)
    halves = [{key: value[at : at + 8] for key, value in batch.items()} for at in (0, 8)]
    wrong = sum(full_batch_grads(model, token_loss, half) for half in halves) / 2
    proof = prove(model, token_loss, batch, splits=["8x2"], dtypes=EXACT, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    (row,) = proof.comparisons
    assert not row.equal
    assert row.grad_max_abs_diff == pytest.approx((wrong - right).abs().max().item())
    assert row.grad_rel_diff == pytest.approx(((wrong - right).norm() / right.norm()).item())
    assert row.param_max_abs_diff == pytest.approx(0.5 * (wrong - right).abs().max().item())
    assert row.loss_diff == pytest.approx(
        sum(token_loss(model, half).item() for half in halves) / 2 - token_loss(model, batch).item()
    )
    assert proof.first_difference.kind == "loss"
    assert "items" in proof.first_difference.reason


@pytest.mark.parametrize(
    ("module", "kind", "name"),
    [(nn.BatchNorm1d(8), "BatchNorm1d", "1"), (nn.Dropout(0.5), "Dropout", "1")],
)
def test_the_first_module_that_differs_is_named(module, kind, name):
    model = net(module, nn.Dropout(0.1))
    proof = prove(model, square_loss, rows(), dtypes=EXACT, splits=["4x4"])
    assert not proof.equal
    assert (proof.first_difference.module, proof.first_difference.kind) == (name, kind)
    assert "hint: " in str(proof)
    assert prove(model.eval(), square_loss, rows(), dtypes=EXACT, splits=["4x4"]).equal


def test_a_split_on_which_batch_norm_cannot_run_is_unequal_and_named():
    proof = prove(net(nn.BatchNorm1d(8)), square_loss, rows(), dtypes=EXACT, splits=["1x16"])
    assert "Expected more than 1 value per channel" in proof.comparisons[0].failure
    assert proof.first_difference.kind == "BatchNorm1d"
    assert json.dumps(proof.to_json(), allow_nan=False)


class MixesSamples(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0)


class MixesOutsideModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden - hidden.mean(dim=0))


def test_a_module_that_mixes_samples_is_named():
    found = prove(net(MixesSamples()), square_loss, rows(), dtypes=EXACT, splits=["4x4"]).first_difference
    assert (found.module, found.kind) == ("1", "MixesSamples")
    assert "other samples" in found.reason


def test_code_between_modules_that_mixes_samples_is_placed_before_the_next_one():
    torch.manual_seed(0)
    found = prove(MixesOutsideModules(), square_loss, rows(), dtypes=EXACT, splits=["4x4"]).first_difference
    assert found.module == "last"
    assert "the code before it" in found.reason


def test_a_loss_over_the_batch_is_told_when_no_module_differs():
    def contrastive(model, batch):
        z = normalize(model(batch[0]))
        return cross_entropy(z @ z.T, torch.arange(len(z)))

    torch.manual_seed(0)
    found = prove(nn.Linear(4, 8), contrastive, rows(), dtypes=EXACT, splits=["4x4"]).first_difference
    assert (found.module, found.kind) == (None, "loss")
    assert "compares samples" in found.reason


def test_a_sum_is_told_from_a_mean():
    found = prove(
        net(), lambda m, b: mse_loss(m(b[0]), b[1], reduction="sum"), rows(), dtypes=EXACT, splits=["4x4"]
    ).first_difference
    assert "sum" in found.reason


class CastsToFloat32(nn.Module):
    """As language models do in their norms and logits."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.inner(x).float()
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True, dtype=torch.float32) + torch.tensor(1e-6))
        return self.out((hidden.to(torch.float32) * scale).to(x.dtype)).to(dtype=torch.float32)


def test_casts_to_float32_inside_a_model_do_not_spoil_the_float64_truth():
    torch.manual_seed(0)
    proof = prove(CastsToFloat32(), lambda m, b: mse_loss(m(b[0]), b[1].float()), rows())
    assert proof.equal
    assert max(row.grad_error for row in proof.comparisons if row.dtype == "float64") < 1e-14


def test_the_model_its_optimizer_and_the_random_numbers_are_left_untouched():
    model = net(nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    square_loss(model, rows()).backward()
    optimizer.step()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    weights, moments = flat_params(model), optimizer.state[model[0].weight]["exp_avg"].clone()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    prove(model, square_loss, rows(), optimizer=optimizer, splits=["8x2"])
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(flat_params(model), weights)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), grads, strict=True))
    assert torch.get_default_dtype() == torch.float32


def test_an_optimizers_state_and_rates_come_along():
    """With momentum, the step after equal gradients is equal only if the momentum was copied."""
    model = net().double()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.3}], lr=0.1, momentum=0.9
    )
    batch = tuple(tensor.double() for tensor in rows())
    square_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    proof = prove(model, square_loss, batch, optimizer=optimizer, dtypes=EXACT, splits=["4x4"])
    assert proof.equal
    assert proof.comparisons[0].param_rel_diff < 1e-12
    assert proof.optimizer == "SGD"


def test_clipping_is_part_of_the_proof():
    proof = prove(net(), square_loss, rows(), max_grad_norm=1e-3, dtypes=EXACT)
    assert proof.equal


def test_several_terms_are_proved_with_their_weights():
    def loss(model, batch):
        out = model(batch[0])
        return {"fit": mse_loss(out, batch[1]), "size": out.square().mean()}

    from fullbatch import samples

    items = {"fit": samples, "size": samples}
    assert prove(net(), loss, rows(), items=items, weights={"size": 0.3}, dtypes=EXACT).equal


def test_a_model_that_draws_random_numbers_is_not_called_equal_without_a_note():
    proof = prove(net(nn.Dropout()), square_loss, rows(), dtypes=EXACT, splits=["16x1"])
    assert proof.equal
    assert "random numbers" in str(proof)


@pytest.mark.parametrize("samples", range(1, 41))
def test_default_splits_cut_the_whole_batch(samples):
    splits = default_splits(samples)
    assert all(sum(split) == samples for split in splits)
    assert len(set(splits)) == len(splits)
    if samples >= 7:
        assert any(len(set(split)) > 1 for split in splits)  # one is ragged


@pytest.mark.parametrize(
    ("text", "sizes"), [("4x4", (4, 4, 4, 4)), ("5+5+5+1", (5, 5, 5, 1)), ("16", (16,)), ("7x2+2", (7, 7, 2)), ([8, 8], (8, 8))]
)
def test_splits_are_read_as_written(text, sizes):
    assert parse_split(text, 16) == sizes


@pytest.mark.parametrize("text", ["", "4x", "x4", "a", "4x4x1", "0x4", "-4x4", "4.0x4", [], [8.0, 8], [16, 0]])
def test_a_split_that_is_none_is_refused(text):
    with pytest.raises(InvalidArgument, match="must be MICRO-BATCHxMICRO-BATCHES or a sum of sizes"):
        parse_split(text, 16)


def test_a_split_of_another_batch_is_refused_with_its_sum():
    with pytest.raises(InvalidArgument, match=r"(?s)'4x5' holds 20 samples, but the batch has 16.*8\+8"):
        prove(net(), square_loss, rows(), splits=["4x5"])


def test_wrong_use_is_refused():
    with pytest.raises(InvalidArgument, match="batch has 0 samples"):
        prove(net(), square_loss, rows(0))
    with pytest.raises(InvalidArgument, match="must be floating-point dtypes, at least one"):
        prove(net(), square_loss, rows(), dtypes=())
    with pytest.raises(OptimizerError, match="holds none of the model's"):
        prove(net(), square_loss, rows(), optimizer=torch.optim.SGD(net().parameters()))
    with pytest.raises(LossError, match="must be a scalar tensor"):
        prove(net(), lambda m, b: m(b[0]), rows())
    with pytest.raises(InvalidArgument, match="not finite"):
        prove(net(), square_loss, (rows()[0] * float("inf"), rows()[1]))


def test_the_json_is_what_its_schema_says(schema):
    proof = prove(net(nn.BatchNorm1d(8)), square_loss, rows(), splits=["1x16", "4x4"])
    jsonschema.validate(proof.to_json(), schema("proof.v1"))
    assert proof.to_json()["equal"] is False


def test_the_proof_is_frozen():
    proof = prove(net(), square_loss, rows(), dtypes=EXACT, splits=["4x4"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        proof.samples = 3


def test_an_optimizer_with_parameters_outside_the_model_is_refused_and_does_not_touch_them():
    outside = nn.Parameter(torch.tensor(1.0))
    model = net()
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    with pytest.raises(OptimizerError, match="holds parameters that are not the model's"):
        prove(model, lambda m, b: outside * square_loss(m, b), rows(), optimizer=optimizer)
    assert outside.item() == 1.0


def test_a_loss_that_uses_another_model_is_refused_and_leaves_no_gradient_on_it():
    model = net()
    with pytest.raises(LossError, match="it uses another one"):
        prove(model, lambda m, b: square_loss(model, b), rows(), dtypes=(torch.float32,))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_of_another_model_moves_nothing():
    model = net()
    before = flat_params(model)
    with pytest.raises(OptimizerError):
        prove(model, square_loss, rows(), optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(before, flat_params(model))


def test_a_loss_that_writes_into_its_batch_changes_neither_the_batch_nor_the_verdict():
    def in_place(model, batch):
        batch[0].mul_(1.5)
        return square_loss(model, batch)

    batch = rows()
    original = batch[0].clone()
    assert prove(net(), in_place, batch).equal
    assert torch.equal(batch[0], original)


@pytest.mark.parametrize("seed", range(40))
def test_a_small_model_is_never_called_unequal_for_its_rounding(seed):
    torch.manual_seed(seed)
    batch = (torch.randn(16, 3), torch.randn(16, 1))
    assert prove(nn.Linear(3, 1), square_loss, batch).equal


def test_a_gradient_that_cancels_is_compared_with_its_parts():
    """At the optimum of least squares the gradient is rounding itself."""
    x, y = (tensor.double() for tensor in rows())
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    assert prove(model, square_loss, (x, y), dtypes=EXACT).equal


def test_a_dtype_in_which_the_full_batch_overflows_is_not_compared():
    model = net()
    batch = tuple(tensor * 1e4 for tensor in rows())
    proof = prove(model, square_loss, batch, dtypes=(torch.float64, torch.float16))
    assert {row.dtype for row in proof.comparisons} == {"float64"}
    assert "float16" in proof.not_run


def test_a_gradient_hook_that_clips_each_micro_batch_is_found():
    model = net()
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    proof = prove(model, square_loss, rows(), dtypes=EXACT, splits=["4x4"])
    assert not proof.equal
    assert proof.first_difference.kind == "gradient hook"


def test_a_gradient_penalty_is_proved():
    def penalised(model, batch):
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse_loss(out, batch[1]) + slope.square().sum(dim=1).mean()

    assert prove(net(nn.Tanh()), penalised, rows(), dtypes=EXACT).equal


def test_complex_buffers_and_casts_by_type_as_keep_their_precision():
    class Rotates(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.out = nn.Linear(4, 1)
            self.register_buffer("turn", torch.polar(torch.ones(2), torch.arange(2.0)))
            self.like = torch.zeros(1)

        def forward(self, x):
            hidden = self.inner(x)
            turned = torch.view_as_real(torch.view_as_complex(hidden.reshape(-1, 2, 2).contiguous()) * self.turn)
            return self.out(turned.reshape(-1, 4).type_as(self.like).to(self.out.weight.dtype).type_as(hidden))

    torch.manual_seed(0)
    proof = prove(Rotates(), square_loss, rows(), dtypes=EXACT)
    assert proof.equal
    assert max(row.grad_error for row in proof.comparisons) < 1e-14


class Checkpointed(nn.Module):
    """A norm and a layer that compute in float32, as Llama's norm does, and run again in backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(8, 8), use_reentrant

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.wide, x, use_reentrant=self.use_reentrant)

    def wide(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + torch.ones(1))
        return torch.nn.functional.linear(wide, self.layer.weight.float()).to(x.dtype)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_casts_to_float32_inside_a_checkpoint_are_float64_when_it_runs_again(use_reentrant):
    proof = prove(net(Checkpointed(use_reentrant)), square_loss, rows())
    assert proof.equal
    exact = [row.grad_error for row in proof.comparisons if row.dtype == "float64"]
    assert len(exact) == 5
    assert max(exact) < 1e-14
    assert torch.get_default_dtype() == torch.float32


def test_wrong_loops_run_over_casts_inside_a_checkpoint():
    model = net(Checkpointed(use_reentrant=False))
    assert run_broken("right", model, square_loss, rows(BROKEN_SAMPLES), items=samples).equal
    assert not run_broken("low-precision", model, square_loss, rows(BROKEN_SAMPLES), items=samples).equal


def test_what_accumulates_in_the_weights_dtype_is_proved_as_it_is():
    """512 micro-batches of one in bfloat16: the proof says that the sum is lost, and that float32 keeps it."""
    torch.manual_seed(0)
    batch = (torch.ones(512, 4), torch.zeros(512, 1))
    model, options = nn.Linear(4, 1, bias=False), {"splits": ["1x512"], "dtypes": (torch.float64, torch.bfloat16)}

    def mean(model, batch):
        return model(batch[0]).mean()

    lost = prove(model, mean, batch, **options)
    assert not lost.equal
    assert (lost.first_difference.kind, "accumulate_in" in lost.first_difference.hint) == ("rounding", True)
    if hasattr(torch.Tensor, "grad_dtype"):
        assert prove(model, mean, batch, accumulate_in=torch.float32, **options).equal


def test_arguments_in_the_wrong_order_or_of_the_wrong_kind_are_told():
    model = net()
    for wrong, told in [
        (lambda: prove(model, rows(), square_loss), "loss is tuple: it must be a function"),
        (lambda: prove(square_loss, square_loss, rows()), "model is function"),
        (lambda: prove(model, square_loss, iter([rows()])), "batch is an iterator"),
        (lambda: prove(model, square_loss, rows(), dtypes=("float64",)), "must be floating-point dtypes"),
        (lambda: prove(model, square_loss, rows(), dtypes=(torch.int64,)), "must be floating-point dtypes"),
        (lambda: prove(model, square_loss, rows(), optimizer="sgd"), "optimizer is str"),
        (lambda: prove(model, square_loss, rows(), optimizer=lambda p: 3), "optimizer returned int"),
        (lambda: prove(model, square_loss, rows(), optimizer=torch.optim.LBFGS), "LBFGS"),
        (lambda: prove(model, square_loss, rows(), splits=4), "splits=4 must be a list"),
        (lambda: prove(model, square_loss, rows(), splits=["1x3000000000"]), "holds 3000000000 samples"),
    ]:
        with pytest.raises(InvalidArgument, match=told):
            wrong()


def test_one_split_or_dtype_alone_is_taken_as_one():
    proof = prove(net(), square_loss, rows(), splits="4x4", dtypes=torch.float64)
    assert [row.split for row in proof.comparisons] == [(4, 4, 4, 4)]
    assert len(prove(net(), square_loss, rows(), splits=[5, 5, 5, 1], dtypes=EXACT).comparisons) == 1
