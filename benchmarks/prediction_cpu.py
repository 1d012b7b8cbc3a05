"""What a trace predicts for the CPU beside what torch's profiler sees a run there hold.

    python benchmarks/prediction_cpu.py [--scale 2] [--only bert,gpt2] 2> /dev/null

The models are those of tests/cpu_models.py, ``scale`` times as wide. Each is predicted and measured twice: as torch
is, with oneDNN, and with torch's own kernels alone. The table of docs/prediction-cpu.md is what this prints.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from fullbatch.memory.measure import measure_cpu
from fullbatch.memory.trace import trace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from cpu_models import MODELS, VARIANTS, case, without_onednn

HEAD = (
    "model", "variant", "peak in", "predicted", "measured", "error", "worst stage",
    "measured, no oneDNN", "error, no oneDNN",
)  # fmt: skip


def compare(name, variant, scale):
    """Stage of the peak, its predicted and measured bytes, and the largest error of any stage."""
    arguments, settings = case(name, variant, scale)
    timeline = trace(*arguments, kernels=None, **settings)
    measured = measure_cpu(*arguments, **settings)
    stages = [one.peak_allocated_bytes for one in measured.stages]
    worst = max((p / m - 1 for p, m in zip(timeline.stage_peaks(), stages, strict=True)), key=abs)
    at = measured.stages[stages.index(max(stages))].name
    return at, timeline.peak_requested_bytes, max(stages), worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=2)
    parser.add_argument("--only", default=",".join(MODELS))
    arguments = parser.parse_args()
    print("|" + "|".join(f" {head} " for head in HEAD) + "|\n" + "|---|---|---" + "|--:" * (len(HEAD) - 3) + "|")
    default, own = [], []
    for name in arguments.only.split(","):
        for variant in VARIANTS:
            row = [name, variant]
            for kernels, errors in ((nullcontext, default), (without_onednn, own)):
                with kernels():
                    at, predicted, measured, worst = compare(name, variant, arguments.scale)
                errors.append(predicted / measured - 1)
                if errors is default:
                    row += [at, f"{predicted:,}", f"{measured:,}", f"{errors[-1]:+.3%}", f"{worst:+.3%}"]
                else:
                    row += [f"{measured:,}", f"{errors[-1]:+.3%}"]
            print("| " + " | ".join(row) + " |", flush=True)
    print()
    for kernels, errors in (("as torch is, with oneDNN", default), ("without oneDNN", own)):
        sizes = [abs(error) for error in errors]
        print(
            f"{kernels}: {sum(size <= 0.01 for size in sizes)} of {len(sizes)} within 1 % at the peak, "
            f"median {statistics.median(sizes):.3%}, worst {max(sizes):.2%}"
        )
    print(f"torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}, scale {arguments.scale}")


if __name__ == "__main__":
    main()
