"""``fullbatch anatomy``: where the memory of a run goes, and whether it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullbatch.cli import measure as measuring
from fullbatch.cli import memory, options
from fullbatch.cli import watch as watching
from fullbatch.memory.settings import parse_settings
from fullbatch.memory.snapshot import predicted_snapshot, write_snapshot
from fullbatch.report import anatomy_tables, measured_tables, plot_anatomy, plot_measured, write_json
from fullbatch.tasks import load


def command(
    context: typer.Context,
    watched: watching.Watched = None,
    task: options.Task = "mlp",
    micro_batch: Annotated[int, typer.Option(min=1, max=2**63 - 1, help="Samples of one micro-batch.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of an update.")] = 1,
    seq_len: memory.SeqLen = None,
    dtype: memory.Dtype = None,
    optimizer: memory.Optimizer = None,
    foreach: memory.Foreach = None,
    fused: memory.Fused = False,
    checkpointing: memory.Checkpointing = False,
    attention: memory.Attention = None,
    chunked_loss: memory.ChunkedLoss = False,
    zero_grad_keep: memory.ZeroGradKeep = False,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clip the gradient's norm to this.")] = None,
    outputs_live: memory.OutputsLive = "micro-batch",
    device: memory.CardName = "24GiB",
    alloc_conf: memory.AllocConf = "",
    hub: memory.Hub = "huggingface",
    top: Annotated[int, typer.Option(min=1, help="Rows of the table of owners.")] = 12,
    save_snapshot: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the prediction as one of torch's memory snapshots too.")
    ] = None,
    measure: measuring.Measure = False,
    on: watching.On = "auto",
    weights: measuring.Weights = False,
    record: measuring.Record = None,
    watch: watching.Watch = False,
    every: watching.Every = None,
    seed: options.Seed = 0,
    out: options.Out = Path("outputs"),
    json_path: options.Json = None,
) -> None:
    """Predict where the memory of a training run goes and whether it fits a device. No GPU, no weights.

    Writes anatomy.json and anatomy.png. Exit code 1: it does not fit. With --measure, the same run is made on the
    accelerator that there is, or on the CPU, and shown beside its prediction there: measured.json, measured.png.

    With --watch, nothing is predicted: the command after -- runs, and what it holds is sampled meanwhile, on the
    accelerator that there is, or in the host's memory. Writes watch.json, watch.csv and watch.png. Exit code: the command's.

    Examples:

      fullbatch anatomy --task qwen2.5-1.5b --accumulate 4 --seq-len 512 --dtype bf16 --device rtx4090

      fullbatch anatomy --task my_task.py:make --micro-batch 8 --device 16GiB

      fullbatch anatomy --task text --micro-batch 4 --measure

      fullbatch anatomy --watch -- python train.py --epochs 3
    """
    watching.check(context, watch, every, watched)
    if watch:
        watching.run(watched or [], every, on, out, json_path)
    measuring.needs_measure(measure, weights=weights, record=record, on=on != "auto")
    backend = measuring.accelerator(on, record) if measure else None
    setup = memory.setup(
        seq_len=seq_len, dtype=dtype, optimizer=optimizer, foreach=foreach, fused=fused, checkpointing=checkpointing,
        attention=attention, chunked_loss=chunked_loss, hub=hub, weights=weights,
    )  # fmt: skip
    run = memory.Run(
        micro_batch=micro_batch, accumulate=accumulate, device=device, alloc_conf=alloc_conf, zero_grad_keep=zero_grad_keep,
        outputs_live=outputs_live, max_grad_norm=max_grad_norm, seed=seed,
    )  # fmt: skip
    paths = [out / f"anatomy.{kind}" for kind in ("json", "png")]
    with options.Output(json_path) as output:
        loaded = load(task, seed=seed, setup=setup, meta=not measure)
        found = memory.predict(loaded, setup, run)
        comparison = measuring.compare(loaded, setup, run, backend, record=record) if measure else None
        fits = found.verdict is None or found.verdict.fits
        written = found.to_json()
        shown = anatomy_tables(found, output.width, top)
        write_json(paths[0], written)
        plot_anatomy(found, paths[1])
        if save_snapshot is not None:
            write_snapshot(save_snapshot, predicted_snapshot(found.timeline, parse_settings(alloc_conf)))
            paths.append(save_snapshot)
        if comparison is not None:
            fits = fits and comparison.out_of_memory is None
            shown += ["", *measured_tables(comparison, output.width)]
            written["measured"] = comparison.to_json()
            paths += [out / f"measured.{kind}" for kind in ("json", "png")]
            write_json(paths[-2], written["measured"])
            plot_measured(comparison, f"{loaded.name}, {micro_batch} x {accumulate}", paths[-1])
        output.show(*shown)
        output.wrote(*paths)
        output.json(written)
    if not fits:
        raise typer.Exit(1)
