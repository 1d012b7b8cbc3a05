"""The training loop whose memory is predicted and measured: one text for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

import torch
from torch import Tensor, nn

from fullbatch.errors import check_max_grad_norm
from fullbatch.torch_private import tree_leaves

OutputsLive = Literal["loss", "micro-batch", "update", "next"]
ZeroGrad = Literal["after the update", "before the forward"]
Loss = Callable[[nn.Module, Any], Any]
"""``loss(model, micro)``: a scalar tensor or a dict of them."""
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Observer(Protocol):
    """Who watches a loop."""

    def stage(self, name: str, update: int = 0, micro_batch: int = 0) -> None:
        """Stage ``name`` begins."""

    def after_backward(self, parameters: Iterable[Tensor]) -> None:
        """Each of ``parameters`` may have a gradient now."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's state is there now."""


class Settings(TypedDict, total=False):
    """Arguments of :class:`Loop` beside the loss and the optimizer."""

    micro_batches: int
    updates: int
    foreach: bool | None
    fused: bool | None
    clip_foreach: bool | None
    zero_grad: ZeroGrad
    zero_grad_keep: bool
    outputs_live: OutputsLive
    max_grad_norm: float | None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Some updates of some equal micro-batches each.

    Attributes:
        loss: ``loss(model, micro)``: a scalar tensor or a dict of them.
        optimizer: Makes the optimizer from the parameters that require a gradient.
        micro_batches: Micro-batches of a window.
        updates: From the second on the optimizer's state is there from the start.
        foreach: The optimizer's foreach kernels; ``None``: as the device has it.
        fused: The optimizer's fused kernel.
        clip_foreach: Foreach kernels where the gradient is clipped; ``None``: as the device has it.
        zero_grad: Where gradients are released.
        zero_grad_keep: Set them to zero in place instead of releasing them.
        outputs_live: How long a variable of the loop holds what the model returned: ``loss``, until the loss
            is there; ``micro-batch``, until its backward is done; ``update``; or ``next``, until the next
            forward returns (``outputs = model(...)`` in a plain loop).
        max_grad_norm: Clip the gradient's norm to this before the step.
    """

    loss: Loss
    optimizer: MakeOptimizer
    micro_batches: int = 1
    updates: int = 2
    foreach: bool | None = None
    fused: bool | None = None
    clip_foreach: bool | None = None
    zero_grad: ZeroGrad = "after the update"
    zero_grad_keep: bool = False
    outputs_live: OutputsLive = "micro-batch"
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check_max_grad_norm(self.max_grad_norm)

    def run(self, model: nn.Module, micro: Any, observer: Observer) -> Any:
        """Train ``model``, which is changed, on ``micro``, the same in every micro-batch, and tell ``observer``.

        Returns:
            What a script would still hold after the last update: the optimizer and the outputs that live on.
        """
        kept: list[Any] = []
        if self.outputs_live != "loss":
            model.register_forward_hook(lambda _, __, output: kept.__setitem__(slice(None), [output]))
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = self.optimizer(parameters)
        _choose_kernels(optimizer, self.foreach, self.fused)
        for update in range(1, self.updates + 1):
            for number in range(1, self.micro_batches + 1):
                observer.stage("forward", update, number)
                if number == 1 and self.zero_grad == "before the forward":
                    optimizer.zero_grad(set_to_none=not self.zero_grad_keep)
                value = self.loss(model, micro)
                total: Any = sum(value.values()) if isinstance(value, dict) else value
                observer.stage("backward", update, number)
                (total if self.micro_batches == 1 else total / self.micro_batches).backward()
                del value, total
                if self.outputs_live == "micro-batch":
                    kept.clear()
                observer.after_backward(parameters)
            observer.stage("update", update)
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, self.max_grad_norm, foreach=self.clip_foreach)
            optimizer.step()
            observer.after_step(optimizer)
            if self.zero_grad == "after the update":
                optimizer.zero_grad(set_to_none=not self.zero_grad_keep)
            if self.outputs_live == "update":
                kept.clear()
        return optimizer, kept


def _choose_kernels(optimizer: torch.optim.Optimizer, foreach: bool | None, fused: bool | None) -> None:
    """On CUDA an optimizer takes foreach kernels by itself (torch/optim/optimizer.py, _default_to_fused_or_foreach)."""
    for group in optimizer.param_groups:
        if fused and "fused" in group:
            group["fused"], group["foreach"] = True, False
        elif "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = foreach


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each with the name of its module."""
    for name, module in model.named_modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                yield name, tensor


def tensors(batch: Any) -> list[Tensor]:
    """The tensors in ``batch``."""
    return [part for part in tree_leaves(batch) if isinstance(part, Tensor)]
