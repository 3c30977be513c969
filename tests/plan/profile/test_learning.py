"""What a profile says goes through the engine into spans, and comes back out of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.engine.spans import Span, SpanKind, ids_of
from m2flow.errors import UserError
from m2flow.flow import FlowGraph, Worker, stage
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.plan import build_plan
from m2flow.plan.choose import choose
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
from m2flow.plan.profile.evidence import Evidence, Sample
from m2flow.plan.profile.growing import fit_growth
from m2flow.plan.profile.learning import fitted
from m2flow.plan.profile.trials import trial_plans
from m2flow.plan.simulate import simulate
from m2flow.plan.simulate_timing import ProfileTiming
from m2flow.plan.units import Bytes, BytesPerSecond, Items, Seconds
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
            (layout({4: 0.1, 8: 0.15, 32: 0.5}, finish=ByReplicas(((1, 0.05), (2, 0.08)))),)
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


@dataclass(frozen=True)
class Ran:
    """A step as a run gives it."""

    spans: Sequence[Span]
    started: float


def observed(
    graph: FlowGraph, plan: Plan, profile: Profile, steps: int = STEPS
) -> tuple[Plan, list[Ran]]:
    timing = ProfileTiming(graph, plan, profile)
    run = Simulation(graph, plan, timing, detailed=True).run(ITEMS, steps)
    starts = [0.0, *(run.step_ends[step] for step in range(steps - 1))]
    spans: list[list[Span]] = [[] for _ in starts]
    for span in run.spans:
        step = span.args.get("step", 0)
        spans[step if isinstance(step, int) else 0].append(told(graph, timing, span))
    return plan, [Ran(some, start) for some, start in zip(spans, starts, strict=True)]


def fit(
    graph: FlowGraph,
    ran: Iterable[tuple[Plan, list[Ran]]],
    known: Profile | None = None,
    **more: Any,
) -> Profile:
    evidence = Evidence(graph)
    for plan, steps in ran:
        evidence.add(plan, steps, **more)
    return fitted(evidence, known)


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


def with_finish(*points: tuple[float, float]) -> Profile:
    (training,) = KNOWN.stage("learner.train").costs
    stage = StageProfile((replace(training, finish=ByReplicas(points)),))
    return replace(KNOWN, stages={**KNOWN.stages, "learner.train": stage})


def finish_of(profile: Profile) -> ByReplicas:
    (cost,) = profile.stage("learner.train").costs
    assert cost.finish is not None
    return cost.finish


def test_a_finish_that_falls_with_more_replicas_comes_back() -> None:
    """Both counts were pooled to one price between them."""
    halved, plans = with_finish((1, 0.8), (2, 0.4)), trial_plans(GRPO, LANES, ITEMS)
    again = fit(GRPO, [observed(GRPO, plan, halved) for plan in plans])
    assert dict(finish_of(again).points) == pytest.approx({1: 0.8, 2: 0.4})
    computed = replace(with_finish((1, 8.0), (2, 4.0), (8, 1.0)), source="analytic")
    pair = [plan for plan in plans if len(plan.placements["learner"].replicas) == 2][:1]
    seen = fit(GRPO, [observed(GRPO, plan, halved) for plan in pair], computed)
    assert dict(finish_of(seen).points) == pytest.approx({1: 0.8, 2: 0.4, 8: 0.1})
    one = [plan for plan in plans if len(plan.placements["learner"].replicas) == 1][:1]
    before = fit(GRPO, [observed(GRPO, plan, with_finish((1, 0.05), (2, 0.05))) for plan in one])
    two = with_finish((1, 9.0), (2, 0.02))
    after = fit(GRPO, [observed(GRPO, plan, two) for plan in pair], before)
    assert dict(finish_of(after).points) == pytest.approx({1: 0.05, 2: 0.02})


@pytest.mark.parametrize(("seconds", "falls"), [(5.0, True), (0.01, False)])
def test_one_count_of_replicas_tells_of_others_where_finishes_have_the_work(
    seconds: float, falls: bool
) -> None:
    plans = trial_plans(GRPO, LANES, ITEMS)
    pair = [plan for plan in plans if len(plan.placements["learner"].replicas) == 2][:1]
    known = with_finish((1, seconds), (2, seconds))
    finish = finish_of(fit(GRPO, [observed(GRPO, plan, known) for plan in pair]))
    assert finish.at(2) == pytest.approx(seconds)
    assert finish.at(1) == pytest.approx(2 * seconds if falls else seconds)


def test_the_last_of_several_finishes_may_have_all_the_work() -> None:
    """Five of six such finishes were cut as the largest ones."""
    plan = build_plan("collocated", GRPO, LANES[:1], ITEMS)

    def span(kind: SpanKind, step: int, number: int, seconds: float) -> Span:
        facts = {"items": 4, "step": step, "minibatch": number, "call": 8 * step + number}
        return Span(0, "learner.train", kind, 0.0, seconds, facts)

    evidence, finishes = Evidence(GRPO), [0.01] * 7 + [1.0]
    spans = [
        span(kind, step, number, seconds if kind == "finish" else 0.1)
        for step in range(6)
        for number, seconds in enumerate(finishes)
        for kind in ("call", "finish")
    ]
    evidence.add(plan, [Ran(spans, 0.0)])
    (cost,) = fitted(evidence, KNOWN).stage("learner.train").costs
    assert cost.finish_seconds(1) == pytest.approx((48 * sum(finishes) / 8 + 2 * 0.05) / 50)


def test_moments_of_several_machines_are_not_compared() -> None:
    """Their clocks differ by more than what passes between two calls."""
    plan = next(plan for plan in trial_plans(GRPO, LANES, ITEMS) if len(plan.lanes) > 1)
    _, steps = observed(GRPO, plan, KNOWN)
    apart = replace(plan, lanes=tuple(replace(lane, node=lane.id % 2) for lane in plan.lanes))
    for where, counted in ((plan, True), (apart, False)):
        evidence = Evidence(GRPO)
        evidence.add(where, steps)
        assert bool(evidence.gaps) == counted


def test_calls_in_which_the_clock_was_set_back_are_passed_over() -> None:
    """Seconds below 0 are no price, and the fit ended the run."""

    def set_back(span: Span) -> Span:
        return replace(span, end=span.start - 600.0)

    ran, late = [], []
    for plan in trial_plans(GRPO, LANES, ITEMS):
        _, (first, second, *rest) = observed(GRPO, plan, KNOWN)
        ran.append((plan, [first, *rest]))
        late.append((plan, [Ran(list(map(set_back, second.spans)), second.started)]))
    profile, without = fit(GRPO, [*ran, *late]), fit(GRPO, ran)
    for name in ("score", "normalise", "learner.train", "gen.generate"):
        (ours,), (theirs,) = profile.stage(name).costs, without.stage(name).costs
        assert ours.seconds == theirs.seconds, name
    assert profile.publish == without.publish

    evidence, plan = Evidence(GRPO), ran[0][0]
    pieces = {"items": 4, "call": 1, "pieces": [[-5.0, "0-3", [1, 2, 3, 4]]]}
    evidence.add(plan, [Ran([Span(0, "gen.generate", "call", 0.0, 2.0, pieces)], 0.0)])
    assert not evidence.timed("gen.generate"), "set back and on again"


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


def test_what_passes_elsewhere_is_told_by_calls_that_no_group_had_its_turn_in() -> None:
    def span(seconds: float, **facts: float) -> Span:
        return Span(0, "world.move", "call", 0.0, seconds, {"items": 4, "step": 0, **facts})

    graph = GRAPHS["embodied"]
    plan = trial_plans(graph, LANES, ITEMS)[0]
    seen = (
        span(2.0, groups=1, busy=0.5), span(2.0, groups=1, busy=1.5),
        span(9.0, groups=2, busy=0.5), span(2.0),
    )  # fmt: skip
    evidence = Evidence(graph)
    evidence.add(plan, [Ran(seen, 0.0)])
    (calls,) = evidence.timed("world.move").values()
    assert [call.seconds for call in calls] == [2.0, 2.0, 2.0]
    rest = {node.name: StageProfile((layout({1: 0.01}),)) for node in graph.nodes}
    profile = fitted(evidence, Profile(rest))
    assert profile.stage("world.move").costs[0].elsewhere == pytest.approx(0.5)
    again = fitted(Evidence(graph), profile)
    assert again.stage("world.move").costs[0].elsewhere == pytest.approx(0.5)


class Divided(Worker):
    """Declares layouts of some sizes, and one that it cannot have."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def layouts(self, kind: str, lanes: int) -> list[Layout]:
        assert kind == "cpu"
        possible = [Layout(f"x{n}", n) for n in self.sizes if n <= lanes]
        return [ONE_LANE, Layout("not", 2, (("heads", 3, 2),)), *possible]


