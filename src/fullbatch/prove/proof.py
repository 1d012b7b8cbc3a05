"""What a proof found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from fullbatch.evidence import Evidence
from fullbatch.plain import plain

SCHEMA = "proof.v1"


def split_name(split: tuple[int, ...]) -> str:
    """``micro-batch x micro-batches`` where all are equal (``4x4``), else their sum (``5+5+5+1``)."""
    if len(set(split)) == 1:
        return f"{split[0]}x{len(split)}"
    if len(split) <= 6:
        return "+".join(map(str, split))
    return "+".join(f"{size}x{len(list(run))}" for size, run in groupby(split))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One split in one dtype against the full batch in that dtype. Differences are split minus full batch.

    Attributes:
        dtype: ``float64``, ``float32``, ...
        split: Samples of each micro-batch.
        grad_max_abs_diff: Largest absolute difference of an element of the gradient before the step.
        grad_rel_diff: 2-norm of the gradients' difference over that of the full batch's.
        grad_error: Relative 2-norm error of the split's gradient against the float64 truth.
        full_batch_error: The same of the full batch's own gradient; 0 in float64, which is the truth.
        bound: Largest ``grad_error`` that counts as equal: 1e-12 in float64, else twice
            ``full_batch_error`` or twice the unit roundoff of the dtype, whichever is larger; more where
            the gradients of the micro-batches cancel (``docs/proof.md``).
        param_max_abs_diff: Largest absolute difference of a parameter after the step.
        param_rel_diff: 2-norm of the parameters' difference over that of the full batch's step.
        loss_diff: Difference of the losses; at most 1e-12 (relative, or absolute below 1) in float64.
            In lower precision it is shown only: the full batch's own error of one number may be 0 by luck.
        steps: Optimizer steps that the split made; the full batch makes 1.
        failure: The error that the loss or the model raised on a part of the batch; ``None``: it ran.
        equal: Whether gradient and loss are within their bounds and ``steps`` is the full batch's.
    """

    dtype: str
    split: tuple[int, ...]
    grad_max_abs_diff: float
    grad_rel_diff: float
    grad_error: float
    full_batch_error: float
    bound: float
    param_max_abs_diff: float
    param_rel_diff: float
    loss_diff: float
    steps: int
    failure: str | None
    equal: bool


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a split first computes something else than the full batch.

    Attributes:
        split: Samples of each micro-batch.
        module: Name of the module in the model; ``None``: every module's output is the same, and the loss differs.
        kind: Class of the module, or ``loss``.
        reason: Why, in words.
        hint: What to do about it.
    """

    split: tuple[int, ...]
    module: str | None
    kind: str
    reason: str
    hint: str

    def __str__(self) -> str:
        where = self.kind if self.module is None else f"module {self.module!r} ({self.kind})"
        return f"first difference: {where}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One update done as the full batch and in several splits, compared in several dtypes.

    Attributes:
        samples: Samples of the full batch.
        items: Items of each term in the full batch.
        optimizer: Class of the optimizer.
        comparisons: One a dtype and split.
        not_run: Dtypes in which the full batch itself does not run, with the reason.
        first_difference: Where the first unequal split departs; ``None`` if all are equal.
        random: Whether the model or the loss draws random numbers (dropout in train mode): splits
            then draw others, and equality holds only as far as the draws happen to agree.
        evidence: What it was measured with.
    """

    samples: int
    items: Mapping[str, int | float]
    optimizer: str
    comparisons: tuple[Comparison, ...]
    not_run: Mapping[str, str] = field(default_factory=dict)
    first_difference: Difference | None = None
    random: bool = False
    evidence: Evidence

    @property
    def equal(self) -> bool:
        """Whether every split is the full batch's update in every dtype that ran."""
        return all(comparison.equal for comparison in self.comparisons)

    def __str__(self) -> str:
        dtypes = list(dict.fromkeys(comparison.dtype for comparison in self.comparisons))
        splits = list(dict.fromkeys(split_name(comparison.split) for comparison in self.comparisons))
        if self.equal:
            worst = max(self.comparisons, key=lambda comparison: (comparison.dtype == "float64", comparison.grad_error))
            lines = [
                f"equal: {', '.join(splits)} make the full batch's update in {', '.join(dtypes)} "
                f"(worst relative gradient error in {worst.dtype}: {worst.grad_error:.1e})"
            ]
        else:
            failed = [comparison for comparison in self.comparisons if not comparison.equal]
            worst = max(failed, key=lambda comparison: math.inf if math.isnan(comparison.grad_error) else comparison.grad_error)
            lines = [
                f"NOT equal: {len(failed)} of {len(self.comparisons)} comparisons differ; worst {split_name(worst.split)} "
                f"in {worst.dtype}: "
                + (worst.failure or f"relative gradient error {worst.grad_error:.1e}, bound {worst.bound:.1e}")
            ]
        if self.first_difference is not None:
            lines += [str(self.first_difference), f"hint: {self.first_difference.hint}"]
        if self.random and self.equal:
            lines.append("note: random numbers are drawn (dropout?); they happened to agree here and need not elsewhere")
        lines += [f"not run in {dtype}: {reason}" for dtype, reason in self.not_run.items()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``, as ``docs/proof.md`` describes them; NaN and infinity become ``None``."""
        return {"schema": SCHEMA, "equal": self.equal, **plain(self)}
