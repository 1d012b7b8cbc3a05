"""Modules whose output for a sample depends on the whole micro-batch."""

from __future__ import annotations

from torch import nn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def takes_batch_statistics(module: nn.Module) -> bool:
    """Whether ``module`` is a BatchNorm that normalises by the micro-batch's own statistics now."""
    return isinstance(module, _BATCH_NORMS) and (module.training or not module.track_running_stats)
