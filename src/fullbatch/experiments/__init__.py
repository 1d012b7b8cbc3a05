"""Experiments: a task run at several sizes, or for real, with its figures."""

from fullbatch.experiments.optimizers import named_optimizer
from fullbatch.experiments.schedule import SCALINGS, WARM_UP_SOURCE
from fullbatch.experiments.sweep import Curve, Point, sweep
from fullbatch.experiments.train import HeldOut, Run, train

__all__ = ["SCALINGS", "WARM_UP_SOURCE", "Curve", "HeldOut", "Point", "Run", "named_optimizer", "sweep", "train"]
