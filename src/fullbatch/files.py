"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
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
    """A path beside ``path`` to write to; it becomes ``path`` at the end, and goes away on an error.

    A link is followed; something that is no regular file (a device, a pipe) is written itself.
    """
    with _told(path):
        target = path.resolve()
        if target.exists() and not target.is_file():
            yield target
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            yield beside
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


class JsonLines:
    """A log of one JSON object a line; each line is on disk before the next begins.

    Args:
        path: Written from the first record on: a run that fails before it leaves the last run's log.
        replaces: Files of the last run that go with its log.
    """

    def __init__(self, path: Path, *, replaces: Sequence[Path] = ()) -> None:
        self._path, self._replaces = path, replaces
        self._stream: TextIO | None = None

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record``."""
        if self._stream is None:
            with _told(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._stream = self._path.open("w", encoding="utf-8", buffering=1)
                for path in self._replaces:
                    path.unlink(missing_ok=True)
        self._stream.write(json.dumps(record, allow_nan=False) + "\n")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}", hint="name another place: --out DIR, --json PATH"
        ) from error
