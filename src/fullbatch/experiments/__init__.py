"""Experiments: a task run at several sizes, or for real, with its figures."""

from fullbatch.experiments.schedule import SCALINGS, WARM_UP_SOURCE
from fullbatch.experiments.stretch import Growth, Stretch, StretchPoint, stretch
from fullbatch.experiments.sweep import Curve, Point, sweep
from fullbatch.experiments.train import HeldOut, Run, train
from fullbatch.tasks import named_optimizer

__all__ = [
    "SCALINGS",
    "WARM_UP_SOURCE",
    "Curve",
    "Growth",
    "HeldOut",
    "Point",
    "Run",
    "Stretch",
    "StretchPoint",
    "named_optimizer",
    "stretch",
    "sweep",
    "train",
]
