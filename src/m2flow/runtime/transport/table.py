"""What each way between two lanes costs: latency plus bytes over a rate.

Scopes say how near two lanes are: `lane` (one process), `node` (two lanes on one machine),
`cluster` (two machines). What lies in the memory of GPUs and is to stay in it has scopes of its
own: `gpu` (two lanes on one GPU) and `gpus` (two GPUs of a machine); between machines it goes
through host memory. Kinds are the ways: `reference`, `shared`, `stream`, `object`, for GPUs
`cuda_ipc` and `staged` (through host memory). Numbers are measured by `measure`; those of
`LinkTable.assumed` hold until then. This module transfers nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

Scope: TypeAlias = Literal["lane", "gpu", "gpus", "node", "cluster"]
SCOPES: tuple[Scope, ...] = ("lane", "gpu", "gpus", "node", "cluster")
SHOWN_BYTES = (1 << 10, 1 << 20, 100 << 20)


@dataclass(frozen=True, slots=True)
class TransferCost:
    """One way between two places.

    Attributes:
        latency_seconds: what a transfer of next to nothing takes, asked for and received.
        bytes_per_second: how the rest grows; infinite where nothing is copied.
    """

    latency_seconds: float
    bytes_per_second: float = math.inf

    def seconds(self, nbytes: int) -> float:
        """Predicted seconds of one transfer."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    @classmethod
    def fitted(cls, seconds_by_nbytes: Mapping[int, float]) -> TransferCost:
        """The cost through the smallest and the largest transfer that was measured."""
        small, large = min(seconds_by_nbytes), max(seconds_by_nbytes)
        latency = seconds_by_nbytes[small]
        grown = seconds_by_nbytes[large] - latency
        return cls(latency, (large - small) / grown if grown > 0 else math.inf)


@dataclass(frozen=True)
class LinkTable:
    """Costs by scope and kind.

    Attributes:
        costs: `costs[scope][kind]`.
        measured: False where the numbers are assumptions.
        absent: why a way does not exist here, as `absent[scope][kind]`.
    """

    costs: Mapping[Scope, Mapping[str, TransferCost]] = field(default_factory=dict)
    measured: bool = True
    absent: Mapping[Scope, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def assumed(cls) -> LinkTable:
        """Cautious figures of ordinary machines, for the time before anything is measured."""
        return cls(
            {
                "lane": {"reference": TransferCost(10e-6)},
                "gpu": {"staged": TransferCost(250e-6, 3e9), "cuda_ipc": TransferCost(250e-6)},
                "gpus": {
                    "staged": TransferCost(250e-6, 3e9),
                    "cuda_ipc": TransferCost(300e-6, 20e9),
                },
                "node": {
                    "stream": TransferCost(80e-6, 1.5e9),
                    "shared": TransferCost(100e-6, 10e9),
                },
                "cluster": {"stream": TransferCost(300e-6, 1e9)},
            },
            measured=False,
        )

    def kinds(self, scope: Scope) -> tuple[str, ...]:
        """The ways there are between two places this near."""
        return tuple(self.costs.get(scope, ()))

    def seconds(self, scope: Scope, kind: str, nbytes: int) -> float:
        """Predicted seconds of a transfer; KeyError for a way that is not in the table."""
        return self.costs[scope][kind].seconds(nbytes)

    def choose(self, scope: Scope, nbytes: int, among: Collection[str] | None = None) -> str | None:
        """The way predicted to be fastest, or None where the table knows none.

        Args:
            scope: how near the two places are.
            nbytes: bytes of the value.
            among: the ways that are open; all when left out.
        """
        costs = self.costs.get(scope, {})
        kinds = [kind for kind in costs if among is None or kind in among]
        return min(kinds, key=lambda kind: costs[kind].seconds(nbytes), default=None)

    def merged(self, other: LinkTable) -> LinkTable:
        """This table with the other's entries in place of its own; measured only if both are.

        A way that the other says is absent here is none of this table's any more.
        """
        costs = _without(self.costs, other.absent, other.costs)
        absent = _without(self.absent, other.costs, other.absent)
        return LinkTable(costs, self.measured and other.measured, absent)

    def to_json(self) -> str:
        """One line of JSON; a rate without bound is null."""
        costs = {
            scope: {
                kind: {
                    "latency_seconds": cost.latency_seconds,
                    "bytes_per_second": cost.bytes_per_second
                    if math.isfinite(cost.bytes_per_second)
                    else None,
                }
                for kind, cost in kinds.items()
            }
            for scope, kinds in self.costs.items()
        }
        absent = {scope: dict(kinds) for scope, kinds in self.absent.items()}
        return json.dumps({"measured": self.measured, "costs": costs, "absent": absent})

    def render(self) -> Table:
        """A table for people: costs, predicted seconds of three sizes, the choice in bold.

        Ways that are absent are rows that say why.
        """
        from rich.table import Table

        title = "Links" if self.measured else "Links (assumed, not measured)"
        note = "In bold: the way that is taken."
        table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
        table.add_column("between", no_wrap=True)
        table.add_column("link")
        for heading in ("latency", "rate", "1 KiB", "1 MiB", "100 MiB"):
            table.add_column(heading, justify="right")
        for scope in SCOPES:
            best = [self.choose(scope, nbytes) for nbytes in SHOWN_BYTES]
            for kind, cost in self.costs.get(scope, {}).items():
                shown = [
                    f"[bold]{text}[/bold]" if kind == winner else text
                    for text, winner in zip(
                        (_seconds(cost.seconds(nbytes)) for nbytes in SHOWN_BYTES),
                        best,
                        strict=True,
                    )
                ]
                latency, rate = _seconds(cost.latency_seconds), _rate(cost.bytes_per_second)
                table.add_row(_BETWEEN[scope], kind, latency, rate, *shown)
            for kind, why in self.absent.get(scope, {}).items():
                table.add_row(_BETWEEN[scope], kind, "-", why)
        return table


_BETWEEN = {
    "lane": "workers of a lane",
    "gpu": "lanes of a GPU",
    "gpus": "GPUs of a node",
    "node": "lanes of a node",
    "cluster": "nodes",
}


_Entry = TypeVar("_Entry")


def _without(
    ours: Mapping[Scope, Mapping[str, _Entry]],
    dropped: Mapping[Scope, Mapping[str, object]],
    theirs: Mapping[Scope, Mapping[str, _Entry]],
) -> dict[Scope, Mapping[str, _Entry]]:
    """Entries by scope and kind: ours but for what is dropped, and theirs in place of ours."""
    found: dict[Scope, Mapping[str, _Entry]] = {}
    for scope in SCOPES:
        gone = dropped.get(scope, {})
        kept = {kind: one for kind, one in ours.get(scope, {}).items() if kind not in gone}
        if both := {**kept, **theirs.get(scope, {})}:
            found[scope] = both
    return found


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _rate(bytes_per_second: float) -> str:
    if math.isinf(bytes_per_second):
        return "not copied"
    return f"{bytes_per_second / 1e9:.3g} GB/s"
