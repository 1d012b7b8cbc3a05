"""The errors that fullbatch raises on purpose.

FullbatchError
├── InvalidArgument (ValueError)   an argument breaks its rule
│   ├── DtypeNotSupported          a dtype that this torch cannot accumulate in
│   ├── BatchError                 a batch that cannot be split or counted
│   ├── LossError                  a loss that is not the mean it should be
│   ├── OptimizerError             an optimizer that does not belong to the model
│   ├── SnapshotError              a memory snapshot that cannot be read
│   └── TaskError                  a task that cannot be loaded or lacks a part
├── OutputError (OSError)          a file that cannot be written
└── HookedStep (RuntimeError)      an optimizer steps in the middle of a window
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class FullbatchError(Exception):
    """What went wrong, and after ``hint:`` something to paste or to change.

    Args:
        message: The argument as the user spelled it, the value received, the rule.
        hint: A fix; shown on a line of its own.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InvalidArgument(FullbatchError, ValueError):
    """An argument breaks its rule."""


class DtypeNotSupported(InvalidArgument):
    """A dtype that this torch cannot accumulate gradients in."""


class BatchError(InvalidArgument):
    """A batch that cannot be split or counted."""


class LossError(InvalidArgument):
    """A loss that is not the mean over items that it is taken for."""


class OptimizerError(InvalidArgument):
    """An optimizer that does not hold the model's parameters, or cannot take one step a window."""


class SnapshotError(InvalidArgument):
    """A memory snapshot that is damaged, hostile, or something else."""


class TaskError(InvalidArgument):
    """A task that cannot be loaded, or lacks a part."""


class OutputError(FullbatchError, OSError):
    """A file that cannot be written."""


def not_one_of(argument: str, value: object, options: Iterable[str]) -> InvalidArgument:
    """The error for ``value``, which is none of ``options``; its hint is the nearest of them."""
    names = list(options)
    near = difflib.get_close_matches(str(value), names, n=1)
    return InvalidArgument(
        f"{argument} {value}: must be one of {', '.join(names)}", hint=f"did you mean {near[0]}?" if near else None
    )


class HookedStep(FullbatchError, RuntimeError):
    """An optimizer steps in the middle of a window: in a backward hook, or in the loss."""


def check_max_grad_norm(max_grad_norm: Any) -> None:
    """A number above 0, or ``None``."""
    if max_grad_norm is None or (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
        return
    raise InvalidArgument(
        f"max_grad_norm={max_grad_norm!r} must be a number above 0",
        hint="leave it out for no clipping; max_grad_norm=math.inf measures the norm without clipping",
    )
