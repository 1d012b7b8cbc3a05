"""What a loss returned: one mean, or several by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fullbatch.accumulate.items import Counter, tokens
from fullbatch.errors import InvalidArgument, LossError

_TOKENS: Any = tokens  # a newcomer's items=tokens is no counter

ONLY_TERM = "loss"
"""Name of the term of a loss that returns one tensor."""


def counters_by_term(items: Counter | Mapping[str, Counter]) -> dict[str, Counter]:
    """The ``items`` argument as a mapping from term to counter."""
    if isinstance(items, Mapping):
        if not items:
            raise InvalidArgument("items={} names no term", hint="leave it out to count samples")
        counters = dict(items)
    else:
        counters = {ONLY_TERM: items}
    for term, counter in counters.items():
        if counter is _TOKENS:
            raise InvalidArgument("items=tokens names no labels", hint='items=tokens("labels")')
        if not callable(counter):
            raise InvalidArgument(
                f"items ({term}) is {counter!r}: it must be a function from a micro-batch to its number of items",
                hint='use fullbatch.samples, fullbatch.tokens("labels") or lambda micro: ...',
            )
    return counters


def weights_by_term(weights: Mapping[str, float] | None, counters: Mapping[str, Counter]) -> dict[str, float]:
    """Weight of each term in the total, 1 where nothing is said."""
    if weights is not None and not isinstance(weights, Mapping):
        raise InvalidArgument(
            f"weights={weights!r} must be a mapping from term to number", hint='weights={"lm": 1.0, "aux": 0.01}'
        )
    unknown = set(weights or {}) - set(counters)
    if unknown:
        raise InvalidArgument(
            f"weights names {sorted(unknown)}, which items does not: the terms are {sorted(counters)}",
            hint="name the same terms in weights, items and the loss's result",
        )
    for term, weight in (weights or {}).items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise InvalidArgument(f"weights[{term!r}]={weight!r} must be a finite number")
    return dict.fromkeys(counters, 1.0) | dict(weights or {})


def as_terms(result: Any, counters: Mapping[str, Counter]) -> dict[str, Tensor]:
    """The loss's ``result`` by term: 0-dimensional means, one for each counter.

    Raises:
        LossError: Not a scalar tensor, or terms other than those that ``items`` counts.
    """
    terms: dict[str, Any] = dict(result) if isinstance(result, Mapping) else {ONLY_TERM: result}
    if set(terms) != set(counters):
        raise LossError(
            f"the loss returned {_shown(result)}, but items counts {sorted(counters)}: the terms must be the same",
            hint="return {"
            + ", ".join(f"'{term}': ..." for term in counters)
            + "} or give items={"
            + ", ".join(f"'{term}': ..." for term in terms)
            + "}",
        )
    for term, value in terms.items():
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            got = (
                f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise LossError(
                f"the loss returned {got}"
                + ("" if term == ONLY_TERM else f" for {term!r}")
                + ": it must be a scalar floating-point tensor, "
                "the mean over the micro-batch's items",
                hint="reduce it: loss.mean(), or cross_entropy(..., reduction='mean')",
            )
    return terms


def _shown(result: Any) -> str:
    return f"the terms {sorted(map(str, result))}" if isinstance(result, Mapping) else "one tensor"
