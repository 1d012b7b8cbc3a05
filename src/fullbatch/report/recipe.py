"""A page on accumulation for a repository, with the numbers of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullbatch.errors import InvalidArgument

_CURVE = "accum-curve.json"
_PITFALLS = {
    "missing-division": "backward on each mean: the gradient is K times too long; Adam and clipping hide it",
    "double-division": "both the user and the framework divide by K",
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
    try:
        parts = [_HEAD, _CODE, _speed(curve), _proof(proof), _run(run), _pitfalls(outputs)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise InvalidArgument(
            f"a file in {outputs} is not what its schema says ({type(error).__name__}: {error})",
            hint="make it again with fullbatch sweep, prove or train",
        ) from None
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _read(path: Path, schema: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found = value["schema"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found != schema:
        raise InvalidArgument(f"{path} is not {schema}: its schema is {found!r}", hint=f"make it again, or remove {path}")
    return dict(value)


def _line(text: Any) -> str:
    """``text`` from a file as one line that Markdown does not read as anything else."""
    return " ".join(str(text).split()).replace("`", "'").replace("<", "&lt;").replace("|", "/")


def _number(value: Any, form: str) -> str:
    return "not a number" if value is None else format(value, form)


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


_CODE = """
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
        f"| {p['effective_batch']:d} | {p['micro_batch']:d} x {p['accum_steps']:d} | {p['samples_per_sec']:,.0f} | "
        f"{p['samples_per_sec_low']:,.0f} to {p['samples_per_sec_high']:,.0f} | "
        f"{p['median_step_ms']:.2f} | {_number(p['avg_loss'], '.4f')} | {p['sync_calls'] / p['steps']:g} |"
        for p in curve["points"]
    ]
    flat = [p["effective_batch"] for p in curve["points"] if p["accum_steps"] == curve["flat_at"]]
    where = (
        f"Here the curve is flat from effective batch {flat[0]:d}" if flat else "Here the curve still rises where the grid ends"
    )
    return "\n".join(
        [
            f"## Throughput against effective batch (task {_line(curve['settings']['task'])})",
            "",
            "| effective batch | micro-batch x accumulation | samples/s | slowest to fastest round | median ms | average loss "
            "| reductions/update |",
            "|---:|---:|---:|---:|---:|---:|---:|",
            *rows,
            "",
            f"{where} (rule: {_line(curve['flat_rule'])}).",
            "",
            _evidence(curve),
        ]
    )


def _proof(proof: dict[str, Any] | None) -> str:
    if proof is None:
        return ""
    rows = proof["comparisons"]
    equal = proof["equal"] is True and rows and all(row["equal"] is True for row in rows)
    exact = [row["grad_error"] for row in rows if row["dtype"] == "float64" and row["grad_error"] is not None]
    worst = f"; worst relative gradient error in float64: {max(exact):.1e}" if exact else ""
    verdict = "every split makes the full batch's update" if equal else "NOT every split makes the full batch's update"
    return f"## Proof\n\n{len(rows)} comparisons: {verdict}{worst}.\n\n{_evidence(proof)}"


def _run(run: dict[str, Any] | None) -> str:
    if run is None:
        return ""
    settings, held_out = run["settings"], run["held_out"]
    result = ""
    if held_out:
        before, after = (_number(point["value"], ".3f") for point in (held_out[0], held_out[-1]))
        result = f"; held out: {before} before, {after} {_line(held_out[-1]['unit'])} after"
    return (
        f"## A run\n\nTask {_line(settings['task'])}: {run['updates']:d} updates of {settings['effective_batch']:d} samples "
        f"in micro-batches of {settings['micro_batch']:d}, {run['samples_per_second']:,.0f} samples/s{result}."
        f"\n\n{_evidence(run)}"
    )


def _pitfalls(outputs: Path) -> str:
    seen = {kind: _read(outputs / f"broken-{kind}.json", "broken-loop.v1") for kind in _PITFALLS}
    measured = any(seen.values())
    head = "| kind | what the loop does |" + (" how far the weights are off here |" if measured else "")
    rows = [f"| `{kind}` | {what} |" + (f" {_off(seen[kind])} |" if measured else "") for kind, what in _PITFALLS.items()]
    return "\n".join(
        [
            "## Pitfalls",
            "",
            head,
            "|---|---|" + ("---|" if measured else ""),
            *rows,
            "",
            "See one: `fullbatch prove --break KIND`.",
        ]
    )


def _off(broken: dict[str, Any] | None) -> str:
    if broken is None:
        return ""
    worst: dict[str, float] = {}
    for row in broken["departures"]:
        name = _line(row["optimizer"])
        worst[name] = max(worst.get(name, 0.0), row["param_rel_diff"])
    return ", ".join(f"{name} {share:.1%}" for name, share in worst.items())


def _evidence(figures: dict[str, Any]) -> str:
    evidence = figures["evidence"]
    versions = ", ".join(f"{_line(name)} {_line(version)}" for name, version in evidence["versions"].items())
    return f"*{_line(evidence['how'])} on {_line(evidence['device'])}, {versions}:* `{_line(evidence['command'])}`"
