"""The simulator: seconds counted by hand, and a slow oracle of shared lanes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.errors import UserError
from m2flow.flow import Flow, Stream, Worker, stage
from m2flow.plan import build_plan
from m2flow.plan.choose.draft import obstacle, to_plan
from m2flow.plan.choose.structures import starts
from m2flow.plan.profile import (
    ByReplicas,
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.simulate import simulate
from m2flow.plan.simulate_timing import ProfileTiming, drawn
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds
from m2flow.simulation.stream import VirtualStream
from tests.plan.random_cases import draw
from tests.plan.small_graphs import GRAPHS, Model, normalise, score

LANES = (LaneSpec(0), LaneSpec(1))


class Trainer(Worker):
    @stage(accumulates=True, minibatches=2)
    def train(self, items):  # type: ignore[no-untyped-def]
        return items

    @train.finish
    def update(self):  # type: ignore[no-untyped-def]
        return {}


class Grpo(Flow):
    """Four samples of each prompt, scored, compared in their group, and trained on."""

    gen: Model
    learner: Trainer

    def step(self, items: Stream) -> Stream:
        return self.learner.train(normalise(score(self.gen.generate(items))))

    def sync(self) -> None:
        self.learner.publish(self.gen)


GRPO = Grpo(gen=Model(), learner=Trainer()).trace()


def line(each: float, least: float = 0.0) -> Piecewise:
    """So much for each item, beside a least price."""
    return Piecewise(((1.0, least + each), (1001.0, least + 1001 * each)))


def layout(each: float, least: float = 0.0, **more: object) -> StageCost:
    return StageCost(1, line(each, least), **more)  # type: ignore[arg-type]


def grpo_profile(lengths: Quantiles | None = None, **more: object) -> Profile:
    """A generator of four samples a prompt, a score, groups, and training in two mini-batches."""
    rounds = line(0.01) if lengths else None
    return Profile(
        {
            "gen.generate": StageProfile((layout(1.0, round=rounds),), Bytes(100), lengths),
            "score": StageProfile((layout(0.25),), Bytes(100)),
            "normalise": StageProfile((layout(0.0),), Bytes(100)),
            "learner.train": StageProfile(
                (layout(0.5, finish=ByReplicas(((1, 1.0), (2, 3.0)))),), Bytes(0)
            ),
        },
        **more,  # type: ignore[arg-type]
    )


ON_ONE_LANE = Plan("custom", LANES[:1], {w: Placement(((0,),)) for w in GRPO.workers})


# --- by hand --------------------------------------------------------------------------------------


def test_a_step_on_one_lane_is_the_sum_of_its_calls() -> None:
    found = simulate(GRPO, ON_ONE_LANE, grpo_profile(), 4)
    assert found.seconds == pytest.approx(4 * 1.0 + 16 * 0.25 + 16 * 0.5 + 2 * 1.0)
    assert found.spread == 0
    assert found.idle == {0: 0}
    assert found.stages["learner.train"] == pytest.approx(10.0)
    assert found.terms["waiting"] == pytest.approx(0.0)


def test_dispatch_is_paid_for_every_command() -> None:
    plain = simulate(GRPO, ON_ONE_LANE, grpo_profile(), 4)
    more = simulate(GRPO, ON_ONE_LANE, grpo_profile(dispatch=Seconds(0.1)), 4)
    calls = 1 + 1 + 1 + 2 + 2 + 1  # one of each stage, but two mini-batches, and an install
    assert more.seconds - plain.seconds == pytest.approx(0.1 * calls)
    assert more.terms["waiting"] == pytest.approx(0.1 * calls)


def test_items_that_share_a_lane_slow_each_other_down() -> None:
    """Lengths of ten: sixteen at work grow by one in 0.16 s."""
    found = simulate(GRPO, ON_ONE_LANE, grpo_profile(Quantiles((10.0,))), 4)
    assert found.stages["gen.generate"] == pytest.approx(10 * 0.16)


def test_the_running_limit_is_kept() -> None:
    """One prompt at a time is four samples at work: four times 10 units of 0.04 s."""
    plan = replace(ON_ONE_LANE, stages={"gen.generate": StagePlan(max_running=1)})
    found = simulate(GRPO, plan, grpo_profile(Quantiles((10.0,))), 4)
    assert found.stages["gen.generate"] == pytest.approx(4 * 10 * 0.04)


def test_slots_of_the_stage_s_own_are_kept() -> None:
    """They were left out: rounds then took no longer for sixteen samples than for four."""
    profile = grpo_profile(Quantiles((10.0,)))
    known = profile.stages["gen.generate"]
    slotted = replace(known.costs[0], round=line(0.0, 0.1), slots=4)
    profile = replace(
        profile, stages={**profile.stages, "gen.generate": replace(known, costs=(slotted,))}
    )
    found = simulate(GRPO, ON_ONE_LANE, profile, 4)
    assert found.stages["gen.generate"] == pytest.approx(4 * 10 * 0.1)


def test_what_is_taken_in_stops_the_others() -> None:
    profile = grpo_profile(Quantiles((10.0,)))
    known = profile.stages["gen.generate"]
    admitting = replace(known, costs=(replace(known.costs[0], admit=line(0.5)),))
    profile = replace(profile, stages={**profile.stages, "gen.generate": admitting})
    plan = replace(ON_ONE_LANE, stages={"gen.generate": StagePlan(max_running=2)})
    found = simulate(GRPO, plan, profile, 4)
    assert found.stages["gen.generate"] == pytest.approx(2 * (10 * 0.08 + 2 * 0.5))


def test_a_done_curve_says_when_items_come_out() -> None:
    profile = grpo_profile()
    known = profile.stages["gen.generate"]
    early = replace(known.costs[0], done=Piecewise(((0, 0), (0.5, 0.25), (1, 1))))
    profile = replace(
        profile, stages={**profile.stages, "gen.generate": replace(known, costs=(early,))}
    )
    second = Placement(((1,),))
    spots = {**dict.fromkeys(GRPO.workers, second), "gen": Placement(((0,),))}
    plan = Plan("custom", LANES, spots, {"score": StagePlan(chunk=8)})
    starts = [s.start for s in simulate(GRPO, plan, profile, 4, steps=1).spans if s.name == "score"]
    assert starts == pytest.approx([1.0, 4.0])  # half of the items after a quarter of 4 s


def test_replicas_finish_together_at_their_price() -> None:
    spots = dict.fromkeys(GRPO.workers, Placement(((0,), (1,))))
    plan = Plan("custom", LANES, spots, {"learner.train": StagePlan(chunk=4)})
    run = simulate(GRPO, plan, grpo_profile(), 4, steps=1)
    assert [s.seconds for s in run.spans if s.kind == "finish"] == pytest.approx([3.0] * 4)


def test_publishing_costs_what_its_place_does() -> None:
    prices = tuple(
        PublishCost("learner", "gen", place, Seconds(seconds))
        for place, seconds in (("same", 0.1), ("node", 0.7), ("cluster", 5.0))
    )
    profile = grpo_profile(publish=prices)
    both = Placement(((0,), (1,)))
    for learner, wanted in ((both, [0.1, 0.1]), (Placement(((0,),)), [0.1, 0.7])):
        spots = {**dict.fromkeys(GRPO.workers, both), "learner": learner}
        run = simulate(GRPO, Plan("custom", LANES, spots), profile, 4, steps=1)
        installs = [s.seconds for s in run.spans if s.kind == "publish" and s.name == "gen"]
        assert sorted(installs) == pytest.approx(wanted)
    far = tuple(replace(lane, node=lane.id) for lane in LANES)
    spots = {**dict.fromkeys(GRPO.workers, Placement(((0,),))), "gen": Placement(((1,),))}
    found = simulate(GRPO, Plan("custom", far, spots), profile, 4)
    assert found.terms["publishing"] == pytest.approx(5.0)


def test_items_from_another_lane_are_brought_before_a_call() -> None:
    link = LinkCost(Seconds(0.5), BytesPerSecond(1600.0))
    spots = {**dict.fromkeys(GRPO.workers, Placement(((1,),))), "gen": Placement(((0,),))}
    plan = Plan("custom", LANES, spots)
    near = simulate(GRPO, plan, grpo_profile(), 4)
    far = simulate(GRPO, plan, grpo_profile(links={"node": link}), 4)
    assert far.seconds - near.seconds == pytest.approx(0.5 + 16 * 100 / 1600)
    assert far.terms["links"] == pytest.approx(1.5)


def test_switches_count_and_memory_is_kept() -> None:
    sizes = {"gen": 40, "score": 50, "learner": 60}
    workers = {
        name: (WorkerCost(1, Bytes(size), Seconds(0.2), Seconds(0.3)),)
        for name, size in sizes.items()
    }
    lanes = (replace(LANES[0], memory_bytes=100),)
    spots = {w: Placement(((0,),), sizes.get(w, 0)) for w in GRPO.workers}
    profile = grpo_profile(workers=workers)
    found = simulate(GRPO, Plan("custom", lanes, spots), profile, 4)
    # The learner makes way for the verifier; generator and verifier make way for the learner; the
    # generator comes back to take its weights.
    assert found.terms["switching"] == pytest.approx(3 * 0.2 + 3 * 0.3)
    assert found.seconds == pytest.approx(4 + 4 + 8 + 2 + 1.5)
    assert found.peak_bytes == {0: 100}
    unlimited = simulate(GRPO, ON_ONE_LANE, profile, 4)
    assert unlimited.terms["switching"] == 0


def test_steps_in_flight_count_once_the_pipeline_is_full() -> None:
    """Generation takes 4 s and the rest 14 s, on lanes of their own: a step in 14 s."""
    spots = {**dict.fromkeys(GRPO.workers, Placement(((1,),))), "gen": Placement(((0,),))}
    plan = Plan("custom", LANES, spots)
    assert simulate(GRPO, plan, grpo_profile(), 4).seconds == pytest.approx(18.0)
    ahead = simulate(GRPO, replace(plan, max_staleness=1), grpo_profile(), 4)
    assert ahead.seconds == pytest.approx(14.0)
    assert ahead.staleness > 0
    assert ahead.idle == {0: pytest.approx(10 / 14), 1: pytest.approx(0.0)}


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_steps_that_end_in_bunches_are_counted_whole(ahead: int, steps: int) -> None:
    """Both lanes generate, for 4 s and 4 s, then train together: two steps end in 22 s and 6 s. By
    turns a step seemed to take 6 s and 22 s."""
    profile = grpo_profile()
    known = profile.stages["learner.train"]
    costs = (*known.costs, replace(known.costs[0], lanes=2))
    stages = {**profile.stages, "learner.train": replace(known, costs=costs)}
    singly, together = Placement(((0,), (1,))), Placement(((0, 1),))
    spots = {**dict.fromkeys(GRPO.workers, singly), "learner": together}
    plan = Plan("custom", LANES, spots, max_staleness=ahead)
    found = simulate(GRPO, plan, replace(profile, stages=stages), 4, steps=steps)
    assert found.seconds == pytest.approx(14.0)
    assert sum(found.terms.values()) == pytest.approx(2 * 14.0)
    assert {"gen.generate", "learner.train"} <= {span.name for span in found.spans}


def test_a_profile_of_other_replicas_is_refused() -> None:
    spots = {**ON_ONE_LANE.placements, "learner": Placement(((0, 1),))}
    with pytest.raises(UserError, match=r"learner\.train.*2 x cpu.*1 x cpu"):
        simulate(GRPO, Plan("custom", LANES, spots), grpo_profile(), 4)


def test_turns_of_loops_are_drawn() -> None:
    graph = GRAPHS["playing"]
    profile = Profile(
        {
            "world.move": StageProfile((layout(1.0),), turns=Quantiles((2.0, 2.0))),
            "policy.act": StageProfile((layout(1.0),)),
            "score": StageProfile((layout(0.0),)),
        }
    )
    plan = Plan("custom", LANES[:1], {w: Placement(((0,),)) for w in graph.workers})
    assert simulate(graph, plan, profile, 3).seconds == pytest.approx(3 * 2 * 2)
    half = replace(profile.stages["world.move"], turns=Quantiles((1.5,)))
    profile = replace(profile, stages={**profile.stages, "world.move": half})
    assert simulate(graph, plan, profile, 3).seconds == pytest.approx(3 * 3)


# --- draws ----------------------------------------------------------------------------------------


LONG_TAIL = Quantiles((1.0, 5.0, 8.0, 20.0, 100.0))


def test_plans_are_compared_on_the_same_lengths() -> None:
    lengths = {}
    for mode in ("collocated", "disaggregated"):
        plan = build_plan(mode, GRPO, LANES, 8)
        for shift in (0, -1):
            timing = ProfileTiming(GRPO, plan, grpo_profile(LONG_TAIL), 3, first_step=shift)
            node = GRPO.node("gen.generate")
            lengths[mode, shift] = [timing.length(node, 2 - shift, item) for item in range(32)]
    assert len({tuple(some) for some in lengths.values()}) == 1
    assert statistics.fmean(drawn(0, 1, 0, 0, n) for n in range(2000)) == pytest.approx(
        0.5, abs=0.03
    )


def test_steps_differ_as_lengths_do() -> None:
    plan = build_plan("collocated", GRPO, LANES, 8)
    one = simulate(GRPO, plan, grpo_profile(LONG_TAIL), 8, steps=8)
    assert one.spread > 0
    assert simulate(GRPO, plan, grpo_profile(LONG_TAIL), 8, steps=8) == one
    assert simulate(GRPO, plan, grpo_profile(LONG_TAIL), 8, steps=8, seed=1).seconds != one.seconds


def test_a_long_answer_takes_long_in_every_later_stage() -> None:
    """Answers that differ in a trainer's price differ as their lengths do, not by another draw."""
    profile = grpo_profile(LONG_TAIL)
    trained = profile.stage("learner.train")
    costs = tuple(replace(cost, spread=0.5) for cost in trained.costs)
    stages = {**profile.stages, "learner.train": replace(trained, costs=costs)}
    plan = build_plan("collocated", GRPO, LANES, 8)
    timing = ProfileTiming(GRPO, plan, replace(profile, stages=stages))
    generate, train = GRPO.node("gen.generate"), GRPO.node("learner.train")
    lengths = [timing.length(generate, 0, item) for item in range(32)]
    seconds = [timing.call(train, 0, (0,), ((item,),)) for item in range(32)]
    longest, shortest = lengths.index(max(lengths)), lengths.index(min(lengths))
    assert seconds[longest] == max(seconds)
    assert seconds[shortest] == min(seconds)
    above = (lengths[longest] - LONG_TAIL.mean) / LONG_TAIL.deviation
    alone = costs[0].seconds.at(1)
    assert seconds[longest] == pytest.approx(alone * (1 + 0.5 * above))


