"""What a profile says goes through the engine into spans, and comes back out of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from m2flow.engine.facts import ids_of
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.engine.spans import Span, SpanKind
from m2flow.errors import UserError
from m2flow.flow import FlowGraph, stage
from m2flow.plan.decide import decide
from m2flow.plan.measured import Evidence, Observed, fit, trial_plans
from m2flow.plan.measured.crowding import fit_alone, undisturbed
from m2flow.plan.measured.observed import Call
from m2flow.plan.measured.trials import FitsGang
from m2flow.plan.profile import (
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.simulate_timing import ProfileTiming
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds
from m2flow.simulation.driver import Simulation
from tests.plan.small_graphs import GRAPHS, Grpo, Model, Trainer


class Stepping(Trainer):
    """Trains, and takes a step on each mini-batch."""

    @stage(accumulates=True, minibatches=2)
    def train(self, items):  # type: ignore[no-untyped-def]
        return items

    @train.finish
    def train_finish(self) -> None: ...


GRPO = Grpo(gen=Model(), learner=Stepping()).trace()

ITEMS, STEPS = 16, 4
LANES = tuple(LaneSpec(number, cores=(number,)) for number in range(2))


def layout(seconds: Mapping[float, float], **more: Any) -> StageCost:
    return StageCost(1, Piecewise(tuple(seconds.items())), **more)


KNOWN = Profile(
    stages={
        "gen.generate": StageProfile(
            (
                layout(
                    {1: 1.0, 16: 2.0},
                    round=Piecewise(((1, 0.010), (8, 0.012), (64, 0.040))),
                    admit=Piecewise(((1, 0.02), (16, 0.10))),
                ),
            ),
            Bytes(100),
            Quantiles(tuple(float(3 + n) for n in range(33))),
        ),
        "score": StageProfile((layout({1: 0.01, 64: 0.16}),), Bytes(10)),
        "normalise": StageProfile((layout({4: 0.003, 64: 0.02}),), Bytes(12)),
        "learner.train": StageProfile(
            (layout({4: 0.1, 8: 0.15, 32: 0.5}, finish=Piecewise(((1, 0.05), (2, 0.08)))),)
        ),
    },
    workers={
        "gen": (WorkerCost(1, Bytes(1000), Seconds(0.2), Seconds(0.1)),),
        "learner": (WorkerCost(1, Bytes(5000), Seconds(0.4), Seconds(0.3)),),
    },
    publish=(
        PublishCost("learner", "gen", "same", Seconds(0.02)),
        PublishCost("learner", "gen", "node", Seconds(0.07)),
    ),
    links={"node": LinkCost(Seconds(0.001), BytesPerSecond(1e5))},
    dispatch=Seconds(0.0005),
)


def told(graph: FlowGraph, timing: ProfileTiming, span: Span) -> Span:
    """The span with what real lanes say beside: lengths, and the sizes of what was made."""
    if span.kind != "call":
        return span
    node, args = graph.node(span.name), dict(span.args)
    if isinstance(args.get("pieces"), list):
        args["pieces"] = [
            [when, ids, [timing.length(node, int(str(args["step"])), item) for item in ids_of(ids)]]
            for when, ids, _ in args["pieces"]
        ]
    made = int(str(args["items"])) * node.expands
    args["bytes"] = made * timing.profile.stage(node.name).output_bytes
    return replace(span, args=args)


def observed(graph: FlowGraph, plan: Plan, profile: Profile, steps: int = STEPS) -> Observed:
    timing = ProfileTiming(graph, plan, profile)
    run = Simulation(graph, plan, timing, length=timing.said_length, detailed=True).run(
        ITEMS, steps
    )
    spans = tuple(told(graph, timing, span) for span in run.spans)
    starts = [0.0, *(run.step_ends[step] for step in range(steps - 1))]
    times = tuple((start, run.step_ends[n] - start) for n, start in enumerate(starts))
    return Observed(plan, ITEMS, spans, times, warm=True)


@pytest.fixture(scope="module")
def found() -> Profile:
    plans = trial_plans(GRPO, LANES, ITEMS)
    return fit(GRPO, [observed(GRPO, plan, KNOWN) for plan in plans])


def test_seconds_of_calls_come_back(found: Profile) -> None:
    for name in ("score", "normalise", "learner.train"):
        (known,), (fitted,) = KNOWN.stage(name).costs, found.stage(name).costs
        measured = [x for x, _ in fitted.seconds.points]
        assert len(measured) >= 3, name
        for items in measured:
            assert fitted.seconds.at(items) == pytest.approx(known.seconds.at(items), rel=0.01)
        assert fitted.error < 0.01
        assert fitted.alone == 1.0


def test_rounds_of_a_streaming_stage_come_back(found: Profile) -> None:
    (known,), (fitted,) = (x.stage("gen.generate").costs for x in (KNOWN, found))
    assert known.round
    assert known.admit
    assert fitted.round
    assert fitted.admit
    for lengths in ([20] * 16, [5, 9, 30, 33] * 4, [3] * 60 + [35] * 4, [35] * 64):
        items = len(lengths) // 4
        running = [sum(x >= n for x in lengths) for n in range(1, max(lengths) + 1)]
        truth = known.admit.at(items) + sum(map(known.round.at, running))
        again = fitted.admit.at(items) + sum(map(fitted.round.at, running))
        assert again == pytest.approx(truth, rel=0.01)


def test_lengths_and_the_way_items_come_out_are_known(found: Profile) -> None:
    stage = found.stage("gen.generate")
    assert stage.lengths
    assert stage.lengths.mean == pytest.approx(19, rel=0.1)
    assert stage.costs[0].done
    assert stage.costs[0].done.points[-1] == (1.0, 1.0)
    assert 0 < stage.costs[0].done.at(0.5) < 1


def test_what_there_is_beside_calls_comes_back(found: Profile) -> None:
    finish = found.stage("learner.train").costs[0].finish
    assert finish
    assert dict(finish.points) == pytest.approx({1: 0.05, 2: 0.08})
    assert {(x.place, round(x.seconds, 6)) for x in found.publish} == {
        ("same", 0.02),
        ("node", 0.07),
    }
    assert found.dispatch == pytest.approx(KNOWN.dispatch, rel=0.01)
    assert found.stage("gen.generate").output_bytes == 100


def test_turns_of_a_loop_are_counted() -> None:
    graph = GRAPHS["embodied"]
    known = Profile(
        stages={
            node.name: StageProfile((layout({1: 0.01, 16: 0.1}),), Bytes(8)) for node in graph.nodes
        }
        | {
            "world.move": StageProfile(
                (layout({1: 0.02, 16: 0.1}),), Bytes(8), turns=Quantiles((2.0, 2.0, 2.0, 5.0))
            )
        },
    )
    plans = trial_plans(graph, LANES, ITEMS)
    assert {plan.fuse_loops for plan in plans} == {True, False}
    turns = fit(graph, [observed(graph, plan, known) for plan in plans]).stage("world.move").turns
    assert turns
    assert turns.values[0] == turns.at(0.6) == 2.0
    assert 2.0 < turns.largest <= 5.0


def only(*workers: str, sizes: Collection[int] = (2, 4)) -> FitsGang:
    """Who can stand on gangs of these sizes."""
    return lambda worker, size: worker in workers and size in sizes


def test_trial_plans_show_every_stage_together_and_apart_in_several_sizes() -> None:
    plans = trial_plans(GRPO, LANES, ITEMS, fits_gang=only("learner"))
    for node in GRPO.nodes:
        replicas = {len(plan.placements[node.worker].replicas) for plan in plans}
        assert replicas == {1, 2}
        assert len({plan.stages[node.name].chunk for plan in plans}) >= 3
    gangs = [p for p in plans if p.placements["learner"].replicas == ((0, 1),)]
    assert {len(plan.placements["gen"].replicas) for plan in gangs} == {2}
    alone = trial_plans(GRPO, LANES[:1], ITEMS, fits_gang=only("learner"))
    assert {plan.mode for plan in alone} == {"together"}


def test_workers_that_stream_are_tried_on_the_gangs_that_fit_them() -> None:
    four = tuple(LaneSpec(number) for number in range(4))

    def fits_gang(worker: str, size: int) -> bool:
        return worker == "learner" or (worker == "gen" and size == 2)

    plans = trial_plans(GRPO, four, ITEMS, fits_gang=fits_gang)
    sizes = [
        tuple(len(plan.placements[worker].replicas[0]) for worker in ("learner", "gen", "score"))
        for plan in plans
    ]
    assert set(sizes) == {(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 1)}
    chunks = {
        p.stages["gen.generate"].chunk for p, own in zip(plans, sizes, strict=True) if own[1] == 2
    }
    assert len(chunks) >= 2, "calls of several sizes"


def test_who_must_keep_to_single_lanes_is_tried_on_no_gang() -> None:
    for graph in GRAPHS.values():
        plans = trial_plans(graph, LANES, ITEMS, fits_gang=lambda worker, size: True)
        for node in graph.nodes:
            sizes = {len(gang) for plan in plans for gang in plan.placements[node.worker].replicas}
            assert sizes == ({1} if node.sticky or node.is_function else {1, 2}), node.name


def test_generation_on_gangs_and_what_publishing_to_it_takes_come_back() -> None:
    (single,) = KNOWN.stage("gen.generate").costs
    pair = replace(single.times(0.4), lanes=2)
    generating = replace(KNOWN.stage("gen.generate"), costs=(single, pair))
    (one,) = KNOWN.stage("learner.train").costs
    training = StageProfile((one, replace(one, lanes=2)))
    stages = {**KNOWN.stages, "gen.generate": generating, "learner.train": training}
    prices = {(1, 1): 0.02, (1, 2): 0.03, (2, 1): 0.04, (2, 2): 0.05}
    known = replace(
        KNOWN,
        stages=stages,
        workers={},
        publish=tuple(
            PublishCost("learner", "gen", place, Seconds(seconds + extra), *lanes)
            for lanes, seconds in prices.items()
            for place, extra in (("same", 0.0), ("node", 0.05))
        ),
    )
    plans = trial_plans(GRPO, LANES, ITEMS, fits_gang=only("learner", "gen"))
    found = fit(GRPO, [observed(GRPO, plan, known) for plan in plans])
    layouts = {layout.lanes: layout for layout in found.stage("gen.generate").costs}
    assert set(layouts) == {1, 2}
    for lanes, layout in layouts.items():
        expected = {1: single, 2: pair}[lanes]
        assert layout.round
        assert expected.round
        for running in (2, 16, 60):
            assert layout.round.at(running) == pytest.approx(expected.round.at(running), rel=0.02)
    for (source, target), seconds in prices.items():
        assert found.publish_seconds("learner", "gen", "same", source, target) == pytest.approx(
            seconds
        )
    chosen = decide(GRPO, found, LANES, ITEMS).chosen.plan
    assert chosen.placements["gen"].replicas == ((0, 1),), "twice as fast on both lanes, and more"


def test_an_isolated_worker_has_the_same_reserved_lanes_in_every_plan() -> None:
    plans = trial_plans(GRPO, LANES, ITEMS, isolated=("gen",))
    assert len({plan.lanes for plan in plans}) == 1
    reserved = [lane.id for lane in plans[0].lanes if lane.reserved_for == "gen"]
    assert len(reserved) == len(LANES)
    assert all(set(plan.placements["gen"].lanes) <= set(reserved) for plan in plans)
    assert trial_plans(GRPO, plans[0].lanes, ITEMS, isolated=("gen",)) == plans


def test_first_calls_do_not_count_unless_the_lanes_were_warm() -> None:
    def span(start: float, seconds: float) -> Span:
        return Span(0, "score", "call", start, start + seconds, {"items": 4, "step": 0})

    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    slow_first = (span(0, 9.0), span(10, 1.0), span(20, 1.0))
    cold, warm = (Observed(plan, ITEMS, slow_first, warm=warm) for warm in (False, True))
    for one, expected in ((cold, [1.0, 1.0]), (warm, [9.0, 1.0, 1.0])):
        evidence = Evidence(GRPO)
        evidence.add(one)
        seconds = [call.seconds for call in evidence.samples.calls["score", 1, "cpu"]]
        assert seconds == pytest.approx(expected)


def test_memory_is_that_of_gauged_calls_and_of_the_finish_after_them() -> None:
    def span(items: int, call: int, taken: int | None, kind: SpanKind = "call") -> Span:
        facts = {"items": items, "step": 0, "call": call, "working_bytes": taken}
        return Span(0, "learner.train", kind, 0.0, 1.0, facts)

    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    seen = observed(GRPO, plan, KNOWN)
    gauged = (span(4, 1, 50), span(4, 2, 70), span(32, 3, 400), span(0, 4, 90, "finish"))
    (found,) = fit(GRPO, [replace(seen, gauged=gauged)]).stage("learner.train").costs
    assert found.working == Piecewise(((4.0, 90.0), (32.0, 400.0)))
    assert found.seconds == fit(GRPO, [seen]).stage("learner.train").costs[0].seconds
    nothing = fit(GRPO, [seen])
    assert all(stage.costs[0].working is None for stage in nothing.stages.values())


def test_memory_of_a_call_that_was_fed_is_not_that_of_its_first_items() -> None:
    facts = {"items": 2, "step": 0, "call": 1, "working_bytes": 900}
    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    fed = Span(0, "gen.generate", "call", 0.0, 1.0, {**facts, "taken": [[0.0, "0-1"], [0.5, "2"]]})
    seen = replace(observed(GRPO, plan, KNOWN), gauged=(fed,))
    assert fit(GRPO, [seen]).stage("gen.generate").costs[0].working is None


def test_a_stage_that_was_never_called_is_named() -> None:
    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    with pytest.raises(UserError, match=r"gen.generate.*never called"):
        fit(GRPO, [Observed(plan, ITEMS, ())])


def test_how_unlike_items_are_comes_back() -> None:
    graph = GRAPHS["scoring"]
    stages = {
        node.name: StageProfile((layout({1: 0.01, 16: 0.16}, spread=0.4),)) for node in graph.nodes
    }
    plans = trial_plans(graph, LANES, ITEMS)
    seen = [observed(graph, plan, Profile(stages), steps=24) for plan in plans]
    for known in fit(graph, seen).stages.values():
        assert known.costs[0].spread == pytest.approx(0.4, rel=0.25)
        assert known.costs[0].seconds.at(16) == pytest.approx(0.16, rel=0.05)


def test_what_other_lanes_cost_is_found() -> None:
    calls = [
        Call(8, 1.0 * (0.8 + 0.2 * beside) * noise, beside)
        for beside in (0.0, 0.3, 0.5, 1.0)
        for noise in (0.99, 1.0, 1.01)
    ]
    assert fit_alone(calls) == pytest.approx(0.8, abs=0.02)
    assert fit_alone([Call(8, 1.0, 1.0), Call(16, 1.5, 0.0)]) == 1.0, "nothing to compare"


def test_calls_that_another_program_held_up_do_not_count() -> None:
    calls = [Call(8, 1.0, effort=0.99), Call(8, 1.01, effort=0.98), Call(8, 2.0, effort=0.5)]
    assert undisturbed(calls) == calls[:2]
    unknown = [Call(8, 1.0), Call(8, 2.0)]
    assert undisturbed(unknown) == unknown
