"""Another plan from step to step, in one run: the result is still that of the eager run."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import m2flow
from m2flow import Batch, Flow, Layout, Place, Stream, Worker, stage
from m2flow.engine.plan import Placement, Plan
from m2flow.errors import NotLoaded, RunFailed, UserError
from m2flow.plan import LaneSpec, build_plan
from m2flow.runtime.driver import standing
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.run import Run
from m2flow.runtime.transport.peering import PeerLost
from tests.equivalence import flows
from tests.equivalence.flows import (
    Outcome,
    Scenario,
    check_same,
    eager_outcome,
    environment,
    grpo,
    output_of,
    toy,
)
from tests.equivalence.random_plans import random_plan

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(flows)  # lanes cannot import the tests
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

LANES = tuple(LaneSpec(number) for number in range(3))
RUNS = [3, pytest.param(8, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with LanePool(LANES) as lanes:
        yield lanes


def replanned_outcome(scenario: Scenario, pool: LanePool, random: Random) -> tuple[Outcome, int]:
    """Run a scenario under a new random plan at each step; and how many workers were moved."""

    def plan() -> Any:
        graph = scenario.make_flow().trace()
        drawn = random_plan(
            graph,
            LANES,
            scenario.items_per_step,
            random,
            state_bytes=scenario.state_bytes,
            gangs_allowed=scenario.gangs_allowed,
        )
        return replace(drawn, max_staleness=0)

    outputs, metrics, moved = [], [], 0
    with m2flow.launch(
        scenario.make_flow(), items_per_step=scenario.items_per_step, plan=plan(), lanes=pool
    ) as run:
        for number, batch in enumerate(scenario.batches):
            if number:
                moved += len(run.replan(plan()).moved)
            result = run.step(batch)
            outputs.append(output_of(result))
            metrics.append(dict(result.metrics))
        states = run.worker_call_everywhere(*scenario.trained)
    return Outcome(outputs, states, metrics, 0), moved


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("make", [toy, environment, grpo], ids=lambda make: make.__name__)
def test_a_new_plan_at_each_step_gives_the_eager_result(
    make: object, runs: int, pool: LanePool, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    scenario: Scenario = grpo(tmp_path) if make is grpo else make()  # type: ignore[operator]
    eager = eager_outcome(scenario)
    torch.set_num_threads(threads)
    moved = 0
    for seed in range(runs):
        there, count = replanned_outcome(scenario, pool, Random(1000 + seed))
        try:
            check_same(there, eager, scenario)
        except AssertionError as error:
            raise AssertionError(f"under the plans of seed {seed}: {error}") from error
        moved += count
    assert moved > runs, "the plans are too much alike"


def _toy_run(pool: LanePool, flow: Flow) -> tuple[Run, Scenario]:
    scenario = toy()
    plan = build_plan("collocated", flow.trace(), LANES[:2], scenario.items_per_step)
    return m2flow.launch(flow, items_per_step=scenario.items_per_step, plan=plan, lanes=pool), (
        scenario
    )


def test_only_what_differs_moves(pool: LanePool) -> None:
    """The lanes stay the processes that they were."""
    flow = toy().make_flow()
    run, scenario = _toy_run(pool, flow)
    with run:
        run.step(scenario.batches[0])
        before = [(lane, at.process_id) for lane, at in pool.addresses.items()]
        finer = build_plan("collocated", run.graph, LANES[:2], scenario.items_per_step)
        finer = replace(finer, stages={})
        assert run.replan(finer).moved == ()
        placements = dict(finer.placements) | {"judge": replace(finer.placements["judge"])}
        placements["judge"] = replace(placements["judge"], replicas=((2,),))
        three = replace(finer, lanes=LANES, placements=placements)
        done = run.replan(three)
        assert done.moved == ("judge",)
        assert done.seconds > 0
        assert [(lane, at.process_id) for lane, at in pool.addresses.items()] == before
        assert run.plan == replace(three, placements=run.plan.placements)


class Lying(Worker):
    """Says in which layout it lies on its lanes."""

    def layouts(self, kind: str, lanes: int) -> tuple[Layout, ...]:
        return Layout("fsdp2", 2), Layout("tp2", 2)

    @stage
    def look(self, items: Batch) -> Batch:
        return items.with_columns(layout=[self.place.gang.layout] * len(items))


class LyingFlow(Flow):
    lying: Lying

    def step(self, items: Stream) -> Stream:
        return self.lying.look(items)


def test_a_change_of_layout_on_the_same_lanes_is_carried_out(pool: LanePool) -> None:
    """The worker stayed in its old layout, under a plan that said the new one."""

    def plan(layout: str) -> Plan:
        return Plan("custom", LANES[:2], {"lying": Placement(((0, 1),), layout=layout)})

    flow, items = LyingFlow(lying=Lying()), Batch({"x": [1, 2]})
    with m2flow.launch(flow, items_per_step=2, plan=plan("fsdp2"), lanes=pool) as run:
        assert run.step(items).output["layout"] == ["fsdp2", "fsdp2"]
        assert run.replan(plan("tp2")).moved == ("lying",)
        assert run.step(items).output["layout"] == ["tp2", "tp2"]
        assert run.replan(plan("tp2")).moved == ()


def test_a_trained_worker_that_cannot_save_its_state_stays(pool: LanePool) -> None:
    flow = flows.Toy(sampler=flows.Sampler(), judge=flows.Judge(), learner=flows.ForgetfulLearner())
    run, scenario = _toy_run(pool, flow)
    with run:
        run.step(scenario.batches[0])
        apart = build_plan("disaggregated", run.graph, LANES[:2], scenario.items_per_step)
        with pytest.raises(UserError, match=r"learner: .*save"):
            run.replan(apart)
        assert not run.movable("learner")
        run.step(scenario.batches[1])  # goes on as it was


class Crowded(flows.Judge):
    """Has no room on the last lane."""

    def load(self, place: Place) -> None:
        super().load(place)
        if place.lane == LANES[-1].id:
            raise MemoryError("no room for 7 GB")


class Tidy(flows.Sampler):
    """Leaves a file where it was closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def close(self) -> None:
        (self.folder / str(self.place.lane)).touch()
        super().close()


