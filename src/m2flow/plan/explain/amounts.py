"""Durations as they stand in an explanation, in plain ASCII."""

from __future__ import annotations


def brief(seconds: float) -> str:
    """Three digits: `850 us`, `12.3 ms`, `4.56 s`, `1234 s`."""
    size = abs(seconds)
    if not size:
        return "0 s"
    for least, unit, factor in ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "us", 1e6)):
        if size >= least or not least:
            value = seconds * factor
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    raise AssertionError("unreachable")
