"""One face for the devices that torch knows."""

from __future__ import annotations

import platform

import torch

from fullbatch.errors import InvalidArgument


def pick(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is the accelerator that torch finds, or the CPU.

    Raises:
        InvalidArgument: This torch has no such device.
    """
    if name == "auto":
        accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
        if accelerator is not None and accelerator.is_available():
            return torch.device(accelerator.current_accelerator())
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # meta has no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidArgument(
            f"device={name!r} cannot be used: {str(error).splitlines()[0]}", hint="device='cpu', or 'auto' for what is there"
        ) from None
    return device


def describe(device: torch.device) -> str:
    """``device`` in words: its name and, for the CPU, the number of threads that torch uses."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({platform.machine()}, {threads} thread{'s' if threads != 1 else ''})"
    return str(device)
