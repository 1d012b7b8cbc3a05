"""``fullbatch sweep``: throughput and loss against the effective batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fullbatch.accumulate import Update
from fullbatch.cli import options
from fullbatch.device import pick
from fullbatch.experiments import sweep
from fullbatch.report import JsonLines, curve_table, plot_curve, write_json
from fullbatch.tasks import load

DEFAULT_LR = 0.05
NOISY = 1.5
"""Fastest over slowest round of a point from which a remark is made."""


def command(
    task: options.Task = "mlp",
    micro_batch: Annotated[int, typer.Option(help="Samples of one micro-batch.")] = 4,
    accum_grid: Annotated[str, typer.Option(help="Numbers of micro-batches of an update.")] = "1,2,4,8,16",
    num_steps: Annotated[int, typer.Option(help="Updates at each point.")] = 25,
    optimizer: Annotated[str, typer.Option(help="sgd, adamw, or task (the task's own).")] = "sgd",
    lr: Annotated[float | None, typer.Option(help=f"Learning rate of sgd or adamw. Default: {DEFAULT_LR}.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns into which the updates of all points are interleaved.")] = 5,
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    out: options.Out = Path("outputs"),
    json_path: options.Json = None,
) -> None:
    """Measure throughput and loss at several effective batches: the accumulation curve.

    Writes accum-curve.json, accum-curve.jsonl (one line an update) and accum-curve.png.

    Examples:

      fullbatch sweep --micro-batch 4 --accum-grid 1,2,4,8,16 --num-steps 25 --seed 0 --lr 0.05

      fullbatch sweep --task text --micro-batch 8 --accum-grid 1,4,16 --num-steps 5 --optimizer task
    """
    grid = options.whole_numbers(accum_grid, "--accum-grid")
    chosen = options.optimizer(optimizer, lr, DEFAULT_LR)
    named = optimizer if chosen is None else f"{optimizer} lr {DEFAULT_LR if lr is None else lr:g}"
    paths = [out / f"accum-curve.{kind}" for kind in ("json", "jsonl", "png")]
    with options.Output(json_path) as output:
        with Progress(console=output.talk, transient=True) as progress, JsonLines(paths[1], replaces=paths[::2]) as log:
            bar = progress.add_task("sweep", total=num_steps * len(grid))

            def on_update(accum_steps: int, update: Update) -> None:
                log.write({"accum_steps": accum_steps, **update.to_json()})
                progress.advance(bar)

            curve = sweep(
                load(task, seed=seed, meta=False),
                micro_batch=micro_batch,
                accum_grid=grid,
                num_steps=num_steps,
                optimizer=chosen,
                rounds=rounds,
                seed=seed,
                device=pick(device),
                on_update=on_update,
                settings={"optimizer": named},
                command=options.command(),
            )
        output.show(curve_table(curve, output.width))
        if len(curve.points) > 1:
            flat = [point.effective_batch for point in curve.points if point.accum_steps == curve.flat_at]
            where = f"flat from effective batch {flat[0]}" if flat else "still rising where the grid ends"
            output.show(f"{where} (rule: {curve.flat_rule})")
        if curve.noise > NOISY:
            output.show(
                f"note: rounds of one point differ by up to {curve.noise:.1f}x: a noisy machine, or too few --num-steps"
            )
        if any(not math.isfinite(point.avg_loss) for point in curve.points):
            output.show("note: a loss is not a number: the learning rate is too high, or a batch had no items")
        output.show(f"task {curve.settings['task']}, {named}; {curve.evidence}")
        write_json(paths[0], curve.to_json())
        plot_curve(curve, paths[2])
        output.wrote(*paths)
        output.json(curve.to_json())
