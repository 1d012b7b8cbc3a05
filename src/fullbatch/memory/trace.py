"""Runs a training loop on tensors without data, and records what it asks of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.memory.cpu_kernels import CpuKernels
from fullbatch.memory.fake import FakeMode, fake_batch, fake_copy
from fullbatch.memory.kernels import Kernels
from fullbatch.memory.loop import Loop, OutputsLive, ZeroGrad, named_tensors, tensors
from fullbatch.memory.recorder import Recorder
from fullbatch.memory.redirect import accelerators_are_here
from fullbatch.memory.semantics import cpu_forms, cuda_forms, no_tracing_branches
from fullbatch.memory.timeline import Timeline


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
    fake = FakeMode(allow_non_fake_inputs=True)
    cuda = kernels is not None
    loop = Loop(
        loss=loss,
        optimizer=optimizer,
        micro_batches=micro_batches,
        updates=updates,
        foreach=True if cuda and foreach is None else foreach,
        fused=fused,
        clip_foreach=cuda or None,
        zero_grad=zero_grad,
        zero_grad_keep=zero_grad_keep,
        outputs_live=outputs_live,
        max_grad_norm=max_grad_norm,
    )
    copied, micro = fake_copy(model, fake), fake_batch(batch, fake)
    buffers = kernels if kernels is not None else CpuKernels()
    recorder = Recorder(buffers.temporaries, buffers.lasting)
    with ExitStack() as stack:
        if kernels is not None:
            stack.enter_context(cuda_forms(capability=kernels.capability, attention=attention))
            stack.enter_context(accelerators_are_here())
        else:
            stack.enter_context(cpu_forms())
        stack.enter_context(no_tracing_branches())
        stack.enter_context(_fresh_autocast())
        stack.enter_context(fake)
        stack.enter_context(recorder)
        stack.enter_context(recorder.naming(copied))
        recorder.stage("model")
        recorder.hold(named_tensors(copied), "weights", "parameter")
        recorder.stage("batch")
        recorder.hold((("", tensor) for tensor in tensors(micro)), "batch", "batch")
        alive = loop.run(copied, micro, _Parts(recorder, copied))
        timeline = recorder.finish()
        del alive
        return timeline


class _Parts:
    """Tells the recorder of a loop what is a gradient and what an optimizer's state, and of which module."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder = recorder
        self._modules = {id(tensor): name for name, tensor in reversed([*named_tensors(model)])}
        self.stage = recorder.stage

    def after_backward(self, parameters: Iterable[Tensor]) -> None:
        self._recorder.mark(((self._module(parameter), parameter.grad) for parameter in parameters), "gradients")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        states = ((self._module(parameter), state) for parameter, state in optimizer.state.items())
        self._recorder.mark(((module, value) for module, state in states for value in state.values()), "optimizer state")
        self._recorder.on_host(_host_state(optimizer))

    def _module(self, parameter: Any) -> str:
        return self._modules.get(id(parameter), "")


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
