"""The ways to train that apply to any task, and those that only a model task has."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fullbatch.accumulate import Loss, map_tensors
from fullbatch.errors import InvalidArgument, not_one_of
from fullbatch.tasks.optimizers import OPTIMIZERS, Make, kernel_options, named_optimizer, with_kernel
from fullbatch.tasks.task import Task
from fullbatch.torch_private import tree_leaves

Dtype = Literal["fp32", "bf16", "amp-bf16", "amp-fp16"]
Attention = Literal["eager", "sdpa", "flash"]
Hub = Literal["huggingface", "modelscope"]

WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}

MODEL_OPTIONS = ("seq_len", "attention", "checkpointing", "chunked_loss", "weights")
"""The fields of :class:`Setup` that a task must know of when its model is made."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a task is to be trained; each field left out: as the task has it.

    Attributes:
        seq_len: Tokens of a sample.
        dtype: ``fp32`` or ``bf16``: of the weights; ``amp-bf16`` or ``amp-fp16``: autocast, the weights as they are.
            ``amp-fp16`` is trained with a ``torch.amp.GradScaler``.
        optimizer: Its name; see :data:`fullbatch.tasks.OPTIMIZERS`.
        foreach: The optimizer steps all parameters together, at the cost of temporaries.
        fused: The optimizer steps in one kernel.
        checkpointing: Each block is computed again in the backward instead of being stored.
        attention: ``eager`` stores the scores; ``sdpa`` and ``flash`` leave the kernel to torch.
        chunked_loss: The logits are made for some tokens at a time, and again in the backward.
        weights: Load the published weights: from the hub, or from the directory that ``hf:DIR`` names.
        hub: Where models are fetched from.

    Raises:
        InvalidArgument: A value is none of its options.
    """

    seq_len: int | None = None
    dtype: Dtype | None = None
    optimizer: str | None = None
    foreach: bool | None = None
    fused: bool = False
    checkpointing: bool = False
    attention: Attention | None = None
    chunked_loss: bool = False
    weights: bool = False
    hub: Hub = "huggingface"

    def __post_init__(self) -> None:
        if self.seq_len is not None and (type(self.seq_len) is not int or self.seq_len < 1):
            raise InvalidArgument(f"seq_len={self.seq_len!r} must be a whole number, at least 1", hint="seq_len=512")
        for name, options in (("dtype", get_args(Dtype)), ("optimizer", OPTIMIZERS), ("attention", get_args(Attention))):
            value = getattr(self, name)
            if value is not None and value not in options:
                raise not_one_of(name, value, options)
        if self.hub not in get_args(Hub):
            raise not_one_of("hub", self.hub, get_args(Hub))
        if self.foreach and self.fused:
            raise InvalidArgument("foreach=True and fused=True: an optimizer has one kernel", hint="leave one of the two out")

    @property
    def model_options(self) -> dict[str, Any]:
        """The :data:`MODEL_OPTIONS` that are asked for."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: getattr(self, name) for name in MODEL_OPTIONS if getattr(self, name) != defaults[name]}

    def without(self, *names: str) -> Setup:
        """This setup with the fields ``names`` as the task has them."""
        return replace(self, **{field.name: field.default for field in fields(self) if field.name in names})  # type: ignore[arg-type]


def apply(task: Task, setup: Setup) -> Task:
    """``task`` with the dtype and the optimizer that ``setup`` asks for; ``task`` itself is not changed.

    Args:
        task: Any task.
        setup: Its options for the model must be left out: they are given when the task is made.

    Raises:
        InvalidArgument: An option for the model, which this task does not take.
    """
    for option, value in setup.model_options.items():
        raise InvalidArgument(
            f"{option}={value!r}: task {task.name} does not take it",
            hint=f"a task of your own takes it as an argument of its function: def make({option}=...)",
        )
    if setup.dtype in WEIGHTS:
        dtype = WEIGHTS[setup.dtype]
        task = replace(task, model=copy.deepcopy(task.model).to(dtype), loss=_in_dtype_of_weights(task.loss))
    if setup.dtype in AUTOCAST:
        task = replace(task, loss=_under_autocast(task.loss, AUTOCAST[setup.dtype]))
    return replace(task, optimizer=_optimizer(task.optimizer, setup))


def _optimizer(own: Make, setup: Setup) -> Make:
    if setup.optimizer is not None:
        return named_optimizer(setup.optimizer, foreach=setup.foreach, fused=setup.fused)
    options = kernel_options(setup.foreach, setup.fused)
    return with_kernel(own, options) if options else own


def _in_dtype_of_weights(loss: Loss) -> Loss:
    def cast(model: nn.Module, micro: Any) -> Any:
        dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), None)
        return loss(model, map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, micro))

    return cast


def _under_autocast(loss: Loss, dtype: torch.dtype) -> Loss:
    def under_autocast(model: nn.Module, micro: Any) -> Any:
        device = next((leaf.device.type for leaf in tree_leaves(micro) if isinstance(leaf, Tensor)), None)
        with torch.autocast(device, dtype=dtype) if device is not None else nullcontext():
            return loss(model, micro)

    return under_autocast
