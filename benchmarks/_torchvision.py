"""Imported before transformers, which imports torchvision: one made for another torch needs help (tasks/vision.py)."""

from contextlib import suppress

from fullbatch.errors import TaskError
from fullbatch.tasks.vision import _models

with suppress(TaskError):  # it is not installed: rows of convolution nets say so
    _models("resnet50")
