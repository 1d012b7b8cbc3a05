"""Gives operators on CPU-labelled fakes the form that they have on CUDA.

Composite operators choose their pieces by device. The ones below are overridden in torch's
dispatcher while a trace runs, below every Python wrapper, so that recomputation inside a backward
takes the same way. Each names the file of PyTorch's sources that it follows.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fullbatch.memory.onednn import lstm_with_workspace

aten = torch.ops.aten
_LOCK = threading.RLock()

Attention = str
"""``auto`` (what torch would choose), ``flash``, ``efficient`` or ``math``."""


@contextmanager
def cuda_forms(*, capability: int, attention: Attention = "auto") -> Iterator[None]:
    """Operators on CPU tensors take the way of a CUDA device of ``capability`` (75 for a T4)."""
    with _LOCK, _overriding() as override:
        override("dropout", _dropout)
        override("softmax.int", _softmax)
        override("log_softmax.int", _log_softmax)
        override("scaled_dot_product_attention", _Attention(capability, attention))
        for name, cast in _AUTOCAST_FLOAT32.items():
            override(name, _to_float32(cast), "AutocastCPU")
        yield


@contextmanager
def cpu_forms() -> Iterator[None]:
    """Operators on tensors without data have what the CPU gives them."""
    with _LOCK, _overriding() as override:
        override("mkldnn_rnn_layer", lstm_with_workspace, "Meta")
        yield


@contextmanager
def _overriding() -> Iterator[Callable[..., None]]:
    """Inside, ``override(name, function)`` puts ``function`` in the place of an operator of torch."""
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # overriding is the point
        library = torch.library.Library("aten", "IMPL")
        undo.callback(library._destroy)

        def override(name: str, function: Callable[..., Any], key: str = "AutogradCPU") -> None:
            library.impl(name, function, key, allow_override=True)

        yield override


def _dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """One fused kernel that keeps a mask of one byte an element (aten/src/ATen/native/Dropout.cpp)."""
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    kept: Tensor = aten.native_dropout.default(tensor, p, train)[0]
    return kept


def _softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _any_softmax(aten._softmax.default, tensor, dim, dtype)


def _log_softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _any_softmax(aten._log_softmax.default, tensor, dim, dtype)


def _any_softmax(kernel: Any, tensor: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    """From float16 to float32 in the kernel; bfloat16 is converted first (aten/src/ATen/native/SoftMax.cpp)."""
    fused = tensor.dtype is torch.float16 and dtype is torch.float32
    if dtype is not None and not fused:
        tensor = tensor.to(dtype)
    result: Tensor = kernel(tensor, dim, fused)
    return result


class _Attention:
    """``scaled_dot_product_attention`` by the kernels of a CUDA device.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (which kernel) and
    aten/src/ATen/native/transformers/attention.cpp (padding of the bias, the way through math).
    """

    def __init__(self, capability: int, wanted: Attention) -> None:
        self._capability, self._wanted = capability, wanted

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None and attn_mask.dtype is torch.bool:  # attention.cpp, convert_boolean_attn_mask
            attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
        kernel = self._kernel(query, key, value, attn_mask)
        if kernel == "flash":
            return self._flash(query, key, value, dropout_p, is_causal, scale)
        if kernel == "efficient":
            return self._efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> str:
        grouped = key.shape[-3] != query.shape[-3]
        flash = (
            self._capability >= 80
            and query.dim() == 4
            and query.dtype in (torch.float16, torch.bfloat16)
            and attn_mask is None
            and query.shape[-1] <= 256
            and query.shape[-1] == value.shape[-1]
        )
        efficient = query.dim() == 4 and not grouped and (query.dtype is not torch.bfloat16 or self._capability >= 80)
        if flash and self._wanted in ("auto", "flash"):
            return "flash"
        return "efficient" if efficient and self._wanted != "math" else "math"

    def _flash(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
    ) -> Tensor:
        width = query.shape[-1]
        short = -width % 8  # attention.cpp, pad_last_dim<8>
        scale = 1 / math.sqrt(width) if scale is None else scale
        if short:
            query, key, value = (torch.constant_pad_nd(part, [0, short]) for part in (query, key, value))
        out: Tensor = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :width] if short else out

    def _efficient(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        saves = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        if bias is not None:
            bias = _aligned(bias, query, key)
        out: Tensor = aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, saves, dropout_p, is_causal, scale=scale
        )[0]
        return out


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The bias with rows that start at multiples of 16 elements (attention.cpp, preprocess_mask: pad_bias<16>)."""
    length = bias.shape[-1]
    if short := -length % 16:
        bias = torch.constant_pad_nd(bias, [0, short])[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _math(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Product, softmax, product (attention.cpp, _scaled_dot_product_attention_math)."""
    if (groups := query.shape[-3] // key.shape[-3]) > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = torch.matmul(query * root, key.transpose(-2, -1) * root)
    if is_causal:
        above = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        bias = torch.where(above, 0.0, -math.inf).to(query.dtype)
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, -1)
    if dropout_p:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def _first(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.float() if isinstance(part, Tensor) and part.is_floating_point() else part for part in args)


# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE: what autocast runs in
# float32 on CUDA and leaves as it is on the CPU. A softmax with a dtype of its own keeps it.
_AUTOCAST_FLOAT32: dict[str, Any] = {
    "layer_norm": aten.layer_norm.default,
    "group_norm": aten.group_norm.default,
    "softmax.int": aten.softmax.int,
    "log_softmax.int": aten.log_softmax.int,
    "pow.Tensor_Scalar": aten.pow.Tensor_Scalar,
    "rsqrt": aten.rsqrt.default,
    "sum": aten.sum.default,
    "sum.dim_IntList": aten.sum.dim_IntList,
    "cumsum": aten.cumsum.default,
    "prod": aten.prod.default,
    "norm.Scalar": aten.norm.Scalar,
    "softplus": aten.softplus.default,
    "exp": aten.exp.default,
    "log": aten.log.default,
    "nll_loss": aten.nll_loss.default,
    "cosine_similarity": aten.cosine_similarity.default,
}


def _to_float32(function: Any) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return function(*_first(args), **kwargs)

    return cast


@contextmanager
def no_tracing_branches() -> Iterator[None]:
    """Branches that torch and transformers take only where tensors have no data are closed, on every device.

    ``linear`` adds its bias out of place to the product of a subclass's tensors; transformers builds full masks.
    """
    masking = sys.modules.get("transformers.masking_utils")
    before = getattr(masking, "is_tracing", None)
    with _LOCK, _overriding() as override:
        override("linear", _linear)
        if before is not None:
            masking.is_tracing = lambda *_: False  # type: ignore[union-attr]
        try:
            yield
        finally:
            if before is not None:
                masking.is_tracing = before  # type: ignore[union-attr]


def _linear(tensor: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The bias is added in place where there is no fused way (aten/src/ATen/native/Linear.cpp, linear)."""
    if bias is not None and tensor.dim() > 2 and not tensor.is_contiguous():
        return torch.matmul(tensor, weight.t()).add_(bias)
    result: Tensor = aten.linear.default._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, tensor, weight, bias)
    return result
