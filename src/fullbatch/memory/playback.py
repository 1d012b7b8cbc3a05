"""Plays a timeline through the allocator: stage by stage, with the middle micro-batches of a long window repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fullbatch.memory.allocator import CachingAllocator, OutOfMemory
from fullbatch.memory.blocks import Block
from fullbatch.memory.timeline import Event, Owner, Stage, Timeline

TRACED = 3
"""Micro-batches of a window that have to be traced: the first, the second, and a third that stands for all others."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of a stage, or of the same stage of several micro-batches.

    Attributes:
        name: ``model``, ``batch``, ``forward``, ``backward`` or ``update``.
        update: Number of the update, from 1; 0 before the first.
        micro_batch: First micro-batch, from 1; 0 outside of any.
        last_micro_batch: Last one that this stands for.
        allocated_bytes: At its end.
        reserved_bytes: At its end.
        peak_allocated_bytes: Most during it.
        peak_reserved_bytes: Most during it.
    """

    name: str
    update: int
    micro_batch: int
    last_micro_batch: int
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Where memory ran out.

    Attributes:
        stage: Name of the stage.
        update: Its update.
        micro_batch: Its micro-batch.
        owner: Who asked.
        requested_bytes: For how much.
        reserved_bytes: What the allocator had by then.
        live: Bytes by owner of what was live.
    """

    stage: str
    update: int
    micro_batch: int
    owner: Owner
    requested_bytes: int
    reserved_bytes: int
    live: dict[Owner, int]


@dataclass(frozen=True, kw_only=True)
class Played:
    """What the allocator went through.

    Attributes:
        stages: In order, as far as the run came.
        peak_allocated_bytes: Most in live blocks, as the allocator rounds.
        peak_reserved_bytes: Most in segments.
        peak_stage: Stage of the most allocated.
        peak_live: Bytes by owner of what was live then.
        num_alloc_retries: Times that the cache was emptied to make room.
        failure: Where it ran out of memory.
    """

    stages: list[StageMemory]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_stage: StageMemory
    peak_live: dict[Owner, int]
    num_alloc_retries: int
    failure: Failure | None


def play(timeline: Timeline, allocator: CachingAllocator, micro_batches: int) -> Played:
    """Play ``timeline`` through ``allocator`` as a run with windows of ``micro_batches``.

    Args:
        timeline: Of ``min(micro_batches, TRACED)`` micro-batches a window.
        allocator: A new one.
        micro_batches: Where there are more than were traced, the last traced one is repeated until
            the allocator's state repeats too: the cost does not grow with their number.
    """
    player = _Player(timeline, allocator)
    windows = _windows(timeline.stages)
    for window in windows:
        for number, stages in window:
            try:
                player.stages(stages)
                if number == TRACED and micro_batches > TRACED:
                    player.repeat(window[TRACED - 2][1], stages, micro_batches - TRACED)
            except OutOfMemory:
                return player.result(failed=True)
    return player.result(failed=False)


def _windows(stages: list[Stage]) -> list[list[tuple[int, list[Stage]]]]:
    """Stages by update, and in it by micro-batch; 0 is what is outside of any."""
    windows: list[list[tuple[int, list[Stage]]]] = []
    update, number = -1, -1
    for stage in stages:
        if stage.update != update:
            windows.append([])
            update, number = stage.update, -1
        if stage.micro_batch != number:
            windows[-1].append((stage.micro_batch, []))
            number = stage.micro_batch
        windows[-1][-1][1].append(stage)
    return windows


@dataclass(eq=False)
class _Life:
    """A block that was asked for: its owner, its bytes, and the events at which it came and went."""

    owner: Owner
    block: Block | None
    size: int
    born: int
    died: int | None = None


