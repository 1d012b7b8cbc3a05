"""Growth of the peak with the length of the sequence, measured until memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullbatch.errors import InvalidArgument
from fullbatch.evidence import Evidence
from fullbatch.memory.compare import Comparison
from fullbatch.plain import plain

SCHEMA = "measured-stretch.v1"


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """One length under one kind of attention, two updates long, in bytes.

    Attributes:
        attention: ``eager``, ``sdpa`` or ``flash``.
        seq_len: Tokens of a sample.
        predicted_peak_allocated_bytes: Most in live tensors, of a run that starts with an empty cache.
        predicted_peak_reserved_bytes: Most that the allocator holds, of such a run; ``None`` where it is not known.
        measured_peak_allocated_bytes: Most in live tensors; where memory ran out, until then.
        measured_peak_reserved_bytes: Most that the allocator held, with what earlier lengths left in its cache.
        device_used_bytes: What the driver reported at the end, for all processes.
        ran_out_in: Stage in which memory ran out; empty where the run went to its end.
    """

    attention: str
    seq_len: int
    predicted_peak_allocated_bytes: int
    predicted_peak_reserved_bytes: int | None
    measured_peak_allocated_bytes: int
    measured_peak_reserved_bytes: int | None
    device_used_bytes: int | None
    ran_out_in: str

    @property
    def fits(self) -> bool:
        """The run went to its end."""
        return not self.ran_out_in


@dataclass(frozen=True, kw_only=True)
class MeasuredStretch:
    """Measured peaks over lengths and kinds of attention.

    Attributes:
        points: In the order asked for; of each kind, up to the length at which memory ran out.
        emptied: The cache was emptied between lengths.
        settings: How the run was set up.
        predicted: How the predicted figures were obtained.
        measured: How the measured ones were.
    """

    points: list[MeasuredPoint]
    emptied: bool
    settings: dict[str, Any] = field(default_factory=dict)
    predicted: Evidence
    measured: Evidence

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"schema": SCHEMA, **plain(self)}


def measured_stretch(
    run: Callable[[str, int, bool], Comparison],
    *,
    attentions: Sequence[str],
    seq_lens: Sequence[int],
    empty_cache: bool = False,
    settings: dict[str, Any] | None = None,
    on_point: Callable[[MeasuredPoint], None] | None = None,
) -> MeasuredStretch:
    """Measure each length under each kind of attention; a kind ends with the length at which memory runs out.

    Args:
        run: ``run(attention, seq_len, empty)``: the run, predicted and measured, after the cache is emptied or not.
        attentions: Kinds of attention, one after the other; each begins with an empty cache.
        seq_lens: Lengths, ascending.
        empty_cache: Empty the cache between lengths too, which hides what earlier ones leave in it.
        settings: Kept in the result.
        on_point: Called after each point.

    Raises:
        InvalidArgument: The lengths are none, not above 0, or do not ascend.
    """
    if not seq_lens or min(seq_lens) < 1 or sorted(set(seq_lens)) != list(seq_lens):
        raise InvalidArgument(
            f"seq_lens={list(seq_lens)} must be lengths above 0 that ascend", hint="--seq-lens 512,1024,2048,4096"
        )
    points: list[MeasuredPoint] = []
    found: Comparison | None = None
    for attention in attentions:
        for seq_len in seq_lens:
            found = run(attention, seq_len, empty_cache or seq_len == seq_lens[0])
            points.append(_point(attention, seq_len, found))
            if on_point is not None:
                on_point(points[-1])
            if not points[-1].fits:
                break
    assert found is not None
    return MeasuredStretch(
        points=points,
        emptied=empty_cache,
        settings={**(settings or {}), "seq_lens": list(seq_lens), "attentions": list(attentions)},
        predicted=found.predicted,
        measured=found.measured,
    )


def _point(attention: str, seq_len: int, found: Comparison) -> MeasuredPoint:
    last = found.stages[-1]
    reserved = [s.measured_peak_reserved_bytes for s in found.stages if s.measured_peak_reserved_bytes is not None]
    return MeasuredPoint(
        attention=attention,
        seq_len=seq_len,
        predicted_peak_allocated_bytes=found.predicted_peak_allocated_bytes,
        predicted_peak_reserved_bytes=found.predicted_peak_reserved_bytes,
        measured_peak_allocated_bytes=max(stage.measured_peak_allocated_bytes for stage in found.stages),
        measured_peak_reserved_bytes=max(reserved, default=None),
        device_used_bytes=last.device_used_bytes,
        ran_out_in=last.name if found.out_of_memory is not None else "",
    )
