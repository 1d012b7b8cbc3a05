"""``fullbatch snapshot``: what is in a memory snapshot, and what other settings would have done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullbatch.cli import options
from fullbatch.memory import find_card
from fullbatch.memory.dissection import COMPARED, dissect
from fullbatch.memory.snapshot_file import read_snapshot
from fullbatch.report import write_json
from fullbatch.report.snapshot import plot_snapshot, snapshot_tables


def command(
    file: Annotated[Path, typer.Argument(help="A file that torch.cuda.memory._dump_snapshot wrote.", metavar="FILE")],
    alloc_conf: Annotated[
        list[str] | None,
        typer.Option(
            help="Replay the history under these settings, as in PYTORCH_ALLOC_CONF; may be given several times. "
            f"Default: {', '.join(COMPARED)}."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Replay it on this device: one that `fullbatch devices` lists, or a size: 24GiB. "
            "Default: as large as the record's out-of-memory error tells, or without end."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the tables of who holds memory.")] = 12,
    out: options.Out = Path("outputs"),
    json_path: options.Json = None,
) -> None:
    """Show what is in one of PyTorch's memory snapshots, and replay it under other settings of the allocator.

    The file may come from a stranger: nothing in it is run. Writes snapshot.json and, of a recorded history, snapshot.png.
    Exit code 1: with --device, the history does not fit it under the settings of the record.

    Examples:

      fullbatch snapshot oom.pickle

      fullbatch snapshot oom.pickle --alloc-conf expandable_segments:True --device rtx4090
    """
    card = None if device is None else find_card(device, "--device")
    with options.Output(json_path) as output:
        found = dissect(
            read_snapshot(file),
            file=str(file),
            alloc_confs=alloc_conf or (),
            card=card,
            settings={"file": str(file), "alloc_conf": alloc_conf or list(COMPARED), "device": device, "top": top},
            command=options.command(),
        )
        output.show(*snapshot_tables(found, output.width, top))
        pasts = [one.past for one in found.devices if one.past is not None]
        write_json(out / "snapshot.json", found.to_json())
        output.wrote(out / "snapshot.json")
        if pasts:
            plot_snapshot(found, out / "snapshot.png")
            output.wrote(out / "snapshot.png")
        output.json(found.to_json())
    if card is not None and any(past.alternatives[0].replay.shortage is not None for past in pasts):
        raise typer.Exit(1)
