"""How a figure was obtained, and with what."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Literal

import torch

from fullbatch.device import describe
from fullbatch.version import __version__

How = Literal["measured", "predicted", "published", "claimed"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The origin of a set of figures.

    Attributes:
        how: ``measured`` here, ``predicted`` by a model, ``published`` with its set-up, or
            ``claimed`` without one.
        device: What it ran on, in words.
        versions: Version of each piece of software that takes part.
        command: What to run to obtain it again; empty for a call from Python.
    """

    how: How
    device: str
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.how} on {self.device}, {versions}"


def measured(device: torch.device, command: str = "") -> Evidence:
    """Evidence for figures measured in this process on ``device``."""
    return Evidence(how="measured", device=describe(device), versions=_versions(), command=command)


def predicted(device: str, command: str = "") -> Evidence:
    """Evidence for figures that a model of ``device`` gave."""
    return Evidence(how="predicted", device=device, versions=_versions(), command=command)


def _versions() -> dict[str, str]:
    return {"fullbatch": __version__, "torch": torch.__version__, "python": platform.python_version()}