def test_the_deviation_of_quantiles() -> None:
    assert Quantiles((3.0,)).deviation == 0
    assert Quantiles((2.0, 2.0)).deviation == 0
    assert Quantiles((0.0, 1.0)).deviation == pytest.approx(12**-0.5)
    values = [one for low, high in pairwise((0.0, 1.0, 5.0))
              for one in (low + (high - low) * n / 5000 for n in range(5000))]  # fmt: skip
    assert Quantiles((0.0, 1.0, 5.0)).deviation == pytest.approx(
        statistics.pstdev(values), rel=1e-3
    )


class Told(Worker):
    @stage(streaming=True, length="budget")
    def generate(self, items):  # type: ignore[no-untyped-def]
        yield items


class TellingFlow(Flow):
    told: Told

    def step(self, items: Stream) -> Stream:
        return self.told.generate(items)


def test_longest_first_where_the_flow_knows_lengths() -> None:
    graph = TellingFlow(told=Told()).trace()
    lengths = Quantiles((1.0, 2.0, 3.0, 50.0))
    work = StageProfile((layout(1.0, round=line(0.1)),), Bytes(0), lengths)
    plan = Plan(
        "custom",
        LANES,
        {"told": Placement(((0,), (1,)))},
        {"told.generate": StagePlan(chunk=1, max_running=1)},
    )
    profile = Profile({"told.generate": work})
    run = simulate(graph, plan, profile, 12, steps=1)
    seconds = [s.seconds for s in sorted(run.spans, key=lambda s: s.start)]
    assert len(run.spans) <= 12
    timing = ProfileTiming(graph, plan, profile)
    longest = max(timing.length(graph.nodes[0], 0, n) for n in range(12))
    assert max(seconds[:2]) >= longest * 0.1  # it is in one of the first two calls


