"""Live blocks by the line of source that asked for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fullbatch.memory.history import Live
from fullbatch.memory.recorded import Frames

BEFORE = "(asked for before the record begins)"
_INSIDE = re.compile(r"(site-packages|dist-packages|pytorch)[/\\]torch[/\\]")


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Bytes that one line of source holds.

    Attributes:
        line: ``file.py:12 function``.
        bytes: In its live blocks.
        blocks: Their number.
    """

    line: str
    bytes: int
    blocks: int


def source_line(frames: Frames) -> str:
    """The innermost line of Python that is not PyTorch's own, as ``file.py:12 function``."""
    python = [frame for frame in frames if frame.filename.endswith(".py")]
    own = [frame for frame in python if not _INSIDE.search(frame.filename)]
    chosen = next(iter(own or python or frames), None)
    if chosen is None:
        return "(no stack was recorded)"
    place = f"{chosen.filename}:{chosen.line}" if chosen.line else chosen.filename
    return f"{place} {chosen.name}".strip()


def holders_of(live: Iterable[Live]) -> list[Holding]:
    """Who has the blocks in ``live``, largest first."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    lines: dict[int, str] = {}
    for block in live:
        line = lines.get(id(block.frames))
        if line is None:
            line = lines[id(block.frames)] = BEFORE if block.frames is None else source_line(block.frames)
        sizes[line] += block.size
        counts[line] += 1
    return [Holding(line=line, bytes=size, blocks=counts[line]) for line, size in sizes.most_common()]
