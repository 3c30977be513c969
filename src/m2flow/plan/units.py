"""Seconds, bytes and items as types of their own, which a type checker keeps apart.

A number becomes a quantity where it is named (`Seconds(0.2)`), and one quantity never stands for
another. What is computed from several of them is named again.
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
