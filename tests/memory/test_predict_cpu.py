"""The prediction for a limited device on the CPU: a run under that limit holds what it says, and fails where it says."""

import copy

import pytest
import torch
from cpu_models import case, without_onednn

from fullbatch.memory import limit, predict_cpu
from fullbatch.memory.allocator import SMALL_SEGMENT
from fullbatch.memory.limit import OutOfMemoryError
from fullbatch.memory.loop import Loop


class Nobody:
    """Watches a loop without a word."""

    def stage(self, name, update=0, micro_batch=0):
        pass

    def after_backward(self, parameters):
        pass

    def after_step(self, optimizer):
        pass


def under(size, arguments, settings):
    """A device of ``size`` bytes after a run on it."""
    model, loss, batch = copy.deepcopy(arguments)
    with without_onednn(), limit(size, device="cpu", holding=(model, batch)) as device:
        Loop(loss=loss, **settings).run(model, batch, Nobody())
    return device


@pytest.mark.parametrize("variant", ["plain", "accumulated", "checkpointed", "sgd"])
@pytest.mark.parametrize("name", ["mlp", "text", "lstm"])
def test_a_run_under_a_limit_reserves_what_is_predicted(name, variant):
    arguments, settings = case(name, variant)
    (model, loss, batch) = arguments
    with without_onednn():
        predicted = predict_cpu(model, loss, batch, **settings)
    assert predicted.failure is None
    device = under("1GiB", arguments, settings)
    assert predicted.peak_allocated_bytes == pytest.approx(device.peak_allocated_bytes, rel=0.01)
    # An optimizer's step counters, which live on the host on CUDA, may need one segment of the small pool more.
    assert 0 <= device.peak_reserved_bytes - predicted.peak_reserved_bytes <= SMALL_SEGMENT


@pytest.mark.parametrize("name", ["mlp", "text", "lstm"])
def test_on_a_device_between_two_predictions_the_larger_fails_and_the_smaller_runs(name):
    (model, loss, batch), settings = case(name, "sgd")
    parts = (batch[:64], batch) if torch.is_tensor(batch) else (tuple(part[:1] for part in batch), batch)
    with without_onednn():
        peaks = [predict_cpu(model, loss, part, **settings).peak_reserved_bytes for part in parts]
        assert peaks[0] < peaks[1]
        size = sum(peaks) // 2
        failure = predict_cpu(model, loss, batch, limit_bytes=size, **settings).failure
    assert failure is not None
    assert under(size, (model, loss, parts[0]), settings).peak_reserved_bytes <= size
    with pytest.raises(OutOfMemoryError):
        under(size, (model, loss, batch), settings)
    assert torch.zeros(size).numel()  # no limit is left behind
