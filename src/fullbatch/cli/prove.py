"""``fullbatch prove``: is an update in micro-batches the full batch's?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from fullbatch.accumulate import map_tensors
from fullbatch.cli import options
from fullbatch.device import pick
from fullbatch.errors import InvalidArgument, not_one_of
from fullbatch.prove import BROKEN_SAMPLES, WRONG, prove, run_broken
from fullbatch.report import BROKEN_LEGEND, PROOF_LEGEND, broken_table, proof_table, write_json
from fullbatch.tasks import Task, load

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIASES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DEFAULT_LR = 1e-3
_LOOP_NOTE = (
    "use.share[i]: items of micro-batch i over the items of its window; use.ends[i]: it ends a window; "
    "use.K: micro-batches of a full window"
)


def command(
    task: options.Task = "mlp",
    batch: Annotated[int, typer.Option(help="Samples of the full batch.")] = 16,
    split: Annotated[
        list[str] | None,
        typer.Option(help="A split to try: 4x4 (micro-batch x micro-batches) or 5+5+5+1. May be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(_DTYPES)}, with commas between.")] = "float64,float32,bfloat16",
    optimizer: Annotated[str, typer.Option(help="task (the task's own), sgd or adamw.")] = "task",
    lr: Annotated[float | None, typer.Option(help=f"Learning rate of --optimizer sgd or adamw. Default: {DEFAULT_LR}.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clip the gradient to this 2-norm.")] = None,
    accumulate_in: Annotated[
        str | None, typer.Option(help="Sum gradients in this dtype where the weights are narrower.")
    ] = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="Evaluation mode: no dropout, frozen BatchNorm.")] = False,
    broken: Annotated[
        str | None, typer.Option("--break", metavar="KIND", help=f"Run a wrong loop instead: {', '.join(WRONG)}, or all.")
    ] = None,
    device: options.Device = "cpu",
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
        chosen = options.optimizer(optimizer, lr, DEFAULT_LR)
        loaded, place = load(task, seed=seed, meta=False), pick(device)
        loaded.model.to(place)
        if evaluation:
            loaded.model.eval()

        def samples(number: int) -> Any:
            drawn = loaded.batch(number, torch.Generator().manual_seed(seed))
            return map_tensors(lambda tensor: tensor.to(place), drawn)

        if broken is not None:
            if split or max_grad_norm is not None or accumulate_in is not None or chosen is not None:
                raise InvalidArgument(
                    "--break runs 24 samples under SGD and AdamW in float64: it takes --task, --eval, --device and --seed only"
                )
            kinds = list(WRONG) if broken == "all" else [broken]
            equal = _break(loaded, samples(BROKEN_SAMPLES), kinds, seed, out, output)
            raise typer.Exit(0 if equal else 1)
        if batch < 1:
            raise InvalidArgument(f"--batch {batch}: must be at least 1")
        proof = prove(
            loaded.model,
            loaded.loss,
            samples(batch),
            optimizer=chosen or loaded.optimizer,
            items=loaded.items,
            weights=loaded.weights,
            max_grad_norm=max_grad_norm,
            accumulate_in=None if accumulate_in is None else _dtype(accumulate_in, "--accumulate-in"),
            splits=split or None,
            dtypes=[_dtype(name, "--dtype") for name in dtype.split(",")],
            seed=seed,
            command=options.command(),
        )
        output.show(proof_table(proof, output.width), PROOF_LEGEND, str(proof))
        output.show(f"task {loaded.name}, {proof.optimizer}; {proof.evidence}")
        path = out / "proof.json"
        write_json(path, proof.to_json())
        output.wrote(path)
        output.json(proof.to_json())
    raise typer.Exit(0 if proof.equal else 1)


def _dtype(name: str, option: str) -> torch.dtype:
    name = _ALIASES.get(name.strip(), name.strip())
    if name not in _DTYPES:
        raise not_one_of(option, name, _DTYPES)
    return _DTYPES[name]


def _break(task: Task, samples: Any, kinds: list[str], seed: int, out: Path, output: options.Output) -> bool:
    loops, paths = [], []
    with Progress(console=output.talk, transient=True) as progress:
        for kind in progress.track(kinds, description="wrong loops"):
            loop = run_broken(kind, task.model, task.loss, samples, items=task.items, seed=seed, command=options.command())
            loops.append(loop)
            paths.append(out / f"broken-{kind}.json")
            write_json(paths[-1], loop.to_json())
    if len(loops) == 1:
        output.show(loops[0].source, _LOOP_NOTE, "")
    equal = all(loop.equal for loop in loops)
    verdict = "equal: on this data the fault does not show" if equal else "NOT equal: the updates are not the full batch's"
    output.show(broken_table(loops, output.width), BROKEN_LEGEND, verdict)
    output.show(f"task {task.name}; {loops[0].evidence}")
    output.wrote(*paths)
    every = [loop.to_json() for loop in loops]
    output.json(every[0] if len(every) == 1 else {"schema": "broken-loops.v1", "loops": every})
    return equal
