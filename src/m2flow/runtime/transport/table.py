"""The ways between two lanes: the rule by which one is taken, and what each was measured to cost.

Scopes say how near two lanes are: `node` (two lanes on one machine), `cluster` (two machines). What
lies in the memory of GPUs and is to stay in it has scopes of its own: `gpu` (two lanes on one GPU)
and `gpus` (two GPUs of a machine); between machines it goes through host memory. Within a lane a
payload is a reference. This module transfers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from m2flow.runtime.transport.frame import JOINED_BYTES

if TYPE_CHECKING:
    from rich.table import Table

Scope: TypeAlias = Literal["gpu", "gpus", "node", "cluster"]

SHARED, STREAM, CUDA_IPC = "shared", "stream", "cuda_ipc"

STAGED = "staged"
"""Of device memory: through host memory, by whatever way the host part takes."""

BETWEEN: Mapping[Scope, str] = {
    "gpu": "lanes of a GPU",
    "gpus": "GPUs of a node",
    "node": "lanes of a node",
    "cluster": "nodes",
}

SHOWN_BYTES = (1 << 10, 1 << 20, 100 << 20)


def way(scope: Scope, nbytes: int) -> str:
    """The way that a payload takes, if it is open. What fits into a message needs no other."""
    match scope:
        case "gpu" | "gpus":
            return CUDA_IPC
        case "node" if nbytes > JOINED_BYTES:
            return SHARED
    return STREAM


@dataclass(frozen=True, slots=True)
class TransferCost:
    """One way between two places.

    Attributes:
        latency_seconds: what a transfer of next to nothing takes, asked for and received.
        bytes_per_second: how the rest grows; None where nothing is copied.
    """

    latency_seconds: float
    bytes_per_second: float | None = None

    def seconds(self, nbytes: int) -> float:
        """Predicted seconds of one transfer."""
        return self.latency_seconds + nbytes / (self.bytes_per_second or math.inf)

    @classmethod
    def fitted(cls, small: tuple[int, float], large: tuple[int, float]) -> TransferCost:
        """The cost through two transfers that were measured, each in bytes and seconds."""
        grown = large[1] - small[1]
        return cls(small[1], (large[0] - small[0]) / grown if grown > 0 else None)


@dataclass(frozen=True)
class LinkTable:
    """Costs by scope and kind: `costs[scope][kind]`."""

    costs: Mapping[Scope, Mapping[str, TransferCost]] = field(default_factory=dict)

    def merged(self, other: LinkTable) -> LinkTable:
        """This table with the other's scopes in place of its own."""
        return LinkTable({**self.costs, **other.costs})

    def taken(self, scope: Scope, nbytes: int) -> TransferCost | None:
        """What the way costs that a payload takes; None if the table does not know it."""
        return self.costs.get(scope, {}).get(way(scope, nbytes))

    def render(self) -> Table:
        """A table for people: costs, and predicted seconds of three sizes, by the way of each."""
        from rich.table import Table

        table = Table(title="Links", title_justify="left")
        table.add_column("between", no_wrap=True)
        table.add_column("link")
        for heading in ("latency", "rate", "1 KiB", "1 MiB", "100 MiB"):
            table.add_column(heading, justify="right")
        for scope, between in BETWEEN.items():
            for kind, cost in self.costs.get(scope, {}).items():
                ways = [(way(scope, nbytes), nbytes) for nbytes in SHOWN_BYTES]
                alone = len(self.costs[scope]) == 1
                shown = [
                    _seconds(cost.seconds(nbytes)) if alone or taken == kind else ""
                    for taken, nbytes in ways
                ]
                rate = _rate(cost.bytes_per_second) if shown[-1] else ""
                table.add_row(between, kind, _seconds(cost.latency_seconds), rate, *shown)
        return table


ASSUMED = LinkTable(
    {
        "node": {SHARED: TransferCost(100e-6, 10e9), STREAM: TransferCost(80e-6, 1.5e9)},
        "cluster": {STREAM: TransferCost(300e-6, 1e9)},
    }
)
"""Cautious figures of ordinary machines, for what was not measured."""


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _rate(bytes_per_second: float | None) -> str:
    if bytes_per_second is None:
        return "not copied"
    return f"{bytes_per_second / 1e9:.3g} GB/s"
