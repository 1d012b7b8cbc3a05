"""Tasks: what to train."""

from fullbatch.tasks.load import BUILT_IN, NAMES, load
from fullbatch.tasks.optimizers import OPTIMIZERS, named_optimizer
from fullbatch.tasks.setup import Setup, apply
from fullbatch.tasks.task import Task

__all__ = ["BUILT_IN", "NAMES", "OPTIMIZERS", "Setup", "Task", "apply", "load", "named_optimizer"]
