"""Sizes and durations as people write them: `200MB`, `1.5 GiB`, `4096`; `12.3 ms`."""

from __future__ import annotations

import re
from decimal import Decimal

from m2flow.errors import UserError

DECIMAL, BINARY = "KMGT", 1024
UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate(DECIMAL, start=1)},
    **{f"{letter}iB": BINARY**power for power, letter in enumerate(DECIMAL, start=1)},
}
"""Bytes of each unit, as standards have it: 1 MB is 1,000,000 bytes and 1 MiB is 1,048,576."""

_BY_LETTERS = {unit.lower(): size for unit, size in UNITS.items()}


def parse_bytes(text: str, key: str = "size") -> int:
    """The number of bytes that a text names; without a unit it counts bytes.

    Args:
        text: a number of at least one byte, and one of `UNITS` in small or large letters.
        key: whose value it is, for errors.

    Raises:
        UserError: the text is no size, or none of whole bytes.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = _BY_LETTERS.get((match[2] or "B").lower()) if match else None
    size = int(Decimal(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise UserError(
            "is not a size",
            key=key,
            value=text,
            expected=f"a number and one of {', '.join(UNITS)}, such as 200MB",
        )
    return size


def bytes_text(size: float) -> str:
    """A size to three digits: `850 B`, `12.3 MB`, `1.2 GB`."""
    for power in range(len(DECIMAL), 0, -1):
        if size >= 1000**power:
            return f"{three_digits(size / 1000**power)} {DECIMAL[power - 1]}B"
    return f"{size:.0f} B"


def brief(seconds: float) -> str:
    """A duration to three digits, in plain ASCII: `850 us`, `12.3 ms`, `4.56 s`, `1234 s`."""
    if seconds == 0 or abs(seconds) >= 1:
        return f"{three_digits(seconds)} s"
    if abs(seconds) >= 1e-3:
        return f"{three_digits(1e3 * seconds)} ms"
    return f"{three_digits(1e6 * seconds)} us"


def three_digits(value: float) -> str:
    """A number with three digits, or with all that stand before the decimal point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
