"""Brute force: every plan of a small problem, simulated, but for those that cannot be the best.

A worker may stand on any neighbouring lanes, in any layout that is priced; each stage may be cut
into any of some numbers of calls; a lane may prefer the first or the last stage. What a placement
takes at least is told by its lanes' work and by the longest way through the flow, by the fastest
calls that any cut allows; placements and cuts are simulated in the order of that bound, until it
is above the best that was found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import RunFailed, UserError
from m2flow.flow.graph import SOURCE, StageNode
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.profile import WorkerCost
from m2flow.plan.simulate import simulate
from m2flow.plan.units import Items
from m2flow.plan.validate import validate

SHARES = (0.5, 1, 2, 4)
"""Calls of a replica and window that are tried."""

Spots = Mapping[str, tuple[WorkerCost, tuple[int, ...]]]
"""Each worker's layout and lanes."""


@dataclass
class Oracle:
    """Brute force on one problem.

    Attributes:
        best: seconds of the best plan so far.
        plan: that plan.
        num_simulated: simulations.
    """

    problem: PlanningProblem
    best: float = math.inf
    plan: Plan | None = None
    num_simulated: int = 0
    most: int = 20_000

    def run(self, within: float = 0.0) -> float:
        """Seconds of the best plan; what a bound shows to be better by less than `within`, as a
        share, is not looked for."""
        bounded = sorted(
            ((self.bound(spots), n, spots) for n, spots in enumerate(self.placements())),
            key=lambda entry: entry[:2],
        )
        for bound, _, spots in bounded:
            if bound >= self.best * (1 - within) or self.num_simulated >= self.most:
                break
            for seconds, cuts in sorted(self.cuts(spots), key=lambda entry: entry[0]):
                if seconds >= self.best * (1 - within) or self.num_simulated >= self.most:
                    break
                for downstream in (False, True):
                    self.simulate(spots, cuts, downstream)
        return self.best

    def placements(self) -> Iterator[Spots]:
        """Every way to put the workers on lanes."""
        menus = []
        for worker in self.problem.workers:
            mine = []
            for option in self.problem.options[worker]:
                ids = self.problem.ids[option.kind]
                for low in range(len(ids)):
                    ends = range(low + option.lanes, len(ids) + 1, option.lanes)
                    mine += [(option, ids[low:high]) for high in ends]
            menus.append(mine)
        for chosen in product(*menus):
            yield dict(zip(self.problem.workers, chosen, strict=True))

    def chunks(self, node: StageNode, spots: Spots) -> list[int]:
        option, lanes = spots[node.worker]
        window = self.problem.windows[node.index]
        replicas = len(lanes) // option.lanes
        calls = {max(1, round(replicas * share)) for share in SHARES}
        return sorted({-(-window // n) for n in calls}, reverse=True)

    def times(self, node: StageNode, spots: Spots, chunk: int) -> tuple[float, float, float]:
        """At least: seconds of all calls on one replica, of the shortest call, of the first one."""
        option, lanes = spots[node.worker]
        cost = self.problem.cost(node, option, None)
        window, each = self.problem.windows[node.index], self.problem.unit_items[node.index]
        sizes = [chunk] * (window // chunk) + ([window % chunk] if window % chunk else [])
        calls = [cost.call(Items(size * each)) + self.problem.profile.dispatch for size in sizes]
        finish = cost.finish_seconds(len(lanes) // option.lanes) if node.has_finish else 0.0
        replicas, turns = len(lanes) // option.lanes, self.least_turns(node)
        busy = max(sum(calls) / replicas, -(-len(calls) // replicas) * min(calls)) + finish
        early = 0.0 if node.streaming and cost.done is not None else min(calls)
        return node.minibatches * turns * busy, min(calls) + finish, early

    def least_turns(self, node: StageNode) -> float:
        if node.loop is None:
            return 1.0
        first = self.problem.graph.nodes[self.problem.graph.loops[node.loop].members[0]]
        turns = self.problem.profile.stage(first.name).turns
        return 0.25 if turns is None else min(1.0, turns.values[0])

    def bound(self, spots: Spots, cuts: Mapping[int, int] | None = None) -> float:
        """Seconds that a step takes at least."""
        nodes = self.problem.graph.nodes
        work: dict[str, float] = dict.fromkeys(self.problem.workers, 0.0)
        first, last = {SOURCE: 0.0}, {SOURCE: 0.0}
        for node in nodes:
            chunks = self.chunks(node, spots) if cuts is None else [cuts[node.index]]
            every = [self.times(node, spots, chunk) for chunk in chunks]
            busy, shortest, early = (min(one[k] for one in every) for k in range(3))
            work[node.worker] += busy * len(spots[node.worker][1])
            start = max(first[producer] for producer in node.inputs)
            first[node.index] = start + early
            last[node.index] = max(
                start + busy, *(last[producer] + shortest for producer in node.inputs)
            )
            if node.loop is not None:
                last[node.index] = start + early
        most = max(last.values())
        sets = {lanes for _, lanes in spots.values()}
        for lanes in {*sets, tuple(x for ids in self.problem.ids.values() for x in ids)}:
            inside = [w for w, (_, mine) in spots.items() if set(mine) <= set(lanes)]
            most = max(most, sum(work[worker] for worker in inside) / len(lanes))
        return most

    def cuts(self, spots: Spots) -> Iterator[tuple[float, Mapping[int, int]]]:
        nodes = self.problem.graph.nodes
        for chosen in product(*(self.chunks(node, spots) for node in nodes)):
            cuts = dict(zip(range(len(nodes)), chosen, strict=True))
            yield self.bound(spots, cuts), cuts

    def simulate(self, spots: Spots, cuts: Mapping[int, int], downstream: bool) -> None:
        graph, problem = self.problem.graph, self.problem
        placements = {}
        for worker, (option, lanes) in spots.items():
            size = option.lanes
            gangs = tuple(lanes[n : n + size] for n in range(0, len(lanes), size))
            working = max(
                problem.working_bytes(node, option, None, cuts[node.index])
                for node in problem.nodes_of[worker]
            )
            placements[worker] = Placement(gangs, option.state_bytes, working, option.layout)
        plan = Plan(
            "oracle",
            problem.lanes,
            placements,
            {node.name: StagePlan(cuts[node.index]) for node in graph.nodes},
            order=tuple(node.name for node in reversed(graph.nodes)) if downstream else (),
            deadline_seconds=math.inf,
        )
        try:
            validate(plan, graph, problem.num_items)
            self.num_simulated += 1
            seconds = simulate(graph, plan, problem.profile, problem.num_items, steps=1).seconds
        except (UserError, RunFailed):
            return
        if seconds < self.best:
            self.best, self.plan = float(seconds), replace(plan, predicted_seconds=seconds)


def lanes_of(kinds: Mapping[str, int], memory: int | None = None) -> tuple[LaneSpec, ...]:
    """So many lanes of each kind, on one machine."""
    names = [kind for kind, count in kinds.items() for _ in range(count)]
    return tuple(LaneSpec(n, kind, memory_bytes=memory) for n, kind in enumerate(names))
