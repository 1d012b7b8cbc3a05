"""A command is watched on a device by its driver's word, and in the host's memory by the kernel's."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from fullbatch.errors import InvalidArgument
from fullbatch.memory import backend as backends
from fullbatch.memory import watch as watching
from fullbatch.memory.watch import DeviceMemory, ProcessTree, gauge_of, watch
from fullbatch.units import GiB, MiB

SLEEPS = [sys.executable, "-c", "import time; time.sleep(0.6)"]


class Card:
    """A device on which the driver says what ``says`` gives, one after the other, and then the last of it again."""

    device = torch.device("cuda:1")

    def __init__(self, *says):
        self.says = list(says)

    def name(self):
        return "Card 24"

    def total_bytes(self):
        return 24 * GiB

    def device_used_bytes(self):
        return self.says.pop(0) if len(self.says) > 1 else self.says[0]


def test_a_devices_peak_and_what_was_there_before_are_its_drivers_word():
    shown = []
    gauge = DeviceMemory(Card(500 * MiB, 600 * MiB, 3 * GiB, 2 * GiB))
    found = watch(SLEEPS, gauge, every_seconds=0.1, show=lambda now, peak: shown.append((now, peak)))
    assert found.baseline_bytes == 500 * MiB
    assert [sample.used_bytes for sample in found.samples[:4]] == [600 * MiB, 3 * GiB, 2 * GiB, 2 * GiB]
    assert found.peak == found.samples[1]
    assert 0.09 <= found.peak.seconds < 0.3
    assert [now for now, _ in shown] == list(found.samples)
    assert shown[-1][1] == found.peak
    assert (found.total_bytes, found.exit_code) == (24 * GiB, 0)
    assert str(found.evidence).startswith("measured on cuda:1 (Card 24), fullbatch ")


def test_a_driver_that_says_nothing_is_told_before_the_command_runs(tmp_path):
    with pytest.raises(InvalidArgument, match=r"cuda:1 \(Card 24\): its driver does not say what is used"):
        watch(["touch", str(tmp_path / "ran")], DeviceMemory(Card(None)))
    assert not (tmp_path / "ran").exists()


def test_a_driver_that_falls_silent_leaves_gaps_and_the_command_runs_on():
    found = watch(SLEEPS, DeviceMemory(Card(1, 2, None)), every_seconds=0.1)
    assert [sample.used_bytes for sample in found.samples] == [2]
    assert found.exit_code == 0


def test_an_error_of_the_display_does_not_leave_the_command_behind(tmp_path):
    def show(now, peak):
        raise BrokenPipeError

    code = f"import time, pathlib; time.sleep(0.5); pathlib.Path({str(tmp_path / 'ran')!r}).touch()"
    with pytest.raises(BrokenPipeError):
        watch([sys.executable, "-c", code], DeviceMemory(Card(1)), show=show)
    assert (tmp_path / "ran").exists()


def test_the_handlers_of_signals_are_those_of_before_when_the_command_has_ended():
    before = [watching.signal.getsignal(number) for number in watching._PASSED_ON]
    watch(["true"], DeviceMemory(Card(1)))
    with pytest.raises(InvalidArgument, match="not found"):
        watch(["no-such-program"], DeviceMemory(Card(1)))
    assert [watching.signal.getsignal(number) for number in watching._PASSED_ON] == before


def test_a_command_is_watched_from_a_thread_too():
    found = []
    thread = threading.Thread(target=lambda: found.append(watch(["true"], DeviceMemory(Card(1)))))
    thread.start()
    thread.join(60)
    assert found[0].exit_code == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")  # noqa: PTH110
def test_proc_and_psutil_agree_on_a_tree(monkeypatch):
    pytest.importorskip("psutil")
    child = "held = b'x' * 30_000_000; print(2, flush=True); input()"
    code = "import subprocess, sys; held = b'x' * 50_000_000; print(1, flush=True); "
    code += f"subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tree:
        assert [tree.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
        by_proc = ProcessTree().used_bytes(tree.pid)
        monkeypatch.setattr(watching, "_PROC", watching.Path("/no/such"))
        by_psutil = ProcessTree().used_bytes(tree.pid)
        tree.communicate("\n")
    assert 80_000_000 <= by_proc < 160_000_000
    assert by_psutil == pytest.approx(by_proc, rel=0.02)
    assert ProcessTree().used_bytes(tree.pid) == 0  # it has ended


def test_without_proc_and_psutil_the_package_is_named(monkeypatch):
    monkeypatch.setattr(watching, "_PROC", watching.Path("/no/such"))
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(watching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidArgument, match="needs the package psutil") as raised:
        ProcessTree()
    assert raised.value.hint == "pip install 'fullbatch[watch]'"


def test_to_watch_a_device_no_tensor_is_made_on_it(monkeypatch):
    """A context of our own would be memory that the command does not have."""

    def refuse(name):
        raise AssertionError(f"made a tensor on {name}")

    properties = SimpleNamespace(total_memory=24 * GiB, uuid="1234")
    module = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        current_device=lambda: 0,
        get_device_name=lambda device: "Card 24",
        get_device_properties=lambda device: properties,
    )
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr(backends, "pick", refuse)
    monkeypatch.setattr(backends, "_nvidia_used_bytes", lambda uuid: 7 * MiB)
    gauge = gauge_of("cuda:1")
    assert (gauge.where, gauge.used_bytes(None)) == ("cuda:1 (Card 24)", 7 * MiB)
    with pytest.raises(AssertionError, match="cuda:2"):  # not among them: pick says what is wrong
        gauge_of("cuda:2")
