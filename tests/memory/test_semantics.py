"""On CPU-labelled fakes, operators ask for what their CUDA kernels ask for."""

import torch
from torch import nn

from fullbatch.memory.kernels import Kernels
from fullbatch.memory.trace import trace

SHAPE = (64, 1024)


def _sizes(function, x, kernels, operator):
    model = nn.Linear(SHAPE[1], SHAPE[1], bias=False)
    timeline = trace(model, lambda model, x: function(model(x)).sum(), x, optimizer=torch.optim.SGD, kernels=kernels, updates=1)
    return [event.size for event in timeline.events if event.size >= 0 and timeline.owners[event.block].operator == operator]


def test_dropout_keeps_a_mask_of_one_byte_an_element():
    sizes = _sizes(lambda y: torch.dropout(y, 0.1, True), torch.zeros(SHAPE), Kernels(), "aten.native_dropout")
    assert sorted(sizes) == [64 * 1024, 4 * 64 * 1024]


def test_each_thread_takes_one_cublas_workspace():
    for capability, size in ((75, 8_519_680), (90, 32 * 2**20)):
        kernels = Kernels(capability=capability)
        for direction in ("forward", "backward"):
            assert _sizes(lambda y: y, torch.zeros(SHAPE), kernels, f"cuBLAS workspace ({direction})") == [size]


def test_the_override_ends_with_the_trace():
    _sizes(lambda y: torch.dropout(y, 0.5, True), torch.zeros(SHAPE), Kernels(), "")
    out = torch.dropout(torch.ones(1000, requires_grad=True), 0.5, True)
    assert out.grad_fn.name() == "MulBackward0"
