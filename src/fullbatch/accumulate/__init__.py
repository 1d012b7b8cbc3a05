"""Exact accumulation: a window of micro-batches becomes one update."""

from fullbatch.accumulate.accumulator import Accumulator, Loss
from fullbatch.accumulate.batch import batch_size, map_tensors, slices
from fullbatch.accumulate.items import Counter, LabelledTokens, samples, tokens
from fullbatch.accumulate.terms import ONLY_TERM
from fullbatch.accumulate.update import Update
from fullbatch.accumulate.window import MicroBatch

__all__ = [
    "ONLY_TERM",
    "Accumulator",
    "Counter",
    "LabelledTokens",
    "Loss",
    "MicroBatch",
    "Update",
    "batch_size",
    "map_tensors",
    "samples",
    "slices",
    "tokens",
]
