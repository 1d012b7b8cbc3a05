"""``fullbatch stretch``: the peak against the length of the sequence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from fullbatch.cli import memory, options
from fullbatch.experiments import stretch
from fullbatch.memory import Anatomy
from fullbatch.report import plot_stretch, stretch_tables, write_json
from fullbatch.tasks import load


def command(
    task: options.Task = "qwen2.5-0.5b",
    seq_lens: Annotated[str, typer.Option(help="Lengths of a sample in tokens.")] = "512,1024,2048,4096,8192",
    attention: Annotated[str, typer.Option(help="Kinds side by side: eager, sdpa, flash.")] = "eager,flash",
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples of one micro-batch.")] = 1,
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
    seed: options.Seed = 0,
    out: options.Out = Path("outputs"),
    json_path: options.Json = None,
) -> None:
    """Predict how the peak grows with the length of the sequence, until the card is full. No GPU is needed.

    Writes stretch.json and stretch.png.

    Example:

      fullbatch stretch --task qwen2.5-1.5b --seq-lens 512,1024,2048,4096 --attention eager,flash --dtype bf16
    """
    lengths = options.whole_numbers(seq_lens, "--seq-lens")
    kinds = attention.split(",")
    setup = memory.setup(
        dtype=dtype, optimizer=optimizer, foreach=foreach, fused=fused, checkpointing=checkpointing,
        chunked_loss=chunked_loss, hub=hub,
    )  # fmt: skip
    setups = {kind: memory.setup(**{**vars(setup), "attention": kind}) for kind in kinds}
    run = memory.Run(
        micro_batch=micro_batch, accumulate=accumulate, device=device, alloc_conf=alloc_conf, zero_grad_keep=zero_grad_keep,
        seed=seed,
    )  # fmt: skip
    paths = [out / f"stretch.{kind}" for kind in ("json", "png")]
    with options.Output(json_path) as output:
        with Progress(console=output.talk, transient=True) as progress:
            bar = progress.add_task("stretch", total=len(lengths) * len(kinds))

            def predict(kind: str, seq_len: int) -> Anatomy:
                chosen = replace(setups[kind], seq_len=seq_len)
                return memory.predict(load(task, seed=seed, setup=chosen), chosen, run)

            found = stretch(predict, attentions=kinds, seq_lens=lengths, on_point=lambda _: progress.advance(bar))
        output.show(*stretch_tables(found, output.width))
        write_json(paths[0], found.to_json())
        plot_stretch(found, paths[1])
        output.wrote(*paths)
        output.json(found.to_json())
