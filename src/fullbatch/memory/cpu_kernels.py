"""What the CPU's kernels take beside their results: buffers that no dispatch shows.

oneDNN is left out: it chooses blocked layouts and scratchpads by the processor's instruction set, and no
source gives their sizes (convolutions, LSTMs, products in bfloat16). A trace agrees with a run to the byte
where ``torch.backends.mkldnn`` is off, and misses oneDNN's buffers where it is on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class CpuKernels:
    """The kernels of torch's own CPU backend."""

    def lasting(self, func: Any, args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
        """None: no library keeps memory that comes from torch's allocator."""
        return ()

    def temporaries(self, func: Any, args: tuple[Any, ...], out: Any) -> Iterable[tuple[str, int]]:
        """Buffers that the kernel of ``func`` takes and gives back."""
        if func is aten.convolution.default:
            image, weight, _, stride, padding, dilation, transposed, _, groups = args
            yield from _columns(image, weight, out, stride, padding, dilation, transposed, groups)
        elif func is aten.convolution_backward.default:
            grad, image, weight, _, stride, padding, dilation, transposed, _, groups, _ = args
            yield from _columns(image, weight, grad, stride, padding, dilation, transposed, groups)


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
