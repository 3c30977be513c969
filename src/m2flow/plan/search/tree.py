"""Plan trees, and what one costs. The search and its brute-force oracle share these words.

**Work.** A step has M source items. A tree is asked for a *round* of R of them, cut into *chunks*
of m (m divides R); the root is asked for R = m = M. A node answers with a first-chunk latency F
and a period P, so that its chunk j (from 1) is out at F + (j - 1) P and its round after
`F + (R/m - 1) P`. Its lanes are counts by kind.

* `Leaf` (a stage, q replicas of g lanes, c calls): its u items of a chunk (counted in whole
  groups) go to the replicas evenly, `ceil(u / q)` each, in c calls. With mini-batches of w source
  items, a chunk of several takes each in turn, a chunk that is smaller than one takes its part of
  the `finish`: F = P = (windows) c call(ceil(ceil(u / q) / c)) + (m / w) finish(q). A stage on
  whole steps needs m = M; otherwise w must divide m or m divide w.
  A *streaming* stage takes the round at once, T = call(items of R for a replica), and chunk j of
  k = R/m is out at t_j = T done(j / k), and all of them a dispatch later. The line from (1, F) to
  (k, T) is laid above all t_j, as low as it goes.
  Every call, here and below, takes the profile's *dispatch* beside the lane's own seconds: until
  the command has reached the lane, and until its end is known. So does every `finish`.
  All replicas of a stage stand on lanes of one kind.
* `Fused` (a cycle on common lanes): F = P = sum over turns of the sum of the members' calls.
* `Split` (a cycle's members on lanes of their own, G groups): a turn with a items takes
  max(sum t_i, G max t_i), t_i the call of member i on one group, and its link onwards. In the first
  one the groups begin one after the other, min(sum t_i, G max t_i) - max t_i more. How many items
  are in their n-th turn follows from the quantiles of the turns (`leaves.segments`).
* `Temporal(a, b)`: on the same lanes, in turn, for each chunk: both are asked for rounds of one
  chunk, F = P = F_a + F_b, and if it is *switched*, plus the seconds to bring and take away all
  that each of them keeps resident. Links are free there, also where the parts turn out to use
  different kinds among the lanes.
* `Spatial(a, b)`: on disjoint lanes, both asked for the same round and chunks. A side has lanes of
  those kinds only on which one of its stages can run, and all of a kind that the other cannot use.
  If b reads from a: F = F_a + F_b + L, P = max(P_a, P_b, L), L the link's seconds for a chunk
  (latency, and bytes over as many links as the smaller side has lanes). Otherwise F, P = max.
* `Chunked(inner, c)`: the inner node is asked for chunks of c, and m/c of them make one:
  F = F' + (m/c - 1) P', P = (m/c) P'.

**Same worker, same place.** A worker stands in one place. Where the stages of one fall to both
sides of a `Temporal`, the node binds it: its leaves below have the layout and replicas bound, and
no `Spatial` stands above them within that node; a cycle there is fused. A `Spatial` never parts a
worker. A bound worker is *held* (resident throughout, counted once) or not (counted by each leaf).

**Memory**, in 128ths of a lane's, rounded up: a leaf keeps r = its state and peaks at r + working.
`Temporal` not switched: r = r_a + r_b, peak = max(peak_a + r_b, r_a + peak_b); switched: the larger
of each; both plus what is held. `Spatial`: the larger of each. No peak exceeds 1. Seconds to bring
and take away what is kept: sum, or if switched or spatial the larger. Cores and host memory: the
sum where things run at once, the larger where in turn; a switched node needs host memory for the
states.

**Publishing** is paid once a step, at the lowest node that has all stages of both ends: at the
price of common lanes in a `Temporal` (where both states must fit beside each other), else at that
of one machine or several, by the node's lanes. A step takes F of the root plus publishing.

With staleness s, a step may be cut into up to s + 1 parts on disjoint lanes, each at work on
another step (`Steps`): its seconds are those of the slowest part, or of the link between one part
and those after it for a whole step, plus publishing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from m2flow.plan.search.problem import Lanes


class Cost(NamedTuple):
    """What a node costs; less is better in each, whatever the node becomes a part of.

    Attributes:
        first: seconds until the first chunk is out (F).
        period: seconds between chunks (P).
        resident: share of a lane's memory that is kept, at most.
        peak: share that is in use at one moment, at most.
        swap: seconds to bring and take away what is kept.
        publishing: seconds a step.
        cores: CPU cores beside the lanes' own.
        host: bytes of the machines' memory in use.
        states: bytes of all states, over all lanes.
    """

    first: float
    period: float = 0.0
    resident: float = 0.0
    peak: float = 0.0
    swap: float = 0.0
    publishing: float = 0.0
    cores: float = 0.0
    host: float = 0.0
    states: float = 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the stages of a worker on both sides of a `Temporal` stand.

    Attributes:
        worker: whose.
        lanes, kind, replicas: its layout.
        held: whether its state stays resident throughout the node.
    """

    worker: str
    lanes: int
    kind: int
    replicas: int
    held: bool


@dataclass(frozen=True, slots=True)
class Leaf:
    """A stage: number of its layout in the profile, replicas, calls of each for a chunk."""

    task: int
    layout: int
    replicas: int
    calls: int = 1


@dataclass(frozen=True, slots=True)
class Fused:
    """A cycle on common lanes: its members' layouts."""

    task: int
    layouts: tuple[int, ...]
    replicas: int


@dataclass(frozen=True, slots=True)
class Split:
    """A cycle whose members stand apart: their layouts and replicas, and groups of items."""

    task: int
    layouts: tuple[int, ...]
    replicas: tuple[int, ...]
    groups: int


@dataclass(frozen=True, slots=True)
class Temporal:
    """Both parts on all lanes in turn."""

    first: Tree
    second: Tree
    switched: bool = False
    bound: tuple[Bound, ...] = ()


@dataclass(frozen=True, slots=True)
class Spatial:
    """The parts on disjoint lanes, as a pipeline."""

    first: Tree
    second: Tree
    first_lanes: Lanes
    second_lanes: Lanes


@dataclass(frozen=True, slots=True)
class Chunked:
    """The inner node works in smaller chunks."""

    inner: Tree
    chunk: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Parts that work on different steps at the same time, and their lanes."""

    parts: tuple[Tree, ...]
    lanes: tuple[Lanes, ...]


Tree = Leaf | Fused | Split | Temporal | Spatial | Chunked | Steps


def leaves(tree: Tree) -> Iterator[Leaf | Fused | Split]:
    """All leaves of a tree, from first to last."""
    match tree:
        case Temporal() | Spatial():
            yield from leaves(tree.first)
            yield from leaves(tree.second)
        case Chunked():
            yield from leaves(tree.inner)
        case Steps():
            for part in tree.parts:
                yield from leaves(part)
        case _:
            yield tree


def mask(tree: Tree) -> int:
    """The tasks of a tree."""
    return sum(1 << leaf.task for leaf in leaves(tree))
