"""What oneDNN takes on the CPU, asked of the library itself.

oneDNN chooses layouts, workspaces and scratchpads by the processor's instruction set, so that no rule gives their
sizes. Each kind of kernel in a trace that it computes is run once by itself, on zeros of the same shapes, and its
memory events are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullbatch.memory.events import live_bytes, profiled
from fullbatch.torch_private import storage_key, tree_leaves, tree_map

aten = torch.ops.aten

_ALWAYS = {
    aten.convolution.default, aten.convolution_backward.default,
    aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default,
}  # fmt: skip
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_NARROW = (torch.bfloat16, torch.float16)

_asked: ContextVar[bool] = ContextVar("oneDNN is asked", default=True)
_known: dict[Any, _Answer] = {}


class _Like(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    numel: int  # of its storage
    offset: int


@dataclass(frozen=True)
class _Answer:
    """What one run of a kernel showed: bytes that it held beside its results, and the results themselves."""

    scratch_bytes: int
    results: Any


@contextmanager
def not_asked() -> Iterator[None]:
    """Inside, oneDNN's buffers are left out of a trace."""
    token = _asked.set(False)
    try:
        yield
    finally:
        _asked.reset(token)


def scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Most bytes that the kernel of ``func`` holds beside its results; 0 where oneDNN does not compute it.

    Args:
        func: The operator.
        args: Its arguments, of which only shapes, strides and dtypes matter.
    """
    if not torch.backends.mkldnn.enabled or not _asked.get():
        return 0
    if func in _ALWAYS or (func in _PRODUCTS and args[0].dtype in _NARROW):
        return _ask(func, args).scratch_bytes
    return 0


def lstm_with_workspace(*args: Any) -> tuple[Tensor, ...]:
    """``mkldnn_rnn_layer`` on tensors without data: its workspace, which torch's own form leaves empty, has its size."""
    made = []
    for like in _ask(aten.mkldnn_rnn_layer.default, args).results:
        if like is None:  # no workspace where there is no backward
            made.append(torch.empty(0, device="meta"))
        else:
            made.append(torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta"))
    return tuple(made)


def _ask(func: Any, args: tuple[Any, ...]) -> _Answer:
    likes = tree_map(lambda part: _like(part) if isinstance(part, Tensor) else part, args)
    grad = torch.is_grad_enabled()  # an LSTM keeps a workspace then
    key = func, repr(likes), grad, torch.get_num_threads()
    if key not in _known:
        if not _known:
            with profiled():  # the profiler wants to begin in the main thread
                pass
        with ThreadPoolExecutor(1) as other:  # where no mode of a trace is on
            _known[key] = other.submit(_run, func, likes, grad).result()
    return _known[key]


def _like(tensor: Tensor) -> _Like:
    numel = tensor.untyped_storage().nbytes() // tensor.element_size()
    return _Like(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, numel, int(tensor.storage_offset()))


def _run(func: Callable[..., Any], likes: Any, grad: bool) -> _Answer:
    def zeros(like: Any) -> Any:
        if not isinstance(like, _Like):
            return like
        return torch.zeros(like.numel, dtype=like.dtype).as_strided(like.shape, like.stride, like.offset)

    args = tree_map(zeros, likes, is_leaf=lambda part: isinstance(part, _Like))
    with torch.set_grad_enabled(grad), profiled() as profiler:
        results = func(*args)
    live = [bytes_ for bytes_, _ in live_bytes(profiler)]
    kept = sum({storage_key(part.untyped_storage()): part.untyped_storage().nbytes() for part in _tensors(results)}.values())
    return _Answer(max(live) - kept, tree_map(lambda part: _like(part) if isinstance(part, Tensor) else part, results))


def _tensors(results: Any) -> list[Tensor]:
    return [part for part in tree_leaves(results) if isinstance(part, Tensor)]