# --- processor sharing against an oracle ----------------------------------------------------------


def slowly(arrivals: Sequence[tuple[float, float]], pace: Sequence[float]) -> dict[int, float]:
    """When each item (arrival, need) is finished, by going from event to event."""
    left = {n: need for n, (_, need) in enumerate(arrivals)}
    done: dict[int, float] = {}
    now = 0.0
    while left:
        here = [n for n in left if arrivals[n][0] <= now]
        coming = [when for when, _ in arrivals if when > now]
        if not here:
            now = min(coming)
            continue
        rate = pace[len(here) - 1]
        next_end = now + min(left[n] for n in here) * rate
        until = min([next_end, *coming])
        for n in here:
            left[n] -= (until - now) / rate
        now = until
        for n in [n for n in here if left[n] <= 1e-9]:
            done[n] = now
            del left[n]
    return done


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=8),
    st.lists(st.floats(0.1, 3.0), min_size=8, max_size=8),
)
def test_items_share_a_lane_as_the_oracle_says(
    arrivals: list[tuple[int, int]], steps: list[float]
) -> None:
    pace = [sum(steps[: n + 1]) for n in range(8)]  # more at work, slower
    stream = VirtualStream(GRPO.nodes[0], 0, 0, 0, 0.0, lambda running: pace[running - 1])
    order = sorted(range(len(arrivals)), key=lambda n: arrivals[n][0])
    ends: dict[int, float] = {}

    def play_until(when: float) -> None:
        while stream.running and stream.next_end() <= when:
            end = stream.next_end()
            stream.finish_next(end)
            ends.update(dict.fromkeys(stream.say(), end))

    for n in order:
        play_until(arrivals[n][0])
        stream.take(float(arrivals[n][0]), (n,), (n,), (float(arrivals[n][1]),), 0.0)
    play_until(float("inf"))
    wanted = slowly([(float(a), float(b)) for a, b in arrivals], pace)
    assert ends == pytest.approx(wanted)
    assert stream.idle


