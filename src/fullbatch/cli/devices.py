"""``fullbatch devices``: the catalogue of accelerators."""

from __future__ import annotations

from fullbatch.cli import options
from fullbatch.memory import CARDS
from fullbatch.plain import plain
from fullbatch.report import cards_table


def command(json_path: options.Json = None) -> None:
    """List the devices that ``--device`` knows: memory, bandwidth, peak speed, and where each figure is from.

    A size of your own works too: ``--device 24GiB``.
    """
    with options.Output(json_path) as output:
        output.show(cards_table(CARDS, output.width))
        output.show("usable: total less what driver and libraries take. Tflop/s: dense, float32 accumulation.")
        output.json({"schema": "devices.v1", "cards": [{**plain(card), "usable_bytes": card.usable_bytes} for card in CARDS]})
