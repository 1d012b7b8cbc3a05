"""What CUDA's kernels take beside their results: buffers that no dispatch shows.

Each rule names the file of PyTorch's sources that it was read in (v2.10 unless said).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullbatch.memory.cudnn import CONVOLUTIONS, Workspace, convolution_buffers
from fullbatch.units import MiB

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The CUDA device whose kernels run.

    Attributes:
        capability: Compute capability times ten: 75 for a T4, 89 for a 4090, 90 for an H100.
        cublas_workspace_bytes: Of one handle; 0 where ``CUBLAS_WORKSPACE_CONFIG=:0:0``.
            Default: by capability.
        hip: The device is AMD's.
        convolution_workspace: The end of the range in which cuDNN's workspaces lie.
        cudnn_benchmark: cuDNN's algorithms are timed (``torch.backends.cudnn.benchmark``).
    """

    capability: int = 80
    cublas_workspace_bytes: int | None = None
    hip: bool = False
    convolution_workspace: Workspace = "least"
    cudnn_benchmark: bool = False

    @property
    def handle_workspace_bytes(self) -> int:
        """Workspace of one cuBLAS handle.

        Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB from
        Hopper on, ``:4096:2:16:8`` (KiB x buffers) before.
        """
        if self.cublas_workspace_bytes is not None:
            return self.cublas_workspace_bytes
        return 32 * MiB if self.capability >= 90 else (4096 * 2 + 16 * 8) * 1024

    def lasting(self, func: Any, args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
        """A cuBLAS handle is made for each thread at its first product; backward has a thread of its own."""
        if func in _CUBLAS and self.handle_workspace_bytes:
            backward = torch._C._current_autograd_node() is not None
            yield f"cuBLAS workspace ({'backward' if backward else 'forward'})", self.handle_workspace_bytes

    def temporaries(self, func: Any, args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
        """Buffers that the kernel of ``func`` takes and gives back."""
        if func in CONVOLUTIONS:
            return convolution_buffers(
                func, args, out,
                capability=self.capability, workspace="least" if self.hip else self.convolution_workspace,
                benchmark=self.cudnn_benchmark,
            )  # fmt: skip
        rule = _TEMPORARIES.get(func)
        return () if rule is None else rule(args, out)


_CUBLAS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default,
    aten.dot.default, aten.addbmm.default, aten._addmm_activation.default,
}  # fmt: skip

Rule = Callable[[tuple[Any, ...], Any], Iterable[tuple[str, int]]]
_TEMPORARIES: dict[Any, Rule] = {}


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        for function in functions:
            _TEMPORARIES[function] = rule
        return rule

    return enter


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@_rule(aten._softmax_backward_data.default)
def _softmax_backward(args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
    """The product of gradient and output, in the gradient's dtype (aten/src/ATen/native/cuda/SoftMax.cu)."""
    yield "softmax backward: gradient times output", _bytes(args[0])


@_rule(aten._scaled_dot_product_efficient_attention_backward.default)
def _efficient_backward(args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
    """``delta`` [B, H, M] and the accumulator of the query's gradient, both float32.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu and
    mem_eff_attention/kernel_backward.h, workspace_size: from sm70 on keys may be split, so a
    tile of 64 x 64 (and a lock of 16 bytes) is kept for each 64 queries and 64 columns.
    """
    query = args[1]  # [B, H, M, D]
    batch, heads, length, width = query.shape
    tiles = -(-length // 64) * -(-width // 64)
    yield "efficient attention backward: delta", batch * heads * length * 4
    yield "efficient attention backward: accumulator", batch * heads * tiles * (64 * 64 * 4 + 16)


@_rule(aten._scaled_dot_product_flash_attention_backward.default)
def _flash_backward(args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
    """The float32 accumulator of the query's gradient, the sum of the softmax, and expanded keys for grouped heads.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    query, key = args[1], args[2]  # [B, H, M, D]
    batch, heads, length, width = query.shape
    rounded_length = -(-length // 128) * 128
    rounded_width = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    yield "flash attention backward: accumulator", batch * rounded_length * heads * rounded_width * 4
    yield "flash attention backward: sum", batch * heads * rounded_length * 4
    if key.shape[1] != heads:
        for name in ("keys", "values"):
            size = batch * key.shape[2] * heads * width * query.element_size()
            yield f"flash attention backward: expanded {name}", size


@_rule(aten.embedding_dense_backward.default)
def _embedding_backward(args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
    """Sorted indices above 3,072 of them, and a float32 sum for each stretch of ten equal ones.

    Source: aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda, and
    EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel (NROWS_PER_THREAD = 10).
    """
    grad, indices, rows, padding_idx = args[:4]
    number = indices.numel()
    if number <= 3072 and padding_idx < 0:
        return
    width = grad.shape[-1]
    yield "embedding backward: sorted indices", 2 * _bytes(indices)
    segments = min(number, rows)
    partial = number // 10 + segments
    yield "embedding backward: segments", 4 * 8 * number
    yield "embedding backward: partial sums", partial * width * 4


@_rule(aten.native_group_norm.default)
def _group_norm(args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
    """Scale and shift of each channel of each sample, float32 (aten/src/ATen/native/cuda/group_norm_kernel.cu)."""
    weight, bias, samples, channels, pixels = args[1:6]
    if pixels > 1 and (weight is not None or bias is not None):
        for name in ("scale", "shift"):
            yield f"group norm: {name}", samples * channels * 4


@_rule(aten.native_group_norm_backward.default)
def _group_norm_backward(args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
    """Two sums and a factor of each channel, two of each group, float32 (the same file)."""
    weight, samples, channels, _, groups = args[4:9]
    for name in ("gradient times input", "gradient", *(["weight"] if weight is not None else [])):
        yield f"group norm backward: {name}", samples * channels * 4
    for name in ("input", "constant"):
        yield f"group norm backward: {name} of a group", samples * groups * 4
