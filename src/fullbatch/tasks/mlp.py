"""Task ``mlp``: a small network learns the labels of another; one label in four is missing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fullbatch.accumulate import tokens
from fullbatch.tasks.task import Task

FEATURES, HIDDEN, CLASSES = 32, 64, 10
UNLABELLED = -100  # torch's default ignore_index of cross_entropy


def mlp() -> Task:
    """Samples ``x`` [n, 32] with ``labels`` [n] from a fixed random network; ragged items, as labels are missing."""
    model = nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        teacher = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).requires_grad_(False)

    def make_batch(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
        x = torch.randn(samples, FEATURES, generator=generator)
        labels = teacher(x).argmax(dim=1)
        missing = torch.rand(samples, generator=generator) < 0.25
        return {"x": x, "labels": labels.masked_fill(missing, UNLABELLED)}

    def loss(model: nn.Module, micro: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(model(micro["x"]), micro["labels"], ignore_index=UNLABELLED)

    return Task(name="mlp", model=model, loss=loss, make_batch=make_batch, items=tokens("labels"))