class Ringed(flows.Judge):
    """Refers to itself, as most workers do by what they hold; a file is there while it is."""

    def __init__(self, folder: Path, narrow: bool = False) -> None:
        super().__init__()
        self.folder, self.narrow = folder, narrow

    def load(self, place: Place) -> None:
        super().load(place)
        self.me = self
        file = self.folder / f"{place.lane} {id(self)}"
        file.touch()
        weakref.finalize(self, file.unlink)
        if self.narrow and place.size > 2:
            raise MemoryError("no room for 7 GB")


def lanes_of_those_alive(folder: Path) -> list[int]:
    return sorted(int(file.name.split()[0]) for file in folder.iterdir())


def test_closed_workers_give_their_memory_back(pool: LanePool, tmp_path: Path) -> None:
    """Those that refer to themselves stayed, with all that they held, when the next were loaded."""
    flow = flows.Toy(sampler=flows.Sampler(), judge=Ringed(tmp_path), learner=flows.Learner())
    for _ in range(2):
        run, scenario = _toy_run(pool, flow)
        with run:
            assert lanes_of_those_alive(tmp_path) == [0, 1]
            run.step(scenario.batches[0])
            moved = dict(run.plan.placements)
            moved["judge"] = replace(moved["judge"], replicas=((2,),))
            assert run.replan(replace(run.plan, lanes=LANES, placements=moved)).moved == ("judge",)
            assert lanes_of_those_alive(tmp_path) == [2]
            run.step(scenario.batches[1])


def test_workers_of_a_plan_that_could_not_be_loaded_give_theirs_back(
    pool: LanePool, tmp_path: Path
) -> None:
    judge = Ringed(tmp_path, narrow=True)
    flow = flows.Toy(sampler=flows.Sampler(), judge=judge, learner=flows.Learner())
    run, scenario = _toy_run(pool, flow)
    with run:
        apart = build_plan("collocated", run.graph, LANES, scenario.items_per_step)
        with pytest.raises(NotLoaded, match="no room for 7 GB"):
            run.replan(apart)
        assert lanes_of_those_alive(tmp_path) == [0, 1]


def test_a_plan_that_cannot_be_loaded_leaves_the_run_as_it_was(
    pool: LanePool, tmp_path: Path
) -> None:
    """Others had been brought up elsewhere already when the judge was found to have no room."""
    scenario = toy()
    eager = eager_outcome(scenario)
    flow = flows.Toy(sampler=Tidy(tmp_path), judge=Crowded(), learner=flows.Learner())
    run, _ = _toy_run(pool, flow)
    outputs, metrics = [], []
    with run:
        apart = build_plan("collocated", run.graph, LANES, scenario.items_per_step)
        for batch in scenario.batches:
            before = run.plan
            with pytest.raises(NotLoaded, match=r"judge\.load ran out of memory .* 7 GB") as caught:
                run.replan(apart)
            assert isinstance(caught.value.__cause__, MemoryError)
            assert (tmp_path / str(LANES[-1].id)).exists(), "what was brought up was not closed"
            assert run.plan == before
            result = run.step(batch)
            outputs.append(output_of(result))
            metrics.append(dict(result.metrics))
        states = run.worker_call_everywhere(*scenario.trained)
    check_same(Outcome(outputs, states, metrics, 0), eager, scenario)


