"""Random numbers that are as before afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def same_rng_after(model: nn.Module) -> Iterator[None]:
    """The generators of the CPU and of ``model``'s devices are afterwards as they were before."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng([device for device in devices if device.type == kind], device_type=kind):
        yield
