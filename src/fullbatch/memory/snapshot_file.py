"""Reads a memory snapshot from a file, and checks every value in it.

Source of the format, older ones included: torch/csrc/cuda/memory_snapshot.cpp, torch/csrc/cuda/Module.cpp and
torch/cuda/_memory_viz.py (v2.13).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fullbatch.errors import SnapshotError
from fullbatch.memory.recorded import STATES, Entry, Frame, Frames, Segment, Snapshot, SnapshotBlock
from fullbatch.memory.settings import AllocatorSettings
from fullbatch.memory.unpickle import FEWER, HINT, unpickle
from fullbatch.units import MiB, show_bytes

MAX_FILE_BYTES = 512 * MiB
MAX_ROWS = 2**23
"""Dicts that are checked. A file can name one dict many times, in lists that it names many times too."""

_LIMIT = 2**63
_MAX_TEXT = 400  # characters of a name


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file that ``torch.cuda.memory._dump_snapshot`` wrote; nothing in the file is run.

    Args:
        path: Of the file.

    Raises:
        SnapshotError: It cannot be read, holds anything but plain data, or that is no memory snapshot.
    """
    try:
        if path.exists() and not path.is_file():
            raise SnapshotError(f"{path}: must be a file", hint=HINT)
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise SnapshotError(
                f"{path}: has {show_bytes(size)}; the limit is {show_bytes(MAX_FILE_BYTES)}",
                hint=FEWER,
            )
        data = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror or error}", hint=HINT) from None
    return check_snapshot(unpickle(data, str(path)), str(path))


def check_snapshot(data: Any, name: str = "snapshot") -> Snapshot:
    """``data`` as a :class:`Snapshot`.

    Args:
        data: As PyTorch's dict; a list is taken for its segments, as ``torch.cuda.memory_snapshot()`` gives them.
        name: Of the file, for errors.

    Raises:
        SnapshotError: A value is not what it must be.
    """
    return _Checker(name).snapshot({"segments": data} if isinstance(data, list) else data)


