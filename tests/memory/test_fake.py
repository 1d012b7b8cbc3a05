"""The lean key to torch's cache of fakes changes no result; and it says when torch's internals moved."""

import inspect

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fullbatch.memory import trace as tracing
from fullbatch.memory.fake import FakeMode
from fullbatch.memory.kernels import Kernels


class _Odd(nn.Module):
    """Strides, offsets, dtypes, lists, scalars of both kinds: what a key must tell apart."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.conv = nn.Conv1d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):  # [N, 3, 12]
        y = self.linear(x) * 2 + self.linear(x.to(torch.bfloat16).float()) * 2.0
        y = torch.cat([y[:, 1:], y[:, :1]], 1)
        y = self.norm(self.conv(y.transpose(1, 2).contiguous().transpose(1, 2)))
        pieces = torch.split(y, [2, 4], 1)
        return sum(piece.flatten(1).softmax(-1).pow(2).sum() for piece in pieces) + y.to(torch.complex64).conj().abs().mean()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_the_record_is_the_same_as_with_torchs_own_key(monkeypatch, optimizer):
    def record():
        made = tracing.trace(
            _Odd(), lambda model, x: model(x), torch.zeros(5, 3, 12), optimizer=optimizer, micro_batches=2, kernels=Kernels()
        )
        return made.events, made.owners, made.stages

    FakeTensorMode.cache_clear()
    lean = record()
    FakeTensorMode.cache_clear()
    monkeypatch.setattr(tracing, "FakeMode", FakeTensorMode)
    assert lean == record()


def test_torch_still_asks_for_its_key_the_same_way():
    assert list(inspect.signature(FakeTensorMode._cache_key).parameters) == ["self", "state", "func", "args", "kwargs"]
    FakeTensorMode.cache_clear()
    with FakeMode() as mode:
        a = torch.zeros(3, 4)
        b = [torch.mm(a, a.t()) for _ in range(5)]
    assert all(one.shape == (3, 3) and one.fake_mode is mode for one in b)
    assert FakeTensorMode.cache_info().hits >= 4  # it is a key: equal calls are found again
