"""Memory of a training run: predicted without a GPU, dissected to the byte, measured, limited."""

from fullbatch.memory.anatomy import Anatomy, Share, Verdict, anatomy
from fullbatch.memory.catalog import CARDS, Card, find_card

__all__ = ["CARDS", "Anatomy", "Card", "Share", "Verdict", "anatomy", "find_card"]
