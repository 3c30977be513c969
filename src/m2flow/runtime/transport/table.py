"""What each way between two places costs: latency plus bytes over a rate.

Scopes say how near two places are: `lane` (one process), `node` (two lanes on one machine),
`cluster` (two machines). What lies in the memory of GPUs and is to stay in it has scopes of its
own: `gpu` (two lanes on one GPU), `gpus` (two GPUs of a machine), `gpu_cluster` (GPUs of two
machines). Kinds are the ways: `reference`, `inline`, `shared`, `stream`, `object`, for GPUs
`cuda_ipc`, `nccl` and `staged` (through host memory), or another that a runtime adds. Numbers are
measured by `measure`; those of `LinkTable.assumed` hold until then. This module transfers nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from rich.table import Table

Scope: TypeAlias = Literal["lane", "gpu", "gpus", "gpu_cluster", "node", "cluster"]
SCOPES: tuple[Scope, ...] = ("lane", "gpu", "gpus", "gpu_cluster", "node", "cluster")
SHOWN_BYTES = (1 << 10, 1 << 20, 100 << 20)


@dataclass(frozen=True, slots=True)
class LinkCost:
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
    def fitted(cls, seconds_by_nbytes: Mapping[int, float]) -> LinkCost:
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
        refused: ways that exist and that one pair of lanes cannot use, a line for each.
    """

    costs: Mapping[Scope, Mapping[str, LinkCost]] = field(default_factory=dict)
    measured: bool = True
    absent: Mapping[Scope, Mapping[str, str]] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    @classmethod
    def assumed(cls) -> LinkTable:
        """Cautious figures of ordinary machines, for the time before anything is measured."""
        return cls(
            {
                "lane": {"reference": LinkCost(10e-6)},
                "gpu": {"staged": LinkCost(250e-6, 3e9), "cuda_ipc": LinkCost(250e-6)},
                "gpus": {"staged": LinkCost(250e-6, 3e9), "cuda_ipc": LinkCost(300e-6, 20e9)},
                "gpu_cluster": {"staged": LinkCost(400e-6, 0.8e9), "nccl": LinkCost(1e-3, 5e9)},
                "node": {"stream": LinkCost(80e-6, 1.5e9), "shared": LinkCost(100e-6, 10e9)},
                "cluster": {"stream": LinkCost(300e-6, 1e9)},
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

    def explain(self, scope: Scope, nbytes: int, among: Collection[str] | None = None) -> str:
        """The choice for a value in a line: each way's seconds, and why others are not there."""
        best = self.choose(scope, nbytes, among)
        costs = self.costs.get(scope, {})
        said = [f"{_BETWEEN[scope]}, {nbytes:,} bytes: {best or 'no way'}"]
        kinds = sorted(costs, key=lambda kind: costs[kind].seconds(nbytes))
        said += [
            f"{kind} {_seconds(costs[kind].seconds(nbytes))}"
            + ("" if among is None or kind in among else " (not open)")
            for kind in kinds
        ]
        said += [f"{kind} absent: {why}" for kind, why in self.absent.get(scope, {}).items()]
        return "; ".join(said)

    def merged(self, other: LinkTable) -> LinkTable:
        """This table with the other's entries in place of its own; measured only if both are.

        A way that the other says is absent here is none of this table's any more.
        """
        costs: dict[Scope, Mapping[str, LinkCost]] = {}
        absent: dict[Scope, Mapping[str, str]] = {}
        for scope in SCOPES:
            theirs, gone = other.costs.get(scope, {}), other.absent.get(scope, {})
            ours = self.costs.get(scope, {})
            costs[scope] = {**{one: ours[one] for one in ours if one not in gone}, **theirs}
            was_gone = self.absent.get(scope, {})
            absent[scope] = {
                **{one: was_gone[one] for one in was_gone if one not in theirs},
                **gone,
            }
        costs = {scope: kinds for scope, kinds in costs.items() if kinds}
        absent = {scope: kinds for scope, kinds in absent.items() if kinds}
        refused = tuple(dict.fromkeys((*self.refused, *other.refused)))
        return LinkTable(costs, self.measured and other.measured, absent, refused)

    def refusing(self, line: str) -> LinkTable:
        """The table with a note that some pair cannot use a way; once for each line."""
        return self if line in self.refused else replace(self, refused=(*self.refused, line))

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
        rest = {"absent": absent, "refused": list(self.refused)}
        return json.dumps({"measured": self.measured, "costs": costs, **rest})

    @classmethod
    def from_json(cls, text: str) -> LinkTable:
        """The table that `to_json` wrote."""
        read = json.loads(text)
        costs: dict[Scope, dict[str, LinkCost]] = {
            scope: {
                kind: LinkCost(
                    cost["latency_seconds"],
                    math.inf if cost["bytes_per_second"] is None else cost["bytes_per_second"],
                )
                for kind, cost in kinds.items()
            }
            for scope, kinds in read["costs"].items()
        }
        return cls(costs, read["measured"], read.get("absent", {}), tuple(read.get("refused", ())))

    def render(self) -> Table:
        """A table for people: costs, predicted seconds of three sizes, the choice in bold.

        Ways that are absent are rows that say why; below stand those that some pair cannot use.
        """
        from rich.table import Table

        title = "Links" if self.measured else "Links (assumed, not measured)"
        notes = "\n".join(("In bold: the way that is taken.", *self.refused))
        table = Table(title=title, title_justify="left", caption=notes, caption_justify="left")
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
    "gpu_cluster": "GPUs of two nodes",
    "node": "lanes of a node",
    "cluster": "nodes",
}


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _rate(bytes_per_second: float) -> str:
    if math.isinf(bytes_per_second):
        return "not copied"
    return f"{bytes_per_second / 1e9:.3g} GB/s"
