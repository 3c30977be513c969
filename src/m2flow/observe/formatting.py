"""How numbers, amounts, durations and paths are written wherever a person reads them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path


def number(value: float) -> str:
    """Short form: 0.123, 12.3, 1,234, 5k, 12.3k, 4.56M; a dash for what is not finite."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return _significant(value / (1e3 if unit == "k" else limit)) + unit
    if size >= 1000:
        return f"{value / 1000:g}k" if value % 100 == 0 else f"{value:,.0f}"
    if 0 < size < 1e-3:
        return f"{value:.2g}"
    return _significant(value)


def _significant(value: float) -> str:
    """At most three significant digits, no more than three decimals, no trailing zeros."""
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    text = f"{value:.{max(0, 3 - whole)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: float) -> str:
    """A duration: 850 µs, 12.3 ms, 4.56 s, 3 min 12 s, 2 h 05 min."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0:
        return "0 s"
    if size < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if size < 1:
        return f"{_significant(value * 1e3)} ms"
    if size < 100:
        return f"{_significant(value)} s"
    minutes, rest = divmod(round(size), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def date(unix: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Unix seconds as a moment of this machine's clock; as seconds where it knows no such."""
    try:
        return time.strftime(form, time.localtime(unix))
    except (ValueError, OverflowError, OSError):
        return f"{unix:g} s"


def clock(value: float) -> str:
    """A duration for a line that is redrawn: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(max(0, round(value)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def percent(share: float) -> str:
    """A share of one as a percentage: 0 %, 0.4 %, 12 %."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < abs(value) < 1 else f"{value:.0f} %"


def told_apart(paths: Sequence[Path]) -> list[str]:
    """Names of paths, with as many parents as it takes for no two to be alike."""
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    else:
        names = [str(path) for path in paths]
    return names
