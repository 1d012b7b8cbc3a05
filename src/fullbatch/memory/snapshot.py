"""Memory snapshots in the format of ``torch.cuda.memory._dump_snapshot``, which PyTorch's viewer opens.

Source of the format: torch/csrc/cuda/memory_snapshot.cpp and torch/cuda/_memory_viz.py (v2.13).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fullbatch.files import replacing
from fullbatch.memory.allocator import CachingAllocator
from fullbatch.memory.blocks import Block, Call
from fullbatch.memory.settings import AllocatorSettings
from fullbatch.memory.timeline import Owner, Timeline

_PROTOCOL = 4  # what PyTorch's viewer reads


def predicted_snapshot(timeline: Timeline, settings: AllocatorSettings | None = None) -> dict[str, Any]:
    """The snapshot that a device without end would write after ``timeline``.

    Args:
        timeline: The run.
        settings: Of the allocator. ``None``: its defaults.

    Returns:
        ``segments`` and ``device_traces`` of one device. A block's frames are its operator, at the source line
        that called for it, and its module, at its part of the peak.
    """
    history: list[Call] = []
    allocator = CachingAllocator(settings=settings, history=history)
    live: dict[int, Block] = {}
    for event in timeline.events:
        if event.size < 0:
            allocator.free(live.pop(event.block, None))
        elif (block := allocator.malloc(event.size, tag=timeline.owners[event.block])) is not None:
            live[event.block] = block
    return allocator_snapshot(allocator, live.values(), history)


def allocator_snapshot(allocator: CachingAllocator, live: Iterable[Block], history: list[Call]) -> dict[str, Any]:
    """The snapshot of a simulated ``allocator``, as device 0.

    Args:
        allocator: As it is now.
        live: All blocks that it gave out and that were not freed; the tag of each is its :class:`Owner`, or ``None``.
        history: What it filled in.
    """
    return {
        "segments": [_segment(blocks, allocator.settings) for blocks in allocator.segments(live)],
        "device_traces": [_entries(history)],
        "allocator_settings": _settings(allocator.settings),
    }


def write_snapshot(path: Path, snapshot: dict[str, Any]) -> None:
    """Write ``snapshot`` to ``path``, whole or not at all."""
    with replacing(path) as beside:
        beside.write_bytes(pickle.dumps(snapshot, protocol=_PROTOCOL))


def _segment(blocks: list[Block], settings: AllocatorSettings) -> dict[str, Any]:
    pool = blocks[0].pool
    allocated = sum(block.size for block in blocks if not block.free)
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested for block in blocks if not block.free),
        "stream": pool.stream,
        "segment_type": "small" if pool.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": settings.expandable_segments,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": 0 if block.free else block.requested,
                "state": "inactive" if block.free else "active_allocated",
                "frames": _frames(block.tag),
            }
            for block in blocks
        ],
    }


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    return {
        "max_split_size": -1 if settings.max_split_size_bytes is None else settings.max_split_size_bytes,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(2**n): steps for n, steps in enumerate(settings.roundup_power2_divisions)},
    }


def _entries(history: list[Call]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for call in history:
        where = "device_free" if call.action == "oom" else "addr"
        entry = {
            where: call.address,
            "size": call.size,
            "stream": call.stream,
            "time_us": len(entries),
            "frames": _frames(call.tag),
        }
        if call.action == "free_completed":
            entries.append({"action": "free_requested", **entry})
        entries.append({"action": call.action, **entry})
    return entries


def _frames(owner: Owner | None) -> list[dict[str, Any]]:
    if owner is None:
        return []
    file, _, line = owner.line.rpartition(":")
    return [
        {"name": owner.operator, "filename": file, "line": int(line or 0)},
        {"name": owner.module or "(outside of the model)", "filename": owner.part, "line": 0},
    ]
