"""A run is shown as it was predicted beside how it went, and a device is asked in its own words."""

import json
from types import SimpleNamespace

import pytest
import torch
from cpu_models import case
from torch import nn

from fullbatch.memory.compare import card_of, compare_cpu, compare_device
from fullbatch.memory.simulated import SimulatedBackend
from fullbatch.units import GiB, MiB


class FakeCuda(SimulatedBackend):
    """A card of 1 GiB in name: its tensors are the CPU's, and its driver has taken 100 MiB for itself."""

    def __init__(self, limit_bytes=GiB):
        super().__init__(limit_bytes)
        self.device = torch.device("cuda", 0)

    def name(self):
        return "Fake 4090"

    def device_used_bytes(self):
        return self.reserved_bytes() + 100 * MiB


@pytest.fixture
def capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))


def stages(found):
    return [(stage.name, stage.update, stage.micro_batch) for stage in found.stages]


ORDER = [("model", 0, 0), ("batch", 0, 0)] + [
    place
    for update in (1, 2)
    for place in [(name, update, number) for number in range(1, 6) for name in ("forward", "backward")]
    + [("update", update, 0)]
]


def test_on_the_cpu_every_stage_stands_beside_its_measurement():
    arguments, settings = case("text", "plain")
    found = compare_cpu(*arguments, **{**settings, "micro_batches": 5}, command="fullbatch anatomy")
    assert stages(found) == ORDER
    assert all(abs(stage.error) < 0.01 for stage in found.stages)
    for stage in found.stages:
        assert stage.predicted_allocated_bytes == pytest.approx(stage.measured_allocated_bytes, rel=0.01)
    assert found.peak.measured_peak_allocated_bytes == max(stage.measured_peak_allocated_bytes for stage in found.stages)
    assert (found.predicted.how, found.measured.how, found.measured.command) == ("predicted", "measured", "fullbatch anatomy")
    assert found.predicted_peak_reserved_bytes is None


def test_a_limited_device_has_reserved_bytes_too_and_repeats_merged_micro_batches():
    (model, loss, batch), settings = case("text", "plain")
    found = compare_device(model, loss, batch, backend=SimulatedBackend(GiB), **{**settings, "micro_batches": 5})
    assert stages(found) == ORDER
    for stage in found.stages:
        assert abs(stage.error) < 0.01
        assert stage.predicted_peak_reserved_bytes == stage.measured_peak_reserved_bytes


def test_where_memory_runs_out_the_stages_end_and_the_prediction_does_not():
    (model, loss, batch), settings = case("text", "plain")
    whole = compare_device(model, loss, batch, backend=SimulatedBackend(GiB), **settings)
    (model, loss, batch), settings = case("text", "plain")
    found = compare_device(model, loss, batch, backend=SimulatedBackend(12 * MiB), **settings)
    assert "Tried to allocate" in found.out_of_memory
    assert stages(found) == stages(whole)[: len(found.stages)]
    assert found.predicted_peak_reserved_bytes == whole.predicted_peak_reserved_bytes > 12 * MiB


@pytest.mark.usefixtures("capability")
def test_a_card_is_predicted_as_what_it_says_it_is():
    backend = FakeCuda()
    card = card_of(backend)
    assert (card.title, card.capability, card.total_bytes, card.context_bytes) == ("Fake 4090", 89, GiB, 100 * MiB)
    model, x = nn.Linear(512, 512), torch.zeros(64, 512)
    found = compare_device(
        model, lambda model, x: model(x).sum(), x, backend=backend, optimizer=torch.optim.AdamW, micro_batches=5
    )
    assert stages(found) == ORDER
    assert found.verdict.startswith("fits: ")
    assert "Fake 4090" in found.predicted.device
    assert found.measured.device == "cuda:0 (Fake 4090)"
    last = found.stages[-1]
    assert last.device_used_bytes == last.measured_reserved_bytes + 100 * MiB
    # Where there is no product yet, CUDA's prediction is the tensors' alone.
    assert found.stages[1].predicted_allocated_bytes == found.stages[1].measured_allocated_bytes


def test_a_device_that_is_not_nvidias_takes_the_rules_of_8_0():
    card = card_of(SimpleNamespace(
        device=torch.device("xpu", 0), name=lambda: "X", total_bytes=lambda: None, device_used_bytes=lambda: None,
        reserved_bytes=lambda: 0,
    ))  # fmt: skip
    assert (card.capability, card.usable_bytes) == (80, 0)


def test_a_comparison_is_json():
    arguments, settings = case("mlp", "sgd")
    found = compare_cpu(*arguments, **settings)
    read = json.loads(json.dumps(found.to_json()))
    assert read["schema"] == "measured.v1"
    assert read["stages"][0]["name"] == "model"
