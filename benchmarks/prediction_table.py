"""The table of docs/prediction.md: each published peak beside its prediction, and why where they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GOALS = {  # median and worst error to stay below, by what a metric counts; xMem states its own median (arXiv 2510.21048)
    "allocated": (0.002, 0.01),
    "reserved": (0.02, 0.07),
    "device": (0.036, None),
}
EXPLAINED = 0.01
"""From this error on the table says why."""

INFERRED = "inferred: what the script's runs before have left was concluded from these rows (operators.py)"
_CAUSES = (  # (in the source or the set-up, in the metric, why); the first that fits
    ("personal_chatgpt", "", "not known; likely libraries' code that loads at the first product, after the context was read"),
    ("nf4", "reserved", "which blocks loading the quantised weights has left in the cache is not known to the block"),
    ("optimum-benchmark", "reserved", "the same run is published with 2,612 to 2,760 MiB"),
    ("transformers docs", "device", "code of kernels that loads after the context was read is in the driver's figure"),
)


def kind_of(metric: str) -> str:
    """What ``metric`` counts: ``allocated``, ``reserved`` or ``device``."""
    return next((kind for kind in ("allocated", "reserved") if kind in metric), "device")


def set_up(row: dict[str, str]) -> str:
    """A row's columns in one cell."""
    if row["model"].startswith("operator "):
        return row["kind"]
    shape = " x ".join(filter(None, (row["micro_batch"], row["seq_len"])))
    if row["accumulate"] not in ("", "1"):
        shape += f", {row['accumulate']} micro-batches"
    dtypes = row["params_dtype"].split(" ")[0]
    if row["compute_dtype"] != row["params_dtype"]:
        dtypes += f" in {row['compute_dtype']}"
    rank = f"LoRA rank {row['lora_rank']}" if row["lora_rank"] else ""
    parts = (shape, dtypes, rank, row["optimizer"].split(" (")[0], row["attention"].split(" ")[0], row["device"])
    checkpointing = "checkpointing" if row["checkpointing"] not in ("", "no") else ""
    return ", ".join(filter(None, (*parts, checkpointing)))


def why(row: dict[str, str], error: float) -> str:
    """Why a row is off, if that is known; nothing where it is not off by much."""
    if row["model"] == "operator embedding":
        return INFERRED
    if abs(error) < EXPLAINED:
        return ""
    seen = row["source"] + " " + row["params_dtype"]
    return next((cause for part, metric, cause in _CAUSES if part in seen and metric in row["metric"]), "not known")


def write_markdown(path: Path, report: dict[str, Any]) -> None:
    """Write what prediction.py found as a table."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        "# Predicted beside published peaks",
        "",
        "Each row of a published measurement is rebuilt from its columns and its source's script, traced without a GPU and",
        "played through the allocator. No constant is fitted to a row: a rule has a source, named where it stands. Rows that",
        "say *inferred* are in no median: which runs of a script came before was concluded from the rows themselves.",
        "MiB; *device*: the driver's figure, or what it grows by.",
        "",
        f"Made by `{report['command']}` ({versions}).",
        "",
        "| group | metric | rows | median error | goal | worst | goal |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, one in report["summary"].items():
        if "median" not in one:
            continue
        group, _, metric = name.partition(" ")
        median, worst = GOALS[kind_of(metric)]
        cells = (f"{one['median']:.2%}", f"{median:.1%}", f"{one['worst']:.2%}", "-" if worst is None else f"{worst:.0%}")
        lines.append(f"| {group} | {metric} | {one['rows']} | {' | '.join(cells)} |")
    if "ranges" in report["summary"]:
        ranges = report["summary"]["ranges"]
        lines += [
            "",
            f"{ranges['hold']} of {ranges['rows']} ranges (cuDNN's workspaces, late code) hold the published figure.",
        ]
    lines += [
        "",
        "| id | model | set-up | metric | published | predicted | error | why |",
        "|---|---|---|---|--:|--:|--:|---|",
    ]
    lines += [_line(one) for one in report["rows"] if "why_not" not in one]
    left_out = [one for one in report["rows"] if "why_not" in one]
    if left_out:
        lines += ["", "Not rebuilt:", "", "| id | model | why not |", "|---|---|---|"]
        lines += [f"| {one['id']} | {_cell(one['model'])} | {_cell(one['why_not'])} |" for one in left_out]
    path.write_text("\n".join(lines) + "\n")


def _line(one: dict[str, Any]) -> str:
    cells = [one["id"], _cell(one["model"]), _cell(one["set_up"]), one["metric"], f"{one['published']:,.1f}"]
    if "holds" in one:
        beside = "" if one["holds"] else f"{one['beside']:+.2%} beside the range"
        cells += [f"{one['low']:,.1f} to {one['high']:,.1f}", "in range" if one["holds"] else beside, one.get("why", "")]
    else:
        cells += [f"{one['predicted']:,.1f}", f"{one['error']:+.2%}", one["why"]]
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
