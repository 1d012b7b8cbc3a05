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
        micro_batch_bytes: Most in live blocks during a forward or backward; the step's peak does not grow.
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
    micro_batch_bytes: int
    static_bytes: int
    unusable_bytes: int
    largest_free_bytes: int
    fits: bool
    room_bytes: int
    retries: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the peak allocated of forward and backward grows under one kind of attention.

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
                    micro_batch_bytes=max(one.peak_allocated_bytes for one in found.stages if one.micro_batch),
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
    linear, square = _fit(points)
    share = float(square / (square + linear)) if square + linear > 0 else 0.0
    order = "linear" if share < 0.1 else "quadratic" if share > 0.5 else "between"
    return Growth(attention=attention, order=order, quadratic_share=share, longest_that_fits=longest)


def _fit(points: list[StretchPoint]) -> tuple[float, float]:
    """Bytes at the greatest length that grow with the length, and with its square.

    Below some length what does not grow may make the peak (gradients at the end of a backward), so the shortest
    are left out until constant + linear + quadratic holds the others within 0.5 %; three are kept.
    """
    lengths = np.array([point.seq_len for point in points], dtype=float) / points[-1].seq_len
    peaks = np.array([point.micro_batch_bytes for point in points], dtype=float)
    # relative residuals: else the greatest length alone decides
    basis = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / peaks[:, None]
    (constant, linear, square), *_ = np.linalg.lstsq(basis, np.ones_like(peaks), rcond=None)
    off = np.abs(basis @ np.array([constant, linear, square]) - 1).max()
    if len(points) > 3 and off > 0.005:
        return _fit(points[1:])
    return max(float(linear), 0.0), max(float(square), 0.0)
