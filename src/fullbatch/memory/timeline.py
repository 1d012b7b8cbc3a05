"""What a run asks of the allocator, in order, and who asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Part = Literal["weights", "gradients", "optimizer state", "activations", "workspace", "batch"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer state", "activations", "workspace", "batch")


class Owner(NamedTuple):
    """Whom a block belongs to.

    Attributes:
        part: Part of the peak.
        module: Name of the module in the model, ``""`` outside of any.
        operator: What made it: ``aten.mm``, ``cuBLAS workspace``, ``parameter``.
        line: Source line that called for it, ``file.py:12``, ``""`` where there is none.
    """

    part: Part
    module: str
    operator: str
    line: str


class Event(NamedTuple):
    """One call of the allocator: block ``block`` appears with ``size`` bytes as asked for, or goes (``size`` -1)."""

    block: int
    size: int


@dataclass(frozen=True)
class Stage:
    """A stretch of a run: its events are ``events[start:end]``.

    Attributes:
        name: ``model``, ``batch``, ``forward``, ``backward`` or ``update``.
        update: Number of the update, from 1; 0 before the first.
        micro_batch: Number of the micro-batch in its window, from 1; 0 outside of any.
        start: First event.
        end: Event after the last.
    """

    name: str
    update: int
    micro_batch: int
    start: int
    end: int


@dataclass
class Timeline:
    """Every allocation and release of a run.

    Attributes:
        events: In order.
        owners: Owner of each block, by number of the block.
        stages: In order, without gaps.
        notes: What the record leaves open, one sentence each.
    """

    events: list[Event] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def resized(self, operator: str, share: float) -> Timeline:
        """The same run with blocks of ``operator`` in ``share`` of their size; with a share of 0 they stay as nothing.

        Args:
            operator: As in :class:`Owner`.
            share: From 0 to 1.
        """
        chosen = {block for block, owner in enumerate(self.owners) if owner.operator == operator}
        events = [
            Event(block, int(size * share)) if size > 0 and block in chosen else Event(block, size)
            for block, size in self.events
        ]
        return Timeline(events, self.owners, self.stages, self.notes)

    def live_bytes(self) -> Iterator[int]:
        """Bytes asked for and not released, after each event."""
        sizes: dict[int, int] = {}
        live = 0
        for block, size in self.events:
            if size < 0:
                live -= sizes.pop(block)
            else:
                sizes[block] = size
                live += size
            yield live

    @property
    def peak_requested_bytes(self) -> int:
        """Most bytes that were live at once, before any rounding."""
        return max(self.live_bytes(), default=0)

    def stage_peaks(self) -> list[int]:
        """Most bytes that were live at once in each stage, before any rounding; its begin counts too."""
        live = [0, *self.live_bytes()]
        return [max(live[stage.start : stage.end + 1]) for stage in self.stages]
