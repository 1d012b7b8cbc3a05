"""A convolution's buffers on CUDA are what arithmetic on its three operands says."""

import pytest
import torch
from torch import nn

from fullbatch.memory.cudnn import WORKSPACE
from fullbatch.memory.kernels import Kernels
from fullbatch.memory.trace import trace

N, C, K, SIDE = 4, 16, 32, 32
MAP = SIDE * SIDE  # elements of a channel of one image


def _buffers(model, x, *, backward=False, **kernels):
    """(operator, bytes) of the buffers that convolutions took in the forward or in the backward."""
    timeline = trace(
        model,
        lambda model, x: model(x).square().sum(),
        x,
        optimizer=torch.optim.SGD,
        updates=1,
        kernels=Kernels(**{"convolution_workspace": "most", **kernels}),
    )
    (stage,) = (one for one in timeline.stages if one.name == ("backward" if backward else "forward"))
    return [
        (timeline.owners[event.block].operator, event.size)
        for event in timeline.events[stage.start : stage.end]
        if event.size > 0 and timeline.owners[event.block].operator.startswith(("cuDNN", "convolution:"))
    ]


def _x(dtype=torch.float32, channels=C):
    return torch.zeros(N, channels, SIDE, SIDE, dtype=dtype)


COPIES = (N * C * MAP + N * K * MAP + C * K) * 4
WINOGRAD = ((N * C + N * K) * (SIDE // 4) ** 2 + C * K) * 36 * 4


@pytest.mark.parametrize("backward", [False, True])
def test_tensor_cores_want_all_three_operands_with_channels_last(backward):
    assert _buffers(nn.Conv2d(C, K, 1), _x(), backward=backward) == [(WORKSPACE, COPIES)]


def test_at_the_lower_end_there_is_no_workspace():
    assert _buffers(nn.Conv2d(C, K, 1), _x(), convolution_workspace="least") == []


def test_miopen_is_not_cudnn():
    assert _buffers(nn.Conv2d(C, K, 1), _x(), hip=True) == []


def test_float32_has_no_tensor_cores_before_ampere_and_half_precision_has():
    assert _buffers(nn.Conv2d(C, K, 1), _x(), capability=75) == []
    half = _buffers(nn.Conv2d(C, K, 1).half(), _x(torch.float16), capability=75)
    assert half == [(WORKSPACE, (N * C + N * K) * MAP * 2 + C * K * 4)]  # the weight's gradient is summed in float32


def test_channels_are_padded_to_sixteen_bytes():
    (found,) = _buffers(nn.Conv2d(3, K, 1), _x(channels=3))
    assert found == (WORKSPACE, (N * 4 * MAP + N * K * MAP + 4 * K) * 4)


def test_a_kernel_of_3_by_3_may_be_transformed_in_tiles_of_6_by_6_for_4_by_4_results():
    assert _buffers(nn.Conv2d(C, K, 3, padding=1), _x(), capability=75) == [(WORKSPACE, WINOGRAD)]
    assert _buffers(nn.Conv2d(C, K, 3, padding=1, stride=2), _x(), capability=75) == []


def test_timed_algorithms_may_hold_spectra():
    # maps of 34 x 34 with their padding are transformed as 64 x 64, and half of the complex numbers is kept
    whole = (N * C + N * K + C * K) * 64 * 33 * 8
    assert _buffers(nn.Conv2d(C, K, 3, padding=1), _x(), cudnn_benchmark=True) == [(WORKSPACE, whole)]


def test_depthwise_convolutions_have_a_kernel_of_torchs_own_unless_channels_come_last():
    model, x = nn.Conv2d(C, C, 1, groups=C), _x()
    assert _buffers(model, x) == []
    assert _buffers(model, x.to(memory_format=torch.channels_last))[0][0] == WORKSPACE


def test_with_channels_last_only_torchs_own_copy_of_the_weight_is_left():
    found = _buffers(nn.Conv2d(C, K, 3, stride=2), _x().to(memory_format=torch.channels_last))
    assert found == [("convolution: contiguous weight", C * K * 9 * 4)]


def test_a_gradient_that_is_a_part_of_another_is_copied_at_either_end():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Conv2d(C, K, 1), nn.Conv2d(C, K, 1)

        def forward(self, x):
            return torch.cat([self.left(x), self.right(x)], 1)

    found = _buffers(Beside(), _x(), backward=True, convolution_workspace="least")
    assert found == [("convolution: contiguous gradient", N * K * MAP * 4)] * 2


def test_a_transposed_convolution_has_the_same_operands_as_the_one_that_it_turns_around():
    forth, back = nn.Conv2d(C, K, 2, stride=2), nn.ConvTranspose2d(K, C, 2, stride=2)
    small = torch.zeros(N, K, SIDE // 2, SIDE // 2)
    assert _buffers(forth, _x()) == _buffers(back, small) == [(WORKSPACE, (N * C * MAP + N * K * MAP // 4 + C * K * 4) * 4)]


@pytest.mark.parametrize(("conv", "shape"), [(nn.Conv1d, (N, C, 8)), (nn.Conv3d, (N, C, 8, 8, 8))])
def test_one_and_three_dimensions_are_taken_too(conv, shape):
    x = torch.zeros(shape)
    assert _buffers(conv(C, K, 1), x) == [(WORKSPACE, (x.numel() * (C + K) // C + C * K) * 4)]
