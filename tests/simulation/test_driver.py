"""The simulated driver's clock: what goes on side by side, and what one thing after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from m2flow.engine import LaneSpec, Placement, Plan, StagePlan
from m2flow.flow import FlowGraph, StageNode, loop
from m2flow.simulation.driver import SimulatedRun, Simulation
from m2flow.simulation.timing import Admitted, Timing
from tests.engine.toy_flows import graph_of


class Even(Timing):
    """Every call takes ten seconds, every move three; items leave in their third turn.

    `worked_on` has (stage, item) as often as the item was worked on.
    """

    def __init__(self, visits: int = 5) -> None:
        self.visits, self.seen = visits, dict[int, int]()
        self.worked_on: list[tuple[int, int]] = []

    def call(
        self, node: StageNode, step: int, lanes: Sequence[int], shares: Sequence[Sequence[int]]
    ) -> float:
        self.worked_on += [(node.index, item) for items in shares for item in items]
        return 10.0

    def admit(self, node: StageNode, step: int, lane: int, items: Sequence[int]) -> Admitted:
        self.worked_on += [(node.index, item) for item in items]
        return Admitted(0.0, [10.0] * (len(items) * node.expands))

    def move(self, worker: str, what: str, lane: int) -> float:
        return 3.0

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        self.seen[item] = self.seen.get(item, 0) + 1
        return self.seen[item] == self.visits - item  # the later ones leave earlier


def played(
    graph: FlowGraph, plan: Plan, items: int = 1, timing: Timing | None = None
) -> SimulatedRun:
    return Simulation(graph, plan, timing or Even()).run(items, 1)


def limited(limit: int, working: int) -> Plan:
    spots = {worker: Placement(((0,),), 10, working) for worker in "abc"}
    return Plan("custom", (LaneSpec(0, memory_bytes=limit),), spots)


CHAIN = graph_of(lambda a, b, c, x: c.score(b.score(a.score(x))), "a", "b", "c")


def test_moves_take_their_time_in_turn_with_calls() -> None:
    room_for_two = played(CHAIN, limited(20, working=0))
    assert room_for_two.step_ends[0] == 30 + 3 * 3 + 3  # one has to make way
    assert room_for_two.peak_bytes[0] == 20
    room_for_one = played(CHAIN, limited(20, working=5))
    assert room_for_one.step_ends[0] == 30 + 3 + 2 * (3 + 3)
    assert room_for_one.peak_bytes[0] == 15


def test_a_streaming_call_on_a_gang_takes_the_time_of_all_its_lanes() -> None:
    graph = graph_of(lambda a, x: a.sample(x), "a")
    plan = Plan("custom", (LaneSpec(0), LaneSpec(1)), {"a": Placement(((1, 0),))})
    timing = Even()
    run = played(graph, plan, items=3, timing=timing)
    calls = [(span.lane, span.start, span.end, span.args["items"]) for span in run.spans]
    assert calls == [(1, 0.0, 10.0, 3), (0, 0.0, 10.0, 0)], "the first lane tells of the items"
    assert sorted(timing.worked_on) == [(0, 0), (0, 1), (0, 2)]


def test_a_fused_loop_takes_turns_and_hands_on_what_leaves() -> None:
    graph = graph_of(lambda a, b, c, x: c.score(loop(a.score, b.score)(x)), "a", "b", "c")
    lanes = (LaneSpec(0), LaneSpec(1))
    spots = {"a": Placement(((0,),)), "b": Placement(((0,),)), "c": Placement(((1,),))}
    plan = Plan("custom", lanes, spots, {"c.score": StagePlan(chunk=1)})
    timing = Even()
    run = played(graph, plan, items=3, timing=timing)
    calls = [(span.name, span.start) for span in run.spans if span.lane == 1]
    assert calls == [("c.score", 30.0), ("c.score", 40.0), ("c.score", 50.0)]
    on_lane_0 = [span.name for span in run.spans if span.lane == 0]
    assert on_lane_0 == ["a.score", "b.score", "a.score", "b.score", "a.score"]
    assert timing.worked_on.count((0, 0)) == 3
    assert timing.worked_on.count((1, 0)) == 2
    assert timing.worked_on.count((1, 2)) == 1


class HalfElsewhere(Even):
    """Of each call of the second stage 6 seconds in 10 pass elsewhere."""

    def elsewhere(self, node: StageNode, lane: int) -> float:
        return 0.6 * node.index

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        self.seen[item] = self.seen.get(item, 0) + 1
        return self.seen[item] == 4


def test_groups_of_a_fused_loop_take_turns_where_a_stage_waits() -> None:
    graph = graph_of(lambda a, b, x: loop(a.score, b.pause)(x), "a", "b")
    plan = Plan("custom", (LaneSpec(0),), {worker: Placement(((0,),)) for worker in "ab"})

    def spans(chunk: int | None) -> list[tuple[str, float, float, object]]:
        cut = replace(plan, stages={"b.pause": StagePlan(chunk=chunk)})
        run = Simulation(graph, cut, HalfElsewhere(), detailed=True).run(2, 1)
        assert run.step_ends[0] == max(span.end for span in run.spans)
        return [(span.name, span.start, span.end, span.args["ids"]) for span in run.spans]

    assert [end for _, _, end, _ in spans(None)] == [10, 20, 30, 40]
    assert spans(2) == spans(None)
    assert spans(1) == [
        ("a.score", 0, 10, "0"),  # is elsewhere until 16
        ("a.score", 10, 20, "1"),  # until 26
        ("b.pause", 10, 24, "0"),
        ("a.score", 24, 34, "0"),  # until 40
        ("b.pause", 20, 38, "1"),
        ("a.score", 38, 48, "1"),  # until 54
        ("b.pause", 34, 52, "0"),
        ("b.pause", 48, 58, "1"),
    ]


def test_what_goes_on_elsewhere_takes_groups_together_as_long_as_all_of_their_items() -> None:
    graph = graph_of(lambda a, b, x: loop(a.score, b.pause)(x), "a", "b")
    spots = {worker: Placement(((0,),)) for worker in "ab"}
    plan = Plan("custom", (LaneSpec(0),), spots, {"b.pause": StagePlan(chunk=1)})

    class MostlyElsewhere(HalfElsewhere):
        def call(self, node: StageNode, *others: Any) -> float:
            return 20.0 * len(others[-1][0]) if node.index else 1.0

    run = Simulation(graph, plan, MostlyElsewhere(), detailed=True).run(2, 1)
    assert [(span.name, span.start, span.end) for span in run.spans] == [
        ("a.score", 0, 1),  # elsewhere until 13
        ("a.score", 1, 2),  # elsewhere from 13 to 25
        ("b.pause", 1, 21),
        ("a.score", 21, 22),  # elsewhere from 25 to 37
        ("b.pause", 2, 33),
        ("a.score", 33, 34),  # elsewhere from 37 to 49
        ("b.pause", 22, 45),
        ("b.pause", 34, 57),
    ]


def test_a_fused_loop_may_go_on_for_longer_than_the_deadline_of_a_call() -> None:
    """Its turns are signs of life, as they are on a lane."""
    graph = graph_of(lambda a, b, x: loop(a.score, b.score)(x), "a", "b")
    spots = {worker: Placement(((0,),)) for worker in "ab"}
    plan = Plan("custom", (LaneSpec(0),), spots, deadline_seconds=30)
    assert Simulation(graph, plan, Even(visits=9)).run(1, 1).step_ends[0] == 9 * 10
