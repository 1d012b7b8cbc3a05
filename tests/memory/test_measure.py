"""Real runs are measured stage by stage: what they hold is what arithmetic says."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fullbatch.errors import InvalidArgument
from fullbatch.memory.backend import TorchBackend, backend_of, is_out_of_memory
from fullbatch.memory.limit import limit
from fullbatch.memory.measure import measure_cpu, measure_device
from fullbatch.memory.simulated import SimulatedBackend
from fullbatch.units import GiB, MiB, parse_bytes

WIDTH, SAMPLES = 1024, 256
WEIGHT, BATCH = WIDTH * WIDTH * 4, SAMPLES * WIDTH * 4  # 4 MiB, 1 MiB


def adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=False)


def run(measure=measure_cpu, **settings):
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    settings = {"optimizer": adamw, "updates": 1} | settings
    return measure(model, lambda model, x: model(x).sum(), torch.zeros(SAMPLES, WIDTH), **settings)


class CountedDevice(SimulatedBackend):
    """A limited device on the CPU whose driver takes 100 MiB for itself, and which keeps a history."""

    def __init__(self, limit_bytes):
        super().__init__(limit_bytes)
        self.calls = []

    def name(self):
        return "counted"

    def synchronize(self):
        self.calls.append("synchronize")

    def device_used_bytes(self):
        return self.reserved_bytes() + 100 * MiB

    def record_history(self, on):
        self.calls.append(f"record {on}")
        return True

    def dump_history(self, path: Path):
        path.write_text("history")


def test_on_the_cpu_each_stage_has_its_bytes():
    stages = {stage.name: stage for stage in run().stages}
    assert list(stages) == ["model", "batch", "forward", "backward", "update"]
    assert stages["model"].peak_allocated_bytes == WEIGHT
    assert stages["batch"].allocated_bytes == WEIGHT + BATCH
    assert stages["forward"].peak_allocated_bytes == pytest.approx(WEIGHT + 2 * BATCH, abs=64)  # and the output
    assert stages["backward"].allocated_bytes == pytest.approx(2 * WEIGHT + BATCH, abs=64)
    assert stages["update"].peak_allocated_bytes >= 5 * WEIGHT + BATCH  # weights, gradients, moments, a temporary
    assert stages["update"].allocated_bytes == pytest.approx(3 * WEIGHT + BATCH, abs=64)


def test_measuring_again_and_again_gives_the_same():
    first = run()
    lump = [torch.zeros(WIDTH, WIDTH) for _ in range(4)]
    second = run()
    del lump
    assert first.stages == second.stages == run().stages


def test_settings_of_the_loop_reach_it():
    stages = run(micro_batches=3, updates=2, zero_grad_keep=True).stages
    assert [stage.micro_batch for stage in stages if stage.name == "forward"] == [1, 2, 3] * 2
    assert stages[-1].allocated_bytes == pytest.approx(4 * WEIGHT + BATCH, abs=64)


def test_the_model_that_is_measured_is_left_as_it_was():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    measure_cpu(model, lambda model, x: model(x).sum(), torch.ones(2, 4), optimizer=adamw)
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)
    assert not model._forward_hooks


def test_a_model_elsewhere_is_refused_by_the_cpu():
    with pytest.raises(InvalidArgument, match="on meta"):
        measure_cpu(nn.Linear(4, 4, device="meta"), lambda model, x: model(x).sum(), torch.ones(2, 4), optimizer=adamw)


def on_counted_device(size, **settings):
    with CountedDevice(parse_bytes(size)) as backend:
        return run(measure_device, backend=backend, **settings), backend


def test_on_a_device_each_stage_has_its_own_peak():
    measurement, backend = on_counted_device("1GiB", outputs_live="loss")
    stages = {stage.name: stage for stage in measurement.stages}
    assert (measurement.out_of_memory, measurement.snapshot) == (None, None)
    assert measurement.evidence.device == "cpu (counted)"
    assert stages["backward"].allocated_bytes < stages["backward"].peak_allocated_bytes
    assert stages["update"].peak_allocated_bytes == measurement.peak_allocated_bytes
    assert all(stage.peak_reserved_bytes >= stage.peak_allocated_bytes for stage in measurement.stages)
    assert stages["update"].device_used_bytes == measurement.peak_reserved_bytes + 100 * MiB
    assert backend.calls.count("synchronize") >= len(stages)


def test_the_cpu_and_a_device_agree_but_for_rounding():
    cpu, (device, _) = run(), on_counted_device("1GiB")
    # On this device the model that is copied counts too.
    assert device.peak_allocated_bytes == pytest.approx(cpu.peak_allocated_bytes + WEIGHT, abs=4096)


def test_a_model_that_is_not_copied_is_trained_itself_and_counts_once():
    cpu, (device, _) = run(), on_counted_device("1GiB", copied=False)
    assert device.peak_allocated_bytes == pytest.approx(cpu.peak_allocated_bytes, abs=4096)


def test_the_cache_stays_from_one_run_to_the_next_unless_it_is_emptied():
    with CountedDevice(GiB) as backend:
        first = run(measure_device, backend=backend, copied=False)
        held = backend.reserved_bytes()
        warm = run(measure_device, backend=backend, copied=False, empty_cache=False)
        cold = run(measure_device, backend=backend, copied=False)
    assert backend.allocated_bytes() == 0
    assert warm.stages[0].reserved_bytes == held
    assert cold.stages == first.stages
    assert cold.stages[0].reserved_bytes < held


def test_out_of_memory_ends_the_run_and_keeps_figures_and_history(tmp_path):
    measurement, backend = on_counted_device("25MiB", snapshot=tmp_path / "oom.pickle")
    assert measurement.stages[-1].name in ("backward", "update")
    assert "Tried to allocate" in measurement.out_of_memory
    assert (tmp_path / "oom.pickle").read_text() == "history"
    assert [call for call in backend.calls if call != "synchronize"] == ["record True", "record False"]


def test_another_error_is_raised_and_ends_the_record(tmp_path):
    with CountedDevice(GiB) as backend, pytest.raises(RuntimeError, match="shapes"):
        measure_device(nn.Linear(4, 4), lambda model, x: model(x), torch.zeros(2, 5), optimizer=adamw,
                       backend=backend, snapshot=tmp_path / "file")  # fmt: skip
    assert backend.calls[-1] == "record False"


def test_a_measurement_is_json():
    measurement = replace(run(), snapshot="x.pickle")
    read = json.loads(json.dumps(measurement.to_json()))
    assert read["peak_allocated_bytes"] == measurement.peak_allocated_bytes
    assert read["stages"][0]["name"] == "model"
    assert read["evidence"]["how"] == "measured"


@pytest.mark.parametrize(("device", "package"), [("musa", "torch_musa"), ("npu:1", "torch_npu")])
def test_a_missing_package_is_named(device, package):
    with pytest.raises(InvalidArgument, match=f"needs the package {package}") as caught:
        backend_of(device)
    assert package in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cpu", "auto"])
def test_a_device_that_is_none_says_what_to_do(device):
    with pytest.raises(InvalidArgument, match="device=") as caught:
        backend_of(device)
    assert caught.value.hint


class Nvml:
    """nvidia-ml-py, with one card of which 3 GiB are used."""

    NVMLError = RuntimeError

    def nvmlInit(self):  # noqa: N802
        self.open = True

    def nvmlShutdown(self):  # noqa: N802
        self.open = False

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid != "GPU-12ab":
            raise self.NVMLError(uuid)
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(used=3 * GiB)


@pytest.mark.parametrize(("nvml", "uuid", "used"), [(Nvml(), "12ab", 3), (Nvml(), "34cd", 5), (None, "12ab", 5)])
def test_the_driver_is_asked_through_nvml_and_else_through_cuda(monkeypatch, nvml, uuid, used):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: it is not installed
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GiB, 8 * GiB))
    assert TorchBackend(torch.device("cuda", 0)).device_used_bytes() == used * GiB
    assert nvml is None or nvml.open is False


def test_memory_that_ran_out_is_known_by_type_or_by_message():
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_measures_and_limits_itself(tmp_path):
    file = tmp_path / "snapshot.pickle"
    measurement = run(measure_device, device="cuda", snapshot=file)
    assert measurement.out_of_memory is None
    assert measurement.peak_allocated_bytes >= 5 * WEIGHT
    assert file.stat().st_size > 0
    with limit("24MiB", device="cuda"):
        assert "out of memory" in run(measure_device, device="cuda").out_of_memory
    torch.empty(64 * MiB, dtype=torch.uint8, device="cuda")
