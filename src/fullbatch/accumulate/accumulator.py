"""One exact update a call, whatever the micro-batch."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.accumulate.arguments import (
    check_loss,
    check_micro_batch,
    check_optimizer,
    check_ranks,
    check_scaler,
    check_scheduler,
)
from fullbatch.accumulate.check import check_mean
from fullbatch.accumulate.items import Counter, samples
from fullbatch.accumulate.params import check_grad_dtype, grads_in, no_hooked_step, trainable
from fullbatch.accumulate.statistics import takes_batch_statistics
from fullbatch.accumulate.sync import GradientSync
from fullbatch.accumulate.terms import as_terms, counters_by_term, weights_by_term
from fullbatch.accumulate.update import Update
from fullbatch.accumulate.window import MicroBatch, Window
from fullbatch.errors import HookedStep, LossError, check_max_grad_norm

Loss = Callable[[Any, Any], "Tensor | Mapping[str, Tensor]"]
"""``loss(model, micro)``: the mean over the micro-batch's items, or a mapping of such means by term."""


class Accumulator:
    """Makes one update a call: the update of the full batch, computed micro-batch by micro-batch.

    Each item of the window enters the gradient with weight 1 / (items in the window). The
    gradient is that of ``sum over terms t of weights[t] * (mean of t over the window's items of t)``.

    Args:
        model: The module whose parameters are trained; handed to ``loss``.
        optimizer: Steps once a window. Holds every trainable parameter of ``model``; others
            may stand beside them (a learned temperature).
        loss: ``loss(model, micro)`` returns the mean over ``micro``'s items as a scalar
            tensor, or a dict of such means, one a term.
        items: What the mean is over: a function from a micro-batch to its number of items,
            or a dict of one function a term. Default: samples. See :func:`tokens`.
        weights: Weight of each term in the total; 1 where nothing is said.
        micro_batch: Samples of one forward and backward. ``None``: all of the batch.
        max_grad_norm: Clip the window's gradient to this 2-norm (after unscaling).
            ``math.inf`` measures the norm and clips nothing.
        scheduler: ``scheduler.step()`` is called once for each real update.
        scaler: A ``torch.amp.GradScaler``. A step that it skips ticks nothing.
        accumulate_in: Sum gradients in this dtype (``torch.float32`` under bfloat16 weights);
            they are rounded to the weights' dtype once, for the step. Needs torch >= 2.10.
        check: Whether to test on the first window, without gradients, that ``loss`` is a mean
            over ``items``. It runs the loss on one micro-batch and on its two halves, in evaluation
            mode: under ``torch.compile`` that compiles more shapes, and ``False`` spares it.

    Raises:
        InvalidArgument: An argument breaks its rule; the message names it and a fix.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def loss(model, micro):
        ...     return torch.nn.functional.mse_loss(model(micro["x"]), micro["y"])
        >>> step = Accumulator(model, optimizer, loss, micro_batch=4)
        >>> step({"x": torch.zeros(10, 2), "y": torch.zeros(10, 1)}).micro_batches
        (4, 4, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        items: Counter | Mapping[str, Counter] = samples,
        weights: Mapping[str, float] | None = None,
        micro_batch: int | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulate_in: torch.dtype | None = None,
        check: bool = True,
    ) -> None:
        check_loss(loss, model)
        check_scaler(scaler)
        check_micro_batch(micro_batch)
        check_max_grad_norm(max_grad_norm)
        check_optimizer(model, optimizer)
        check_scheduler(scheduler, optimizer)
        check_ranks(model)
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.counters = counters_by_term(items)
        self.weights = weights_by_term(weights, self.counters)
        self.micro_batch = micro_batch
        self.max_grad_norm = max_grad_norm
        self.scheduler = scheduler
        # A disabled scaler scales nothing and skips nothing: it is no scaler.
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.accumulate_in = accumulate_in
        self.updates = 0
        """Updates made so far."""
        self._params = trainable(model, optimizer)
        self._sync = GradientSync(model)
        self._unchecked = check
        self._warned = False
        check_grad_dtype(accumulate_in, self._params)

    def __call__(self, batch: Any) -> Update:
        """Make one update from ``batch``.

        Args:
            batch: A nesting of tensors, one sample a row of dimension 0: the samples of one
                effective batch. Or an iterator of ready micro-batches (``iter([...])``).

        Returns:
            What the window did. ``skipped`` says why no update was made, if so.

        Raises:
            BatchError: The batch cannot be split or counted.
            LossError: The loss is not a scalar mean over the items.
            HookedStep: An optimizer is about to step inside the window.

        An exception leaves no gradients behind, and no update (one of the scheduler's comes after the update).
        """
        started = time.perf_counter()
        self._look_for_new_parameters()
        window = Window.of(batch, self.micro_batch, self.counters)
        work = window.with_items
        if self._unchecked and work:
            self._unchecked = not check_mean(self.model, self.loss, self.counters, window, batch)
        self._warn_of_batch_norm(work)
        sync_calls = self._sync.calls
        losses: dict[str, Tensor] = {}
        norm: Tensor | None = None
        skipped: str | None = "no items in the window"
        self._clear()
        try:
            if work:
                losses, norm, skipped = self._update(window, work)
        finally:
            self._clear()
        if skipped is None:
            self.updates += 1
            if self.scheduler is not None:
                self.scheduler.step()
        terms, grad_norm = _to_host(losses, norm)
        counted = {term: value for term, value in terms.items() if window.items[term]}
        return Update(
            index=self.updates,
            loss=sum(self.weights[term] * value for term, value in counted.items()) if counted else math.nan,
            terms={term: counted.get(term, math.nan) for term in self.counters},
            items=window.items,
            samples=window.samples,
            micro_batches=tuple(micro.samples for micro in window.micro_batches),
            grad_norm=grad_norm,
            skipped=skipped,
            sync_calls=self._sync.calls - sync_calls,
            seconds=time.perf_counter() - started,
        )

    def _update(
        self, window: Window, work: Sequence[tuple[MicroBatch, Mapping[str, float]]]
    ) -> tuple[dict[str, Tensor], Tensor | None, str | None]:
        losses: dict[str, Tensor] = {}
        graphs = 0
        with grads_in(self.accumulate_in, self._params) as round_grads:
            with no_hooked_step(self._params):
                for position, (micro, items) in enumerate(work):
                    with self._sync.micro_batch(last=position == len(work) - 1):
                        graphs += self._forward_backward(micro, items, window.items, losses, first=position == 0)
            if not graphs:
                raise LossError(
                    "the loss returned a tensor without a graph: no parameter was used, or it was detached",
                    hint="return the loss itself, not loss.detach() or torch.tensor(loss.item()), and do not run under no_grad",
                )
            if all(parameter.grad is None for parameter in self._params):
                raise HookedStep(
                    "no parameter has a gradient after backward: a hook takes them away, at every micro-batch",
                    hint="remove the optimizer from register_post_accumulate_grad_hook: Accumulator steps once a window",
                )
            with self._scaler_state():
                norm = self._clip()
                round_grads()
                return losses, norm, self._step()

    def _forward_backward(
        self,
        micro: MicroBatch,
        items: Mapping[str, float],
        all_items: Mapping[str, float],
        losses: dict[str, Tensor],
        *,
        first: bool,
    ) -> bool:
        """Add ``micro``'s part of the gradient; return whether it had a graph (a constant has none)."""
        terms = as_terms(self.loss(self.model, micro.data), self.counters)
        if first and any(parameter.grad is not None for parameter in self._params):
            raise LossError("the loss ran backward itself", hint="return the loss; Accumulator runs backward with its weight")
        total = self._weighted(terms, items, all_items, losses)
        del terms
        if not total.requires_grad:
            return False
        (total if self.scaler is None else self.scaler.scale(total)).backward()
        return True

    def _weighted(
        self,
        terms: Mapping[str, Tensor],
        items: Mapping[str, float],
        all_items: Mapping[str, float],
        losses: dict[str, Tensor],
    ) -> Tensor:
        """A micro-batch's part of the window's loss; each term's part is added to ``losses``, without a graph."""
        total: Tensor | None = None
        for term, mean in terms.items():
            if not items[term]:
                continue  # a mean over nothing: 0/0 in many losses
            share = items[term] / all_items[term]
            factor = self.weights[term] * share
            part = mean if factor == 1 else mean * factor
            total = part if total is None else total + part
            if share == 1:  # the only micro-batch with items of this term
                losses[term] = mean.detach().clone() if mean.is_leaf else mean.detach()  # a leaf may be stepped
                continue
            if term not in losses:
                losses[term] = torch.zeros_like(mean, dtype=torch.promote_types(mean.dtype, torch.float32), requires_grad=False)
            losses[term].add_(mean.detach(), alpha=share)
        assert total is not None
        return total

    def _clip(self) -> Tensor | None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.max_grad_norm is None:
            return None
        return torch.nn.utils.clip_grad_norm_(self._params, self.max_grad_norm)

    def _step(self) -> str | None:
        """Step the optimizer; return why it did not."""
        if self.scaler is None:
            self.optimizer.step()
            return None
        scale = self.scaler.get_scale()
        steps: list[bool] = []
        hook = self.optimizer.register_step_post_hook(lambda *_: steps.append(True))
        try:
            self.scaler.step(self.optimizer)
        finally:
            hook.remove()
        self.scaler.update()
        # Fused optimizers are called in any case and look at found_inf themselves: the scale tells.
        if steps and self.scaler.get_scale() >= scale:
            return None
        return f"the scaler found inf or NaN in the gradients at scale {scale:g}"

    @contextmanager
    def _scaler_state(self) -> Iterator[None]:
        """After an error inside, the scaler has forgotten that it unscaled."""
        try:
            yield
        except BaseException:
            if self.scaler is not None:
                self.scaler.update(new_scale=self.scaler.get_scale())
            raise

    def _look_for_new_parameters(self) -> None:
        """Layers may be added or unfrozen between windows; the optimizer must hold them too."""
        parameters = trainable(self.model, self.optimizer)
        if list(map(id, parameters)) != list(map(id, self._params)):
            check_optimizer(self.model, self.optimizer)
            check_grad_dtype(self.accumulate_in, parameters)
            self._params = parameters

    def _clear(self) -> None:
        for parameter in self._params:
            parameter.grad = None

    def _warn_of_batch_norm(self, work: Sequence[Any]) -> None:
        if self._warned or len(work) < 2:
            return
        self._warned = True  # said once, or looked at once
        if any(map(takes_batch_statistics, self.model.modules())):
            warnings.warn(
                "the model has BatchNorm in train mode: its statistics are those of each micro-batch, so the update "
                "is not the full batch's. Freeze them (module.eval()) or use GroupNorm or LayerNorm.",
                stacklevel=3,
            )


def _to_host(losses: Mapping[str, Tensor], norm: Tensor | None) -> tuple[dict[str, float], float | None]:
    """The window's numbers, with the one synchronisation that they need."""
    tensors = [*losses.values(), *(() if norm is None else (norm,))]
    if not tensors:
        return {}, None
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    numbers = torch.stack([tensor.detach().to(tensors[0].device, dtype) for tensor in tensors]).tolist()
    return dict(zip(losses, numbers, strict=False)), None if norm is None else numbers[-1]
