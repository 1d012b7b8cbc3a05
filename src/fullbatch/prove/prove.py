"""One update done as the full batch and in splits, compared."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.accumulate import Accumulator, Counter, Loss, MicroBatch, batch_size, samples, slices
from fullbatch.accumulate.arguments import check_loss, check_optimizer
from fullbatch.accumulate.items import count
from fullbatch.accumulate.rng import same_rng_after
from fullbatch.accumulate.terms import counters_by_term
from fullbatch.errors import DtypeNotSupported, FullbatchError, InvalidArgument, OptimizerError
from fullbatch.evidence import measured
from fullbatch.prove.locate import first_difference
from fullbatch.prove.precision import MakeOptimizer, backward_in, copy_in, in_dtype, loss_in, maker_of
from fullbatch.prove.proof import Comparison, Difference, Proof
from fullbatch.prove.reference import full_batch_backward
from fullbatch.prove.splits import parse_splits
from fullbatch.prove.watch import Outcome, flat_grads, watched

FLOAT64_BOUND = 1e-12
"""Relative gradient error that is rounding in float64: the contract of DESIGN.md."""

TOO_IMPRECISE = 0.5
"""Own relative error of the full batch beyond which its gradient says nothing: half of it is wrong."""


def prove(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    optimizer: MakeOptimizer | torch.optim.Optimizer = torch.optim.AdamW,
    items: Counter | Mapping[str, Counter] = samples,
    weights: Mapping[str, float] | None = None,
    max_grad_norm: float | None = None,
    accumulate_in: torch.dtype | None = None,
    splits: Sequence[str | Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] | torch.dtype = (torch.float64, torch.float32, torch.bfloat16),
    seed: int = 0,
    command: str = "",
) -> Proof:
    """Do one update as the full batch and in splits, on copies, and compare them.

    In float64 equal means a relative gradient error of at most 1e-12. In a lower precision the
    truth is the float64 gradient of the same rounded weights and batch, and a split may be at
    most twice as far from it as the full batch itself is. Where the gradients of the micro-batches
    cancel, rounding of the largest of them counts as equal too (``docs/proof.md``).

    Args:
        model: As it is trained; left untouched. In train mode, dropout and BatchNorm differ
            between splits, and the proof says so; ``model.eval()`` leaves them out.
        loss: As for :class:`fullbatch.Accumulator`.
        batch: A nesting of tensors, one sample a row of dimension 0.
        optimizer: A function from parameters to an optimizer, or one of ``model``'s, whose
            settings and state are copied. Default: AdamW.
        items: What the loss is a mean over.
        weights: Weight of each term.
        max_grad_norm: Clip the gradient to this 2-norm before the step.
        accumulate_in: As for :class:`fullbatch.Accumulator`, in the dtypes that are narrower.
        splits: ``"4x4"`` (micro-batch x micro-batches), ``"5+5+5+1"`` or lists of sizes.
            Default for 16 samples: 16x1, 4x4, 2x8, 1x16, 5+5+5+1; the like for other numbers.
        dtypes: What to compute in.
        seed: Seeds each run in the same way.
        command: Recorded in the proof's evidence.

    Raises:
        InvalidArgument: An argument breaks its rule, or the full batch's loss is not finite.
    """
    check_loss(loss, model)
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"model is {type(model).__name__}: it must be a torch.nn.Module", hint="prove(model, loss, batch)"
        )
    if isinstance(batch, Iterator):
        raise InvalidArgument(
            "batch is an iterator: a proof cuts one batch of tensors", hint="prove(model, loss, next(iter(loader)))"
        )
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if not dtypes or not all(isinstance(dtype, torch.dtype) and dtype.is_floating_point for dtype in dtypes):
        raise InvalidArgument(f"dtypes={dtypes!r} must be floating-point dtypes, at least one", hint="dtypes=(torch.float64,)")
    if any(parameter.is_complex() for parameter in model.parameters()):
        raise InvalidArgument("model has complex parameters: a proof compares real ones")
    n = batch_size(batch)
    if n == 0:
        raise InvalidArgument("batch has 0 samples: a proof needs at least 1")
    if not (isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
        raise OptimizerError(
            f"optimizer is {type(optimizer).__name__}: it must be an optimizer, or a function from parameters to one",
            hint="optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    sizes = parse_splits(splits, n)
    counters = counters_by_term(items)
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(model, optimizer)
    run = _Runner(model, loss, batch, maker_of(optimizer, model), counters, weights, max_grad_norm, accumulate_in, sizes, seed)
    comparisons: list[Comparison] = []
    not_run: dict[str, str] = {}
    with same_rng_after(model), _grads_set_aside(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the verdict says what a warning would
        for dtype in dtypes:
            try:
                comparisons += run.compare(dtype)
            except (RuntimeError, NotImplementedError, DtypeNotSupported, _TooImprecise) as error:
                if dtype == torch.float64 or (len(dtypes) == 1 and not isinstance(error, _TooImprecise)):
                    raise
                not_run[_name(dtype)] = str(error).splitlines()[0]
        if not comparisons:
            raise InvalidArgument(f"in none of the dtypes can the update be compared: {not_run}", hint="add torch.float64")
        found = _explain(run, comparisons)
        random = run.draws_random_numbers()
    return Proof(
        samples=n,
        items=count(counters, [batch])[0],
        optimizer=type(run.optimizer(copy_in(model))).__name__,
        comparisons=tuple(comparisons),
        not_run=not_run,
        first_difference=found,
        random=random,
        evidence=measured(next(model.parameters()).device, command),
    )


def _explain(run: _Runner, comparisons: list[Comparison]) -> Difference | None:
    unequal = [comparison for comparison in comparisons if not comparison.equal]
    if not unequal:
        return None
    exact = [comparison for comparison in comparisons if comparison.dtype == "float64"]
    if not exact or not all(comparison.equal for comparison in exact):
        return first_difference(run.model, run.loss, run.batch, unequal[0].split, seed=run.seed)
    return Difference(
        split=unequal[0].split,
        module=None,
        kind="rounding",
        reason=f"float64 is equal; in {unequal[0].dtype} the sum of {len(unequal[0].split)} gradients rounds more than "
        "the full batch's own arithmetic",
        hint="accumulate in a wider dtype (accumulate_in=torch.float64 or float32), or in fewer micro-batches",
    )


class _TooImprecise(Exception):
    """The full batch itself is too far from the truth to say anything of its splits."""


@contextmanager
def _grads_set_aside(model: nn.Module) -> Iterator[None]:
    """``model``'s own gradients, which a loss that uses the model directly would change, come back afterwards."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