# --- the account ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_terms_are_all_the_time_of_all_lanes(seed: int) -> None:
    case = draw(seed)
    problem, lanes = case.problem, case.lanes
    fitting = (d for d in starts(problem, seed % 2) if obstacle(problem, d) is None)
    for draft in islice(fitting, 3):
        plan = to_plan(problem, draft)
        one = simulate(case.graph, plan, case.profile, case.num_items, steps=2)
        assert sum(one.terms.values()) == pytest.approx(one.seconds * len(lanes))
        idle = sum(one.idle.values()) * one.seconds
        assert idle == pytest.approx(one.terms["waiting"], abs=1e-9)
        assert sum(one.stages.values()) == pytest.approx(one.terms["compute"])
        start, end = one.window
        for lane in lanes:
            mine = sorted((s for s in one.spans if s.lane == lane.id), key=lambda s: s.start)
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))
            assert all(span.end > start and span.start < end for span in mine)


# --- what calls cost beside their stages ----------------------------------------------------------


def test_a_generator_with_slots_works_on_no_more_at_once() -> None:
    """Ten items of one unit, of which two are at work at once: five rounds, not one."""
    stream = VirtualStream(GRPO.nodes[0], 0, 0, 0, 0.0, lambda running: 1.0, slots=2)
    stream.take(0.0, range(10), range(10), [1.0] * 10, 0.0)
    ends = []
    while stream.running:
        ends.append(stream.next_end())
        stream.finish_next(ends[-1])
        stream.say()
    assert ends == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_overheads_of_the_controller_make_a_step_longer() -> None:
    plan = build_plan("collocated", GRPO, LANES, 8)
    free = simulate(GRPO, plan, grpo_profile(LONG_TAIL), 8, steps=1)
    dear = replace(grpo_profile(LONG_TAIL), event_overhead=Seconds(0.5))
    assert simulate(GRPO, plan, dear, 8, steps=1).seconds > free.seconds + 0.5


