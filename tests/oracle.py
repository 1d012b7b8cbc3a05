"""The reference of the tests: plain autograd on the whole batch. It shares no code with fullbatch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

IGNORED = -100


def full_batch_grads(model, loss, batch):
    """Gradient of ``loss(model, batch)`` [number of parameters in all], the model left as it was."""
    model.zero_grad()
    loss(model, batch).backward()
    flat = flat_grads(model)
    model.zero_grad()
    return flat


def flat_grads(model):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def flat_params(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def relative_error(found, right):
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


class Recorder(torch.optim.SGD):
    """SGD that keeps the gradient of each step and steps with lr 0.1."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)
        self.model = model
        self.grads = []

    def step(self, closure=None):
        self.grads.append(flat_grads(self.model).clone())
        return super().step(closure)


class Tagger(nn.Module):
    """Token tagger [B, T] -> logits [B, T, 7], no dropout, with tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, ids):
        return torch.tanh(self.mix(self.embed(ids)).cumsum(dim=1)) @ self.embed.weight.T


def tagger(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return Tagger().to(dtype)


def token_loss(model, micro):
    return cross_entropy(model(micro["ids"]).flatten(0, 1), micro["labels"].flatten(), ignore_index=IGNORED)


def token_batch(samples, length=5, seed=0, masked=0.4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, (samples, length), generator=generator)
    labels = torch.randint(7, (samples, length), generator=generator)
    return {"ids": ids, "labels": labels.masked_fill(torch.rand(samples, length, generator=generator) < masked, IGNORED)}
