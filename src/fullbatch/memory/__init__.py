"""Memory of a training run: predicted without a GPU, dissected to the byte, measured, limited."""

from fullbatch.memory.anatomy import Anatomy, Share, Verdict, anatomy
from fullbatch.memory.catalog import CARDS, Card, find_card
from fullbatch.memory.limit import limit
from fullbatch.memory.measure import Measurement, StagePeak, measure_cpu, measure_device
from fullbatch.memory.predict_cpu import predict_cpu

__all__ = [
    "CARDS",
    "Anatomy",
    "Card",
    "Measurement",
    "Share",
    "StagePeak",
    "Verdict",
    "anatomy",
    "find_card",
    "limit",
    "measure_cpu",
    "measure_device",
    "predict_cpu",
]