@dataclass(frozen=True)
class _Runner:
    model: nn.Module
    loss: Loss
    batch: Any
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    counters: Mapping[str, Counter]
    weights: Mapping[str, float] | None
    max_grad_norm: float | None
    accumulate_in: torch.dtype | None
    splits: list[tuple[int, ...]]
    seed: int

    def compare(self, dtype: torch.dtype) -> list[Comparison]:
        full = self.full_batch(dtype)
        truth = full if dtype == torch.float64 else self.full_batch(dtype, torch.float64)
        if not torch.isfinite(truth.grads).all() or not math.isfinite(truth.loss):
            raise InvalidArgument(
                f"batch gives a loss of {truth.loss:g} or a gradient that is not finite: there is nothing to compare with",
                hint="give a batch with items (labels) of every term, and finite values",
            )
        unit = torch.finfo(dtype).eps / 2
        own = _relative(full.grads, truth.grads)
        if not own <= TOO_IMPRECISE:
            raise _TooImprecise(
                f"the full batch's own gradient is off by {own:.1e} (overflow, underflow?): no standard to compare with"
            )
        found = []
        for split in self.splits:
            part, failure = self.in_split(split, dtype)
            error = _relative(part.grads, truth.grads)
            bound = FLOAT64_BOUND if dtype == torch.float64 else 2 * max(own, unit)
            if bound < error < math.inf:
                # Perhaps the parts' gradients cancel: their rounding is in proportion to them, not to their sum.
                largest = self.largest_part(split, dtype) / truth.grads.norm().item()
                bound = max(bound, largest * (FLOAT64_BOUND if dtype == torch.float64 else 2 * unit))
            found.append(
                Comparison(
                    dtype=_name(dtype),
                    split=split,
                    grad_max_abs_diff=_max_abs(part.grads - full.grads),
                    grad_rel_diff=_relative(part.grads, full.grads),
                    grad_error=error,
                    full_batch_error=own,
                    bound=bound,
                    param_max_abs_diff=_max_abs(part.step - full.step),
                    param_rel_diff=_relative(part.step, full.step),
                    loss_diff=part.loss - full.loss,
                    steps=part.steps,
                    failure=failure,
                    equal=error <= bound and part.steps == full.steps and (dtype != torch.float64 or _loss_equal(part, full)),
                )
            )
        return found

    def draws_random_numbers(self) -> bool:
        """Whether the loss of the full batch uses torch's generator."""
        model, batch = self._copy()
        devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
        before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        self.loss(model, batch)
        after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        return not all(map(torch.equal, before, after))

    def largest_part(self, split: tuple[int, ...], dtype: torch.dtype) -> float:
        """The largest 2-norm of the gradient of one micro-batch's own mean."""
        norms = [0.0]
        for part in slices(self.batch, split):
            model, data = copy_in(self.model, dtype, torch.float64), in_dtype(part, dtype, torch.float64)
            torch.manual_seed(self.seed)
            with suppress(Exception), backward_in(torch.float64):  # a part may have no items, or not run alone
                full_batch_backward(model, loss_in(self.loss, torch.float64), data, self.weights, None)
                norms.append(flat_grads(model.parameters()).norm().item())
        return max(filter(math.isfinite, norms))

    def _wider(self, dtype: torch.dtype) -> torch.dtype | None:
        wider = self.accumulate_in is not None and torch.finfo(self.accumulate_in).bits > torch.finfo(dtype).bits
        return self.accumulate_in if wider else None

    def full_batch(self, *dtypes: torch.dtype) -> Outcome:
        model, batch = self._copy(*dtypes)
        optimizer = self.optimizer(model)
        with watched(model, optimizer) as seen, backward_in(dtypes[-1]):
            loss = full_batch_backward(model, loss_in(self.loss, dtypes[-1]), batch, self.weights, self.max_grad_norm)
            optimizer.step()
        return seen.outcome(loss.item())

    def in_split(self, split: tuple[int, ...], dtype: torch.dtype) -> tuple[Outcome, str | None]:
        """The split's outcome; where the user's code fails on a part of a batch that runs whole, NaN and the error."""
        model, batch = self._copy(dtype)
        optimizer = self.optimizer(model)
        step = Accumulator(
            model,
            optimizer,
            loss_in(self.loss, dtype),
            items=self.counters,
            weights=self.weights,
            max_grad_norm=self.max_grad_norm,
            accumulate_in=self._wider(dtype),
            check=False,
        )
        with watched(model, optimizer) as seen:
            try:
                with backward_in(dtype):
                    update = step(MicroBatch(data, size) for data, size in zip(slices(batch, split), split, strict=True))
            except FullbatchError:
                raise
            except Exception as error:
                nothing = torch.full_like(seen.before, torch.nan)
                return Outcome(nothing, nothing, math.nan, seen.steps), f"{type(error).__name__}: {error}".splitlines()[0]
        return seen.outcome(update.loss), None

    def _copy(self, *dtypes: torch.dtype) -> tuple[nn.Module, Any]:
        model, batch = copy_in(self.model, *dtypes), in_dtype(self.batch, *dtypes)
        torch.manual_seed(self.seed)
        return model, batch


def _loss_equal(part: Outcome, full: Outcome) -> bool:
    # Only in float64: in lower precision the full batch's own error of this one number may be 0 by luck.
    return abs(part.loss - full.loss) <= FLOAT64_BOUND * max(1.0, abs(full.loss))


def _relative(found: Tensor, right: Tensor) -> float:
    difference, scale = (found - right).norm().item(), right.norm().item()
    return 0.0 if difference == 0.0 else difference / scale if scale else float("inf")


def _max_abs(difference: Tensor) -> float:
    return difference.abs().max().item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
