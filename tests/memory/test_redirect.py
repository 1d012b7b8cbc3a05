"""A task that names CUDA is traced like the same task that does not."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullbatch.memory.fake import FakeMode
from fullbatch.memory.kernels import Kernels
from fullbatch.memory.redirect import accelerators_are_here
from fullbatch.memory.trace import trace


class _Net(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.first, self.last, self.device = nn.Linear(64, 256), nn.Linear(256, 10), device

    def forward(self, x):
        hidden = checkpoint(self._middle, self.first(x), use_reentrant=False)
        return self.last(hidden)

    def _middle(self, x):  # runs again inside the backward
        noise = torch.zeros(x.shape, device=self.device)
        shift = torch.arange(256).to(self.device)
        return nn.functional.dropout((x + noise + shift).relu(), 0.1)


def _events(device, move):
    def loss(model, batch):
        x, y = move(batch["x"]), batch["y"].to(device, non_blocking=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            return nn.functional.cross_entropy(model(x), y) + torch.ones(3, device=torch.device(device)).sum()

    batch = {"x": torch.zeros(32, 64), "y": torch.zeros(32, dtype=torch.long)}
    timeline = trace(_Net(device), loss, batch, optimizer=torch.optim.AdamW, kernels=Kernels(capability=80))
    return timeline.stages, [(owner.part, owner.module, owner.operator) for owner in timeline.owners]


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.cuda(),
        lambda x: x.cuda(0, non_blocking=True),
        lambda x: x.to(0),
        lambda x: x.to("cuda:1"),
        lambda x: x.to(device=torch.device("cuda", 0), dtype=torch.float32),
    ],
)
def test_naming_cuda_changes_nothing(move):
    assert _events("cuda", move) == _events("cpu", lambda x: x)


def test_autocast_without_a_dtype_is_float16_as_on_cuda():
    with accelerators_are_here(), torch.autocast("cuda"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float16
    with accelerators_are_here(), torch.autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.tensor([1.0, 2.0], device="cuda:0"),
        lambda: torch.as_tensor(np.ones(3), device="cuda"),
        lambda: torch.zeros(3).new_ones(3, device="cuda"),
        lambda: torch.empty_like(torch.zeros(3), device=torch.device("cuda")),
        lambda: nn.Linear(2, 2).to("cuda").weight,
        lambda: nn.Linear(2, 2).cuda().weight,
        lambda: nn.Linear(2, 2, device="cuda").weight,
    ],
)
def test_what_is_made_on_cuda_is_with_the_rest(make):
    with accelerators_are_here(), FakeMode(allow_non_fake_inputs=True):
        assert make().device.type == "cpu"


def test_outside_all_is_as_it_was():
    names = [(torch.Tensor, "to"), (torch.Tensor, "cuda"), (torch, "as_tensor"), (torch.autocast, "__init__")]
    before = [getattr(*name) for name in names]
    with accelerators_are_here():
        assert all(getattr(*name) is not was for name, was in zip(names, before, strict=True))
    assert [getattr(*name) for name in names] == before
    assert not {"to", "cuda"} & set(vars(torch.Tensor))  # they come from its base again