def divided(*workers: str, sizes: Sequence[int] = (2, 4)) -> dict[str, Worker]:
    """Workers with layouts of these sizes."""
    return dict.fromkeys(workers, Divided(sizes))


def test_trial_plans_show_every_stage_together_and_apart_in_several_sizes() -> None:
    plans = trial_plans(GRPO, LANES, ITEMS, workers=divided("learner", sizes=(2,)))
    for node in GRPO.nodes:
        replicas = {len(plan.placements[node.worker].replicas) for plan in plans}
        assert replicas == {1, 2}
        assert len({plan.stages[node.name].chunk for plan in plans}) >= 3
    gangs = [p for p in plans if p.placements["learner"].replicas == ((0, 1),)]
    assert {len(plan.placements["gen"].replicas) for plan in gangs} == {2}
    alone = trial_plans(GRPO, LANES[:1], ITEMS, workers=divided("learner", sizes=(2,)))
    assert {plan.mode for plan in alone} == {"collocated"}


def test_workers_are_tried_in_each_layout_that_they_declare() -> None:
    four = tuple(LaneSpec(number) for number in range(4))
    workers = divided("learner") | divided("gen", sizes=(2,))
    plans = trial_plans(GRPO, four, ITEMS, workers=workers)
    names = [
        tuple(plan.placements[worker].layout for worker in ("learner", "gen", "score"))
        for plan in plans
    ]
    assert set(names) == {
        ("one", "one", "one"),
        ("x2", "one", "one"),
        ("one", "x2", "one"),
        ("x2", "x2", "one"),
        ("x4", "one", "one"),
    }
    chunks = {
        plan.stages["gen.generate"].chunk
        for plan, own in zip(plans, names, strict=True)
        if own[1] == "x2"
    }
    assert len(chunks) >= 2, "calls of several sizes"


