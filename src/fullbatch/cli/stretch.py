"""``fullbatch stretch``: the peak against the length of the sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fullbatch.cli import measure as measuring
from fullbatch.cli import memory, options
from fullbatch.experiments import measured_stretch, stretch
from fullbatch.memory import Anatomy, find_card
from fullbatch.memory.compare import Comparison
from fullbatch.memory.simulated import SimulatedBackend
from fullbatch.report import measured_stretch_tables, plot_measured_stretch, plot_stretch, stretch_tables, write_json
from fullbatch.tasks import load


def command(
    task: options.Task = "qwen2.5-0.5b",
    seq_lens: Annotated[str, typer.Option(help="Lengths of a sample in tokens.")] = "512,1024,2048,4096,8192",
    attention: Annotated[str, typer.Option(help="Kinds side by side: eager, sdpa, flash.")] = "eager,flash",
    micro_batch: Annotated[int, typer.Option(min=1, max=2**63 - 1, help="Samples of one micro-batch.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of an update.")] = 1,
    dtype: memory.Dtype = None,
    optimizer: memory.Optimizer = None,
    foreach: memory.Foreach = None,
    fused: memory.Fused = False,
    checkpointing: memory.Checkpointing = False,
    chunked_loss: memory.ChunkedLoss = False,
    zero_grad_keep: memory.ZeroGradKeep = False,
    device: memory.CardName = "24GiB",
    alloc_conf: memory.AllocConf = "",
    hub: memory.Hub = "huggingface",
    measure: measuring.Measure = False,
    on: measuring.On = "auto",
    weights: measuring.Weights = False,
    empty_cache: Annotated[
        bool, typer.Option("--empty-cache", help="--measure empties the allocator's cache between lengths.")
    ] = False,
    seed: options.Seed = 0,
    out: options.Out = Path("outputs"),
    json_path: options.Json = None,
) -> None:
    """Predict how the peak grows with the length of the sequence, until the card is full. No GPU is needed.

    Writes stretch.json and stretch.png.

    With --measure each length is run for real, two updates of it, until memory runs out, in one process and without
    emptying the allocator's cache in between: measured-stretch.json and .png instead. On the CPU the memory is that of
    --device, with CUDA's allocator simulated. Exit code 1: memory ran out.

    Examples:

      fullbatch stretch --task qwen2.5-1.5b --seq-lens 512,1024,2048,4096 --attention eager,flash --dtype bf16

      fullbatch stretch --task my_task.py:make --seq-lens 64,128,256 --measure --on cpu --device 64MiB
    """
    measuring.needs_measure(measure, weights=weights, empty_cache=empty_cache, on=on != "auto")
    lengths = options.whole_numbers(seq_lens, "--seq-lens")
    kinds = attention.split(",")
    setup = memory.setup(
        dtype=dtype, optimizer=optimizer, foreach=foreach, fused=fused, checkpointing=checkpointing,
        chunked_loss=chunked_loss, hub=hub, weights=weights,
    )  # fmt: skip
    setups = {kind: memory.setup(**{**vars(setup), "attention": kind}) for kind in kinds}
    run = memory.Run(
        micro_batch=micro_batch, accumulate=accumulate, device=device, alloc_conf=alloc_conf, zero_grad_keep=zero_grad_keep,
        seed=seed,
    )  # fmt: skip
    if measure:
        place = measuring.accelerator(on) or SimulatedBackend(find_card(device, "--device").usable_bytes)
    paths = [out / f"{'measured-' if measure else ''}stretch.{kind}" for kind in ("json", "png")]
    with options.Output(json_path) as output:
        with Progress(console=output.talk, transient=True) as progress:
            bar = progress.add_task("stretch", total=len(lengths) * len(kinds))

            def predict(kind: str, seq_len: int) -> Anatomy:
                chosen = replace(setups[kind], seq_len=seq_len)
                return memory.predict(load(task, seed=seed, setup=chosen), chosen, run)

            def run_it(kind: str, seq_len: int, empty: bool) -> Comparison:
                chosen = replace(setups[kind], seq_len=seq_len)
                loaded = load(task, seed=seed, setup=chosen, meta=False)
                return measuring.compare(loaded, chosen, run, place, empty_cache=empty)

            if measure:
                measured = measured_stretch(
                    run_it, attentions=kinds, seq_lens=lengths, empty_cache=empty_cache, settings={"task": task, **vars(run)},
                    on_point=lambda _: progress.advance(bar),
                )  # fmt: skip
            else:
                found = stretch(predict, attentions=kinds, seq_lens=lengths, on_point=lambda _: progress.advance(bar))
        if measure:
            shown, written = measured_stretch_tables(measured, output.width), measured.to_json()
            plot_measured_stretch(measured, task, paths[1])
        else:
            shown, written = stretch_tables(found, output.width), found.to_json()
            plot_stretch(found, paths[1])
        write_json(paths[0], written)
        output.show(*shown)
        output.wrote(*paths)
        output.json(written)
    if measure and not all(point.fits for point in measured.points):
        raise typer.Exit(1)
