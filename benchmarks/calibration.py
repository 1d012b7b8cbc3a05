"""Is the stated chance to fit right? ``python benchmarks/calibration.py docs/prediction.json [--write]``.

Each published run is asked about on cards of many sizes around its predicted peak: the chance that the other models'
runs give it, against whether its measured peak fits. ``--write`` keeps the runs for :mod:`fullbatch.memory.chance`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from fullbatch.memory.chance import chance_to_fit
from fullbatch.report import write_json

KEPT = Path(__file__).parents[1] / "src" / "fullbatch" / "memory" / "published.json"
METRICS = ("peak reserved", "device used minus context at start")
CARDS = [1 + percent / 200 for percent in range(-20, 21)]  # over the predicted peak: -10 % to +10 % by halves
BINS = [(0.0, 0.05), (0.05, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 0.95), (0.95, 1.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="what prediction.py --json wrote")
    parser.add_argument("--write", action="store_true", help="keep the runs in the package")
    arguments = parser.parse_args()
    runs = kept(json.loads(arguments.file.read_text())["rows"])
    answers = [
        (chance_to_fit(int(run["predicted_mib"] * 2**20), int(run["predicted_mib"] * card * 2**20), others(runs, run)),
         run["measured_mib"] <= run["predicted_mib"] * card)
        for run in runs
        for card in CARDS
    ]  # fmt: skip
    print(f"{len(runs)} runs of {len({run['model'] for run in runs})} models, {len(CARDS)} cards each")
    print("| stated chance | answers | mean of them | runs that fitted |\n|---|---|---|---|")
    for low, high in BINS:
        inside = [(chance, fits) for chance, fits in answers if low <= chance < high or chance == high == 1.0]
        if inside:
            mean, share = (statistics.fmean(column) for column in zip(*inside, strict=True))
            print(f"| {low:.0%} to {high:.0%} | {len(inside)} | {mean:.1%} | {share:.1%} |")
    brier = statistics.fmean((chance - fits) ** 2 for chance, fits in answers)
    print(f"Brier score {brier:.4f} (0.25: a coin)")
    if arguments.write:
        write_json(KEPT, {"schema": "published-peaks.v1", "command": "python benchmarks/calibration.py", "rows": runs})
        print(f"wrote {KEPT.name}")


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of language models whose peak of reserved memory, or of the device's without the context, is known."""
    return [
        {
            "id": row["id"],
            "model": row["model"].split("/")[-1],
            "measured_mib": row["published"],
            "predicted_mib": row["predicted"],
        }
        for row in rows
        if row["metric"] in METRICS and "predicted" in row
    ]


def others(runs: list[dict[str, Any]], run: dict[str, Any]) -> list[float]:
    """Measured over predicted, of all runs but those of the same model."""
    return [one["measured_mib"] / one["predicted_mib"] for one in runs if one["model"] != run["model"]]


if __name__ == "__main__":
    main()
