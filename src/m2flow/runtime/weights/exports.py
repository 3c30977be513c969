"""Messages between the launcher and the lanes about a version that is published. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sends:
    """What a lane that lays a version of weights out may let go of before.

    Attributes:
        oldest: versions before this one are needed by nobody any more.
    """

    oldest: int


@dataclass(frozen=True, slots=True)
class Export:
    """A lane has laid a version of weights out, for those who ask.

    Attributes:
        source, version: whose weights they are, and which.
        lane: which lane.
        num_bytes: size of what lies there.
        via: the lane that brings it to the addressee's node; None if the addressee does itself.
    """

    source: str
    version: int
    lane: int
    num_bytes: int
    via: int | None = None


@dataclass(frozen=True, slots=True)
class WeightsKey:
    """Asks a lane for a version of weights: its TensorManifest and a snapshot, a uint8 tensor."""

    source: str
    version: int