def test_generation_on_gangs_and_what_publishing_to_it_takes_come_back() -> None:
    (single,) = KNOWN.stage("gen.generate").costs
    pair = replace(single.times(0.4), lanes=2, layout="x2")
    generating = replace(KNOWN.stage("gen.generate"), costs=(single, pair))
    (one,) = KNOWN.stage("learner.train").costs
    training = StageProfile((one, replace(one, lanes=2, layout="x2")))
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
    plans = trial_plans(GRPO, LANES, ITEMS, workers=divided("learner", "gen", sizes=(2,)))
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
    chosen = choose(GRPO, found, LANES, ITEMS).chosen.plan
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
    for warm, expected in ((False, [1.0, 1.0]), (True, [9.0, 1.0, 1.0])):
        evidence = Evidence(GRPO)
        evidence.add(plan, [Ran(slow_first, 0.0)], warm=warm)
        seconds = [call.seconds for call in evidence.of("call", ("score", "one", 1, "cpu"))]
        assert seconds == pytest.approx(expected)


def test_memory_is_that_of_gauged_calls_and_of_the_finish_after_them() -> None:
    def span(items: int, call: int, taken: int | None, kind: SpanKind = "call") -> Span:
        facts = {"items": items, "step": 0, "call": call, "working_bytes": taken}
        return Span(0, "learner.train", kind, 0.0, 1.0, facts)

    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    seen = observed(GRPO, plan, KNOWN)
    gauged = (span(4, 1, 50), span(4, 2, 70), span(32, 3, 400), span(0, 4, 90, "finish"))
    (found,) = fit(GRPO, [seen], gauged=gauged).stage("learner.train").costs
    assert found.working == Piecewise(((4.0, 90.0), (32.0, 400.0)))
    assert found.seconds == fit(GRPO, [seen]).stage("learner.train").costs[0].seconds
    nothing = fit(GRPO, [seen])
    assert all(stage.costs[0].working is None for stage in nothing.stages.values())


