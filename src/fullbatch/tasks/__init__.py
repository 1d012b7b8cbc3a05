"""Tasks: what to train."""

from fullbatch.tasks.load import BUILT_IN, load
from fullbatch.tasks.task import Task

__all__ = ["BUILT_IN", "Task", "load"]
