"""The first module whose output changes when the batch is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.accumulate import map_tensors, slices
from fullbatch.accumulate.statistics import takes_batch_statistics
from fullbatch.prove.precision import copy_in, gradient_hooks, in_dtype, loss_in
from fullbatch.prove.proof import Difference

# Outputs are compared in float64: rounding stays below this, relative to the largest element.
_ROUNDING = 1e-9

_Call = tuple[list[Tensor], list[Tensor]]  # inputs and outputs of one call of a module


def first_difference(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: Any, split: tuple[int, ...], *, seed: int
) -> Difference:
    """Run ``batch`` whole and split, in float64, and compare every module's output.

    All outputs of both runs are kept meanwhile: about the activations of two full batches.
    """
    (whole,), (total,) = _calls(model, loss, [batch], seed)
    try:
        parts, losses = _calls(model, loss, slices(batch, split), seed)
    except Exception as error:
        return _of_failure(model, split, error)
    modules = dict(model.named_modules())
    for key, (inputs, outputs) in whole.items():
        name = key[0]
        calls = [part.get(key) for part in parts]
        if any(call is None for call in calls):
            return _at(split, name, modules[name], "it is not called for every micro-batch", "route by sample, not by batch")
        found_inputs, found_outputs = ([call[side] for call in calls if call is not None] for side in (0, 1))
        if _same(outputs, found_outputs):
            continue
        if not _same(inputs, found_inputs):
            reason = "what it receives differs already: the code before it mixes samples, or draws random numbers"
            return _at(split, name, modules[name], reason, "look at the forward that calls it")
        return _at(split, name, modules[name], *_why(modules[name]))
    if any(map(gradient_hooks, model.parameters())):
        reason = "a hook changes the gradient of a parameter, at every micro-batch and not once a window"
        hint = "change the window's gradient instead: optimizer.register_step_pre_hook(...)"
        return Difference(split=split, module=None, kind="gradient hook", reason=reason, hint=hint)
    if isinstance(total, Tensor) and torch.allclose(sum(losses, start=torch.zeros_like(total)), total, rtol=_ROUNDING):
        reason = "it is the sum over the samples, not the mean over the items"
        return Difference(split=split, module=None, kind="loss", reason=reason, hint="reduction='mean', or divide by the items")
    return Difference(
        split=split,
        module=None,
        kind="loss",
        reason="every module's output is the same; the loss is no mean over the items that are counted, or it compares samples",
        hint='return a mean and count what it is over (items=tokens("labels")); a loss over the whole batch cannot be split',
    )


def _of_failure(model: nn.Module, split: tuple[int, ...], error: Exception) -> Difference:
    for name, module in model.named_modules():
        if takes_batch_statistics(module):
            return _at(split, name, module, *_why(module))
    return Difference(
        split=split,
        module=None,
        kind="loss",
        reason=f"it does not run on a part of the batch ({type(error).__name__}: {error})",
        hint="a shape or a size that is written into the model or the loss? They must take any number of samples",
    )


def _why(module: nn.Module) -> tuple[str, str]:
    if takes_batch_statistics(module):
        return (
            "in train mode its statistics are those of each micro-batch",
            "freeze them (module.eval()), or use GroupNorm or LayerNorm; --eval proves the rest",
        )
    if "dropout" in type(module).__name__.lower() or isinstance(getattr(module, "dropout", None), float):
        return (
            "its random draws differ between splits (each is a fair draw, none is the full batch's)",
            "prove in evaluation mode: model.eval(), or --eval",
        )
    return (
        "a sample's output depends on the other samples of the micro-batch, or on random draws",
        "look at its forward for operations over dimension 0; --eval tells whether train mode is the cause",
    )


def _at(split: tuple[int, ...], name: str, module: nn.Module, reason: str, hint: str) -> Difference:
    return Difference(split=split, module=name, kind=type(module).__name__, reason=reason, hint=hint)


def _calls(
    model: nn.Module, loss: Callable[[Any, Any], Any], batches: list[Any], seed: int
) -> tuple[list[dict[tuple[str, int], _Call]], list[Any]]:
    """Inputs and outputs of each call of each module, by name and count, in the order in which calls end; the losses."""
    twin = copy_in(model, torch.float64)
    torch.manual_seed(seed)
    seen, losses = [], []
    for batch in batches:
        calls: dict[tuple[str, int], _Call] = {}
        with _recording(twin, calls):
            value = loss_in(loss, torch.float64)(twin, in_dtype(batch, torch.float64))
        losses.append(value.detach() if isinstance(value, Tensor) else value)
        seen.append(calls)
    return seen, losses


@contextmanager
def _recording(model: nn.Module, calls: dict[tuple[str, int], _Call]) -> Iterator[None]:
    counts: dict[str, int] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            counts[name] = counts.get(name, 0) + 1
            calls[name, counts[name]] = (_tensors((args, kwargs)), _tensors(output))

        return hook

    handles = [module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor.detach().clone())
        return tensor

    map_tensors(keep, value)
    return found


def _same(whole: list[Tensor], parts: list[list[Tensor]]) -> bool:
    if any(len(part) != len(whole) for part in parts):
        return False
    return all(_joined_equal(tensor, pieces) for tensor, pieces in zip(whole, zip(*parts, strict=True), strict=True))


def _joined_equal(whole: Tensor, pieces: tuple[Tensor, ...]) -> bool:
    for dim in range(whole.ndim):  # samples first as a rule, but [T, B, D] exists
        rest = [size for at, size in enumerate(whole.shape) if at != dim]
        fits = all(
            piece.ndim == whole.ndim and [size for at, size in enumerate(piece.shape) if at != dim] == rest for piece in pieces
        )
        if fits and sum(piece.shape[dim] for piece in pieces) == whole.shape[dim]:
            return _close(whole, torch.cat(pieces, dim))
    # Nothing to join along: something shared by all samples, the same for each micro-batch, or beyond comparison.
    return all(piece.shape != whole.shape or _close(whole, piece) for piece in pieces)


def _close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = one.abs().nan_to_num(0.0, 0.0, 0.0).max() if one.numel() else torch.tensor(0.0)
    return torch.allclose(one, other, rtol=0.0, atol=_ROUNDING * float(scale), equal_nan=True)
