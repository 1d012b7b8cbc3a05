"""What the CPU's kernels take beside their results: buffers that no dispatch shows.

Those of torch's own kernels follow from its sources; oneDNN is asked: see :mod:`fullbatch.memory.onednn`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullbatch.memory.onednn import scratch_bytes

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class CpuKernels:
    """The kernels of the CPU.

    Attributes:
        onednn: Ask oneDNN for what it takes.
    """

    onednn: bool = True

    def lasting(self, func: Any, args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
        """None: no library keeps memory that comes from torch's allocator."""
        return ()

    def temporaries(self, func: Any, args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
        """Buffers that the kernel of ``func`` takes and gives back."""
        if self.onednn and (size := scratch_bytes(func, args)):
            yield "oneDNN: copies and scratchpad", size
        if func is aten.convolution.default:
            image, weight, _, stride, padding, dilation, transposed, _, groups = args
            yield from _columns(image, weight, out, stride, padding, dilation, transposed, groups)
        elif func in _PROMOTING:
            yield from _promoted(args, out)
        elif func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            yield from _flash_buffers(args[0], args[1], forward=True)
        elif func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            yield from _flash_buffers(args[1], args[2], forward=False)
        elif func in (aten.mean.dim, aten.mean.default) and args[0].dtype in (torch.bfloat16, torch.float16):
            # aten/src/ATen/native/ReduceOps.cpp, mean_out: summed in float32
            yield "mean: operand and sum in float32", (args[0].numel() + out.numel()) * 4
        elif func is aten.convolution_backward.default:
            grad, image, weight, _, stride, padding, dilation, transposed, _, groups, _ = args
            yield from _columns(image, weight, grad, stride, padding, dilation, transposed, groups)


_PROMOTING = {
    packet.Tensor for packet in (aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_)
}  # fmt: skip


def _promoted(args: tuple[Any, ...], out: Tensor) -> Iterable[tuple[str, int]]:
    """Operands of another dtype than they are computed in are converted first; on CUDA the kernel does it.

    Source: aten/src/ATen/TensorIterator.cpp, compute_types. Scalars are read, not converted.
    """
    operands = [part for part in args if isinstance(part, Tensor)]
    if len(operands) < 2 or operands[0].dtype is operands[1].dtype:
        return
    dtype = torch.result_type(*operands)
    for operand in operands:
        if operand.dtype is not dtype and operand.dim():
            yield "operand in the dtype of the result", operand.numel() * dtype.itemsize


def _flash_buffers(query: Tensor, key: Tensor, forward: bool) -> Iterable[tuple[str, int]]:
    """A block of scores for each thread, in float32, and again in the dtype of the query where that is narrower.

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention and its backward: rows of scores in
    blocks of 256 from 768 queries on, 64 from 192, else 32; columns in blocks of 512.
    """
    length, width = query.shape[-2:]
    rows = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    block = rows * min(512, key.shape[-2])
    numbers = block + 2 * rows + rows * width if forward else 2 * block  # the backward has the scores' gradient too
    threads, size = torch.get_num_threads(), query.element_size()
    yield "attention: scores", threads * numbers * max(size, 4)
    if size < 4:
        yield "attention: scores in the query's dtype", threads * (block if forward else 2 * block) * size


def _columns(
    image: Tensor,
    weight: Tensor,
    result: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    groups: int,
) -> Iterable[tuple[str, int]]:
    """The image unfolded, in the forward and again in the backward (one at a time there).

    Source: aten/src/ATen/native/ConvolutionMM2d.cpp, compute_columns2d (a kernel of 1 x 1 needs no columns);
    aten/src/ATen/native/Convolution.cpp, use_mkldnn, for when that is not the way.
    """
    if torch.backends.mkldnn.enabled and image.dtype is not torch.float64:
        return
    if weight.dim() != 4 or transposed or groups != 1 or any(d != 1 for d in dilation):
        return
    height, width = weight.shape[2:]
    plain = all(s == 1 for s in stride) and all(p == 0 for p in padding)
    if height == width == 1 and plain:
        return
    yield (
        "convolution: columns",
        (image.shape[0] * weight[0].numel() * result.shape[2] * result.shape[3] * image.element_size()),
    )