def test_publishing_is_priced_with_the_kinds_at_both_ends() -> None:
    """The kind of the first lane was taken for that of both ends."""
    costs = [
        PublishCost("a", "b", "node", Seconds(price), source_kind=one, target_kind=other)
        for price, one, other in ((1.0, "gpu", "gpu"), (2.0, "gpu", "cpu"), (3.0, "cpu", "gpu"))
    ]
    profile = Profile({}, publish=tuple(costs))
    for price, *kinds in ((1.0, "gpu", "gpu"), (2.0, "gpu", "cpu"), (3.0, "cpu", "gpu")):
        ends = (kinds[0], kinds[1])
        assert profile.publish_seconds("a", "b", "node", 1, 1, ends) == price


def test_a_plan_publishes_at_the_price_of_the_kinds_that_it_takes() -> None:
    prices = [
        PublishCost("learner", "gen", "node", Seconds(price), source_kind=one, target_kind=other)
        for price, one, other in ((1.0, "cpu", "cpu"), (2.0, "cpu", "gpu"), (3.0, "gpu", "cpu"))
    ]
    known = grpo_profile(publish=tuple(prices))
    both = {
        name: replace(one, costs=(*one.costs, *(replace(x, kind="gpu") for x in one.costs)))
        for name, one in known.stages.items()
    }
    states = {
        name: (*some, *(replace(x, kind="gpu") for x in some))
        for name, some in known.workers.items()
    }
    profile = replace(known, stages=both, workers=states)
    lanes = (LaneSpec(0), LaneSpec(1, "gpu"))
    for learner, gen, price in ((0, 1, 2.0), (1, 0, 3.0)):
        spots = dict.fromkeys(GRPO.workers, Placement(((0,),)))
        spots |= {"learner": Placement(((learner,),)), "gen": Placement(((gen,),))}
        found = simulate(GRPO, Plan("custom", lanes, spots), profile, 4)
        assert found.terms["publishing"] == pytest.approx(price)


