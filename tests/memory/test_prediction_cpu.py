"""What a trace predicts for the CPU is what torch's profiler sees a run there hold, to 1 % at the peak and in each stage."""

import pytest
import torch
from cpu_models import MODELS, OF_TRANSFORMERS, VARIANTS, case, without_onednn

from fullbatch.memory.measure import measure_cpu
from fullbatch.memory.onednn import not_asked
from fullbatch.memory.trace import trace
from fullbatch.units import MiB


def agrees(name, variant):
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    arguments, settings = case(name, variant)
    predicted = trace(*arguments, kernels=None, **settings)
    measured = measure_cpu(*arguments, **settings)
    assert measured.peak_allocated_bytes > 2 * MiB  # 1 % is more than a few counters
    assert predicted.peak_requested_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.01)
    for stage, peak, seen in zip(predicted.stages, predicted.stage_peaks(), measured.stages, strict=True):
        assert (stage.name, stage.update, stage.micro_batch) == (seen.name, seen.update, seen.micro_batch)
        assert peak == pytest.approx(seen.peak_allocated_bytes, rel=0.01), stage


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_predicted_within_1_percent(name, variant):
    agrees(name, variant)


@pytest.mark.parametrize("variant", ["plain", "checkpointed", "bfloat16"])
@pytest.mark.parametrize("name", ["lstm", "conv", "text"])
def test_without_onednn_too(name, variant):
    with without_onednn():
        agrees(name, variant)


def test_onednn_is_not_asked_where_it_is_off_or_not_wanted():
    arguments, settings = case("lstm", "sgd")

    def onednn():
        return [owner for owner in trace(*arguments, **settings).owners if "oneDNN" in owner.operator]

    assert onednn()
    with not_asked():
        assert not onednn()
    with without_onednn():
        assert not onednn()


def test_asking_onednn_leaves_random_numbers_and_the_run_alone():
    arguments, settings = case("conv", "sgd")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    trace(*arguments, **settings)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_linear_layer_adds_its_bias_in_place_to_a_transposed_input():
    layer, x = torch.nn.Linear(32, 64), torch.randn(16, 8, 32).transpose(0, 1)
    timeline = trace(layer, lambda layer, x: layer(x).sum(), x, optimizer=torch.optim.SGD, updates=1)
    assert [owner.operator for owner in timeline.owners if owner.operator in ("aten.add", "aten.mm")] == ["aten.mm"] * 2


def test_an_operand_of_another_dtype_is_converted_for_the_addition():
    layer, x = torch.nn.Linear(64, 64), torch.randn(128, 64)

    def loss(layer, x):
        return (layer(x).bfloat16() + x).sum()

    operands = [o for o in trace(layer, loss, x, optimizer=torch.optim.SGD, updates=1).owners if "operand" in o.operator]
    assert len(operands) == 1
    measured, _ = measure_cpu(layer, loss, x, optimizer=torch.optim.SGD, updates=1).stages[2:4]
    assert measured.peak_allocated_bytes == trace(layer, loss, x, optimizer=torch.optim.SGD, updates=1).stage_peaks()[2]


def test_a_convolution_without_onednn_unfolds_its_image():
    layer, x = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False), torch.randn(4, 8, 64, 64)
    columns = 4 * 8 * 3 * 3 * 64 * 64 * 4
    with without_onednn():
        timeline = trace(layer, lambda layer, x: layer(x).sum(), x, optimizer=torch.optim.SGD, updates=1)
    sizes = [event.size for event in timeline.events if timeline.owners[event.block].operator == "convolution: columns"]
    assert sizes == [columns, -1, columns, -1]
