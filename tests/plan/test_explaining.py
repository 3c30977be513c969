"""Why a plan was chosen: the picture, the chain that bounds it, and what would flip the choice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.spans import Span, SpanKind
from m2flow.plan import from_json
from m2flow.plan.decide import decide
from m2flow.plan.explaining import (
    Explanation,
    bottleneck,
    explained,
    flips,
    in_words,
    picture,
    summary,
    to_document,
)
from m2flow.plan.explaining.differences import differences, title
from m2flow.plan.explaining.other_lanes import in_words as in_words_of_a_tree
from m2flow.plan.explaining.other_lanes import searched, shape
from m2flow.plan.explaining.path import chain, path_seconds
from m2flow.plan.explaining.picture import stage_letters
from m2flow.plan.explaining.rescaled import priced, rescaled, simulated
from m2flow.plan.explaining.rows import lane_names, rows
from m2flow.plan.explaining.seconds import brief, slower
from m2flow.plan.prediction import Candidate, Decision, Prediction
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
from m2flow.plan.search import Chunked, problem, search
from m2flow.plan.simulate import simulate
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds
from tests.plan.small_graphs import TALKING

GEN, TRAIN = "gen.generate", "learner.train"
STAGES = (GEN, TRAIN)


def lanes(count: int) -> tuple[LaneSpec, ...]:
    return tuple(LaneSpec(n, cores=(n,)) for n in range(count))


def plan_of(mode: str, gen: Iterable[int], learner: Iterable[int], count: int = 2) -> Plan:
    where = {"gen": gen, "learner": learner}
    spots = {name: Placement(tuple((lane,) for lane in on)) for name, on in where.items()}
    return Plan(mode, lanes(count), spots, {GEN: StagePlan(8), TRAIN: StagePlan(16)})


def predicted(seconds: float, *spans: Span, count: int = 2) -> Prediction:
    busy = dict.fromkeys(range(count), 0.0)
    for span in spans:
        busy[span.lane] += span.seconds
    idle = {lane: 1 - min(1.0, spent / seconds) for lane, spent in busy.items()}
    waiting = Seconds(sum(idle.values()) * seconds)
    return Prediction(
        Seconds(seconds),
        Seconds(0.0),
        idle,
        {"compute": Seconds(count * seconds - waiting), "waiting": waiting},
        {},
        spans=spans,
    )


def span(lane: int, name: str, start: float, end: float, kind: SpanKind = "call") -> Span:
    return Span(lane, name, kind, start, end)


def profile(
    generate: float = 1.0, train: float = 1.0, publish: float = 0.05, spread: bool = False
) -> Profile:
    """Seconds in proportion to items; lengths that differ if `spread`."""
    lengths = Quantiles((1.0, 10.0, 40.0)) if spread else None
    each = generate / 16
    whole = StageCost(
        1,
        Piecewise(((1.0, each), (16.0, generate))),
        done=Piecewise(((0.0, 0.0), (1.0, 1.0))),
        round=Piecewise(((1.0, each / 20), (64.0, each / 10))) if spread else None,
    )
    layouts = {
        GEN: StageProfile((whole,), Bytes(64), lengths),
        TRAIN: StageProfile(
            (
                StageCost(
                    1,
                    Piecewise(((1.0, train / 64), (64.0, train))),
                    finish=Piecewise(((1.0, 0.01), (2.0, 0.02))),
                ),
            )
        ),
    }
    places = ("same", "node")
    return Profile(
        layouts,
        {"learner": (WorkerCost(1, Bytes(100)),), "gen": (WorkerCost(1, Bytes(50)),)},
        tuple(PublishCost("learner", "gen", place, Seconds(publish)) for place in places),
        {"node": LinkCost(Seconds(1e-3), BytesPerSecond(1e6))},
        key={"model": {"path": "tiny"}},
    )


@pytest.fixture(scope="module")
def decision() -> Decision:
    return decide(TALKING, profile(), lanes(2), 16)


@pytest.fixture(scope="module")
def why(decision: Decision) -> Explanation:
    return explained(decision, TALKING, assumptions=("nothing",))


# --- rows and pictures ----------------------------------------------------------------------------


def test_lanes_with_the_same_row_are_one_row() -> None:
    spans = [span(lane, GEN, 0, 6) for lane in (0, 1, 2, 4)] + [span(3, TRAIN, 5, 10)]
    found = rows(predicted(10, *spans, count=6), plan_of("x", range(6), [0], 6), 10)
    assert [lane_names(row.lanes) for row in found] == ["lanes 0-2, 4", "lane 3", "lane 5"]
    assert found[0].columns == (("call", GEN),) * 6 + (None,) * 4
    assert [piece.start for piece in found[1].pieces(10)] == [5]
    assert all(row.alike for row in found)


def test_many_rows_are_folded_by_the_workers_on_the_lanes() -> None:
    spans = [span(lane, GEN, 0, 5 + lane / 10) for lane in range(30)]
    spans += [span(lane, TRAIN, 6, 10) for lane in range(30, 40)]
    plan = plan_of("x", range(30), range(30, 40), 40)
    found = rows(predicted(10, *spans, count=40), plan, 100)
    assert [lane_names(row.lanes) for row in found] == ["lanes 0-29", "lanes 30-39"]
    assert [row.alike for row in found] == [False, True]
    assert sum(column is not None for column in found[0].columns) == pytest.approx(65, abs=2)


def test_what_is_short_is_shown_all_the_same() -> None:
    spans = [span(0, GEN, 0, 9.99), span(0, "gen", 9.99, 10, "publish")]
    (row, _) = rows(predicted(10, *spans), plan_of("x", [0], [1]), 20)
    assert ("publish", "gen") in row.columns


def test_a_call_that_is_fed_counts_once() -> None:
    spans = [span(0, GEN, 0, 10), span(0, GEN, 1, 5), span(0, GEN, 2, 10)]
    (row, _) = rows(predicted(10, *spans), plan_of("x", [0], [1]), 10)
    assert row.columns == (("call", GEN),) * 10


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_a_picture_keeps_to_its_width(width: int) -> None:
    spans = [span(0, GEN, 0, 4), span(1, TRAIN, 4, 9), span(1, TRAIN, 9, 10, "finish")]
    lines = picture(predicted(10, *spans), plan_of("x", [0], [1]), STAGES, width, ascii_only=True)
    assert max(map(len, lines)) <= width
    assert "\n".join(lines).isascii()
    assert lines[0].startswith("lane 0")
    assert lines[0].count("G") == pytest.approx(0.4 * (len(lines[0]) - 20), abs=2)
    assert lines[1].count("T") > lines[1].count("t") > 0
    legend = " ".join(lines)
    for words in ("G gen.generate", "T learner.train", "small letter: its finish", ". idle"):
        assert words in legend
    assert "0 s" in legend
    assert "10 s" in legend


def test_a_picture_in_unicode_differs_in_its_frame_alone() -> None:
    spans = (span(0, GEN, 0, 4), span(1, TRAIN, 4, 10))
    plain, drawn = (
        picture(predicted(10, *spans), plan_of("x", [0], [1]), STAGES, 80, ascii_only)
        for ascii_only in (True, False)
    )
    assert not "".join(drawn).isascii()
    assert [line.count("G") for line in plain] == [line.count("G") for line in drawn]


def test_no_spans_no_picture() -> None:
    assert picture(predicted(1.0), plan_of("x", [0], [1]), STAGES, 80) == []


def test_letters_are_initials_where_these_are_free() -> None:
    names = ["gen.generate", "group_advantage", "a.train", "b.train", "c.train_2"]
    found = stage_letters(names)
    assert len(set(found.values())) == len(names)
    assert found["gen.generate"] == "G"
    assert found["group_advantage"] == "A"
    assert found["a.train"] == "T"
    many = stage_letters(f"stage{n}.run" for n in range(30))
    assert list(many.values()).count("?") == 4


def test_durations_have_three_digits() -> None:
    assert [brief(x) for x in (0, 8.5e-4, 0.0123, 4.56, 99.96, 1234.4)] == [
        "0 s", "850 us", "12.3 ms", "4.56 s", "100 s", "1234 s",
    ]  # fmt: skip
    assert [slower(x, 1.0) for x in (1.001, 1.12, 0.9, 3.0)] == [
        "as fast", "12% slower", "10% faster", "3.0 times as long",
    ]  # fmt: skip


# --- the chain ------------------------------------------------------------------------------------


def test_the_chain_goes_through_the_call_that_was_waited_for() -> None:
    spans = [
        span(0, GEN, 0, 6),
        span(1, GEN, 0, 3),
        span(1, "items", 6, 6.5, "transfer"),
        span(1, TRAIN, 6.5, 9),
        span(1, TRAIN, 9, 9.5, "finish"),
        span(0, "gen", 9.5, 10, "publish"),
    ]
    found = chain(spans, TALKING)
    assert path_seconds(found) == {GEN: 6, TRAIN: 3, "links": 0.5, "publishing": 0.5}
    assert [segment.lane for segment in found] == [0, 1, 1, 1, 0]


def test_the_chain_enters_a_streaming_call_that_goes_on() -> None:
    """Training begins on what is finished; it is the bottleneck from then on."""
    spans = [span(0, GEN, 0, 8), span(1, TRAIN, 3, 7), span(1, TRAIN, 7, 11)]
    assert path_seconds(chain(spans, TALKING)) == {TRAIN: 8, GEN: 3}


def test_what_nothing_explains_is_waiting() -> None:
    spans = [span(0, GEN, 1, 4), span(1, TRAIN, 6, 10)]
    assert path_seconds(chain(spans, TALKING)) == {TRAIN: 4, "waiting": 3, GEN: 3}


def test_the_bottleneck_says_where_and_why() -> None:
    spans = [span(0, GEN, 0, 9), span(1, GEN, 0, 2), span(1, TRAIN, 9, 10)]
    plan = plan_of("collocated", [0, 1], [0, 1])
    found = bottleneck(Candidate(plan, predicted(10, *spans)), TALKING)
    assert found is not None
    assert (found.what, found.lanes, found.share) == (GEN, (0,), 0.9)
    assert "lane 0 has no time left" in found.why
    assert sum(found.path.values()) == pytest.approx(10)


def test_the_tail_of_a_stage_is_told() -> None:
    spans = [span(0, GEN, 0, 9), *(span(lane, GEN, 0, 2) for lane in (1, 2, 3))]
    plan = plan_of("collocated", range(4), [0], 4)
    found = bottleneck(Candidate(plan, predicted(9, *spans, count=4)), TALKING)
    assert found is not None
    assert "the last 7 s of it run on at most half of its lanes" in found.why
    assert "lane 0 has no time left" in found.why


# --- differences ----------------------------------------------------------------------------------


def test_differences_in_words() -> None:
    plan = plan_of("collocated", [0, 1], [0, 1])
    other = replace(
        plan_of("auto", [0], [1]),
        stages={GEN: StagePlan(4, max_running=8, switch_at=0.8, keep=1), TRAIN: StagePlan(16)},
        order=(TRAIN, GEN),
        max_staleness=1,
    )
    assert differences(plan, plan) == []
    said = differences(plan, other)
    for phrase in (
        "gen on lane 0 instead of lanes 0-1",
        "learner on lane 1 instead of lanes 0-1",
        "gen.generate in calls of 4 instead of 8",
        "at most 8 running in gen.generate instead of any",
        "gen.generate on 1 of its replicas from 80% done instead of on all its lanes to the end",
        "a lane prefers learner.train",
        "staleness 1 instead of 0",
    ):
        assert phrase in said, said
    assert len(said) == 7
    assert title(other).startswith("auto, staleness 1, gen.generate on 1 of its replicas")


# --- sensitivity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [GEN, TRAIN, "publishing", "links", "switching"])
def test_rescaling_touches_one_input(what: str) -> None:
    before, after = profile(spread=True), rescaled(profile(spread=True), what, 2.0)
    for name in STAGES:
        times = 2.0 if name == what else 1.0
        old, new = before.stage(name).costs[0], after.stage(name).costs[0]
        assert new.seconds.at(8) == pytest.approx(times * old.seconds.at(8))
        for inner in ("round", "finish"):
            if (curve := getattr(old, inner)) is not None:
                assert getattr(new, inner).at(2) == pytest.approx(times * curve.at(2))
    size = Bytes(1000)
    times = 2.0 if what == "links" else 1.0
    assert after.links["node"].seconds(size) == pytest.approx(
        times * before.links["node"].seconds(size)
    )
    times = 2.0 if what == "publishing" else 1.0
    assert after.publish[0].seconds == times * before.publish[0].seconds
    assert priced(before, what) == (what != "switching")  # nothing to bring or take away


@pytest.fixture(scope="module")
def contest() -> Decision:
    """Generation gains by two lanes, training does not, so it may as well stand beside it.

    In turn on both lanes a step takes g / 2 + t, side by side the larger of g and t.
    """
    flat = profile(generate=1.0)
    layout = StageCost(1, Piecewise(((1.0, 0.2), (64.0, 0.2))))  # of each of two mini-batches
    flat = replace(flat, stages={**flat.stages, TRAIN: StageProfile((layout,))})
    plans = [
        replace(plan, stages={GEN: StagePlan(4), TRAIN: StagePlan()}, max_staleness=1)
        for plan in (plan_of("in turn", [0, 1], [0, 1]), plan_of("beside", [0], [1]))
    ]
    judged = [Candidate(plan, simulate(TALKING, plan, flat, 16)) for plan in plans]
    judged.sort(key=lambda one: one.prediction.seconds)
    return Decision(judged[0], tuple(judged[1:]), flat, 16)


def test_a_flip_flips(contest: Decision) -> None:
    """Beyond its factor the rival is faster, and halfway there it is not."""
    judge = simulated(TALKING, 16)
    found = [flip for flip in flips(contest, TALKING, judge=judge) if flip.how == "simulated"]
    assert {flip.what for flip in found} >= {TRAIN}
    for flip in found:

        def ahead(factor: float, what: str = flip.what) -> float:
            scaled = rescaled(contest.profile, what, factor)
            return judge(contest.chosen, scaled) / judge(contest.others[0], scaled)

        assert ahead(flip.factor) > 1
        assert ahead(flip.factor**0.5) < 1.02
        assert flip.seconds is not None
        assert flip.instead < flip.seconds
        assert flip.mode == contest.others[0].plan.mode
        assert flip.changes


def test_estimates_find_flips_without_simulating(contest: Decision) -> None:
    told = flips(contest, TALKING, judge=None)
    assert all(flip.how in ("estimated", "searched") for flip in told if flip.what != "memory")
    order = [max(flip.factor, 1 / flip.factor) for flip in told]
    assert order == sorted(order)


def test_a_fixed_schedule_is_stretched_along_its_chain() -> None:
    """Without a tree: twice the seconds of training are five more of ten, and no fewer."""
    spans = (span(0, GEN, 0, 5), span(0, TRAIN, 5, 10))
    slim = (span(0, GEN, 0, 10.4), span(1, TRAIN, 2, 4))
    chosen = Candidate(plan_of("collocated", [0], [0]), predicted(10, *spans))
    other = Candidate(plan_of("disaggregated", [0], [1]), predicted(10.4, *slim))
    asked = Decision(chosen, (other,), profile(), 16)
    found = {flip.what: flip for flip in flips(asked, TALKING)}
    dearer, cheaper = found[TRAIN], found[GEN]
    assert (dearer.what, dearer.mode, dearer.how) == (TRAIN, "disaggregated", "estimated")
    # 10 + 5 (f - 1) > 1.01 * 10.4
    assert dearer.factor == pytest.approx(1.1008, rel=0.01)
    # 10 + 5 (f - 1) > 1.01 * 10.4 f
    assert (cheaper.what, cheaper.factor) == (GEN, pytest.approx(0.907, rel=0.01))


def test_a_choice_that_somebody_else_made_has_no_flips() -> None:
    """What was not the best in the first place is not overtaken."""
    slow = Candidate(plan_of("a", [0], [0]), predicted(10, span(0, GEN, 0, 10)))
    fast = Candidate(plan_of("b", [0], [1]), predicted(5, span(0, GEN, 0, 5)))
    assert flips(Decision(slow, (fast,), profile(), 16), TALKING) == []


def test_less_memory_is_told_where_a_leaner_plan_is_there() -> None:
    roomy = tuple(replace(lane, memory_bytes=1000) for lane in lanes(2))
    fat = replace(predicted(5, span(0, GEN, 0, 5)), peak_bytes={0: Bytes(800)})
    lean = replace(predicted(9, span(0, GEN, 0, 9)), peak_bytes={0: Bytes(300)})
    chosen = Candidate(replace(plan_of("a", [0], [0]), lanes=roomy), fat)
    other = Candidate(replace(plan_of("b", [0], [1]), lanes=roomy), lean)
    found = flips(Decision(chosen, (other,), profile(), 16), TALKING)
    memory = next(flip for flip in found if flip.what == "memory")
    assert (memory.factor, memory.mode, memory.seconds) == (0.8, "b", None)


# --- the whole ------------------------------------------------------------------------------------


def test_the_words_say_everything(why: Explanation) -> None:
    told = "\n".join(in_words(why, 100, ascii_only=True))
    assert told.isascii()
    for part in (
        "plan: ", "items/s", "bottleneck: ", "idle: ", "runner-up: ", "compute", "switching",
        "publishing", "links", "waiting", "of the chain", "what would change the choice:",
        "G gen.generate", "assumed, as nothing was measured:", "  nothing",
    ):  # fmt: skip
        assert part in told, part
    assert told.startswith("\n".join(summary(why)))


def test_the_words_set_memory_at_its_peak_beside_states() -> None:
    """Of the lane that holds most; the profile says what the plan does not."""
    limited = (*lanes(1), replace(lanes(2)[1], memory_bytes=2000))
    held = replace(predicted(5, span(0, GEN, 0, 5)), peak_bytes={0: Bytes(100), 1: Bytes(1234)})
    chosen = Candidate(replace(plan_of("a", [0, 1], [1]), lanes=limited), held)
    told = summary(explained(Decision(chosen, (), profile(), 16), TALKING, sensitivity=False))
    assert "memory: at most 1.23 KB of 2 KB on a lane, whose states are 150 B" in told


def test_a_profile_that_was_cut_short_is_told(decision: Decision) -> None:
    cut = replace(decision, profile=replace(decision.profile, cut_by=Seconds(20.0)))
    why = explained(cut, TALKING, sensitivity=False)
    assert "measured (cut short by a budget of 20 s), in" in summary(why)[1]
    assert to_document(why)["decision"]["profile"]["cut_by"] == 20.0


def test_the_document_is_a_plan_file_too(why: Explanation) -> None:
    document = json.loads(json.dumps(to_document(why)))
    assert from_json(json.dumps(document)) == why.chosen.plan
    decision = document["decision"]
    assert decision.keys() == {
        "title", "items_per_step", "seconds_to_decide", "stands", "predicted", "measured_seconds",
        "bottleneck", "runners_up", "flips", "frontier", "considered", "profile", "assumptions",
        "stages", "timeline",
    }  # fmt: skip
    figures = decision["predicted"]
    assert figures["seconds"] == why.chosen.prediction.seconds
    whole = figures["seconds"] * len(why.chosen.plan.lanes)
    assert sum(figures["terms"].values()) == pytest.approx(whole, rel=0.02)
    assert sum(decision["bottleneck"]["path"].values()) == pytest.approx(
        figures["seconds"], rel=0.02
    )
    assert decision["runners_up"][0]["ratio"] >= 0.99
    shown = [lane for row in decision["timeline"]["rows"] for lane in row["lanes"]]
    assert sorted(shown) == [0, 1]
    assert {flip["how"] for flip in decision["flips"]} <= {"simulated", "estimated", "searched"}


def test_the_frontier_is_told_where_staleness_was_allowed() -> None:
    found = decide(TALKING, profile(spread=True), lanes(2), 16, max_staleness=1)
    told = summary(explained(found, TALKING, sensitivity=False))
    (line,) = [n for n, text in enumerate(told) if text.startswith("throughput by staleness")]
    if len(found.frontier) > 1:
        assert told[line + 1].strip().startswith("staleness 0: ")
    else:
        assert told[line].endswith("gains nothing")


def test_a_short_budget_still_decides(decision: Decision) -> None:
    """The plan that the search likes best is judged first, and always."""
    hasty = decide(TALKING, profile(), lanes(2), 16, budget=0.0)
    assert len(hasty.others) < len(decision.others)
    assert hasty.chosen.found is not None
    assert hasty.chosen.prediction.seconds < 1.1 * decision.chosen.prediction.seconds


def test_other_numbers_of_lanes_are_searched(decision: Decision) -> None:
    """What is told is what the search finds there, and only if stages stand otherwise."""
    found = min(
        (one for one in (decision.chosen, *decision.others) if one.found is not None),
        key=lambda one: one.found.seconds if one.found else 0.0,
    )
    asked = replace(decision, chosen=found)
    for flip in searched(asked, TALKING, None):
        count = round(2 * flip.factor)
        there = search(problem(TALKING, decision.profile, {"cpu": count}, 16))[0]
        assert flip.instead == there.seconds
        assert shape(there) != shape(found.found)
        assert " instead of " in flip.changes[0]
    late = replace(asked, seconds_to_decide=1000.0)
    assert list(searched(late, TALKING, None)) == []


def test_a_shape_knows_no_lanes_and_no_order() -> None:
    """Two trees whose stages stand together alike have one shape."""
    stated = problem(TALKING, profile(), {"cpu": 4}, 16)
    one, more = (search(problem(TALKING, profile(), {"cpu": count}, 16))[0] for count in (2, 4))
    assert shape(one) == shape(replace(one, tree=Chunked(one.tree, 1)))
    assert ("|" in shape(more)) == ("|" in in_words_of_a_tree(stated, more))
