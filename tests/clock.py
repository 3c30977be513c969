"""A clock for modules that look at `time`: it goes on where a test, or a sleep, says so."""

from __future__ import annotations


class Clock:
    """Stands for the module `time`.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