class _Checker:
    """Turns plain data into records. Places are formats, filled in only for an error."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stacks: dict[int, Frames] = {}  # by id of the list: a stack that many entries share is read once
        self._texts: dict[str, str] = {}
        self._rows = 0

    def snapshot(self, data: Any) -> Snapshot:
        self._dict(data, "it")
        segments = [self._segment(row, (n,)) for n, row in enumerate(self._list(data, "segments", ""))]
        segments.sort(key=lambda segment: (segment.device, segment.address))
        for one, other in pairwise(segments):
            if one.device == other.device and one.address + one.size > other.address:
                raise self._error("segments", (), f"two of them at address {other.address}", "must not overlap")
        traces = self._list(data, "device_traces", "", optional=True)
        for number, trace in enumerate(traces):
            if type(trace) is not list:
                raise self._error("device_traces[{}]", (number,), trace, "must be a list")
        return Snapshot(
            segments=tuple(segments),
            traces=tuple(tuple(self._entry(row, (n, i)) for i, row in enumerate(trace)) for n, trace in enumerate(traces)),
            settings=self._settings(data.get("allocator_settings")),
        )

    def _segment(self, row: Any, at: tuple[int, ...]) -> Segment:
        where = "segments[{}]"
        self._dict(row, where, *at)
        address, size = self._whole(row, "address", where, *at), self._whole(row, "total_size", where, *at)
        blocks: list[SnapshotBlock] = []
        end = address
        for number, part in enumerate(self._list(row, "blocks", where + ".", *at)):
            blocks.append(block := self._block(part, end, (*at, number)))
            end = block.address + block.size
        if end != address + size:
            raise self._error(where + ".total_size", at, size, f"must be the sum of its blocks, {end - address}")
        pool = row.get("segment_pool_id")
        return Segment(
            device=self._whole(row, "device", where, *at, default=0),
            address=address,
            size=size,
            stream=self._whole(row, "stream", where, *at, default=0, least=-_LIMIT),
            expandable=row.get("is_expandable") is True,
            private=isinstance(pool, (tuple, list)) and any(pool),
            blocks=tuple(blocks),
        )

    def _block(self, row: Any, address: int, at: tuple[int, ...]) -> SnapshotBlock:
        where = "segments[{}].blocks[{}]"
        self._dict(row, where, *at)
        if self._whole(row, "address", where, *at, default=address) != address:
            raise self._error(where + ".address", at, row["address"], f"must be where the block before it ends, {address}")
        size = self._whole(row, "size", where, *at, least=1)
        state = row.get("state")
        if state not in STATES:
            raise self._error(where + ".state", at, state, f"must be one of {', '.join(STATES)}")
        frames, requested = row.get("frames"), self._whole(row, "requested_size", where, *at, default=size)
        if frames is None and row.get("history"):  # before PyTorch 2.1
            past = self._list(row, "history", where + ".", *at)[0]
            self._dict(past, where + ".history[0]", *at)
            frames, requested = past.get("frames"), self._whole(past, "real_size", where + ".history[0]", *at)
        if state != "inactive" and requested > size:
            raise self._error(where + ".requested_size", at, requested, f"must not be more than size, {size}")
        return SnapshotBlock(address, size, 0 if state == "inactive" else requested, state, self._frames(frames, where, at))

    def _entry(self, row: Any, at: tuple[int, ...]) -> Entry:
        where = "device_traces[{}][{}]"
        self._dict(row, where, *at)
        action = row.get("action")
        if type(action) is not str:
            raise self._error(where + ".action", at, action, "must be text")
        address = self._whole(
            row, "device_free" if action == "oom" else "addr", where, *at, default=0 if action not in _PLACED else None
        )
        size = self._whole(row, "size", where, *at)
        stream = self._whole(row, "stream", where, *at, default=0, least=-_LIMIT)
        return Entry(action, address, size, stream, self._frames(row.get("frames"), where, at))

    def _frames(self, rows: Any, where: str, at: tuple[int, ...]) -> Frames:
        if rows is None:
            return ()
        if (known := self._stacks.get(id(rows))) is not None:
            return known
        if type(rows) is not list:
            raise self._error(where + ".frames", at, rows, "must be a list")
        frames: list[Frame] = []
        for number, row in enumerate(rows):
            here = (*at, number)
            self._dict(row, where + ".frames[{}]", *here)
            line = self._whole(row, "line", where + ".frames[{}]", *here, default=0)
            frames.append(Frame(self._text(row.get("name")), self._text(row.get("filename")), line))
        self._stacks[id(rows)] = tuple(frames)
        return self._stacks[id(rows)]

    def _text(self, value: Any) -> str:
        """A name that a terminal can show: what is no text, or would steer the terminal, is replaced."""
        if type(value) is not str:
            return "?"
        if value not in self._texts:
            self._texts[value] = "".join(letter if letter.isprintable() else "?" for letter in value[:_MAX_TEXT])
        return self._texts[value]

    def _settings(self, row: Any) -> AllocatorSettings | None:
        if not isinstance(row, dict):
            return None
        largest, threshold = row.get("max_split_size"), row.get("garbage_collection_threshold")
        settings = AllocatorSettings(
            expandable_segments=row.get("expandable_segments") is True,
            max_split_size_bytes=largest if type(largest) is int and 0 < largest < 2**62 else None,
            garbage_collection_threshold=threshold if type(threshold) is float and 0 < threshold < 1 else 0.0,
        )
        roundup = row.get("roundup_power2_divisions")
        divisions = tuple(roundup.values()) if type(roundup) is dict else ()
        if len(divisions) == 16 and all(type(value) is int and 0 <= value <= 2**16 for value in divisions):
            settings = replace(settings, roundup_power2_divisions=divisions)
        return settings

    def _whole(self, row: dict[str, Any], key: str, where: str, *at: int, default: int | None = None, least: int = 0) -> int:
        value = row.get(key, default)
        if type(value) is int and least <= value < _LIMIT:
            return value
        raise self._error(f"{where}.{key}", at, value, f"must be a whole number from {least} to 2**63 - 1")

    def _list(self, row: dict[str, Any], key: str, where: str, *at: int, optional: bool = False) -> list[Any]:
        value = row.get(key, [] if optional else None)
        if type(value) is list:
            return value
        raise self._error(where + key, at, value, "must be a list")

    def _dict(self, value: Any, where: str, *at: int) -> None:
        self._rows += 1
        if self._rows > MAX_ROWS:
            raise SnapshotError(f"{self._name}: has more than {MAX_ROWS:,} blocks, entries and frames", hint=FEWER)
        if type(value) is not dict:
            raise self._error(where, at, value, "must be a dict")

    def _error(self, where: str, at: tuple[int, ...], value: Any, rule: str) -> SnapshotError:
        shown = (
            "nothing"
            if value is None
            else ascii(value)[:60]
            if isinstance(value, (int, float, str))
            else f"a {type(value).__name__}"
        )
        return SnapshotError(f"{self._name}: {where.format(*at)} is {shown}: {rule}", hint=HINT)


_PLACED = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom")
