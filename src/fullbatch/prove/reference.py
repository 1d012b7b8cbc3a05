"""The full batch's update in plain autograd: what every proof compares with. It shares no code with the accumulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.errors import LossError


def full_batch_backward(
    model: nn.Module,
    loss: Callable[[Any, Any], Any],
    batch: Any,
    weights: Mapping[str, float] | None,
    max_grad_norm: float | None,
) -> Tensor:
    """Leave the gradient of the whole batch in ``model``, clipped; return the loss (0-dimensional)."""
    result = loss(model, batch)
    if isinstance(result, Mapping):
        total = sum(((weights or {}).get(term, 1.0) * value for term, value in result.items()), start=torch.tensor(0.0))
    else:
        total = result
    if not isinstance(total, Tensor) or total.ndim or not total.requires_grad:
        raise LossError(
            f"the loss of the full batch is {total!r}: it must be a scalar tensor that depends on the parameters",
            hint="return the mean over the items, not detached: cross_entropy(..., reduction='mean')",
        )
    total.backward()
    if all(parameter.grad is None for parameter in model.parameters()):
        raise LossError(
            "the loss gives no gradient to the model that it is called with (a copy): it uses another one",
            hint="use the argument: def loss(model, micro): ... model(micro) ...",
        )
    if max_grad_norm is not None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.sqrt(sum((grad.double().square().sum() for grad in grads), start=torch.tensor(0.0)))
        if norm > max_grad_norm:
            for grad in grads:
                grad.mul_(max_grad_norm / (norm + 1e-6))  # 1e-6 as torch.nn.utils.clip_grad_norm_, torch 2.13
    return total.detach().clone()
