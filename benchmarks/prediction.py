"""Predicted against published peaks: ``python benchmarks/prediction.py measured.csv [--only A10] [--markdown PATH]``.

Each row of the file is rebuilt (published.py), traced without a GPU and played through the
allocator. No constant is fitted to a row. Where cuDNN runs convolutions the prediction is a range, and what counts is
whether the published figure lies in it.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _torchvision  # noqa: F401
from prediction_table import INFERRED, set_up, why, write_markdown
from published import rebuild
from rebuilt import CannotRebuild

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.cudnn import WORKSPACE
from fullbatch.memory.playback import TRACED, play
from fullbatch.memory.trace import trace
from fullbatch.report import write_json

MiB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="ids of rows, or their beginnings, with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    wanted = tuple(filter(None, arguments.only.split(",")))
    rows = [row for row in csv.DictReader(arguments.file.open()) if not wanted or row["id"].startswith(wanted)]
    done: list[dict[str, Any]] = []
    runs: dict[str, dict[str, Any] | str] = {}
    for row in rows:
        key = json.dumps({name: value for name, value in row.items() if name not in ("id", "metric", "value_mib")})
        if key not in runs:
            runs[key] = run(row)
        figures = runs[key]
        if isinstance(figures, str):
            done.append({"id": row["id"], "model": row["model"], "metric": row["metric"], "why_not": figures})
            print(f"{row['id']:6} not rebuilt: {figures}", flush=True)
            continue
        if _is_range(figures):
            done.append(in_range(row, figures))
            continue
        kind = "allocated" if "allocated" in row["metric"] else "reserved"
        measured = float(row["value_mib"])
        value = (figures[kind] + (figures["outside"] if _of_driver(row) else 0)) / MiB
        error = value / measured - 1
        done.append({
            "id": row["id"], "model": row["model"], "set_up": set_up(row), "metric": row["metric"], "published": measured,
            "predicted": round(value, 3), "error": round(error, 5), "why": why(row, error), "seconds": figures["ms"] / 1000,
        })  # fmt: skip
        print(
            f"{row['id']:6} {row['model'].split('/')[-1][:26]:26} {row['micro_batch']:>3} x {row['seq_len']:>5} "
            f"{row['attention'][:5]:5} {row['params_dtype'][:4]:4} {row['metric'][:14]:14} "
            f"{measured:10.3f} {value:10.3f} {error:+8.2%} {figures['ms'] / 1000:5.1f} s",
            flush=True,
        )
    summary = {}
    counted = [one for one in done if "error" in one and one["why"] != INFERRED]
    for group in sorted({(one["id"][0], one["metric"]) for one in counted}):
        errors = [abs(one["error"]) for one in counted if (one["id"][0], one["metric"]) == group]
        summary[" ".join(group)] = {
            "rows": len(errors), "median": round(statistics.median(errors), 5), "worst": round(max(errors), 5)
        }  # fmt: skip
        print(f"{' '.join(group):40} rows {len(errors):3}  median {statistics.median(errors):.2%}  worst {max(errors):.2%}")
    ranges = [one for one in done if "holds" in one]
    if ranges:
        summary["ranges"] = {"rows": len(ranges), "hold": sum(one["holds"] for one in ranges)}
        print(f"ranges: {summary['ranges']['hold']} of {len(ranges)} hold the published figure")
    report = {"command": _command(), "versions": _versions(), "rows": done, "summary": summary}
    if arguments.json is not None:
        write_json(arguments.json, report)
    if arguments.markdown is not None:
        write_markdown(arguments.markdown, report)


def _command() -> str:
    """As it can be pasted at the root of the repository."""
    paths = [str(Path(word).name) if word.endswith(".csv") else word for word in sys.argv[1:]]
    return " ".join(["python benchmarks/prediction.py", *paths])


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "fullbatch")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _is_range(figures: dict[str, Any]) -> bool:
    """Whether the prediction is a range: outside of the allocator, or by workspaces of more than 0.1 % of the peak."""
    ends = figures.get("ends", [])
    peaks = [end["allocated"] for end in ends]
    return figures["more"] > 0 or (bool(peaks) and max(peaks) > 1.001 * min(peaks))


def in_range(row: dict[str, str], figures: dict[str, Any]) -> dict[str, Any]:
    """Whether the published figure lies between the ends; the cache is bounded by what is allocated below."""
    ends = figures["ends"]
    kind = "allocated" if "allocated" in row["metric"] else "reserved"
    outside = figures["outside"] if _of_driver(row) else 0
    least = kind if len(ends) == 1 else "allocated"
    low = (min(end[least] for end in ends) + outside) / MiB
    high = (max(end[kind] for end in ends) + outside + figures["more"]) / MiB
    measured = float(row["value_mib"])
    holds = low <= measured <= high
    miss = "holds" if holds else f"{measured / (low if measured < low else high) - 1:+.2%} beside it"
    print(
        f"{row['id']:6} {row['model'][:26]:26} {row['micro_batch']:>3} {row['optimizer'][:12]:12} {row['metric'][:26]:26} "
        f"{measured:10.3f} in {low:10.3f} .. {high:10.3f} {miss:>17} {figures['ms'] / 1000:5.1f} s",
        flush=True,
    )
    return {
        "id": row["id"], "model": row["model"], "set_up": set_up(row), "metric": row["metric"], "published": measured,
        "low": round(low, 3), "high": round(high, 3), "holds": holds, "seconds": figures["ms"] / 1000,
        "beside": 0.0 if holds else round(measured / (low if measured < low else high) - 1, 5),
    }  # fmt: skip


def _of_driver(row: dict[str, str]) -> bool:
    return any(word in row["metric"] for word in ("driver", "device used", "process"))


def run(row: dict[str, str]) -> dict[str, Any] | str:
    begin = time.perf_counter()
    try:
        made = rebuild(row)
        with made.around():
            timeline = trace(
                made.model, made.loss, made.batch, optimizer=made.optimizer,
                kernels=replace(made.kernels, convolution_workspace="most"),
                micro_batches=min(made.micro_batches, TRACED), **made.loop,
            )  # fmt: skip
    except CannotRebuild as error:
        return str(error)
    except Exception as error:  # a row of a kind that no one has seen says why, and the others go on
        return f"{type(error).__name__}: {error}"

    def peaks(share: float) -> dict[str, int]:
        allocator = CachingAllocator()
        run = timeline.resized(WORKSPACE, share)
        if made.load is not None:
            run = made.load(run, allocator)
        played = play(run, allocator, made.micro_batches)
        steady = [stage for stage in played.stages if stage.update > 1 or not made.steady]
        return {
            "allocated": max(stage.peak_allocated_bytes for stage in steady),
            "reserved": max(stage.peak_reserved_bytes for stage in steady),
        }

    figures: dict[str, Any] = {**peaks(0), "outside": made.outside_bytes, "more": made.outside_more_bytes}
    figures["ends"] = [peaks(0)]
    if any(owner.operator == WORKSPACE for owner in timeline.owners):
        figures["ends"] = [peaks(share) for share in (0, 0.25, 0.5, 0.75, 1)]
    return {**figures, "ms": int((time.perf_counter() - begin) * 1000)}


if __name__ == "__main__":
    main()
