"""A line at the bottom of the terminal while another program writes above it."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from rich.console import Console

_LEAST_ROWS = 4  # with fewer, all of them are the other program's


class BottomLine:
    """Takes the terminal's last row from what scrolls, as apt and dpkg do; without a terminal on stderr it does nothing.

    rich's own live displays redraw the rows that they wrote last, which are no longer theirs when a program in
    between, which they cannot see, has written too. Source of the sequences: DECSTBM, DECSC and DECRC of the VT100.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal and sys.stderr.isatty() and not (console.is_dumb_terminal or console.legacy_windows)
        self._size: os.terminal_size | None = None

    def __enter__(self) -> BottomLine:
        return self

    def show(self, text: str) -> None:
        """Write ``text`` in place of what was there."""
        if not self._live:
            return
        size = os.get_terminal_size(sys.stderr.fileno())
        if size.lines < _LEAST_ROWS:
            return
        begin = ""
        if self._size is None:
            begin = "\n\x1b[1A"  # where the cursor is in the last row, all goes up by one
        if self._size != size:
            begin += f"\x1b7\x1b[1;{size.lines - 1}r\x1b8"
        self._size = size
        self._write(f"{begin}\x1b7\x1b[{size.lines};1H\x1b[2K{text[: size.columns - 1]}\x1b8")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._size is not None:
            self._write(f"\x1b7\x1b[r\x1b[{self._size.lines};1H\x1b[2K\x1b8")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