class Cluttered(flows.Judge):
    """Has no room on the last lane, and then none in a process that has loaded it before."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def load(self, place: Place) -> None:
        super().load(place)
        full, here = self.folder / "full", self.folder / str(os.getpid())
        if place.lane == LANES[-1].id:
            full.touch()
            raise MemoryError("no room for 7 GB")
        if full.exists() and here.exists():
            raise MemoryError("no room for 6 GB")
        here.touch()


def test_a_run_whose_plan_before_cannot_be_loaded_either_goes_back_to_its_snapshot(
    pool: LanePool, tmp_path: Path
) -> None:
    scenario = toy()
    eager = eager_outcome(scenario)
    judge = Cluttered(tmp_path)
    flow = flows.Toy(sampler=flows.Sampler(), judge=judge, learner=flows.Learner())
    run, _ = _toy_run(pool, flow)
    outputs, metrics = [], []
    with run:
        apart = build_plan("collocated", run.graph, LANES, scenario.items_per_step)
        for number, batch in enumerate(scenario.batches):
            if number == 1:
                before = run.plan
                with pytest.raises(NotLoaded, match=r"no room for [67] GB"):
                    run.replan(apart)
                assert run.plan == before
            result = run.step(batch)
            outputs.append(output_of(result))
            metrics.append(dict(result.metrics))
        states = run.worker_call_everywhere(*scenario.trained)
        assert not run.losses
    check_same(Outcome(outputs, states, metrics, 0), eager, scenario)


def test_a_lane_that_is_lost_while_workers_load_is_not_the_plan_s_fault(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another lane tells of it first."""
    run, scenario = _toy_run(pool, toy().make_flow())

    def lost(self: Run, *_: object) -> None:
        os.kill(pool.addresses[2].process_id, signal.SIGKILL)
        raise RunFailed("workers were not loaded") from PeerLost("lane 2 is gone")

    with run:
        run.step(scenario.batches[0])
        apart = build_plan("collocated", run.graph, LANES, scenario.items_per_step)
        monkeypatch.setattr(Run, "_bring_up", lost)
        with pytest.raises(RunFailed) as caught:
            run.replan(apart)
        assert type(caught.value) is RunFailed
        assert pool.lost.keys() == {2}
    pool.restart(list(pool.lost))


def test_states_that_do_not_fit_into_host_memory_stay_where_they_are(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is gathered on its lane, and copied."""
    run, scenario = _toy_run(pool, toy().make_flow())
    asked: list[tuple[object, ...]] = []
    ask_all = pool.ask_all

    def noted(orders: Any, seconds: float) -> Any:
        asked.append((sorted(orders), seconds))
        return ask_all(orders, seconds)

    monkeypatch.setattr(pool, "ask_all", noted)
    with run:
        run.step(scenario.batches[0])
        deadline = run.plan.deadline_seconds
        apart = build_plan("disaggregated", run.graph, LANES[:2], scenario.items_per_step)
        gang = sorted(run._placements["learner"].replicas[0])
        states = [run._state_bytes[worker] for worker in ("judge", "learner", "sampler")]
        monkeypatch.setattr(standing, "usable_memory", lambda: (max(states), 1 << 40))
        with pytest.raises(NotLoaded, match="to move the states of its workers takes"):
            run.replan(apart)
        assert not asked
        run.step(scenario.batches[1])
        enough = sum(states) + max(states)
        monkeypatch.setattr(standing, "usable_memory", lambda: (enough, 1 << 40))
        assert "learner" in run.replan(replace(apart, deadline_seconds=7.0)).moved
        assert (gang, deadline) in asked


def test_states_that_do_not_fit_under_another_plan_leave_the_run_as_it_was(pool: LanePool) -> None:
    run, scenario = _toy_run(pool, toy().make_flow())
    with run:
        run.step(scenario.batches[0])
        before = run.plan
        narrow = tuple(replace(lane, memory_bytes=1) for lane in LANES)
        apart = build_plan("collocated", run.graph, narrow, scenario.items_per_step)
        with pytest.raises(NotLoaded, match="at most 1 byte"):
            run.replan(apart)
        assert run.plan == before
        run.step(scenario.batches[1])


def test_no_new_plan_while_steps_are_in_flight_or_for_one_process(pool: LanePool) -> None:
    flow = toy().make_flow()
    run, scenario = _toy_run(pool, flow)
    with run:
        steps = run.steps(scenario.batches)
        next(steps)
        assert run.replan(run.plan).moved == ()  # the steps come one after the other
        elsewhere = replace(run.plan, lanes=(LaneSpec(7),))
        with pytest.raises(UserError):
            run.replan(elsewhere)
    eager = m2flow.launch(toy().make_flow(), items_per_step=scenario.items_per_step)
    with eager, pytest.raises(UserError, match="eager"):
        eager.replan(eager.plan)
