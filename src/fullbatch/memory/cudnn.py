"""What a convolution takes on CUDA beside its result.

Copies that torch makes are certain. The workspace depends on the algorithm, which cuDNN chooses by heuristics that
are not public: what is known is which algorithms there are and what each has to hold. Hence a range, from none at
all (implicit matrix product) to the most that one of them holds.

Sources: aten/src/ATen/native/cudnn/Conv_v8.cpp (v2.10): the workspace of the chosen plan comes from the caching
allocator for the time of the call; the plan is the first of cuDNN's list that runs, and where its workspace finds no
memory the next one is tried. With ``cudnn.benchmark`` all plans are timed in one workspace that holds the largest.
docs.nvidia.com/deeplearning/cudnn, Legacy API, "Data and Filter Formats": padding, folding and NCHW-to-NHWC
transformations are used to call the Tensor Cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten

Workspace = Literal["least", "most"]
"""An end of the range: no workspace, or the largest."""

WORKSPACE = "cuDNN workspace"
"""Operator that owns what only the upper end of the range has."""

CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}

_WINOGRAD = {3: (6, 4), 5: (9, 5)}
"""Side of the kernel: sides of a transformed tile and of its part of the result.

Source: names of cuDNN's kernels, winogradForwardData4x4 and winogradForwardData9x9_5x5; a tile of m results under
a kernel of r needs m + r - 1 inputs a side (arXiv 1509.09308).
"""
_FFT_TILE = 32  # CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING: tiles of 32 x 32
_FFT_SIDE = 256  # CUDNN_CONVOLUTION_FWD_ALGO_FFT: maps of at most 256 a side with their padding


class _Convolution(NamedTuple):
    """``small`` [N, K, ...] comes from ``large`` [N, C, ...] where no convolution is transposed; else the other way."""

    large: Tensor
    weight: Tensor
    small: Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    channels_last: bool


def convolution_buffers(
    func: Any, args: tuple[Any, ...], out: Any, *, capability: int, workspace: Workspace, benchmark: bool
) -> Iterable[tuple[str, int]]:
    """Buffers of one call of ``aten.convolution`` or ``aten.convolution_backward``.

    Args:
        func: Which of the two.
        args: Its arguments.
        out: Its result.
        capability: Compute capability times ten.
        workspace: End of the range.
        benchmark: cuDNN's algorithms are timed (``torch.backends.cudnn.benchmark``).
    """
    backward = func is aten.convolution_backward.default
    grad, image, weight = args[:3] if backward else (None, *args[:2])
    stride, padding, dilation, transposed, _, groups = args[4:10] if backward else args[3:9]
    layout = torch.contiguous_format
    for tensor in (image, weight):
        if tensor.dim() >= 4 and (suggested := suggest_memory_format(tensor)) is not torch.contiguous_format:
            layout = suggested
    # aten/src/ATen/native/Convolution.cpp, _convolution and convolution_backward; cudnn/ConvShared.cpp
    for name, tensor in (("input", image), ("gradient", grad), ("weight", weight)):
        if tensor is not None and not tensor.is_contiguous(memory_format=layout):
            yield f"convolution: contiguous {name}", tensor.numel() * tensor.element_size()
    large, small = (image, grad if backward else out)[:: -1 if transposed else 1]
    one = _Convolution(large, weight, small, stride, padding, dilation, groups, layout is not torch.contiguous_format)
    if workspace == "most" and _with_cudnn(one, transposed) and (size := _most(one, capability, benchmark)):
        yield WORKSPACE, size


def _with_cudnn(one: _Convolution, transposed: bool) -> bool:
    """Depthwise convolutions have a kernel of torch's own, unless channels come last or, for some shapes, in float16.

    Source: aten/src/ATen/native/Convolution.cpp, use_cudnn_depthwise.
    """
    channels = one.large.shape[1]
    depthwise = not transposed and 1 < one.groups == channels and one.weight.shape[0] % channels == 0
    return not depthwise or one.channels_last or (one.large.dtype is torch.float16 and channels >= 32)


def _most(one: _Convolution, capability: int, benchmark: bool) -> int:
    """Most bytes that one of the algorithms holds; the forward and both gradients have the same three operands."""
    sizes = [_copies(one, capability), _winograd(one)]
    if benchmark:
        sizes += [_fft(one), _fft_tiles(one)]
    return max(sizes)


def _copies(one: _Convolution, capability: int) -> int:
    """All three operands in the layout of the kernel, with channels in multiples of 16 bytes.

    Tensor Cores want channels last (float32 as TF32 from capability 8.0 on, half precision from 7.0), other kernels
    want them first; grouped ones exist in either. The weight's gradient is summed in float32.
    """
    large, weight, small = one.large, one.weight, one.small
    tensor_cores = capability >= (70 if large.dtype is torch.float16 else 80)
    unit = max(1, 16 // large.element_size())
    short = (large.shape[1] // one.groups) % unit or (small.shape[1] // one.groups) % unit
    if one.groups == 1 and tensor_cores == one.channels_last and not (tensor_cores and short):
        return 0
    padded = [_padded(tensor, unit) for tensor in (large, small)]
    return sum(padded) * large.element_size() + _padded(weight, unit) * max(4, weight.element_size())


def _padded(tensor: Tensor, unit: int) -> int:
    """Elements of ``tensor`` with its channels in multiples of ``unit``."""
    channels = tensor.shape[1]
    return tensor.numel() // max(channels, 1) * (-(-channels // unit) * unit)


def _winograd(one: _Convolution) -> int:
    """Input, weight and result in the transformed domain (``WINOGRAD_NONFUSED``): kernels of 3 x 3 or 5 x 5, stride 1."""
    side = one.weight.shape[-1]
    if not _plain(one) or side not in _WINOGRAD or one.weight.shape[-2] != side:
        return 0
    tile, part = _WINOGRAD[side]
    tiles = math.prod(-(-length // part) for length in one.small.shape[2:])
    return _operands(one, tiles, 1) * tile**2 * one.large.element_size()


def _fft(one: _Convolution) -> int:
    """Spectra of whole maps and of kernels (``FFT``), in a power of two a side; complex numbers, half of them kept."""
    reach = max((length + 2 * pad for length, pad in zip(one.large.shape[2:], one.padding, strict=False)), default=0)
    if not _plain(one) or reach > _FFT_SIDE:
        return 0
    side = 1 << max(4, (reach - 1).bit_length())  # the smallest of cuDNN's kernels is fft2d_r2c_16x16
    return _operands(one, 1, 1) * side * (side // 2 + 1) * 8


def _fft_tiles(one: _Convolution) -> int:
    """Spectra of overlapping tiles and of kernels (``FFT_TILING``)."""
    if not _plain(one) or max(one.weight.shape[2:]) > _FFT_TILE:
        return 0
    results = zip(one.small.shape[2:], one.weight.shape[2:], strict=True)
    tiles = math.prod(-(-length // (_FFT_TILE - kernel + 1)) for length, kernel in results)
    return _operands(one, tiles, 1) * _FFT_TILE * (_FFT_TILE // 2 + 1) * 8


def _operands(one: _Convolution, tiles: int, kernels: int) -> int:
    """Maps of all three operands: each image channel has ``tiles`` of them, each kernel ``kernels``."""
    samples, channels, results = one.large.shape[0], one.large.shape[1], one.small.shape[1]
    return samples * (channels + results) * tiles + channels * results * kernels


def _plain(one: _Convolution) -> bool:
    """In two dimensions, with stride 1, dense and in one group; kernels of 1 x 1 have nothing to transform."""
    return (
        one.large.dim() == 4
        and one.groups == 1
        and all(step == 1 for step in (*one.stride, *one.dilation))
        and max(one.weight.shape[2:]) > 1
    )
