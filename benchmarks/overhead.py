"""What Accumulator costs beside the shortest correct loop written by hand, and beside other libraries.

    python benchmarks/overhead.py [--json docs/overhead.json] [--quick]

Same model, same data, same optimizer; the loops take turns in one process, in an order that is drawn anew for each
turn, and each figure is the median over turns of the time against the hand-written loop's in the same turn. Peak live
bytes are those of one update's allocations as torch's profiler reports them, over weights, optimizer state and batch.
The error is that of one update's gradient in float64 against plain autograd on the whole batch.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import platform
import random
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fullbatch import Accumulator
from fullbatch.tasks import load

OTHERS_EVERY = 3  # turns of accelerate and fabric, which take as long: the figure that matters is fullbatch's
LABELS = {"hand": "by hand", "fullbatch": "fullbatch", "accelerate": "Accelerate", "fabric": "Lightning Fabric"}
MICRO_BATCH = 4
TURNS = {("mlp", 1): 600, ("mlp", 8): 300, ("mlp", 64): 100, ("text", 1): 80, ("text", 8): 45, ("text", 64): 31}


def labelled(micro):
    return int((micro["labels"] != -100).sum())


def micros_of(batch, size):
    columns = {key: value.split(size) for key, value in batch.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def by_hand(model, optimizer, loss):
    def update(batch):
        micros = micros_of(batch, MICRO_BATCH)
        counts = [labelled(micro) for micro in micros]
        total, seen = sum(counts), 0.0
        for micro, n in zip(micros, counts, strict=True):
            share = loss(model, micro) * (n / total)
            share.backward()
            seen += share.detach()
        optimizer.step()
        optimizer.zero_grad()
        return seen.item()

    return update


def fullbatch(model, optimizer, loss, items):
    step = Accumulator(model, optimizer, loss, items=items, micro_batch=MICRO_BATCH, check=False)
    return lambda batch: step(batch).loss


def accelerate(model, optimizer, loss, K):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=K)
    model, optimizer = accelerator.prepare(model, optimizer)

    def update(batch):  # a mean of means: accelerate divides by K
        seen = 0.0
        for micro in micros_of(batch, MICRO_BATCH):
            with accelerator.accumulate(model):
                mean = loss(model, micro)
                accelerator.backward(mean)
                optimizer.step()
                optimizer.zero_grad()
                seen += mean.detach() / K
        return seen.item()

    return update


def fabric(model, optimizer, loss):
    from lightning.fabric import Fabric

    engine = Fabric(accelerator="cpu", devices=1)
    engine.launch()
    model, optimizer = engine.setup(model, optimizer)

    def update(batch):
        micros = micros_of(batch, MICRO_BATCH)
        counts = [labelled(micro) for micro in micros]
        total, seen = sum(counts), 0.0
        for i, (micro, n) in enumerate(zip(micros, counts, strict=True)):
            with engine.no_backward_sync(model, enabled=i + 1 < len(micros)):
                share = loss(model, micro) * (n / total)
                engine.backward(share)
                seen += share.detach()
        optimizer.step()
        optimizer.zero_grad()
        return seen.item()

    return update


def peak_bytes(update, batch, static):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        update(batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return static + peak


def loop_of(label, task, K, model, optimizer):
    arguments = {"fullbatch": (task.items,), "accelerate": (K,)}.get(label, ())
    make = {"hand": by_hand, "fullbatch": fullbatch, "accelerate": accelerate, "fabric": fabric}[label]
    return make(model, optimizer, task.loss, *arguments)


def in_float64(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


def gradient_error(label, task, K, batch):
    """Relative, from the way of one step of SGD with learning rate 1."""
    batch = {key: in_float64(value) for key, value in batch.items()}
    model = copy.deepcopy(task.model).double()
    parameters = list(model.parameters())
    task.loss(model, batch).backward()
    right = torch.cat([p.grad.flatten() for p in parameters])
    model.zero_grad()
    before = torch.cat([p.detach().flatten() for p in parameters])
    loop_of(label, task, K, model, torch.optim.SGD(parameters, lr=1.0))(batch)
    found = before - torch.cat([p.detach().flatten() for p in parameters])
    return ((found - right).norm() / right.norm()).item()


def measure(name, K, turns):
    task = load(name)
    batch = task.batch(MICRO_BATCH * K, torch.Generator().manual_seed(0))
    loops, errors = {}, {}
    for label in ("hand", "fullbatch", "accelerate", "fabric"):
        if label in ("accelerate", "fabric") and importlib.util.find_spec({"fabric": "lightning"}.get(label, label)) is None:
            print(f"{label} is not installed: left out (pip install 'fullbatch[all]')")
            continue
        errors[label] = gradient_error(label, task, K, batch)
        model = copy.deepcopy(task.model)
        loops[label] = loop_of(label, task, K, model, task.optimizer(model.parameters()))
    static = sum(p.numel() * p.element_size() for p in task.model.parameters()) * 3 + sum(
        t.numel() * t.element_size() for t in batch.values()
    )  # weights and AdamW's two moments, and the batch
    for update in loops.values():
        for _ in range(3):
            update(batch)
    peaks = {label: peak_bytes(update, batch, static) for label, update in loops.items()}
    times = {label: [] for label in loops}
    order = list(loops)
    gc.disable()
    for turn in range(turns):
        random.shuffle(order)
        for label in order:
            if turn % OTHERS_EVERY and label in ("accelerate", "fabric"):
                continue
            started = time.perf_counter()
            loops[label](batch)
            times[label].append(time.perf_counter() - started)
    gc.enable()
    rows = []
    for label in loops:
        hands = times["hand"][::OTHERS_EVERY] if label in ("accelerate", "fabric") else times["hand"]
        ratios = [mine / hand for mine, hand in zip(times[label], hands, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(
            {
                "task": name,
                "K": K,
                "loop": label,
                "turns": len(ratios),
                "median_ms": 1000 * statistics.median(times[label]),
                "time_ratio": middle,
                "time_ratio_quartiles": [low, high],
                "peak_bytes": peaks[label],
                "peak_ratio": peaks[label] / peaks["hand"],
                "gradient_error": errors[label],
            }
        )
        print(
            f"{name:5} K={K:<3} {label:10} {rows[-1]['median_ms']:9.3f} ms  time ratio {middle:.3f} ({low:.3f}..{high:.3f})"
            f"  peak {peaks[label]:>11,} bytes  ratio {rows[-1]['peak_ratio']:.7f}"
            f"  error {errors[label]:.1e}",
            flush=True,
        )
    return rows


def as_markdown(rows):
    lines = [
        "| task | micro-batches | loop | time | quartiles | peak | gradient error in float64 |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["time_ratio_quartiles"]
        lines.append(
            f"| {row['task']} | {row['K']} | {LABELS[row['loop']]} | {row['time_ratio']:.3f} | {low:.3f} to {high:.3f} | "
            f"{row['peak_ratio']:.5f} | {row['gradient_error']:.1e} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tenth of the turns")
    parser.add_argument("--task", choices=("mlp", "text"))
    arguments = parser.parse_args()
    random.seed(0)
    rows = []
    for (name, K), turns in TURNS.items():
        if arguments.task in (None, name):
            rows += measure(name, K, max(2, turns // 10) if arguments.quick else turns)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "fullbatch": version("fullbatch")}
    versions |= {name: version(name) for name in ("accelerate", "lightning") if importlib.util.find_spec(name)}
    print(
        f"measured on {platform.machine()}, {torch.get_num_threads()} threads, "
        + ", ".join(f"{k} {v}" for k, v in versions.items())
    )
    if arguments.json:
        value = {"command": "make bench", "versions": versions, "threads": torch.get_num_threads(), "rows": rows}
        arguments.json.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
