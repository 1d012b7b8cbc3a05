"""Is the loss a mean over the items that are counted? Asked once, without gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.accumulate.batch import map_tensors, slices
from fullbatch.accumulate.items import Counter, LabelledTokens, count
from fullbatch.accumulate.rng import same_rng_after
from fullbatch.accumulate.terms import as_terms
from fullbatch.accumulate.window import Window
from fullbatch.errors import LossError


def check_mean(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    counters: Mapping[str, Counter],
    window: Window,
    batch: Any,
) -> bool:
    """Compare the loss of some samples with that of their halves; return whether that settles it.

    A mean over n = a + b items is ``(a * mean_a + b * mean_b) / n``; a sum is ``sum_a + sum_b``.

    Raises:
        LossError: The loss is a sum.

    A loss that is neither (another number of items, samples that see each other, randomness)
    is warned of: it may be meant.
    """
    whole = _some_samples(window, batch)
    if whole is None:
        return False
    data, samples = whole
    sizes = [samples // 2, samples - samples // 2]
    try:
        # Copies: a loss may write into its micro-batch.
        parts = [map_tensors(torch.clone, part) for part in (data, *slices(data, sizes))]
        items = count(counters, parts)
        with _undisturbed(model), torch.no_grad():
            values = [as_terms(loss(model, part), counters) for part in parts]
    except Exception:  # whatever it is, the window itself meets it next, and says so
        return True
    done = False
    for term in counters:
        n, a, b = (row[term] for row in items)
        if not (a and b):
            continue
        total, first, second = (value[term].item() for value in values)
        if not all(map(math.isfinite, (total, first, second))):
            continue
        scale = max(abs(total), abs(first), abs(second))
        tolerance = scale * _precision(model, values[0][term]) ** 0.5
        done = True
        if abs(total - (a * first + b * second) / n) <= tolerance:
            continue
        if abs(total - (first + second)) <= tolerance:
            raise LossError(
                f"the loss ({term}) is a sum: {total:.6g} on {samples} samples, {first:.6g} + {second:.6g} on their halves; "
                "it must be the mean over the items",
                hint="use reduction='mean' or divide by the number of items; check=False turns this test off",
            )
        warnings.warn(
            f"the loss ({term}) is {total:.6g} on {samples} samples with {n} items, but its halves give "
            f"({a} * {first:.6g} + {b} * {second:.6g}) / {n} = {(a * first + b * second) / n:.6g}. "
            f"It is a mean over other items ({_suggestion(counters[term])}?), a sum of several means (return a dict of them), "
            "looks at several samples at once, or is random: the update may not be the full batch's. "
            "fullbatch.prove(...) measures it; check=False turns this test off.",
            stacklevel=4,
        )
    return done


def _suggestion(counter: Counter) -> str:
    if isinstance(counter, LabelledTokens):
        return f"shift={not counter.shift}, or another ignore_index than {counter.ignore_index}"
    return 'items=tokens("labels")'


def _some_samples(window: Window, batch: Any) -> tuple[Any, int] | None:
    for micro, _ in window.with_items:
        if micro.samples >= 2:
            return micro.data, micro.samples
    if isinstance(batch, Iterator) or window.samples < 2:
        return None
    return slices(batch, [2, window.samples - 2])[0], 2


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; modes, buffers and random numbers are as before afterwards."""
    # The attribute and not eval(): a module's own eval may merge or move weights.
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, name, b, b.clone()) for module in model.modules() for name, b in module.named_buffers(recurse=False)]
    try:
        with same_rng_after(model):
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, saved in buffers:
                setattr(module, name, buffer)  # it may have been replaced
                buffer.copy_(saved)


def _precision(model: nn.Module, value: Tensor) -> float:
    """Unit roundoff of the lowest precision that takes part (weights, autocast, the loss)."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} | {value.dtype}
    kind = value.device.type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    return max(torch.finfo(dtype).eps for dtype in dtypes)
