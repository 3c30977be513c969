"""Durations as they stand in an explanation, in plain ASCII."""

from __future__ import annotations

from m2flow.plan.sizes import three_digits


def brief(seconds: float) -> str:
    """Three digits: `850 us`, `12.3 ms`, `4.56 s`, `1234 s`."""
    if seconds == 0 or abs(seconds) >= 1:
        return f"{three_digits(seconds)} s"
    if abs(seconds) >= 1e-3:
        return f"{three_digits(1e3 * seconds)} ms"
    return f"{three_digits(1e6 * seconds)} us"
