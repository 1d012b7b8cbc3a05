"""What another command holds while it runs, sampled from outside of it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fullbatch.device import pick
from fullbatch.errors import InvalidArgument
from fullbatch.evidence import Evidence, measured
from fullbatch.memory.backend import Backend, backend_of
from fullbatch.plain import plain
from fullbatch.units import KiB

SCHEMA = "watch.v1"
_PROC = Path("/proc")
_PASSED_ON = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at the memory.

    Attributes:
        seconds: Since the command was started.
        used_bytes: What was held then.
    """

    seconds: float
    used_bytes: int


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A command that ran, and what it held.

    Attributes:
        watched: The command and its arguments.
        what: What was sampled, in words.
        exit_code: The command's own; 128 + its number where a signal ended it, as shells have it.
        ended_by: That signal's name; ``None`` for an exit of its own.
        seconds: From its start to its end.
        every_seconds: Between two samples.
        baseline_bytes: What was held before it was started.
        total_bytes: All there is; ``None`` where the device does not say.
        largest_process_bytes: Most resident memory of one of its processes on the host, by the kernel's count, which
            misses nothing between samples; ``None`` where that was less than fullbatch itself held.
        samples: In order.
        evidence: Where it ran.
    """

    watched: tuple[str, ...]
    what: str
    exit_code: int
    ended_by: str | None
    seconds: float
    every_seconds: float
    baseline_bytes: int
    total_bytes: int | None
    largest_process_bytes: int | None
    samples: tuple[Sample, ...]
    evidence: Evidence

    @property
    def peak(self) -> Sample:
        """The first of the highest samples."""
        return max(self.samples, key=lambda sample: sample.used_bytes)

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the peak."""
        peak = {"peak_bytes": self.peak.used_bytes, "peak_at_seconds": self.peak.seconds}
        return {"schema": SCHEMA, **peak, **plain(self)}


class Gauge(Protocol):
    """Something to sample.

    Attributes:
        where: The device in words.
        what: What is counted, in words.
    """

    where: str
    what: str

    def used_bytes(self, pid: int | None) -> int | None:
        """What is held now by the process ``pid`` and its children, or by all; ``None`` where it cannot be said."""

    def total_bytes(self) -> int | None:
        """All there is."""


def gauge_of(on: str = "auto") -> Gauge:
    """What says how much memory of the device ``on`` is used.

    Args:
        on: ``auto`` (the accelerator that torch finds, or the CPU), or a device's name.

    Raises:
        InvalidArgument: It is not there, or nothing here says what other processes hold on it.
    """
    kind = pick("auto").type if on == "auto" else on.partition(":")[0]
    if kind == "cpu":
        return ProcessTree()
    if kind == "mps":
        raise InvalidArgument(
            "--on mps: its driver tells a process of its own memory only, not of another's",
            hint="--on cpu: the chip's memory is the host's; or --measure, which runs a task in this process",
        )
    return DeviceMemory(backend_of(on, touch=False))


class DeviceMemory:
    """What the driver of an accelerator says is used, by all processes.

    Args:
        backend: The device.
    """

    what = "used on the device, all processes, by its driver"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.where = f"{backend.device} ({backend.name()})"

    def used_bytes(self, pid: int | None) -> int | None:
        return self._backend.device_used_bytes()

    def total_bytes(self) -> int | None:
        return self._backend.total_bytes()


class ProcessTree:
    """Resident memory of a process and its descendants: from ``/proc`` on Linux, from psutil elsewhere.

    What processes share counts in each of them.

    Raises:
        InvalidArgument: There is neither.
    """

    what = "resident memory of the command and its children"

    def __init__(self) -> None:
        self.where = f"cpu ({platform.machine()})"
        self._of: Callable[[int], int] = _resident_by_proc
        if not (_PROC / "self" / "status").exists():
            if importlib.util.find_spec("psutil") is None:
                raise InvalidArgument(
                    f"--watch on the CPU of {platform.system()}: needs the package psutil",
                    hint="pip install 'fullbatch[watch]'",
                )
            self._of = _resident_by_psutil

    def used_bytes(self, pid: int | None) -> int | None:
        return 0 if pid is None else self._of(pid)

    def total_bytes(self) -> int | None:
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None


def _resident_by_proc(pid: int) -> int:
    """Source of the fields: proc_pid_status(5). A process that ends meanwhile, or has ended, counts nothing."""
    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            try:
                text = (folder / "status").read_text(errors="replace")
            except OSError:
                continue
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            children.setdefault(int(fields["PPid"]), []).append(int(folder.name))
            resident[int(folder.name)] = int(fields.get("VmRSS", "0 kB").split()[0]) * KiB
    total, tree = 0, [pid]
    while tree:
        process = tree.pop()
        total += resident.get(process, 0)
        tree += children.get(process, ())
    return total


