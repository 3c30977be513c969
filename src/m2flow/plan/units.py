"""Seconds, bytes and items as types of their own, which a type checker keeps apart.

A number becomes a quantity where it is named (`Seconds(0.2)`), and one quantity never stands for
another. What is computed from several of them goes through the functions below, whose names say
what is multiplied or divided by what: a price per item cannot pass for the price of a step.
"""

from __future__ import annotations

from typing import NewType

Seconds = NewType("Seconds", float)
"""A duration."""

Bytes = NewType("Bytes", int)
"""A size."""

Items = NewType("Items", int)
"""A number of items of a stage, as it receives them."""

BytesPerSecond = NewType("BytesPerSecond", float)
"""A rate of transfer."""


def add(*parts: Seconds) -> Seconds:
    """Durations one after the other."""
    return Seconds(sum(parts))


def times(count: float, each: Seconds) -> Seconds:
    """So many times a duration."""
    return Seconds(count * each)


def transfer(size: Bytes, rate: BytesPerSecond) -> Seconds:
    """How long so many bytes are on their way at a rate."""
    return Seconds(size / rate)
