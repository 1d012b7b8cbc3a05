"""Experiments: a task run at several sizes, or for real, with its figures."""

from fullbatch.experiments.measured_stretch import MeasuredPoint, MeasuredStretch, measured_stretch
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
    "MeasuredPoint",
    "MeasuredStretch",
    "Point",
    "Run",
    "Stretch",
    "StretchPoint",
    "measured_stretch",
    "named_optimizer",
    "stretch",
    "sweep",
    "train",
]