def _resident_by_psutil(pid: int) -> int:
    psutil = importlib.import_module("psutil")
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for process in tree:
        try:
            total += int(process.memory_info().rss)
        except psutil.Error:  # ended meanwhile
            continue
    return total


def watch(
    command: Sequence[str],
    gauge: Gauge,
    *,
    every_seconds: float = 0.5,
    show: Callable[[Sample, Sample], None] | None = None,
    typed: str = "",
) -> Watched:
    """Run ``command`` to its end and sample ``gauge`` meanwhile.

    It is started without a shell and has this process's stdin, stdout and stderr. SIGINT, SIGTERM, SIGHUP and
    SIGQUIT go on to it, and this process waits for what it makes of them.

    Args:
        command: A program and its arguments.
        gauge: What is sampled.
        every_seconds: Between two samples.
        show: Called at each sample with it and the highest so far.
        typed: The command line, for the evidence.

    Raises:
        InvalidArgument: It cannot be started, or nothing is said of the memory.
    """
    baseline = gauge.used_bytes(None)
    if baseline is None:
        raise InvalidArgument(f"{gauge.where}: its driver does not say what is used", hint="--on cpu samples the host's memory")
    samples: list[Sample] = []
    peak = Sample(seconds=0.0, used_bytes=-1)
    floor = _largest_process_bytes(own=True)
    start = time.monotonic()
    with _signals_to_child() as starts:
        child = starts(command)
        try:
            while child.returncode is None:
                seconds = time.monotonic() - start
                used = gauge.used_bytes(child.pid)
                if used is not None:
                    samples.append(Sample(seconds=round(seconds, 3), used_bytes=used))
                    peak = max(peak, samples[-1], key=lambda sample: sample.used_bytes)
                    if show is not None:
                        show(samples[-1], peak)
                spent = time.monotonic() - start
                try:
                    child.wait(every_seconds - spent % every_seconds)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            code = child.wait()  # whatever became of the watching: the command runs to its end
    seconds = time.monotonic() - start
    largest = _largest_process_bytes(own=False)
    return Watched(
        watched=tuple(command),
        what=gauge.what,
        exit_code=code if code >= 0 else 128 - code,
        ended_by=None if code >= 0 else signal.Signals(-code).name,
        seconds=round(seconds, 3),
        every_seconds=every_seconds,
        baseline_bytes=baseline,
        total_bytes=gauge.total_bytes(),
        largest_process_bytes=largest if largest > floor else None,
        samples=tuple(samples) or (Sample(seconds=0.0, used_bytes=baseline),),
        evidence=replace(measured(torch.device("cpu"), typed), device=gauge.where),
    )


@contextmanager
def _signals_to_child() -> Iterator[Callable[[Sequence[str]], subprocess.Popen[bytes]]]:
    """A function that starts a command, to which signals then go instead of to this process."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # between the handlers' start and the child's

    def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
        nonlocal child
        try:
            child = subprocess.Popen(command)
        except OSError as error:
            why = "not found" if isinstance(error, FileNotFoundError) else f"cannot be run: {error.strerror or error}"
            raise InvalidArgument(
                f"--watch {command[0]}: {why}", hint="it is started without a shell; for a line of one: -- sh -c 'a | b'"
            ) from None
        for number in early:
            child.send_signal(number)
        return child

    def pass_on(number: int, _: Any) -> None:
        if child is None:
            early.append(number)
        elif number == signal.SIGTERM or not _in_foreground():
            child.send_signal(number)  # else the terminal has sent it to the child too: twice is more than once

    if threading.current_thread() is not threading.main_thread():  # others may not set handlers
        yield start
        return
    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield start
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether a key such as Ctrl-C at the terminal reaches this process's group, to which the child belongs."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | getattr(os, "O_NOCTTY", 0))
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _largest_process_bytes(*, own: bool) -> int:
    """Most resident memory of one ended child, and with ``own`` of this process, which a child's count begins at.

    Source: getrusage(2); a child begins as a copy of this process. In KiB, but in bytes on macOS. 0 where there is none.
    """
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return 0
    of = [resource.RUSAGE_CHILDREN, *([resource.RUSAGE_SELF] if own else [])]
    return max(int(resource.getrusage(who).ru_maxrss) for who in of) * (1 if sys.platform == "darwin" else KiB)
