"""How busy other lanes are beside a stage, against counting by moments; and what it changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.engine.spans import Span
from m2flow.plan.builders import build_plan
from m2flow.plan.busy import BusyLanes, as_beside, is_crowded, mean_beside
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile
from m2flow.plan.simulate import simulate
from tests.plan.small_graphs import GRAPHS

BLOCKS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=6)


def lane(number: int, blocks: list[tuple[int, int]]) -> list[Span]:
    spans, now = [], 0
    for idle, work in blocks:
        start = now + idle
        now = start + work
        spans.append(Span(number, f"s{number}", "call", float(start), float(now)))
    return spans


@given(BLOCKS, BLOCKS, BLOCKS)
def test_the_share_is_that_of_counted_moments(
    a: list[tuple[int, int]], b: list[tuple[int, int]], c: list[tuple[int, int]]
) -> None:
    spans = [*lane(0, a), *lane(1, b), *lane(2, c)]
    lanes = {0, 1, 2}
    for span in spans:
        others = lanes - {span.lane}
        counted = [
            any(s.lane == x and s.start <= moment < s.end for s in spans)
            for moment in range(int(span.start), int(span.end))
            for x in others
        ]
        expected = sum(counted) / len(counted)
        assert BusyLanes(spans, lanes).beside(span, (span.lane,)) == pytest.approx(expected)


def profile(alone: float) -> Profile:
    layout = StageCost(1, Piecewise(((1, 1.0), (8, 8.0))), alone=alone)
    return Profile({name: StageProfile((layout,)) for name in ("world.move", "score")})


def test_a_stage_is_faster_where_the_other_lanes_are_idle() -> None:
    graph, lanes = GRAPHS["scoring"], (LaneSpec(0), LaneSpec(1))
    together = build_plan("collocated", graph, lanes, 8)
    one = Placement(((0,),))
    single = Plan("custom", lanes, {"world": one, "score": one})
    assert not is_crowded(profile(1.0))
    assert is_crowded(profile(0.5))
    for plan, slow, fast in ((together, 8.0, 8.0), (single, 16.0, 8.0)):
        assert simulate(graph, plan, profile(1.0), 8).seconds == pytest.approx(slow)
        assert simulate(graph, plan, profile(0.5), 8).seconds == pytest.approx(fast)
    apart = Plan("custom", lanes, {"world": one, "score": Placement(((1,),))})
    assert simulate(graph, apart, profile(1.0), 8).seconds == pytest.approx(16.0)
    assert simulate(graph, apart, profile(0.5), 8).seconds == pytest.approx(8.0)


def test_shares_are_means_over_the_seconds_of_a_stage() -> None:
    spans = [*lane(0, [(0, 4), (0, 4)]), *lane(1, [(2, 2)])]
    assert mean_beside(spans, (0, 1)) == {"s0": pytest.approx(0.25), "s1": pytest.approx(1.0)}
    scaled = as_beside(profile(0.5), {"score": 0.5}).stage("score").costs[0]
    assert scaled.seconds.at(8) == pytest.approx(6.0)
    assert scaled.alone == 1.0
