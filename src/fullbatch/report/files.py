"""Files that are whole or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fullbatch.errors import OutputError


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` to ``path`` as JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, by way of a file beside it: never half of it."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it becomes ``path`` at the end, and goes away on an error."""
    beside = path.with_name(f".{path.name}.part")
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield beside
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def json_lines(path: Path) -> Iterator[JsonLines]:
    """A log of one JSON object a line; each line is on disk before the next begins."""
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w", encoding="utf-8", buffering=1)
    with stream:
        yield JsonLines(stream)


class JsonLines:
    """See :func:`json_lines`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record``."""
        self._stream.write(json.dumps(record, allow_nan=False) + "\n")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}", hint="--out DIR names a folder that can be"
        ) from error