def test_memory_of_a_call_that_was_fed_is_not_that_of_its_first_items() -> None:
    facts = {"items": 2, "step": 0, "call": 1, "working_bytes": 900}
    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    fed = Span(0, "gen.generate", "call", 0.0, 1.0, {**facts, "taken": [[0.0, "0-1"], [0.5, "2"]]})
    seen = observed(GRPO, plan, KNOWN)
    assert fit(GRPO, [seen], gauged=(fed,)).stage("gen.generate").costs[0].working is None


def test_a_stage_whose_calls_were_all_fed_has_a_price() -> None:
    facts = {"items": 4, "step": 0, "call": 1, "taken": [[0.0, "0-1"], [0.5, "2-3"]]}
    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    _, (step, *_) = observed(GRPO, plan, KNOWN)
    others = [span for span in step.spans if span.name != "gen.generate"]
    fed = Span(0, "gen.generate", "call", 0.0, 2.0, facts)
    profile = fit(GRPO, [(plan, [Ran([*others, fed], 0.0)])])
    assert profile.stage("gen.generate").costs[0].call(Items(4)) == 2.0


def test_a_stage_that_was_never_called_is_named() -> None:
    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    with pytest.raises(UserError, match=r"gen.generate.*never called"):
        fit(GRPO, [(plan, [])])


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


# --- a limit of a stage's own ---------------------------------------------------------------------


def played(lengths: Sequence[int], slots: int) -> Sample:
    """A call that works on so many items at once, in rounds of 10 ms and 1 ms for each item."""
    waiting, at_work = list(enumerate(lengths)), dict[int, int]()
    now, pieces = 0.05, []
    while waiting or at_work:
        while waiting and len(at_work) < slots:
            item, length = waiting.pop(0)
            at_work[item] = length
        now += 0.010 + 0.001 * len(at_work)
        at_work = {item: left - 1 for item, left in at_work.items()}
        done = tuple(item for item, left in at_work.items() if not left)
        if done:
            pieces.append((now, done, tuple(float(lengths[item]) for item in done)))
        at_work = {item: left for item, left in at_work.items() if left}
    return Sample(len(lengths), now, tuple(pieces))


@pytest.mark.parametrize("slots", [8, 16])
def test_a_limit_of_the_stages_own_is_found(slots: int) -> None:
    """Rounds of small calls explained most calls, and said a third of what large ones take."""
    draw = random.Random(1)
    sizes = [4] * 12 + [64] * 4
    calls = [played([draw.randint(3, 40) for _ in range(size)], slots) for size in sizes]
    growth = fit_growth(calls)
    assert growth is not None
    rounds, _, found = growth
    assert found == slots
    for running in (2, slots):
        assert rounds.at(running) == pytest.approx(0.010 + 0.001 * running, rel=0.05)


def test_rounds_that_explain_only_small_calls_are_refused() -> None:
    """The median call was explained, and the simulator was up to 2.7 times too fast."""
    draw = random.Random(1)
    small = [played([draw.randint(3, 40) for _ in range(4)], 8) for _ in range(12)]
    large = []
    for least, most in ((3, 5), (3, 5), (30, 40), (30, 40)):
        call = played([draw.randint(least, most) for _ in range(64)], 64)
        pieces = tuple((3.0 * when / call.seconds, *rest) for when, *rest in call.pieces)
        large.append(Sample(64, 3.0, pieces))  # type: ignore[arg-type]  # however long the items are
    assert fit_growth(small) is not None
    assert fit_growth([*small, *large]) is None


