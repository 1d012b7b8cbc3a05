"""``fullbatch prove``: is an update in micro-batches the full batch's?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    loaded = load(task, seed=seed)
    if evaluation:
        loaded.model.eval()
    else:
        loaded.model.train()
    if broken is not None:
        _break(loaded, list(WRONG) if broken == "all" else [broken], seed, out, json_path)
        return
    if batch < 1:
        raise InvalidArgument(f"--batch {batch}: must be at least 1")
    names = [name.strip() for name in dtype.split(",")]
    unknown = [name for name in names if name not in _DTYPES]
    if unknown:
        raise InvalidArgument(f"--dtype {unknown[0]}: must be of {', '.join(_DTYPES)}", hint="--dtype float64,float32")
    proof = prove(
        loaded.model,
        loaded.loss,
        loaded.batch(batch, torch.Generator().manual_seed(seed)),
        optimizer=loaded.optimizer if optimizer == "task" else named_optimizer(optimizer, lr),
        items=loaded.items,
        weights=loaded.weights,
        max_grad_norm=max_grad_norm,
        splits=split or None,
        dtypes=[_DTYPES[name] for name in names],
        seed=seed,
        command=options.command(),
    )
    console = options.data(json_path)
    console.print(proof_table(proof))
    console.print(str(proof), soft_wrap=True, markup=False)
    console.print(f"{proof.evidence}", soft_wrap=True, markup=False)
    _finish(proof.to_json(), out / "proof.json", json_path, equal=proof.equal)


def _break(task: Task, kinds: list[str], seed: int, out: Path, json_path: str | None) -> None:
    if not callable(task.items):
        raise InvalidArgument("--break needs a task whose loss has one term")
    samples = task.batch(BROKEN_SAMPLES, torch.Generator().manual_seed(seed))
    loops = []
    with Progress(console=options.talk(), transient=True) as progress:
        for kind in progress.track(kinds, description="wrong loops"):
            loop = run_broken(kind, task.model, task.loss, samples, items=task.items, seed=seed, command=options.command())
            loops.append(loop)
            write_json(out / f"broken-{kind}.json", loop.to_json())
    console = options.data(json_path)
    if len(loops) == 1:
        console.print(loops[0].source, soft_wrap=True, markup=False)
    console.print(broken_table(loops))
    equal = all(loop.equal for loop in loops)
    console.print(
        "equal: on this data the fault does not show"
        if equal
        else "NOT equal: the wrong loop's updates are not the full batch's"
    )
    console.print(f"{loops[0].evidence}", soft_wrap=True, markup=False)
    value = (
        loops[0].to_json() if len(loops) == 1 else {"schema": "broken-loops.v1", "loops": [loop.to_json() for loop in loops]}
    )
    _finish(value, None, json_path, equal=equal)


def _finish(value: dict[str, Any], path: Path | None, json_path: str | None, *, equal: bool) -> None:
    if path is not None:
        write_json(path, value)
        options.talk().print(f"wrote {path}", soft_wrap=True)
    options.emit_json(value, json_path)
    raise typer.Exit(0 if equal else 1)
