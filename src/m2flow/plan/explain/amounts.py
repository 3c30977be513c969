"""Durations and ratios as they stand in an explanation, in plain ASCII."""

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


def slower(seconds: float, than: float) -> str:
    """How much longer, in words: `12 % slower`, `as fast`, `1.8 times slower`."""
    ratio = seconds / than if than > 0 else 1.0
    if abs(ratio - 1) < 0.005:
        return "as fast"
    if ratio < 1:
        return f"{1 - ratio:.0%} faster"
    return f"{ratio - 1:.0%} slower" if ratio < 2 else f"{ratio:.1f} times as long"