# --- speed ----------------------------------------------------------------------------------------


def calls_of_a_simulation(prompts: int, steps: int = 1) -> int:
    """How many calls, of Python's functions and of C's, it takes: 16 samples of each prompt on two
    lanes."""
    flow = replace(GRPO.nodes[0], expands=16)
    nodes = [flow, *(replace(n, fanout=16, group_size=16) for n in GRPO.nodes[1:])]
    graph = replace(GRPO, nodes=tuple(nodes))
    plan = build_plan("disaggregated", graph, LANES, prompts)
    profile = grpo_profile(LONG_TAIL)
    simulate(graph, plan, profile, prompts, steps=1)  # what is kept from one time to the next
    calls = 0

    def count(frame: object, event: str, what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulate(graph, plan, profile, prompts, steps=steps)
    finally:
        sys.setprofile(before)
    return calls


def test_a_small_step_takes_few_calls_and_a_large_one_no_more_of_each_item() -> None:
    """50,000 of them for a step of 32 prompts, which are some 20 ms; `benchmarks/search.py` holds
    the time of whole searches."""
    small = calls_of_a_simulation(32)
    assert small < 125_000
    assert calls_of_a_simulation(128) < 4.4 * small
    assert calls_of_a_simulation(32, steps=4) < 4.4 * small