# --- what is known is corrected -------------------------------------------------------------------


def noisy(ran: tuple[Plan, list[Ran]], seed: int) -> tuple[Plan, list[Ran]]:
    """Each call 5 % more or less, and one in twenty held up to twice its time."""
    draw = random.Random(seed)
    plan, steps = ran

    def late(span: Span) -> Span:
        factor = draw.gauss(1.0, 0.05) * (2.0 if draw.random() < 0.05 else 1.0)
        args = dict(span.args)
        if isinstance(args.get("pieces"), list):
            args["pieces"] = [[when * factor, *rest] for when, *rest in args["pieces"]]
        return replace(span, end=span.start + span.seconds * factor, args=args)

    return plan, [Ran([late(span) for span in step.spans], step.started) for step in steps]


def test_curves_through_noisy_calls_are_within_the_noise() -> None:
    """Two profiles of one flow led to choices 17 % apart."""
    plans = trial_plans(GRPO, LANES, ITEMS)
    seen = [observed(GRPO, plan, KNOWN, steps=8) for plan in plans]
    for seed in range(5):
        profile = fit(GRPO, [noisy(ran, seed) for ran in seen])
        for name in ("score", "normalise", "learner.train"):
            (known,), (curve,) = KNOWN.stage(name).costs, profile.stage(name).costs
            for items in (x for x, _ in curve.seconds.points):
                assert curve.seconds.at(items) == pytest.approx(known.seconds.at(items), rel=0.15)
        (known,), (curve,) = (x.stage("gen.generate").costs for x in (KNOWN, profile))
        assert curve.round
        assert known.round
        for running in (4, 16, 32):
            assert curve.round.at(running) == pytest.approx(known.round.at(running), rel=0.15)


def test_many_small_calls_do_not_push_out_a_few_large_ones() -> None:
    evidence = Evidence(GRPO)
    for plan in trial_plans(GRPO, LANES, ITEMS):
        evidence.add(*observed(GRPO, plan, KNOWN, steps=8))
    sizes = {call.size for call in evidence.of("call", ("learner.train", "one", 1, "cpu"))}
    assert {4, 8, 16, 32} <= sizes


@pytest.mark.parametrize("seed", range(3))
def test_choices_by_noisy_profiles_lie_close_together(seed: int) -> None:
    """Two profiles of one flow led to choices 17 % apart."""
    plans = trial_plans(GRPO, LANES, ITEMS)
    seen = [observed(GRPO, plan, KNOWN, steps=8) for plan in plans]
    best = choose(GRPO, KNOWN, LANES, ITEMS).chosen.prediction.seconds
    chosen = choose(GRPO, fit(GRPO, [noisy(ran, seed) for ran in seen]), LANES, ITEMS).chosen
    assert simulate(GRPO, chosen.plan, KNOWN, ITEMS).seconds <= 1.05 * best


def test_a_known_profile_is_corrected_where_it_ran_and_beside_it() -> None:
    """Steps under one plan: prices of what ran come true, other layouts are scaled as it was."""
    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    pair = replace(KNOWN.stage("learner.train").costs[0].times(0.7), lanes=2, layout="x2")
    costs = KNOWN.stage("learner.train").costs[0], pair
    believed = replace(
        KNOWN,
        stages={
            **{name: stage.times(1.5) for name, stage in KNOWN.stages.items()},
            "learner.train": StageProfile(tuple(cost.times(2.0, 6.0) for cost in costs)),
        },
        source="analytic",
    )
    _, steps = observed(GRPO, plan, KNOWN)
    profile = fit(GRPO, [(plan, steps)], believed)
    (ran,) = KNOWN.stage("learner.train").costs
    one, two = profile.stage("learner.train").costs
    assert (one.lanes, two.lanes) == (1, 2)
    for items in (4, 8, 32):
        assert one.call(items) == pytest.approx(ran.call(items), rel=0.02)
        assert two.call(items) == pytest.approx(pair.call(items), rel=0.02)
    assert two.finish_seconds(1) == pytest.approx(pair.finish_seconds(1), rel=0.02)
    assert profile.source == "measured"
    assert profile.workers == believed.workers
    assert profile.publish_seconds("learner", "gen", "same", 1, 1) == pytest.approx(0.02)


