"""What the verbs about memory share where they measure: their options, and the measurement itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fullbatch.cli import options
from fullbatch.cli.memory import Run, first_batch
from fullbatch.device import pick
from fullbatch.errors import InvalidArgument
from fullbatch.memory.backend import Backend, backend_of
from fullbatch.memory.compare import Comparison, compare_cpu, compare_device
from fullbatch.tasks import Setup, Task

Measure = Annotated[bool, typer.Option("--measure", help="Run it for real too, and show both side by side.")]
On = Annotated[str, typer.Option("--on", help="Where --measure runs: auto, cpu, cuda, musa, npu, xpu or mps.")]
Weights = Annotated[bool, typer.Option("--weights", help="--measure loads the published weights. Default: random ones.")]
Record = Annotated[
    Path | None, typer.Option("--record", metavar="PATH", help="--measure writes the allocator's history here, as torch does.")
]


def needs_measure(measure: bool, **given: Any) -> None:
    """Refuse options that only a measurement has.

    Args:
        measure: Whether there is one.
        given: Options by name, with what was typed.

    Raises:
        InvalidArgument: One was typed, and there is no measurement.
    """
    for name, value in given.items():
        if value and not measure:
            raise InvalidArgument(f"--{name.replace('_', '-')}: only a measurement takes it", hint="add --measure")


def accelerator(on: str, record: Path | None = None) -> Backend | None:
    """The memory of device ``on``; ``None`` for the CPU.

    Args:
        on: Its name, or ``auto``.
        record: File for the allocator's history.

    Raises:
        InvalidArgument: It is not there, or the package that brings it is not, or it keeps no history.
    """
    if on == "cpu" or (on == "auto" and pick("auto").type == "cpu"):
        if record is not None:
            raise InvalidArgument(f"--record {record}: the CPU keeps no history of its allocator", hint="--on cuda does")
        return None
    return backend_of(on)


def compare(
    task: Task, setup: Setup, run: Run, backend: Backend | None, *, record: Path | None = None, empty_cache: bool = True
) -> Comparison:
    """Predict ``task`` on the device of ``backend`` and run it there.

    Args:
        task: With data in its model, which is trained.
        setup: How it is trained.
        run: Its sizes.
        backend: The device's memory. ``None``: the CPU, by the profiler's memory events.
        record: File for the allocator's history.
        empty_cache: What the allocator still holds from before is given back first.
    """
    given: dict[str, Any] = {
        "optimizer": task.optimizer, "micro_batches": run.accumulate, "foreach": setup.foreach, "fused": setup.fused,
        "zero_grad_keep": run.zero_grad_keep, "outputs_live": run.outputs_live, "max_grad_norm": run.max_grad_norm,
        "command": options.command(),
    }  # fmt: skip
    batch = first_batch(task, run)
    if backend is None:
        return compare_cpu(task.model, task.loss, batch, **given)
    return compare_device(task.model, task.loss, batch, backend=backend, snapshot=record, empty_cache=empty_cache, **given)
