"""Accelerators: how much memory a run really has on each, and how fast it is."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from fullbatch.errors import InvalidArgument
from fullbatch.units import GiB, MiB, parse_bytes

_CONTEXT = 290 * MiB
_CONTEXT_SOURCE = "context about 290 MiB with lazy loading (CUDA >= 11.7)"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A device that torch sees as one.

    Attributes:
        name: As typed after ``--device``.
        title: As its vendor calls it.
        total_bytes: What torch or the driver reports as total; for a card without such a report, the vendor's figure.
        context_bytes: What the driver and its libraries take before the first tensor.
        bandwidth: Of its memory, bytes a second. ``None``: not known.
        flops: Peak dense operations a second by dtype, with float32 accumulation.
        capability: CUDA compute capability times ten; 80's rules for a device that is not NVIDIA's.
        hip: AMD's.
        source: Of each figure.
        how: ``published`` by the vendor or in reports of users, ``claimed`` without a set-up.
    """

    name: str
    title: str
    total_bytes: int
    context_bytes: int = _CONTEXT
    bandwidth: float | None = None
    flops: dict[str, float] | None = None
    capability: int = 80
    hip: bool = False
    source: str = ""
    how: str = "published"

    @property
    def usable_bytes(self) -> int:
        """What tensors and the allocator's cache can have together."""
        return max(0, self.total_bytes - self.context_bytes)


def _nvidia(
    name: str, title: str, total_gib: float, bandwidth_gb: float, fp32: float, half: float, capability: int, sheet: str,
    context_bytes: int = _CONTEXT, context_source: str = _CONTEXT_SOURCE,
) -> Card:  # fmt: skip
    """``total_gib`` as torch prints it in its out-of-memory message; Tflop/s dense."""
    flops = {"fp32": fp32 * 1e12, "fp16": half * 1e12}
    if capability >= 80:
        flops["bf16"] = half * 1e12
    return Card(
        name=name,
        title=title,
        total_bytes=int(total_gib * GiB),
        context_bytes=context_bytes,
        bandwidth=bandwidth_gb * 1e9,
        flops=flops,
        capability=capability,
        source=f"total: torch's out-of-memory messages in public issues; speed: {sheet}; {context_source}",
    )


_T4_CONTEXT = "context 141 MiB after steps (fitcheck-llm 0.3.1)"

CARDS: tuple[Card, ...] = (
    _nvidia("rtx3090", "NVIDIA GeForce RTX 3090", 23.69, 936, 35.6, 71, 86, "NVIDIA GA102 whitepaper"),
    _nvidia("rtx4090", "NVIDIA GeForce RTX 4090", 23.64, 1008, 82.6, 165.2, 89, "NVIDIA Ada whitepaper"),
    _nvidia("rtx5090", "NVIDIA GeForce RTX 5090", 31.37, 1792, 104.8, 209.5, 120, "NVIDIA RTX Blackwell whitepaper"),
    _nvidia("t4", "NVIDIA T4", 14.56, 320, 8.1, 65, 75, "NVIDIA T4 datasheet", 141 * MiB, _T4_CONTEXT),
    _nvidia("v100-16gb", "NVIDIA V100 16 GB", 15.77, 900, 15.7, 125, 70, "NVIDIA V100 datasheet (SXM2)"),
    _nvidia("v100-32gb", "NVIDIA V100 32 GB", 31.73, 900, 15.7, 125, 70, "NVIDIA V100 datasheet (SXM2)"),
    _nvidia("a10", "NVIDIA A10", 22.06, 600, 31.2, 125, 86, "NVIDIA A10 datasheet"),
    _nvidia("a6000", "NVIDIA RTX A6000", 47.53, 768, 38.7, 154.8, 86, "NVIDIA RTX A6000 datasheet"),
    _nvidia("l4", "NVIDIA L4", 21.96, 300, 30.3, 121, 89, "NVIDIA L4 datasheet"),
    _nvidia("l40s", "NVIDIA L40S", 44.39, 864, 91.6, 362, 89, "NVIDIA L40S datasheet"),
    _nvidia("a100-40gb", "NVIDIA A100 40 GB", 39.39, 1555, 19.5, 312, 80, "NVIDIA A100 datasheet (SXM)"),
    _nvidia("a100-80gb", "NVIDIA A100 80 GB", 79.15, 2039, 19.5, 312, 80, "NVIDIA A100 datasheet (SXM)"),
    _nvidia("h100", "NVIDIA H100 80 GB", 79.10, 3350, 67, 989.5, 90, "NVIDIA H100 datasheet (SXM5)"),
    _nvidia("h200", "NVIDIA H200", 139.72, 4800, 67, 989.5, 90, "NVIDIA H200 datasheet (SXM)"),
    _nvidia("b200", "NVIDIA B200", 178.35, 8000, 75, 2250, 100, "NVIDIA HGX B200 datasheet"),
    Card(
        name="mi250x", title="AMD Instinct MI250X, one of its two GCDs", total_bytes=int(63.98 * GiB),
        context_bytes=450 * MiB, bandwidth=1638e9, flops={"fp32": 23.9e12, "fp16": 191.5e12, "bf16": 191.5e12}, hip=True,
        source="total: torch's out-of-memory messages; speed: AMD MI250X datasheet, halved; "
        "context about 450 MiB (optimum-benchmark, MI2xx)",
    ),
    Card(
        name="mi300x", title="AMD Instinct MI300X", total_bytes=int(191.69 * GiB), context_bytes=450 * MiB,
        bandwidth=5300e9, flops={"fp32": 163.4e12, "fp16": 1307.4e12, "bf16": 1307.4e12}, hip=True,
        source="total: torch's out-of-memory messages; speed: AMD MI300X datasheet; context: as MI2xx, not its own",
    ),
    Card(
        name="mtt-s4000", title="Moore Threads MTT S4000", total_bytes=48 * GiB, bandwidth=768e9,
        flops={"fp32": 25e12, "fp16": 100e12, "bf16": 100e12}, how="claimed",
        source="total and speed: Moore Threads MTT S4000 product page; context: NVIDIA's, not its own",
    ),
    Card(
        name="ascend-910b", title="Huawei Ascend 910B", total_bytes=int(60.97 * GiB), bandwidth=1600e9,
        flops={"fp16": 320e12, "bf16": 320e12}, how="claimed",
        source="total: torch_npu's out-of-memory messages; speed: press reports; context: NVIDIA's, not its own",
    ),
)  # fmt: skip


def find_card(text: str, argument: str = "device") -> Card:
    """The card called ``text``, or one of so many bytes (``24GiB``: all of it usable).

    Args:
        text: A name of the catalogue, in any case and with or without dashes, or a size.
        argument: Name of what the user typed it for.

    Raises:
        InvalidArgument: It is neither.
    """
    wanted = _bare(text)
    for card in CARDS:
        if _bare(card.name) == wanted:
            return card
    if text[:1].isdigit():
        size = parse_bytes(text, argument)
        return Card(name=text, title=f"a device of {text}", total_bytes=size, context_bytes=0, source="the user", how="claimed")
    names = [card.name for card in CARDS]
    near = difflib.get_close_matches(wanted, [_bare(name) for name in names], n=1, cutoff=0.5)
    meant = next((name for name in names if near and _bare(name) == near[0]), None)
    raise InvalidArgument(
        f"{argument} {text!r}: must be one of {', '.join(names)}, or a size such as 24GiB",
        hint=f"did you mean {meant}?" if meant else "fullbatch devices lists them",
    )


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
