"""What a call costs beside its lane: from the end of what allowed it to its start."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from m2flow.engine.spans import Span

SAME_MOMENT = 2e-3
"""Seconds between the end of a transfer and the start of the call that it was for, at most."""


def gaps(spans: Sequence[Span], steps: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Seconds from the end of a lane's work to its next call.

    Only where that end was the last thing that happened on any lane before the call: then nothing
    else can have caused it, and the gap is what a report and a command take.
    """
    moments = sorted(
        [span.end for span in spans]
        + [span.start + float(piece[0]) for span in spans for piece in pieces_of(span)]
        + [started for started, _ in steps]
    )
    for lane in {span.lane for span in spans}:
        before: Span | None = None
        brought: Span | None = None
        for span in sorted((s for s in spans if s.lane == lane), key=lambda one: one.start):
            if span.kind == "transfer":
                brought = span
                continue
            start = span.start
            if brought is not None and start - brought.end < SAME_MOMENT:
                start = brought.start
            last = moments[bisect_right(moments, start) - 1]
            if before is not None and "call" in span.args and last == before.end:
                yield start - last
            before, brought = span, None


def pieces_of(span: Span) -> list[Any]:
    """What a streaming call has handed on; see `m2flow.engine.facts`."""
    pieces = span.args.get("pieces", [])
    return pieces if isinstance(pieces, list) else []
