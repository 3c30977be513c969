"""Which way to send weights: the one with the least predicted seconds, and the reckoning behind it.

The ways are `shared` (targets run on memory that the source has written for all of them), `copy`
(each target takes a whole copy), `broadcast` (one collective for all targets) and `delta` (only
what has changed). Which of them can be had depends on where the targets stand; what they cost comes
from measured links and rates. Figures in, choice out: nothing is sent here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from m2flow.runtime.weights.rates import Rates

Method: TypeAlias = Literal["shared", "copy", "broadcast", "delta"]
Scope: TypeAlias = Literal["lane", "gpu", "node", "cluster"]
NEIGHBOURS: tuple[Scope, ...] = ("gpu", "node")
NEAR: tuple[Scope, ...] = ("lane", *NEIGHBOURS)

INDEX_BYTES = 2
"""About what the index of a changed element takes in a delta."""


class Links(Protocol):
    """The part of `m2flow.runtime.transport.table` that this module needs."""

    def kinds(self, scope: Scope, /) -> Iterable[str]:
        """The ways there are between lanes this far apart."""
        ...

    def seconds(self, scope: Scope, kind: str, num_bytes: int, /) -> float:
        """Predicted seconds of one message."""
        ...


@dataclass(frozen=True, slots=True)
class Publish:
    """What is to be sent, and to whom.

    Attributes:
        num_bytes: of the weights, tied tensors once.
        targets: how many lanes receive them at each distance from the source.
        itemsize: bytes of an element.
        fraction_changed: elements that change from version to version, as the encoder measured it;
            None where nobody has yet.
        exported: the source's weights lie in memory that other lanes can read, without a copy.
        whole: every target takes everything whole, and from a source that holds it whole. Only
            then can it be a broadcast.
        group: there is a process group of the source and all targets.
        tree: a broadcast to n targets sends everything log2(n + 1) times in a row, as Gloo's does;
            False for a ring, such as NCCL's, which sends it once.
        delta: the target keeps a decoder, for the memory of another copy.
    """

    num_bytes: int
    targets: Mapping[Scope, int]
    itemsize: int = 2
    fraction_changed: float | None = None
    exported: bool = False
    whole: bool = True
    group: bool = False
    tree: bool = True
    delta: bool = True

    def count(self, *scopes: Scope) -> int:
        """Targets at these distances."""
        return sum(self.targets.get(scope, 0) for scope in scopes)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way to send, what it would take, and why.

    Attributes:
        seconds: None where it cannot be had.
        reason: what the seconds are made of, or what is in the way.
    """

    method: Method
    seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The way chosen, and all that were looked at.

    Attributes:
        reasons: fastest first, then those that cannot be had.
    """

    method: Method
    predicted_seconds: float
    reasons: tuple[Alternative, ...]

    def explain(self) -> str:
        """One line for each way, the chosen one marked."""
        lines = []
        for way in self.reasons:
            mark = "*" if way.method == self.method else " "
            seconds = "       no" if way.seconds is None else f"{way.seconds * 1e3:7.2f} ms"
            lines.append(f"{mark} {way.method:<9} {seconds:>10}  {way.reason}")
        return "\n".join(lines)


def choose(publish: Publish, links: Links, rates: Rates | None = None) -> Choice:
    """The fastest way to send weights. To be asked once for each group of targets that are alike.

    Args:
        publish: what is to be sent, and to whom.
        links: measured links, one at least for each distance in question.
        rates: what this machine does in memory; the defaults are a modest server core's.
    """
    assert publish.count(*NEAR, "cluster"), "weights are published to somebody"
    rates = rates or Rates()
    ways = [way(publish, links, rates) for way in (_shared, _copy, _broadcast, _delta)]
    ways.sort(key=lambda way: math.inf if way.seconds is None else way.seconds)
    best = ways[0]
    assert best.seconds is not None, "a copy needs no more than a link"
    return Choice(best.method, best.seconds, tuple(ways))


def _shared(publish: Publish, links: Links, rates: Rates) -> Alternative:
    if far := publish.count("cluster"):
        return Alternative("shared", None, f"{far} of the targets on other nodes")
    export = _export_seconds(publish, rates)
    # What is there already is read at the price of a message that says where.
    views = _near_seconds(publish, links, 0)
    return Alternative(
        "shared", export + views, f"export {_ms(export)}, {publish.count(*NEAR)} views {_ms(views)}"
    )


def _copy(publish: Publish, links: Links, rates: Rates) -> Alternative:
    # Copies on one node share its memory, those to other nodes share the sender's wire. Either
    # needs a message.
    export = _export_seconds(publish, rates)
    near = publish.count(*NEAR) * publish.num_bytes / rates.copy + _near_seconds(publish, links, 0)
    far = _far_seconds(publish, links, publish.num_bytes)
    return Alternative(
        "copy",
        export + near + far,
        f"export {_ms(export)}, {publish.count(*NEAR)} copies {_ms(near)}, "
        f"{publish.count('cluster')} to other nodes {_ms(far)}",
    )


def _broadcast(publish: Publish, links: Links, rates: Rates) -> Alternative:
    if not publish.group:
        return Alternative("broadcast", None, "no process group of source and targets")
    if not publish.whole:
        return Alternative("broadcast", None, "source and targets are not all whole replicas")
    if publish.count("lane"):
        return Alternative("broadcast", None, "a target stands on the source's lane")
    scopes: tuple[Scope, ...] = (*NEIGHBOURS, "cluster")
    slowest = max(
        _send(links, scope, publish.num_bytes) for scope in scopes if publish.count(scope)
    )
    count = publish.count(*scopes)
    rounds = math.ceil(math.log2(count + 1)) if publish.tree else 1
    packing = publish.num_bytes / rates.copy  # at either end, beside the other end's and the wire
    return Alternative(
        "broadcast",
        rounds * slowest + packing,
        f"{rounds} x {_ms(slowest)} over the slowest link, packing {_ms(packing)}",
    )


def _delta(publish: Publish, links: Links, rates: Rates) -> Alternative:
    if not publish.delta:
        return Alternative("delta", None, "the targets keep no decoder")
    known = publish.fraction_changed is not None
    fraction = 1.0 if publish.fraction_changed is None else publish.fraction_changed
    sparse = fraction * (publish.itemsize + INDEX_BYTES) / publish.itemsize
    num_bytes = round(min(1.0, sparse) * publish.num_bytes)
    encode = publish.num_bytes / rates.compare + publish.num_bytes / rates.checksum
    near = _near_seconds(publish, links, num_bytes)
    far = _far_seconds(publish, links, num_bytes)
    # Receivers apply side by side, those of one node sharing its memory.
    apply = publish.num_bytes / rates.checksum + num_bytes / rates.copy
    changed = f"{fraction:.2%} changed" if known else "nothing measured: as if all had changed"
    return Alternative(
        "delta",
        encode + near + far + apply,
        f"{changed}, encode {_ms(encode)}, send {_ms(near + far)}, apply {_ms(apply)}",
    )


def _export_seconds(publish: Publish, rates: Rates) -> float:
    """Putting the weights where lanes of this node can read them."""
    needed = publish.count(*NEIGHBOURS) and not publish.exported
    return publish.num_bytes / rates.copy if needed else 0.0


def _near_seconds(publish: Publish, links: Links, num_bytes: int) -> float:
    """A message to each target beside the source."""
    scopes = [scope for scope in NEIGHBOURS if publish.count(scope)]
    return sum(publish.count(scope) * _send(links, scope, num_bytes) for scope in scopes)


def _far_seconds(publish: Publish, links: Links, num_bytes: int) -> float:
    """A message to each target on another node."""
    count = publish.count("cluster")
    return count * _send(links, "cluster", num_bytes) if count else 0.0


def _send(links: Links, scope: Scope, num_bytes: int) -> float:
    """By the fastest way there is; infinite where the table knows none."""
    ways = (links.seconds(scope, kind, num_bytes) for kind in links.kinds(scope))
    return min(ways, default=math.inf)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
