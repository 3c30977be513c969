"""What a pilot chooses, in virtual time: the simulator plays its plans by a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.flow import Batch, Flow, Stream, Worker, stage
from m2flow.plan.choose.judge import shape
from m2flow.plan.lanes import with_memory
from m2flow.plan.profile import Piecewise, Profile, StageCost, StageProfile, WorkerCost
from m2flow.plan.race import Entrant, Race
from m2flow.plan.units import Bytes, Seconds
from m2flow.runtime.driver.pilot import Pilot
from tests.runtime.virtual_run import VirtualRun, result_of

ITEMS, STEPS = 16, 40
LANES = (LaneSpec(0, cores=(0,)), LaneSpec(1, cores=(1,)))


class Asker(Worker):
    @stage
    def ask(self, items: Batch) -> Batch:
        return items


class Counter(Worker):
    @stage
    def count(self, items: Batch) -> Batch:
        return items


@stage
def joined(asked: Batch, counted: Batch) -> Batch:
    return asked


class Fork(Flow):
    """Ask and count; neither needs the other."""

    asker: Asker
    counter: Counter

    def step(self, items: Stream) -> Stream:
        return joined(self.asker.ask(items), self.counter.count(items))


GRAPH = Fork(asker=Asker(), counter=Counter()).trace()


def line(*points: tuple[float, float]) -> StageProfile:
    return StageProfile((StageCost(1, Piecewise(points)),))


def takes(ask: float, count: float) -> Profile:
    """A call of `ask` takes so long for any number of items, one of `count` for each item."""
    return Profile(
        {
            "asker.ask": line((1, ask), (16, ask)),
            "counter.count": line((1, count), (16, 16 * count)),
            "joined": line((1, 1e-4), (16, 1e-4)),
        }
    )


SLOW_SERVICE = takes(0.2, 0.0125)
"""Best is one lane that asks, while the other one counts."""


def apart(plan: Plan) -> bool:
    """Whether one lane asks and the other one counts."""
    ask, count = plan.placements["asker"].lanes, plan.placements["counter"].lanes
    return len(ask) == 1 and not set(ask) & set(count)


def calls_of(plan: Plan) -> int:
    """Items of the largest call that asks."""
    return plan.stages["asker.ask"].chunk or ITEMS


def test_a_run_of_which_nothing_is_known_finds_the_better_plan() -> None:
    kept: list[Profile] = []
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS, keep=kept.append)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    assert pilot.plan.mode == "collocated"
    run.steps(pilot, STEPS)
    assert apart(pilot.plan)
    assert all(apart(plan) for plan in run.plans[20:])
    assert kept[-1].source == "measured"
    assert kept[-1].stage("asker.ask").costs[0].seconds.at(16) == pytest.approx(0.2, rel=0.01)


def test_the_winner_is_expected_to_take_what_it_was_measured_to_take() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    run.steps(pilot, STEPS)
    assert pilot.plan.predicted_seconds == pytest.approx(run.seconds[-1], rel=0.01)


def test_a_stored_profile_that_is_wrong_is_corrected() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, known=takes(0.02, 0.0125), num_steps=STEPS)
    assert not apart(pilot.plan)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    run.steps(pilot, 16)
    assert run.seconds[-1] == pytest.approx(0.2, rel=0.01)
    assert pilot.profile is not None
    corrected = pilot.profile.stage("asker.ask").costs[0].seconds.at(16)
    assert corrected == pytest.approx(0.2, rel=0.25)


def test_a_plan_that_would_not_repay_its_pause_is_not_tried() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, known=takes(0.02, 0.0125), num_steps=8)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS, load_seconds=1000.0)
    run.steps(pilot, 8)
    first = run.plans[0].placements
    assert all(plan.placements == first for plan in run.plans)
    assert run.now < 1000.0


def test_a_run_that_goes_as_its_profile_says_stays_with_the_best_plan() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, known=SLOW_SERVICE, num_steps=STEPS)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    run.steps(pilot, STEPS)
    assert apart(run.plans[0])
    assert apart(run.plans[-1])
    best = min(run.seconds)
    assert run.seconds[-1] <= 1.01 * best


def test_a_drift_that_lasts_leads_to_another_choice() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, takes(0.02, 0.0125), ITEMS)
    run.steps(pilot, 20)
    assert not apart(pilot.plan)
    run.truth = takes(0.3, 0.0125)
    run.steps(pilot, STEPS)
    assert run.seconds[-1] == pytest.approx(0.3, rel=0.01)
    assert pilot.plan.predicted_seconds == pytest.approx(0.3, rel=0.01)


def test_a_plan_that_cannot_run_is_ruled_out_and_the_step_taken_under_another() -> None:
    """Plans with one lane for each worker run out of memory."""
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(
        GRAPH, SLOW_SERVICE, ITEMS, fails=lambda plan: "out of memory" if apart(plan) else None
    )
    run.steps(pilot, STEPS)
    assert len(run.seconds) == STEPS
    assert not apart(pilot.plan)
    assert pilot.race is not None
    assert "out of memory" in [entrant.verdict for entrant in pilot.race.entrants]


def test_where_all_of_a_race_cannot_run_others_are_tried() -> None:
    """While they race, all of them turn out to fail."""
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    while pilot.race is None:
        run.steps(pilot, len(run.seconds) + 1)
    raced = {shape(entrant.plan) for entrant in pilot.race.entrants}
    run.fails = lambda plan: "out of memory" if shape(plan) in raced else None
    run.steps(pilot, STEPS)
    assert len(run.seconds) == STEPS
    assert shape(pilot.plan) not in raced
    assert pilot.watch is not None


def test_a_winner_that_fails_later_makes_way_for_the_next_best() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    run.steps(pilot, 30)
    assert pilot.watch is not None
    winner = shape(pilot.plan)
    run.fails = lambda plan: "out of memory" if shape(plan) == winner else None
    run.steps(pilot, STEPS)
    assert all(shape(plan) != winner for plan in run.plans[30:])
    assert pilot.watch is not None


def test_a_winner_that_cannot_be_loaded_makes_way_for_the_next_best() -> None:
    """Another entrant has run last, and the run stands under that one."""
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    run.steps(pilot, 30)
    winner = pilot.plan
    assert apart(winner)
    pilot.gone_over(run.plans[0], ("asker", "counter"), 0.0)
    pilot.refuse(winner, "no memory")
    run.loads = lambda plan: not apart(plan)
    run.steps(pilot, STEPS)
    assert not any(apart(plan) for plan in run.plans[30:])
    assert pilot.watch is not None


def test_a_guess_that_cannot_run_makes_way_for_another_one() -> None:
    """Calls with more than four items run out of memory."""
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(
        GRAPH,
        SLOW_SERVICE,
        ITEMS,
        fails=lambda plan: "out of memory" if calls_of(plan) > 4 else None,
    )
    run.steps(pilot, STEPS)
    assert run.plans[0].mode == "collocated in smaller calls"
    assert all(calls_of(plan) <= 4 for plan in run.plans)


def test_where_no_plan_can_run_the_failure_is_told() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS, fails=lambda _plan: "out of memory")
    with pytest.raises(AssertionError, match="no plan is left"):
        run.steps(pilot, STEPS)
    assert not run.seconds
    assert calls_of(pilot.plan) == 1


def test_a_worker_that_cannot_move_stays_when_a_plan_has_failed() -> None:
    """The best plans would stand it elsewhere; taking the step again must not end the run."""
    pilot = Pilot(GRAPH, LANES, ITEMS, known=takes(0.02, 0.0125), num_steps=STEPS)
    first = pilot.plan.placements
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS, fixed=("asker", "counter"))
    run.fails = lambda plan: "no memory" if calls_of(plan) > 4 else None
    run.steps(pilot, STEPS)
    for worker in run.fixed:
        assert all(p.placements[worker].replicas == first[worker].replicas for p in run.plans)


def test_the_deadline_of_the_run_is_that_of_every_plan() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS, deadline_seconds=7.0)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    run.steps(pilot, 20)
    assert {plan.deadline_seconds for plan in run.plans} == {7.0}


def test_the_only_plan_that_was_tried_may_fail_while_a_step_is_in_flight() -> None:
    """Two steps of it have ended, and the third, begun before, fails: others are tried then."""
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    run.steps(pilot, 2, looks=False)  # of two plans that overlap nobody asks in between
    first = pilot.plan
    instead = pilot.instead("out of memory", run)
    assert instead is not None
    pilot.gone_over(instead, (), 0.0)
    while pilot.wants_to_look:
        pilot.gone_over(pilot.next_plan(run), (), 0.0)
    run.steps(pilot, STEPS)
    assert all(shape(plan) != shape(first) for plan in run.plans[2:])


def test_steps_in_flight_when_the_turn_of_their_plan_ends_are_not_the_next_ones() -> None:
    """Nor do steps count with which the pipeline is filled, again after each pause."""
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS, max_staleness=1)
    first, other = replace(pilot.plan, max_staleness=1), replace(pilot.plan, order=("joined",))
    pilot.race = Race([Entrant("first", first, 1.0), Entrant("other", other, 1.0)], 8)
    pilot.gone_over(first, (), 0.0)
    pilot.note(result_of(0, [], 0.0, 5.0), first)  # it fills the pipeline
    pilot.begins_with_none_in_flight()
    for step, seconds in enumerate((4.0, 1.0, 2.0), start=1):  # the last was in flight
        pilot.note(result_of(step, [], 0.0, seconds), first)
    assert [one.measured for one in pilot.race.entrants] == [[1.0], []]


def test_where_the_pipeline_is_emptied_after_each_step_its_steps_count() -> None:
    """As for a checkpoint of each step: no step is ever taken with a full pipeline."""
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS, max_staleness=1)
    first, other = replace(pilot.plan, max_staleness=1), replace(pilot.plan, order=("joined",))
    pilot.race = Race([Entrant("first", first, 1.0), Entrant("other", other, 1.0)], 8)
    pilot.gone_over(first, (), 0.0)
    for step, seconds in enumerate((5.0, 4.0, 3.0, 2.0)):
        pilot.begins_with_none_in_flight()
        pilot.note(result_of(step, [], 0.0, seconds), first)
        if pilot.race.current.plan is not first:
            break
    assert [one.measured for one in pilot.race.entrants] == [[3.0], []]


def test_the_first_step_after_workers_were_brought_up_anew_does_not_count() -> None:
    """However often the pipeline was emptied before; and then they count again."""
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS, max_staleness=1)
    first, other = replace(pilot.plan, max_staleness=1), replace(pilot.plan, order=("joined",))
    pilot.race = Race([Entrant("first", first, 1.0), Entrant("other", other, 1.0)], 8)
    pilot.gone_over(first, (), 0.0)
    for step, seconds in enumerate((5.0, 4.0, 9.0, 8.0, 3.0)):
        pilot.begins_with_none_in_flight()
        if seconds == 9.0:
            pilot.begins_with_none_in_flight(cold=True)
            pilot.begins_with_none_in_flight()
        pilot.note(result_of(step, [], 0.0, seconds), first)
    assert [one.measured for one in pilot.race.entrants] == [[3.0], []]


def test_first_calls_that_are_the_only_ones_of_their_step_are_no_price() -> None:
    """Each lane has one call of each stage in a collocated step, and compiles in the first."""
    kept: list[Profile] = []
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS, keep=kept.append)
    run = VirtualRun(GRAPH, takes(2.0, 0.125), ITEMS)
    run.steps(pilot, 1)
    run.truth = SLOW_SERVICE
    run.steps(pilot, STEPS)
    assert kept[0].stage("asker.ask").costs[0].seconds.at(8) == pytest.approx(0.2, rel=0.05)
    assert apart(pilot.plan)


def test_a_stage_that_no_item_has_reached_yet_is_waited_for() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, SLOW_SERVICE, ITEMS)
    run.unseen = frozenset({"counter.count"})
    run.steps(pilot, 5)
    assert pilot.race is None
    assert {plan.mode for plan in run.plans} == {"collocated"}
    run.unseen = frozenset()
    run.steps(pilot, STEPS)
    assert apart(pilot.plan)


def test_a_plan_that_could_not_be_loaded_is_not_taken_up_again_on_other_lanes() -> None:
    pilot = Pilot(GRAPH, LANES, ITEMS, known=SLOW_SERVICE, num_steps=STEPS)
    best = pilot.plan
    pilot.refuse(best, "no room for 7 GB")
    alone = pilot.on_lanes(LANES[:1], {})
    assert [lane.id for lane in alone.lanes] == [0]
    other = pilot.on_lanes(LANES, {})
    assert {name: spot.lanes for name, spot in other.placements.items()} != {
        name: spot.lanes for name, spot in best.placements.items()
    }


def test_a_plan_that_has_run_is_judged_with_the_states_that_take_turns() -> None:
    """It was judged as if nobody had a state: no switch was in its price."""
    moved = Seconds(0.3)
    states = {name: (WorkerCost(1, Bytes(60), moved, moved),) for name in ("asker", "counter")}
    pilot = Pilot(GRAPH, with_memory(LANES, 100), ITEMS, num_steps=STEPS)
    run = VirtualRun(GRAPH, replace(SLOW_SERVICE, workers=states), ITEMS)
    run.steps(pilot, 3)
    assert pilot.decision is not None
    ran = {shape(plan) for plan in run.plans}
    every = (pilot.decision.chosen, *pilot.decision.others)
    judged = [one for one in every if shape(one.plan) in ran]
    assert len(judged) == 2
    assert all(one.prediction.terms["switching"] > 0 for one in judged)
