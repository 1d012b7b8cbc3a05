"""Bytes as people write them, and back."""

from __future__ import annotations

import re

from fullbatch.errors import InvalidArgument

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
_UNITS = {
    "": 1, "b": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_bytes(text: str, argument: str = "size") -> int:
    """``"24GiB"``, ``"24 GB"`` or ``"512"`` in bytes: GiB is 1024^3, GB is 10^9.

    Raises:
        InvalidArgument: It is no size, or not above 0.

    >>> parse_bytes("1.5GiB"), parse_bytes("24GB")
    (1610612736, 24000000000)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _UNITS.get(found[2].lower()) if found else None
    if found is None or factor is None or not 1 <= (size := float(found[1]) * factor) < 2**63:
        raise InvalidArgument(f"{argument} {text!r}: must be a size above 0 with its unit", hint="24GiB, 512MiB, 80GB")
    return int(size)


def show_bytes(size: int) -> str:
    """``size`` bytes with the unit that suits it: ``B``, ``KiB``, ``MiB`` or ``GiB``.

    >>> show_bytes(1536), show_bytes(3 * MiB), show_bytes(-5 * GiB // 2)
    ('1.5 KiB', '3.0 MiB', '-2.50 GiB')
    """
    if abs(size) < KiB:
        return f"{size} B"
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        if abs(size) < unit * 1024:
            return f"{size / unit:,.1f} {name}"
    return f"{size / GiB:,.2f} GiB"
