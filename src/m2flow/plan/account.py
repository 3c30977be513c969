"""The memory account: on each kind of lane, how many bytes each worker holds, and for what.

The figures are those that plans are priced with: of a worker's state, and of what its largest call
takes beside it. So their sums are the plan's `state_bytes` and `working_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from m2flow.engine.plan import LaneSpec, Plan, StagePlan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.chunks import call_items
from m2flow.plan.memory import needs
from m2flow.plan.profile import Profile
from m2flow.plan.profile.work import FlowWork, StageWork, WorkerWork, by_purpose, without
from m2flow.plan.sizes import bytes_text
from m2flow.plan.units import Items

STATE, CALL = "state", "working memory"
"""What bytes are for where a workload does not say."""


@dataclass(frozen=True)
class Holding:
    """A worker's memory on a lane.

    Attributes:
        worker: whose.
        state: bytes of its state, by what they are for.
        stage: whose call takes the most beside it; empty if none takes any.
        call: bytes of that call, by what they are for.
        hosted: bytes in host memory, by what they are for.
        away_bytes: of its state, that are kept while it is away.
    """

    worker: str
    state: Mapping[str, float]
    stage: str
    call: Mapping[str, float]
    hosted: Mapping[str, float]
    away_bytes: float

    @property
    def state_bytes(self) -> float:
        return sum(self.state.values())

    @property
    def call_bytes(self) -> float:
        return sum(self.call.values())


@dataclass(frozen=True)
class LaneAccount:
    """Lanes that hold the same.

    Attributes:
        lanes: their numbers.
        kind: of lanes.
        limit: bytes that may be taken on each; None for no limit.
        holdings: of the workers that stand there.
        at_once: bytes of what a single command needs together, at most, and who needs them.
        neighbours: lanes of the same machine that hold the same, this one included.
        published: by worker, bytes of a version of its weights that these lanes have in the host
            memory of a machine, for lanes that take it over.
    """

    lanes: tuple[int, ...]
    kind: str
    limit: int | None
    holdings: tuple[Holding, ...]
    at_once: tuple[float, str]
    neighbours: int
    published: Mapping[str, float]

    @property
    def most_bytes(self) -> float:
        """Of all states, and of the largest call."""
        states = sum(one.state_bytes for one in self.holdings)
        return states + max((one.call_bytes for one in self.holdings), default=0.0)

    @property
    def takes_turns(self) -> bool:
        """Whether states must make way for each other."""
        return self.limit is not None and self.most_bytes > self.limit

    @property
    def host_bytes(self) -> float:
        """Bytes of a machine's host memory that these lanes take: what workers hold there, weights
        that are published, and room for all states of accelerators with a limit. (States of lanes
        of cores go to a disk.)"""
        away = sum(one.away_bytes for one in self.holdings)
        if self.limit is None or self.kind == "cpu":
            away = 0.0
        hosted = sum(size for one in self.holdings for size in one.hosted.values())
        return self.neighbours * (away + hosted) + sum(self.published.values())


def accounts(
    plan: Plan, graph: FlowGraph, works: Mapping[str, FlowWork], profile: Profile, num_items: int
) -> list[LaneAccount]:
    """The account of a plan whose sizes are those of the profile.

    Args:
        plan: who stands where.
        graph: its flow.
        works: by kind of lane what the workload declares.
        profile: made of the same; it knows what streaming stages hold.
        num_items: source items of a step.
    """
    alike: dict[tuple[str, int | None, tuple[str, ...]], list[LaneSpec]] = {}
    for lane in plan.lanes:
        names = sorted(name for name, spot in plan.placements.items() if lane.id in spot.lanes)
        alike.setdefault((lane.kind, lane.memory_bytes, tuple(names)), []).append(lane)
    found = []
    for (kind, limit, here), lanes in alike.items():
        every = (
            _holding(name, kind, plan, graph, works[kind], profile, num_items) for name in here
        )
        holdings = tuple(one for one in every if one.state or one.call or one.hosted)
        if holdings:
            numbers = tuple(lane.id for lane in lanes)
            needed = (need for need in needs(plan, graph) if need.lane == numbers[0])
            most = max(needed, key=lambda need: need.num_bytes)
            at_once = most.num_bytes, " and ".join(most.workers)
            neighbours = max(Counter(lane.node for lane in lanes).values())
            published = _published(lanes, plan, graph, works)
            found.append(
                LaneAccount(numbers, kind, limit, holdings, at_once, neighbours, published)
            )
    return found


def _published(
    lanes: Sequence[LaneSpec], plan: Plan, graph: FlowGraph, works: Mapping[str, FlowWork]
) -> dict[str, float]:
    """Bytes of published weights that some lanes hold in the host memory of one machine.

    Each lane of the source's first replica lays out its part of a version there, unless nobody
    takes it but lanes where the source stands whole. What lanes of another machine take is brought
    to that machine once.

    Returns:
        by worker that publishes, on the machine where it is most.
    """
    kind_of = {lane.id: lane.kind for lane in plan.lanes}
    mine = {lane.id for lane in lanes}
    there: dict[int, set[int]] = {}
    for lane in plan.lanes:
        there.setdefault(lane.node, set()).add(lane.id)
    found: dict[str, float] = {}
    for edge in graph.weight_edges:
        source, target = plan.placements[edge.source], plan.placements[edge.target]
        first = source.replicas[0]
        takers = set(target.lanes) - (set(source.lanes) if len(first) == 1 else set())
        if not takers:
            continue
        workers = works[kind_of[target.lanes[0]]].workers
        size = workers.get(edge.target, WorkerWork(())).weight_bytes
        for node in {lane.node for lane in lanes}:
            here = there[node]
            parts = len(here & mine & set(first))
            if here & mine & takers:
                parts += len(set(first) - here)
            if held := size * parts / len(first):
                found[edge.source] = max(found.get(edge.source, 0.0), held)
    return found


def _holding(
    worker: str,
    kind: str,
    plan: Plan,
    graph: FlowGraph,
    work: FlowWork,
    profile: Profile,
    num_items: int,
) -> Holding:
    spot, own = plan.placements[worker], work.workers.get(worker, WorkerWork(()))
    layout = spot.layout, len(spot.replicas[0])
    states, hosted = (
        next((held for one, held in known if (one.name, one.lanes) == layout), 0.0)
        for known in (own.states, own.hosted)
    )
    usable = sum(lane.kind == kind and lane.reserved_for is None for lane in plan.lanes)
    more = max(1.0, usable / len(spot.lanes))
    told = by_purpose(hosted, STATE)
    hosted = {what: size * (more if what in own.dealt else 1.0) for what, size in told.items()}

    def call(node: StageNode) -> dict[str, float]:
        """What the largest call of a stage takes, by what it is for."""
        declared = work.stages.get(node.name, StageWork(())).layouts
        one = next((x for x in declared if (x.layout.name, x.layout.lanes) == layout), None)
        if one is None:
            return {}
        stage = plan.stages.get(node.name, StagePlan())
        items = call_items(node, stage, num_items)
        found = by_purpose(one.working_bytes(items), CALL)
        if one.rounds is None:
            return found
        try:
            cost = profile.cost(node.name, *layout, kind, stage.max_running)
        except UserError:  # it does not fit there, and whoever runs the plan will refuse it
            return found
        held = cost.working_bytes(Items(items)) - sum(found.values())
        return {one.rounds.what: max(0.0, held), **found}

    calls = {node.name: call(node) for node in graph.nodes if node.worker == worker}
    stage = max(calls, key=lambda name: sum(calls[name].values()), default="")
    return Holding(
        worker,
        by_purpose(states, STATE),
        stage,
        calls.get(stage, {}),
        hosted,
        without(states, own.dropped),
    )


# --- in words -------------------------------------------------------------------------------------


def in_lines(found: list[LaneAccount]) -> list[str]:
    """A table for each kind of lane."""
    lines = []
    for account in found:
        first, last, count = account.lanes[0], account.lanes[-1], len(account.lanes)
        one = f"{account.kind} lane {first}"
        which = one if count == 1 else f"each of {count} {account.kind} lanes ({first} to {last})"
        may = "no limit" if account.limit is None else f"at most {bytes_text(account.limit)}"
        lines.append(f"memory of {which}, {may}:")
        rows = list(_rows(account))
        width = max(len(name) for name, *_ in rows)
        for name, size, note in rows:
            lines.append(f"  {name:<{width}}  {bytes_text(size):>8}  {note}".rstrip())
    return lines


def _rows(account: LaneAccount) -> Iterator[tuple[str, float, str]]:
    for one in account.holdings:
        size = one.state_bytes + one.call_bytes
        too_large = account.limit is not None and size > account.limit
        yield one.worker, size, "more than the limit: it does not fit" if too_large else ""
        for what, size in one.state.items():
            yield f"  {what}", size, ""
        for what, size in one.call.items():
            yield f"  {what}", size, f"while {one.stage} runs"
        for what, size in one.hosted.items():
            yield f"  {what}", size, "in host memory, not counted here"
    for source, size in account.published.items():
        yield f"weights that {source} publishes", size, "in host memory once, not counted here"
    turns = "more than the limit: states make way for each other" if account.takes_turns else ""
    yield "all states and the largest call", account.most_bytes, turns
    needed, who = account.at_once
    share = f" ({needed / account.limit:.0%} of the limit)" if account.limit else ""
    yield "needed at once at most", needed, f"for {who}{share}"
    if account.host_bytes:
        yield "host memory of a machine", account.host_bytes, ""
