"""Predicted against published peaks: ``python benchmarks/prediction.py measured.csv [--only A10,A12]``.

Each row of the file is rebuilt (published.py), traced without a GPU and played through the
allocator. No constant is fitted to a row.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from published import CannotRebuild, rebuild

from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.playback import TRACED, play
from fullbatch.memory.trace import trace
from fullbatch.report import write_json

MiB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="ids of rows, or their beginnings, with commas between")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = tuple(filter(None, arguments.only.split(",")))
    rows = [row for row in csv.DictReader(arguments.file.open()) if not wanted or row["id"].startswith(wanted)]
    done: list[dict[str, Any]] = []
    runs: dict[str, dict[str, int] | str] = {}
    for row in rows:
        key = json.dumps(
            {name: value for name, value in row.items() if name not in ("id", "metric", "value_mib", "note", "source")}
        )
        if key not in runs:
            runs[key] = run(row)
        figures = runs[key]
        if isinstance(figures, str):
            done.append({"id": row["id"], "model": row["model"], "metric": row["metric"], "why_not": figures})
            print(f"{row['id']:6} not rebuilt: {figures}", flush=True)
            continue
        kind = "allocated" if "allocated" in row["metric"] else "reserved"
        measured = float(row["value_mib"])
        value = (figures[kind] + (figures["outside"] if "driver" in row["metric"] else 0)) / MiB
        if "GB" in row["metric"]:
            value = value * MiB / 1e6
        error = value / measured - 1
        done.append({
            "id": row["id"], "model": row["model"], "metric": row["metric"], "published": measured,
            "predicted": round(value, 3), "error": round(error, 5), "seconds": figures["ms"] / 1000,
        })  # fmt: skip
        print(
            f"{row['id']:6} {row['model'].split('/')[-1][:26]:26} {row['micro_batch']:>3} x {row['seq_len']:>5} "
            f"{row['attention'][:5]:5} {row['params_dtype'][:4]:4} {row['metric'][:14]:14} "
            f"{measured:10.3f} {value:10.3f} {error:+8.2%} {figures['ms'] / 1000:5.1f} s",
            flush=True,
        )
    summary = {}
    for group in sorted({(one["id"][0], one["metric"]) for one in done if "error" in one}):
        errors = [abs(one["error"]) for one in done if "error" in one and (one["id"][0], one["metric"]) == group]
        summary[" ".join(group)] = {
            "rows": len(errors), "median": round(statistics.median(errors), 5), "worst": round(max(errors), 5)
        }  # fmt: skip
        print(f"{' '.join(group):40} rows {len(errors):3}  median {statistics.median(errors):.2%}  worst {max(errors):.2%}")
    if arguments.json is not None:
        write_json(arguments.json, {"command": " ".join(sys.argv), "rows": done, "summary": summary})


def run(row: dict[str, str]) -> dict[str, int] | str:
    begin = time.perf_counter()
    try:
        made = rebuild(row)
    except CannotRebuild as error:
        return str(error)
    timeline = trace(
        made.model, made.loss, made.batch, optimizer=made.optimizer, kernels=made.kernels,
        micro_batches=min(made.micro_batches, TRACED), **made.loop,
    )  # fmt: skip
    played = play(timeline, CachingAllocator(), made.micro_batches)
    steady = [stage for stage in played.stages if stage.update > 1 or not made.steady]
    return {
        "allocated": max(stage.peak_allocated_bytes for stage in steady),
        "reserved": max(stage.peak_reserved_bytes for stage in steady),
        "outside": made.outside_bytes,
        "ms": int((time.perf_counter() - begin) * 1000),
    }


if __name__ == "__main__":
    main()
