"""The memory events of a profile: what torch's CPU allocator gave out and took back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fullbatch.errors import FullbatchError


def profiled() -> profile:
    """A profile of the CPU with memory events."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def live_bytes(profiler: profile, is_mark: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[int, bool]]:
    """Bytes that are live after each memory event, and at each mark, with whether it is one.

    Args:
        profiler: Made by :func:`profiled`, and ended.
        is_mark: Whether an event of this name is a mark.

    Raises:
        FullbatchError: There are no memory events.
    """
    with tempfile.TemporaryDirectory() as folder:  # the profile as a file is the public way to the addresses
        path = Path(folder) / "profile.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    seen = [event for event in events if event.get("name") == "[memory]" or is_mark(str(event.get("name")))]
    if not any(event["name"] == "[memory]" for event in seen):
        raise FullbatchError(f"torch {torch.__version__}: its profiler reports no memory events")
    sizes: dict[int, int] = {}  # by address
    live = 0
    for event in sorted(seen, key=lambda event: float(event["ts"])):
        mark = event["name"] != "[memory]"
        if not mark:
            size, address = event["args"]["Bytes"], event["args"]["Addr"]
            if size > 0:
                sizes[address] = size
                live += size
            else:
                live -= sizes.pop(address, 0)  # 0: it is older than the profile
        yield live, mark
