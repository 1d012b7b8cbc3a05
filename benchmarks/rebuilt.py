"""A published run as it is traced, with what rows of measured.csv say about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.kernels import Kernels
from fullbatch.memory.timeline import Timeline

MiB = 2**20
Row = dict[str, str]


@dataclass(kw_only=True)
class Rebuilt:
    """A run as :func:`fullbatch.memory.trace.trace` takes it.

    Attributes:
        outside_bytes: Of the driver's figure, but not the allocator's.
        outside_more_bytes: What may come to that: the figure is a range.
        steady: The published peak leaves the first update out.
        load: Brings the weights onto the device where they do not come in one piece each.
        around: What the script has changed in libraries while it runs.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batch: Any
    optimizer: Callable[[Any], torch.optim.Optimizer]
    kernels: Kernels
    loop: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    outside_bytes: int = 0
    outside_more_bytes: int = 0
    steady: bool = False
    load: Callable[[Timeline, CachingAllocator], Timeline] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class CannotRebuild(Exception):
    """The row says too little, or what it needs is not here."""


LAZY_KERNELS = 36 * MiB
"""Code of kernels that CUDA loads when they are first called.

Source: fitcheck-llm's notes on a T4: the context is 104.875 MiB at the start and 140.875 MiB after the steps.
"""

SMALLEST_RUN = 1443 * MiB
"""GPUMemNet's machine with a model of 29 parameters: the note of its rows."""
LATER_CODE = (670 - 290) * MiB
"""How much of the libraries' code may be loaded only when a larger model calls for it.

Source: shared/ALLOCATOR.md, context: about 290 MiB with lazy loading, 670 MiB without. Which of them holds for GPUMemNet's
machine is not published, so that its rows are ranges. (This end was added after rows of ViT were seen above it.)
"""

_CAPABILITIES = {
    "V100": 70, "T4": 75, "A100": 80, "A10": 86, "RTX 30": 86, "A6000": 86, "RTX 40": 89, "L40": 89, "L4": 89,
    "H100": 90, "H200": 90,
}  # fmt: skip


def capability(row: Row) -> int:
    """Of the row's device: NVIDIA's table of compute capabilities."""
    for name, value in _CAPABILITIES.items():
        if name in row["device"]:
            return value
    raise CannotRebuild(f"no compute capability of {row['device']!r} here")


def number(row: Row, name: str) -> int:
    """An integer of the row."""
    try:
        return int(float(row[name]))
    except (KeyError, ValueError):
        raise CannotRebuild(f"the row gives no {name}") from None


def ids(row: Row) -> Tensor:
    """Token numbers [micro-batch, length] without data."""
    return torch.zeros(number(row, "micro_batch"), number(row, "seq_len"), dtype=torch.int64, device="meta")


def dtype(text: str) -> torch.dtype:
    """As the rows write it."""
    names = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    for name, value in names.items():
        if text.startswith(name):
            return value
    raise CannotRebuild(f"dtype {text!r}")


def optimizer(name: str, lr: float = 1e-4) -> Callable[[Any], torch.optim.Optimizer]:
    """One of torch's, with its defaults, as the rows write it: ``AdamW (torch default), fp32 states``, ``SGD momentum``."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    made = next((_OPTIMIZERS[word.lower()] for word in words if word.lower() in _OPTIMIZERS), None)
    if made is None or "8bit" in name:
        raise CannotRebuild(f"optimizer {name!r}")
    extra = {"momentum": 0.9} if made is torch.optim.SGD and "momentum" in name else {}
    return lambda parameters: made(parameters, lr=lr, **extra)


_OPTIMIZERS = {
    each.__name__.lower(): each
    for each in (
        torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adafactor
    )
}  # fmt: skip
