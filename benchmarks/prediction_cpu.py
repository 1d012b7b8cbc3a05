"""What a trace predicts for the CPU beside what a run there holds, at its peak.

    python benchmarks/prediction_cpu.py [--scale 4] [--only bert,gpt2]

The models are those of tests/cpu_models.py, ``scale`` times as wide. Each is predicted and measured twice: with
torch's own kernels, and with oneDNN, which takes blocked copies and scratchpads that no trace knows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from fullbatch.memory.measure import measure_cpu
from fullbatch.memory.trace import trace
from fullbatch.units import MiB

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from cpu_models import MODELS, VARIANTS, case, without_onednn


def peaks(name, variant, scale):
    """Predicted and measured peak in bytes, and the error."""
    arguments, settings = case(name, variant, scale)
    predicted = trace(*arguments, kernels=None, **settings).peak_requested_bytes
    measured = measure_cpu(*arguments, **settings).peak_allocated_bytes
    return predicted, measured, predicted / measured - 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--only", default=",".join(MODELS))
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, peak in MiB, scale {arguments.scale}")
    print(f"{'model':8}{'variant':14}{'predicted':>10}{'measured':>10}{'error':>9}   with oneDNN{'':3}{'error':>9}")
    for name in arguments.only.split(","):
        for variant in VARIANTS:
            with without_onednn():
                predicted, measured, error = peaks(name, variant, arguments.scale)
            _, with_onednn, error_onednn = peaks(name, variant, arguments.scale)
            print(
                f"{name:8}{variant:14}{predicted / MiB:10.2f}{measured / MiB:10.2f}{error:9.2%}"
                f"   {with_onednn / MiB:11.2f}   {error_onednn:9.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
