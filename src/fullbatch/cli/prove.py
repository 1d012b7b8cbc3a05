"""``fullbatch prove``: is an update in micro-batches the full batch's?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress

from fullbatch.cli import options
from fullbatch.errors import InvalidArgument
from fullbatch.experiments import named_optimizer
from fullbatch.prove import BROKEN_SAMPLES, WRONG, prove, run_broken
from fullbatch.report import broken_table, proof_table, write_json
from fullbatch.tasks import Task, load

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def command(
    task: options.Task = "mlp",
    batch: Annotated[int, typer.Option(help="Samples of the full batch.")] = 16,
    split: Annotated[
        list[str] | None,
        typer.Option(help="A split to try: 4x4 (micro-batch x micro-batches) or 5+5+5+1. May be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(_DTYPES)}, with commas between.")] = "float64,float32,bfloat16",
    optimizer: Annotated[str, typer.Option(help="task (the task's own), sgd or adamw.")] = "task",
    lr: Annotated[float, typer.Option(help="Learning rate of --optimizer sgd or adamw.")] = 1e-3,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clip the gradient to this 2-norm.")] = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="Evaluation mode: no dropout, frozen BatchNorm.")] = False,
    broken: Annotated[
        str | None, typer.Option("--break", metavar="KIND", help=f"Run a wrong loop instead: {', '.join(WRONG)}, or all.")
    ] = None,
    seed: options.Seed = 0,
    out: options.Out = Path("outputs"),
    json_path: options.Json = None,
) -> None:
    """Do one update as the full batch and in micro-batches, and compare them.

    In float64 the gradients must agree to 1e-12; in lower precision a split may err at most twice
    as much as the full batch itself does. Exit code 0: equal, 1: not equal, 2: wrong use.

    Examples:

      fullbatch prove

      fullbatch prove --task text --batch 16 --split 4x4 --split 5+5+5+1

      fullbatch prove --break missing-division
    """
    with options.Output(json_path) as output:
        loaded = load(task, seed=seed)
        loaded.model.train(not evaluation)
        if broken is not None:
            equal = _break(loaded, list(WRONG) if broken == "all" else [broken], seed, out, output)
        else:
            equal = _prove(loaded, batch, split, dtype, optimizer, lr, max_grad_norm, seed, out, output)
    raise typer.Exit(0 if equal else 1)


def _prove(
    task: Task,
    batch: int,
    split: list[str] | None,
    dtype: str,
    optimizer: str,
    lr: float,
    max_grad_norm: float | None,
    seed: int,
    out: Path,
    output: options.Output,
) -> bool:
    if batch < 1:
        raise InvalidArgument(f"--batch {batch}: must be at least 1")
    names = [name.strip() for name in dtype.split(",")]
    unknown = [name for name in names if name not in _DTYPES]
    if unknown:
        raise InvalidArgument(f"--dtype {unknown[0]}: must be of {', '.join(_DTYPES)}", hint="--dtype float64,float32")
    proof = prove(
        task.model,
        task.loss,
        task.batch(batch, torch.Generator().manual_seed(seed)),
        optimizer=task.optimizer if optimizer == "task" else named_optimizer(optimizer, lr),
        items=task.items,
        weights=task.weights,
        max_grad_norm=max_grad_norm,
        splits=split or None,
        dtypes=[_DTYPES[name] for name in names],
        seed=seed,
        command=options.command(),
    )
    path = out / "proof.json"
    write_json(path, proof.to_json())
    output.show(proof_table(proof), str(proof), str(proof.evidence))
    output.wrote(path)
    output.json(proof.to_json())
    return proof.equal


def _break(task: Task, kinds: list[str], seed: int, out: Path, output: options.Output) -> bool:
    if not callable(task.items):
        raise InvalidArgument("--break needs a task whose loss has one term")
    samples = task.batch(BROKEN_SAMPLES, torch.Generator().manual_seed(seed))
    loops, paths = [], []
    with Progress(console=output.talk, transient=True) as progress:
        for kind in progress.track(kinds, description="wrong loops"):
            loop = run_broken(kind, task.model, task.loss, samples, items=task.items, seed=seed, command=options.command())
            loops.append(loop)
            paths.append(out / f"broken-{kind}.json")
            write_json(paths[-1], loop.to_json())
    if len(loops) == 1:
        output.show(loops[0].source)
    equal = all(loop.equal for loop in loops)
    verdict = "equal: on this data the fault does not show" if equal else "NOT equal: the updates are not the full batch's"
    output.show(broken_table(loops), verdict, str(loops[0].evidence))
    output.wrote(*paths)
    every = [loop.to_json() for loop in loops]
    output.json(every[0] if len(every) == 1 else {"schema": "broken-loops.v1", "loops": every})
    return equal
