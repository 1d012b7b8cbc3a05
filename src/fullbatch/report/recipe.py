"""A page on accumulation for a repository, with the numbers of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullbatch.errors import InvalidArgument
from fullbatch.prove.loops import WRONG

_CURVE = "accum-curve.json"
_PITFALLS = {
    "missing-division": "backward on each mean: the gradient is K times too long; Adam and clipping hide it",
    "unequal-items": "a mean of means: items in short micro-batches weigh more",
    "short-window-weight": "the last window is divided by the nominal K",
    "lost-gradient": "`zero_grad` inside the window",
    "stale-gradient": "`zero_grad` forgotten: the last window's gradient comes again",
    "early-step": "the optimizer steps at every micro-batch",
    "lost-tail": "`if (i + 1) % K == 0` alone: the last micro-batches reach no update",
    "scheduler-rate": "the scheduler ticks per micro-batch",
    "ema-rate": "the averaged weights move per micro-batch",
    "partial-clip": "clipping each micro-batch instead of the window's gradient",
    "scaled-clip": "clipping before `scaler.unscale_`",
    "unscale-rate": "`unscale_` or `scaler.update` per micro-batch",
    "hooked-step": "an optimizer in a backward hook steps at every micro-batch",
    "low-precision": "many micro-batches summed in bfloat16: accumulate in float32",
}


def recipe(outputs: Path) -> str:
    """The page as Markdown, from the JSON that ``sweep``, ``prove`` and ``train`` left in ``outputs``.

    Raises:
        InvalidArgument: There is no accumulation curve, or a file is not what its name says.
    """
    curve = _read(outputs / _CURVE, "accum-curve.v1")
    if curve is None:
        raise InvalidArgument(f"there is no {outputs / _CURVE}: the recipe shows the numbers of a run", hint="fullbatch sweep")
    proof = _read(outputs / "proof.json", "proof.v1")
    run = _read(outputs / "train.json", "train.v1")
    parts = [_HEAD, _code(), _speed(curve), _proof(proof), _run(run), _pitfalls(outputs)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _read(path: Path, schema: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found = value["schema"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != schema:
        raise InvalidArgument(f"{path} is not {schema}: its schema is {found!r}", hint=f"make it again, or remove {path}")
    return dict(value)


_HEAD = """
# Gradient accumulation

The law: **every item of a window has the same weight in the update, 1 / (items in the window, over all ranks).**
An item is what the loss is a mean over (a sample, a labelled token); a window is the micro-batches of one update.

1. Count the items of the whole window before the first forward.
2. Scale each micro-batch's mean loss by its items / the window's items. Not by 1 / K: micro-batches differ.
3. Skip the gradient reduction on all but the last micro-batch, around forward *and* backward.
4. Once a window, in this order: unscale, clip, step, `zero_grad`, schedule. The rest of an epoch is a window too.
5. Log throughput against the effective batch; stop raising it where the curve is flat.
"""


def _code() -> str:
    return """
## By hand, for one process

```python
def update(model, optimizer, scheduler, loss, micros, items):
    counts = [items(micro) for micro in micros]
    total = sum(counts)
    if total == 0:
        return  # nothing to learn from: no update, no tick
    for i, (micro, n) in enumerate(zip(micros, counts)):
        if n == 0:
            continue  # a mean over nothing is NaN
        (loss(model, micro) * n / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
```

Over ranks: sum `total` over them, multiply by their number (DistributedDataParallel divides by it), and run all
micro-batches but the last under `with model.no_sync():`, forward included.

## With fullbatch

```python
from fullbatch import Accumulator, tokens

step = Accumulator(model, optimizer, loss, items=tokens("labels"), micro_batch=4, max_grad_norm=1.0, scheduler=scheduler)
for batch in loader:
    update = step(batch)  # one update, whatever the micro-batch; update.loss, update.samples_per_second
```
"""


def _speed(curve: dict[str, Any]) -> str:
    rows = [
        f"| {p['effective_batch']} | {p['micro_batch']} x {p['accum_steps']} | {p['samples_per_sec']:,.0f} | "
        f"{p['median_step_ms']:.2f} | {p['avg_loss']:.4f} | {p['sync_calls'] / p['steps']:g} |"
        for p in curve["points"]
    ]
    flat = [p["effective_batch"] for p in curve["points"] if p["accum_steps"] == curve["flat_at"]]
    where = (
        f"Here the curve is flat from effective batch {flat[0]}" if flat else "Here the curve still rises where the grid ends"
    )
    return "\n".join(
        [
            f"## Throughput against effective batch (task {curve['settings']['task']})",
            "",
            "| effective batch | micro-batch x accumulation | samples/s | median ms | average loss | reductions/update |",
            "|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
            f"{where} (rule: {curve['flat_rule']}).",
            "",
            _evidence(curve),
        ]
    )


def _proof(proof: dict[str, Any] | None) -> str:
    if proof is None:
        return ""
    exact = [row for row in proof["comparisons"] if row["dtype"] == "float64" and row["grad_error"] is not None]
    worst = f"; worst relative gradient error in float64: {max(row['grad_error'] for row in exact):.1e}" if exact else ""
    verdict = "every split makes the full batch's update" if proof["equal"] else "NOT every split makes the full batch's update"
    return f"## Proof\n\n{len(proof['comparisons'])} comparisons: {verdict}{worst}.\n\n{_evidence(proof)}"


def _run(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    settings, held_out = run["settings"], run["held_out"]
    result = (
        f"; held out: {held_out[0]['value']:.3f} before, {held_out[-1]['value']:.3f} {held_out[-1]['unit']} after"
        if held_out
        else ""
    )
    return (
        f"## A run\n\nTask {settings['task']}: {run['updates']} updates of {settings['effective_batch']} samples "
        f"in micro-batches of {settings['micro_batch']}, {run['samples_per_second']:,.0f} samples/s{result}."
        f"\n\n{_evidence(run)}"
    )


def _pitfalls(outputs: Path) -> str:
    rows = []
    for kind in WRONG:
        if kind not in _PITFALLS:
            continue
        broken = _read(outputs / f"broken-{kind}.json", "broken-loop.v1")
        rows.append(f"| `{kind}` | {_PITFALLS[kind]} | {_seen(broken)} |")
    return "\n".join(
        [
            "## Pitfalls",
            "",
            "| kind | what the loop does | measured here |",
            "|---|---|---|",
            *rows,
            "",
            "See one: `fullbatch prove --break missing-division`.",
        ]
    )


def _seen(broken: dict[str, Any] | None) -> str:
    if broken is None:
        return ""
    first = {row["optimizer"]: row for row in reversed(broken["departures"]) if row["param_rel_diff"] > 0 or row["steps"] != 1}
    return ", ".join(
        f"{name}: weights {row['param_rel_diff']:.0%} off at update {row['update']}" for name, row in sorted(first.items())
    )


def _evidence(figures: dict[str, Any]) -> str:
    evidence = figures["evidence"]
    versions = ", ".join(f"{name} {version}" for name, version in evidence["versions"].items())
    return f"*{evidence['how']} on {evidence['device']}, {versions}:* `{evidence['command']}`"