def test_a_state_that_a_worker_does_not_tell_stays_as_it_was_assumed() -> None:
    """A simulator that cannot be moved says 0: what its renderer was assumed to take is kept."""
    plan = build_plan("collocated", GRPO, LANES, ITEMS)
    spots = {
        name: replace(spot, state_bytes={"learner": 7000}.get(name, 0))
        for name, spot in plan.placements.items()
    }
    evidence = Evidence(GRPO)
    evidence.add(replace(plan, placements=spots), [], moves=[("gen", "onload", 0.9)])
    found = fitted(evidence, KNOWN)
    (assumed,), (told,) = found.workers["gen"], found.workers["learner"]
    assert (assumed.state_bytes, assumed.onload) == (1000, 0.9)
    assert told.state_bytes == 7000


def test_limits_that_were_not_tried_are_scaled() -> None:
    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    (free,) = KNOWN.stage("gen.generate").costs
    limited = replace(free.times(3.0), max_running=2)
    stage = replace(KNOWN.stage("gen.generate"), costs=(limited.times(2.0), free.times(2.0)))
    believed = replace(KNOWN, stages={**KNOWN.stages, "gen.generate": stage}, source="analytic")
    costs = fit(GRPO, [observed(GRPO, plan, KNOWN)], believed).stage("gen.generate").costs
    by_limit = {cost.max_running: cost for cost in costs}
    assert set(by_limit) == {None, 2}
    items = by_limit[None].seconds.points[-1][0]
    ratio = by_limit[None].call(Items(round(items))) / free.times(2.0).call(Items(round(items)))
    assert by_limit[2].call(Items(8)) == pytest.approx(
        ratio * limited.times(2.0).call(Items(8)), rel=0.2
    )


def test_a_measured_profile_gives_way_slowly() -> None:
    """A single slow step does not undo what was measured before."""
    plan = trial_plans(GRPO, LANES, ITEMS)[0]
    slow = replace(KNOWN, stages={name: one.times(2.0) for name, one in KNOWN.stages.items()})
    _, steps = observed(GRPO, plan, slow, steps=1)
    after = fit(GRPO, [(plan, steps)], KNOWN).stage("score").costs[0]
    items = 32  # of a replica's calls in this plan
    known = KNOWN.stage("score").costs[0].call(items)
    assert known * 1.1 < after.call(items) < known * 1.9
    many = observed(GRPO, plan, slow, steps=24)[1]
    settled = fit(GRPO, [(plan, many)], KNOWN).stage("score").costs[0]
    assert settled.call(items) == pytest.approx(2 * known, rel=0.1)


def link_after(*transfers: tuple[float, float, float]) -> LinkCost:
    evidence = Evidence(GRPO)
    evidence.transfers += transfers
    return fitted(evidence, KNOWN).links["node"]


def test_transfers_of_one_size_say_nothing_of_larger_ones() -> None:
    """Half of what they took was once put down to their bytes: more of them took too long."""
    found = link_after((1.0, 200.0, 0.004), (1.0, 200.0, 0.006))
    assert found.rate == KNOWN.links["node"].rate
    assert found.latency == pytest.approx(0.005 - 200.0 / found.rate)


def test_transfers_of_many_sizes_tell_the_rate() -> None:
    found = link_after(*((1.0, size, 0.002 + size / 5e4) for size in (1e3, 4e3, 2e4)))
    assert (found.latency, found.rate) == pytest.approx((0.002, 5e4))
