"""Growth of the peak with the length of the sequence, predicted, until the card is full."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fullbatch.errors import InvalidArgument
from fullbatch.evidence import Evidence
from fullbatch.memory import Anatomy
from fullbatch.plain import plain

SCHEMA = "stretch.v1"


@dataclass(frozen=True, kw_only=True)
class StretchPoint:
    """One length under one kind of attention.

    Attributes:
        attention: ``eager``, ``sdpa`` or ``flash``.
        seq_len: Tokens of a sample.
        peak_allocated_bytes: Most in live blocks.
        peak_reserved_bytes: Most in the allocator's segments.
        static_bytes: Weights and optimizer state, which do not grow.
        unusable_bytes: Peak reserved minus peak allocated.
        largest_free_bytes: Largest free block at the end of the run.
        fits: On the card asked about.
        room_bytes: Usable minus peak reserved.
        retries: Times that the allocator emptied its cache to go on.
    """

    attention: str
    seq_len: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    static_bytes: int
    unusable_bytes: int
    largest_free_bytes: int
    fits: bool
    room_bytes: int
    retries: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the peak allocated grows under one kind of attention.

    Attributes:
        attention: Which.
        order: ``linear``, ``quadratic``, ``between`` or ``unknown`` (fewer than three lengths).
        quadratic_share: Part of the growing bytes at the greatest length that is due to the square of
            the length, in a least-squares fit of constant + linear + quadratic.
        longest_that_fits: Of the lengths tried; ``None``: none.
    """

    attention: str
    order: str
    quadratic_share: float
    longest_that_fits: int | None


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Predicted peaks over lengths and kinds of attention.

    Attributes:
        points: In the order asked for.
        growth: One a kind of attention.
        card: Title of the card.
        usable_bytes: Of the card.
        settings: How the run was set up.
        evidence: How the figures were obtained.
    """

    points: list[StretchPoint]
    growth: list[Growth]
    card: str
    usable_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"schema": SCHEMA, **plain(self)}


def stretch(
    predict: Callable[[str, int], Anatomy],
    *,
    attentions: Sequence[str],
    seq_lens: Sequence[int],
    on_point: Callable[[StretchPoint], None] | None = None,
) -> Stretch:
    """Predict the peak at each length under each kind of attention.

    Args:
        predict: ``predict(attention, seq_len)``: the anatomy of that run, with a verdict.
        attentions: Kinds of attention, side by side.
        seq_lens: Lengths, ascending.
        on_point: Called after each point.

    Raises:
        InvalidArgument: The lengths are none, not above 0, or do not ascend.
    """
    if not seq_lens or min(seq_lens) < 1 or sorted(set(seq_lens)) != list(seq_lens):
        raise InvalidArgument(
            f"seq_lens={list(seq_lens)} must be lengths above 0 that ascend", hint="--seq-lens 512,1024,2048,4096"
        )
    points: list[StretchPoint] = []
    found: Anatomy | None = None
    for attention in attentions:
        for seq_len in seq_lens:
            found = predict(attention, seq_len)
            verdict = found.verdict
            assert verdict is not None
            points.append(
                StretchPoint(
                    attention=attention,
                    seq_len=seq_len,
                    peak_allocated_bytes=found.peak_allocated_bytes,
                    peak_reserved_bytes=found.peak_reserved_bytes,
                    static_bytes=found.parts["weights"] + found.parts["optimizer state"],
                    unusable_bytes=found.parts["unusable"],
                    largest_free_bytes=found.largest_free_bytes,
                    fits=verdict.fits,
                    room_bytes=verdict.room_bytes,
                    retries=verdict.num_alloc_retries,
                )
            )
            if on_point is not None:
                on_point(points[-1])
    assert found is not None
    assert found.verdict is not None
    settings = {key: value for key, value in found.settings.items() if key not in ("seq_len", "attention")}
    return Stretch(
        points=points,
        growth=[_growth(attention, [point for point in points if point.attention == attention]) for attention in attentions],
        card=found.verdict.card,
        usable_bytes=found.verdict.usable_bytes,
        settings={**settings, "seq_lens": list(seq_lens), "attentions": list(attentions)},
        evidence=found.evidence,
    )


def _growth(attention: str, points: list[StretchPoint]) -> Growth:
    fitting = [point.seq_len for point in points if point.fits]
    longest = max(fitting, default=None)
    if len(points) < 3:
        return Growth(attention=attention, order="unknown", quadratic_share=math.nan, longest_that_fits=longest)
    lengths = np.array([point.seq_len for point in points], dtype=float)
    lengths /= lengths[-1]
    peaks = np.array([point.peak_allocated_bytes for point in points], dtype=float)
    # relative residuals: else the greatest length alone decides
    basis = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / peaks[:, None]
    (_, linear, square), *_ = np.linalg.lstsq(basis, np.ones_like(peaks), rcond=None)
    square, linear = max(square, 0.0), max(linear, 0.0)
    share = float(square / (square + linear)) if square + linear > 0 else 0.0
    order = "linear" if share < 0.1 else "quadratic" if share > 0.5 else "between"
    return Growth(attention=attention, order=order, quadratic_share=share, longest_that_fits=longest)