@dataclass
class _Player:
    timeline: Timeline
    allocator: CachingAllocator
    lives: list[_Life] = field(default_factory=list)
    held: dict[int, list[_Life]] = field(default_factory=dict)  # block of the timeline -> what it stands for
    done: list[StageMemory] = field(default_factory=list)
    clock: int = 0
    peak: tuple[int, int, int] = (0, 0, 0)  # allocated, at which event, in which of the stages
    now: Stage | None = None

    def stages(self, stages: list[Stage]) -> None:
        for stage in stages:
            self._begin(stage)
            for event in self.timeline.events[stage.start : stage.end]:
                if event.size < 0:
                    self._release(event.block)
                else:
                    self.held[event.block] = [self._take(event)]
            self._end(stage, stage.micro_batch)

    def repeat(self, before: list[Stage], last: list[Stage], times: int) -> None:
        """Micro-batch ``last`` again and again, each in the place that it had to the one ``before`` it."""
        born_before, born = (_births(self.timeline, stages) for stages in (before, last))
        place = {block: at for at, block in enumerate(born)}
        place_before = {block: at for at, block in enumerate(born_before)}
        previous = {at: self.held[block][0] for at, block in enumerate(born) if block in self.held}
        kept: dict[int, list[_Life]] = {}  # what a micro-batch leaves behind goes when the last one's does
        state = self._state(previous)
        for number in range(TRACED + 1, TRACED + times + 1):
            current: dict[int, _Life] = {}
            for stage in last:
                self._begin(stage)
                for event in self.timeline.events[stage.start : stage.end]:
                    block = event.block
                    if event.size >= 0:
                        current[place[block]] = self._take(event)
                    elif block in place:
                        self._give(current.pop(place[block]))
                    elif place_before.get(block) in previous:
                        self._give(previous.pop(place_before[block]))
                self._end(stage, number)
            for at, life in previous.items():
                kept.setdefault(at, []).append(life)
            leaves, previous = bool(previous), current
            before_state, state = state, self._state(previous)
            if not leaves and state == before_state:
                self._stands_for(TRACED + times, len(last))
                break
        for at, block in enumerate(born):
            alive = [*([previous[at]] if at in previous else []), *kept.get(at, [])]
            self.held.pop(block, None)
            if alive:
                self.held[block] = alive

    def result(self, failed: bool) -> Played:
        failure = None
        if failed:
            assert self.now is not None
            at = self.lives[-1]
            failure = Failure(
                stage=self.now.name,
                update=self.now.update,
                micro_batch=self.now.micro_batch,
                owner=at.owner,
                requested_bytes=at.size,
                reserved_bytes=self.allocator.reserved_bytes,
                live=self._live(self.clock),
            )
            self.lives.pop()
            self._end(self.now, self.now.micro_batch)
        allocated, at_event, stage = self.peak
        return Played(
            stages=self.done,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=max(stage.peak_reserved_bytes for stage in self.done),
            peak_stage=self.done[stage],
            peak_live=self._live(at_event),
            num_alloc_retries=self.allocator.num_alloc_retries,
            failure=failure,
        )

    def _state(self, live: dict[int, _Life]) -> Any:
        """Of the allocator, and where in it the blocks are that the next micro-batch will release."""
        return self.allocator.state_key(life.block for _, life in sorted(live.items()) if life.block is not None)

    def _begin(self, stage: Stage) -> None:
        self.now = stage
        self.allocator.reset_peaks()

    def _end(self, stage: Stage, number: int) -> None:
        allocator = self.allocator
        self.done.append(
            StageMemory(
                name=stage.name,
                update=stage.update,
                micro_batch=number,
                last_micro_batch=number,
                allocated_bytes=allocator.allocated_bytes,
                reserved_bytes=allocator.reserved_bytes,
                peak_allocated_bytes=allocator.peak_allocated_bytes,
                peak_reserved_bytes=allocator.peak_reserved_bytes,
            )
        )

    def _stands_for(self, last: int, stages: int) -> None:
        for at in range(len(self.done) - stages, len(self.done)):
            stage = self.done[at]
            self.done[at] = StageMemory(**{**vars(stage), "last_micro_batch": last})

    def _take(self, event: Event) -> _Life:
        self.clock += 1
        life = _Life(self.timeline.owners[event.block], None, event.size, self.clock)
        self.lives.append(life)
        life.block = self.allocator.malloc(event.size, tag=life.owner)
        if life.block is not None:
            life.size = life.block.size
        if self.allocator.allocated_bytes > self.peak[0]:
            self.peak = (self.allocator.allocated_bytes, self.clock, len(self.done))
        return life

    def _release(self, block: int) -> None:
        for life in self.held.pop(block):
            self._give(life)

    def _give(self, life: _Life) -> None:
        self.clock += 1
        life.died = self.clock
        self.allocator.free(life.block)

    def _live(self, event: int) -> dict[Owner, int]:
        live: Counter[Owner] = Counter()
        for life in self.lives:
            if life.block is not None and life.born <= event and (life.died is None or life.died > event):
                live[life.owner] += life.size
        return dict(live)


def _births(timeline: Timeline, stages: list[Stage]) -> list[int]:
    return [block for block, size in _events(timeline, stages) if size >= 0]


def _events(timeline: Timeline, stages: list[Stage]) -> Iterator[Event]:
    for stage in stages:
        yield from timeline.events[stage.start : stage.end]
