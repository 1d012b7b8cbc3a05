"""Runs a training loop on tensors without data, and records what it asks of the allocator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from fullbatch.memory.kernels import Kernels
from fullbatch.memory.recorder import Recorder
from fullbatch.memory.semantics import cuda_forms
from fullbatch.memory.timeline import Timeline

OutputsLive = Literal["loss", "micro-batch", "update", "next"]
ZeroGrad = Literal["after the update", "before the forward"]


def trace(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    micro_batches: int = 1,
    updates: int = 2,
    kernels: Kernels | None = None,
    attention: str = "auto",
    foreach: bool | None = None,
    fused: bool | None = None,
    zero_grad: ZeroGrad = "after the update",
    zero_grad_keep: bool = False,
    outputs_live: OutputsLive = "micro-batch",
    max_grad_norm: float | None = None,
) -> Timeline:
    """Record ``updates`` updates of ``micro_batches`` micro-batches each.

    Args:
        model: Its tensors may be real or on the meta device; it is not changed.
        loss: ``loss(model, micro)``: a scalar tensor or a dict of them.
        batch: One micro-batch.
        optimizer: Makes the optimizer from the parameters that require a gradient.
        micro_batches: Micro-batches of a window.
        updates: From the second on the optimizer's state is there from the start.
        kernels: The CUDA device. ``None``: the CPU's own kernels.
        attention: ``auto`` (what torch would choose), ``flash``, ``efficient`` or ``math``.
        foreach: The optimizer's foreach kernels; ``None``: as on CUDA, where ``kernels`` is given.
        fused: The optimizer's fused kernel.
        outputs_live: How long a variable of the loop holds what the model returned: ``loss``, until the loss
            is there; ``micro-batch``, until its backward is done; ``update``; or ``next``, until the next
            forward returns (``outputs = model(...)`` in a plain loop).
        zero_grad: Where gradients are released.
        zero_grad_keep: Set them to zero in place instead of releasing them.
        max_grad_norm: Clip the gradient's norm to this before the step.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    cuda = kernels is not None
    copied, micro = fake_copy(model, fake), fake_batch(batch, fake)
    recorder = Recorder(
        kernels.temporaries if kernels is not None else _nothing, kernels.lasting if kernels is not None else _nothing
    )
    with ExitStack() as stack:
        if kernels is not None:
            stack.enter_context(cuda_forms(capability=kernels.capability, attention=attention))
        stack.enter_context(_fresh_autocast())
        stack.enter_context(fake)
        stack.enter_context(recorder)
        stack.enter_context(recorder.naming(copied))
        kept: list[Any] = []
        if outputs_live != "loss":
            copied.register_forward_hook(lambda _, __, output: kept.__setitem__(slice(None), [output]))
        recorder.stage("model")
        recorder.hold(_named_tensors(copied), "weights", "parameter")
        recorder.stage("batch")
        recorder.hold((("", tensor) for tensor in _tensors(micro)), "batch", "batch")
        parameters = [parameter for parameter in copied.parameters() if parameter.requires_grad]
        chosen = optimizer(parameters)
        _choose_kernels(chosen, True if cuda and foreach is None else foreach, fused)
        for update in range(1, updates + 1):
            for number in range(1, micro_batches + 1):
                recorder.stage("forward", update, number)
                if number == 1 and zero_grad == "before the forward":
                    chosen.zero_grad(set_to_none=not zero_grad_keep)
                value = loss(copied, micro)
                total: Any = sum(value.values()) if isinstance(value, dict) else value
                recorder.stage("backward", update, number)
                (total if micro_batches == 1 else total / micro_batches).backward()
                del value, total
                if outputs_live == "micro-batch":
                    kept.clear()
                recorder.mark((p.grad for p in parameters), "gradients")
            recorder.stage("update", update)
            if max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, max_grad_norm, foreach=cuda or None)
            chosen.step()
            recorder.mark(_state(chosen), "optimizer state")
            recorder.on_host(_host_state(chosen))
            if zero_grad == "after the update":
                chosen.zero_grad(set_to_none=not zero_grad_keep)
            if outputs_live == "update":
                kept.clear()
        return recorder.finish()


def fake_copy(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """``model`` with every tensor replaced by one without data, on the CPU in name; shared tensors stay shared."""
    memo: dict[int, Any] = {}
    bases: dict[int, Tensor] = {}
    with fake:
        for _, tensor in _named_tensors(model):
            if id(tensor) in memo:
                continue
            made = _fake(tensor, bases)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
        return copy.deepcopy(model, memo)


def fake_batch(batch: Any, fake: FakeTensorMode) -> Any:
    """``batch`` with every tensor replaced by one without data."""
    bases: dict[int, Tensor] = {}
    with fake:
        return tree_map(lambda part: _fake(part, bases) if isinstance(part, Tensor) else part, batch)


def _fake(tensor: Tensor, bases: dict[int, Tensor]) -> Tensor:
    """A fake of ``tensor``; views of one storage become views of one fake."""
    if tensor.is_meta:  # the storage of a meta tensor tells nothing of sharing
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    storage = tensor.untyped_storage()
    base = bases.get(storage._cdata)
    if base is None or base.dtype is not tensor.dtype:
        base = torch.empty(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype, device="cpu")
        bases[storage._cdata] = base
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                yield name, tensor


def _tensors(batch: Any) -> list[Tensor]:
    return [part for part in tree_leaves(batch) if isinstance(part, Tensor)]


def _choose_kernels(optimizer: torch.optim.Optimizer, foreach: bool | None, fused: bool | None) -> None:
    """On CUDA an optimizer takes foreach kernels by itself (torch/optim/optimizer.py, _default_to_fused_or_foreach)."""
    for group in optimizer.param_groups:
        if fused and "fused" in group:
            group["fused"], group["foreach"] = True, False
        elif "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = foreach


def _state(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values()]


def _host_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Step counters, which stay on the host unless the kernel is fused or capturable."""
    counters = []
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            continue
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor):
                counters.append(step)
    return counters


@contextmanager
def _fresh_autocast() -> Iterator[None]:
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _nothing(func: Any, args: Any, out: Any) -> tuple[()]:
    return ()
