"""What a trace predicts for the CPU is what a run there holds: the peak within 1 %, each stage within 3 % of it.

oneDNN is off: it takes blocked copies and scratchpads whose sizes depend on the processor's instruction set and
stand in no source. ``benchmarks/prediction_cpu.py`` shows what it adds.
"""

import pytest
import torch
from cpu_models import MODELS, OF_TRANSFORMERS, VARIANTS, case, without_onednn

from fullbatch.memory.measure import measure_cpu
from fullbatch.memory.trace import trace
from fullbatch.units import MiB


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_predicted_within_1_percent(name, variant):
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    arguments, settings = case(name, variant)
    with without_onednn():
        predicted = trace(*arguments, kernels=None, **settings)
        measured = measure_cpu(*arguments, **settings)
    assert measured.peak_allocated_bytes > 2 * MiB  # 1 % is more than a few counters
    assert predicted.peak_requested_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)
    live = list(predicted.live_bytes())
    for stage, seen in zip(predicted.stages, measured.stages, strict=True):
        assert (stage.name, stage.update, stage.micro_batch) == (seen.name, seen.update, seen.micro_batch)
        peak = max(live[max(stage.start - 1, 0) : stage.end], default=0)
        assert peak == pytest.approx(seen.peak_allocated_bytes, abs=0.03 * measured.peak_allocated_bytes)


def test_a_convolution_without_onednn_unfolds_its_image():
    layer, x = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False), torch.randn(4, 8, 64, 64)
    columns = 4 * 8 * 3 * 3 * 64 * 64 * 4
    with without_onednn():
        timeline = trace(layer, lambda layer, x: layer(x).sum(), x, optimizer=torch.optim.SGD, updates=1)
    sizes = [event.size for event in timeline.events if timeline.owners[event.block].operator == "convolution: columns"]
    assert sizes == [columns, -1, columns, -1]
