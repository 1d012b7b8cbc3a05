"""``fullbatch train``: a real run at an effective batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fullbatch.accumulate import Update
from fullbatch.cli import options
from fullbatch.device import pick
from fullbatch.experiments import SCALINGS, WARM_UP_SOURCE, HeldOut, train
from fullbatch.plain import plain
from fullbatch.report import JsonLines, plot_run, write_json
from fullbatch.tasks import load

_SCALINGS = "; ".join(f"{name}: {scaling.source}" for name, scaling in SCALINGS.items())


def command(
    task: options.Task = "text",
    effective_batch: Annotated[int, typer.Option(help="Samples of one update.")] = 256,
    micro_batch: Annotated[int, typer.Option(help="Samples of one forward and backward.")] = 16,
    updates: Annotated[int, typer.Option(help="Updates to make.")] = 60,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate at --reference-batch. Default: the task's.")] = None,
    scale_lr: Annotated[str, typer.Option(help=f"How the rate follows the effective batch. {_SCALINGS}.")] = "none",
    reference_batch: Annotated[int, typer.Option(help="Effective batch at which the learning rate was found.")] = 256,
    warmup_samples: Annotated[
        int, typer.Option(help=f"Samples over which the rate rises, whatever the batch ({WARM_UP_SOURCE}).")
    ] = 2048,
    max_grad_norm: Annotated[float, typer.Option(help="Clip the window's gradient to this 2-norm; inf: do not.")] = 1.0,
    eval_every: Annotated[int, typer.Option(help="Updates between two measurements on held-out samples.")] = 20,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: options.Out = Path("outputs"),
    json_path: options.Json = None,
) -> None:
    """Train a task for real: warm-up and cosine, clipping, held-out loss.

    Writes train.jsonl (one line an update or measurement), train.json and train.png.

    Examples:

      fullbatch train --effective-batch 256 --micro-batch 16

      fullbatch train --effective-batch 1024 --micro-batch 16 --scale-lr sqrt --updates 30
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    paths = [out / f"train.{kind}" for kind in ("json", "jsonl", "png")]
    with options.Output(json_path) as output:
        loaded = load(task, seed=seed, meta=False)
        unit, factor = loaded.unit
        with Progress(*columns, console=output.talk) as progress, JsonLines(paths[1], replaces=paths[::2]) as log:
            bar = progress.add_task("updates", total=updates)

            def on_update(update: Update, rate: float) -> None:
                log.write({"kind": "update", "lr": rate, **update.to_json()})
                shown = f"{update.loss * factor:.3f} {unit}, {update.samples_per_second:,.0f} samples/s"
                progress.update(bar, advance=1, description=update.skipped or shown)

            def on_held_out(point: HeldOut) -> None:
                log.write({"kind": "held_out", **plain(point)})
                output.talk.print(f"update {point.update}: held out {point.value:.3f} {point.unit}", soft_wrap=True)

            run = train(
                loaded,
                effective_batch=effective_batch,
                micro_batch=micro_batch,
                updates=updates,
                lr=lr,
                scale_lr=scale_lr,
                reference_batch=reference_batch,
                warmup_samples=warmup_samples,
                max_grad_norm=max_grad_norm,
                eval_every=eval_every,
                seed=seed,
                device=pick(device),
                on_update=on_update,
                on_held_out=on_held_out,
                command=options.command(),
            )
        settings = run.settings
        output.show(
            f"{len(run.updates)} updates of {settings['effective_batch']} samples "
            f"in micro-batches of {settings['micro_batch']}: "
            f"{run.samples_per_second:,.0f} samples/s, peak learning rate {settings['peak_lr']:.2e}"
        )
        if run.held_out:
            first, last = run.held_out[0], run.held_out[-1]
            output.show(f"held out: {first.value:.3f} -> {last.value:.3f} {last.unit}")
        if not run.finite:
            output.show(
                f"stopped: the loss of update {run.updates[-1].index} is not a number; lower --lr or raise --warmup-samples"
            )
        output.show(f"task {settings['task']}, {settings['optimizer']}; {run.evidence}")
        write_json(paths[0], run.to_json())
        plot_run(run, paths[2])
        output.wrote(*paths)
        output.json(run.to_json())
    raise typer.Exit(0 if run.finite else 1)
