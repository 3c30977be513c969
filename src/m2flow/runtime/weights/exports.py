"""Messages between the launcher and the lanes about a version that is published. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Method: TypeAlias = Literal["shared", "copy"]
"""How weights travel: the target runs on memory that the source has written for all of the node's
lanes, or it takes a copy of its own."""


@dataclass(frozen=True, slots=True)
class Sends:
    """How a lane is to lay a version of weights out.

    Attributes:
        readers: way -> the lanes of the installs that will take it, each once.
        oldest: versions before this one are needed by nobody any more.
    """

    readers: Mapping[Method, tuple[int, ...]]
    oldest: int


@dataclass(frozen=True, slots=True)
class Export:
    """Where a lane has laid a version of weights out, for those who take it one way.

    Attributes:
        source, version: whose weights they are, and which.
        lane: which lane.
        method: which way.
        manifest: hash of the lane's TensorManifest; a reader without that manifest asks for it.
        num_bytes: size of what lies there.
        handle: in shared memory of the node; None for those who are to ask.
        reader: which of the handle's readers the addressee is.
        via: the lane that brings it to the addressee's node; None if the addressee does itself.
    """

    source: str
    version: int
    lane: int
    method: Method
    manifest: int
    num_bytes: int
    handle: Any = None
    reader: int = 0
    via: int | None = None


@dataclass(frozen=True, slots=True)
class WeightsKey:
    """Asks a lane for a version of weights: a snapshot as one uint8 tensor."""

    source: str
    version: int


@dataclass(frozen=True, slots=True)
class ManifestKey:
    """Asks a lane for the TensorManifest of an export, by its hash."""

    source: str
    manifest: int
