"""Proofs: one update done as the full batch and in splits, compared; and what wrong loops do instead."""

from fullbatch.prove.broken import SAMPLES as BROKEN_SAMPLES
from fullbatch.prove.broken import BrokenLoop, Departure, run_broken
from fullbatch.prove.loops import WRONG
from fullbatch.prove.proof import Comparison, Difference, Proof, split_name
from fullbatch.prove.prove import prove

__all__ = [
    "BROKEN_SAMPLES",
    "WRONG",
    "BrokenLoop",
    "Comparison",
    "Departure",
    "Difference",
    "Proof",
    "prove",
    "run_broken",
    "split_name",
]
