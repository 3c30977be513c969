"""Which lanes are started again, given up and called back, and what plan is made for those left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import CannotHeal, RunFailed, UserError
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.plan import build_plan, with_sizes
from m2flow.runtime.driver import processes as processes_module
from m2flow.runtime.driver.elastic import ElasticPlan
from m2flow.runtime.driver.mending import Mender, _Coming
from m2flow.runtime.driver.methods import STEP, Methods
from m2flow.runtime.driver.processes import LaneProcesses
from m2flow.runtime.driver.supervision import LASTING_STEPS, LOOK_SECONDS, NO_MACHINE, Supervision
from tests.plan.small_graphs import GRPO

LANES = tuple(LaneSpec(number) for number in range(4))
ITEMS = 8


# --- plans for the lanes that are left ------------------------------------------------------------


class Sharded:
    """A worker that knows gangs of any of these numbers of lanes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        assert kind == "cpu"
        return [ONE_LANE, *(Layout(f"fsdp{n}", n) for n in self.sizes if n <= lanes)]


def elastic(plan: Plan, learner: Sharded | None = None, isolated: str = "") -> ElasticPlan:
    methods = Methods({STEP: GRPO}, {STEP: ITEMS}, frozenset(filter(None, [isolated])))
    workers = dict.fromkeys(plan.placements, learner or Sharded())
    return ElasticPlan(methods, methods.planned(plan), cast("Any", workers), None)


def made(mode: str, **options: Any) -> Plan:
    return replace(build_plan(mode, GRPO, LANES, ITEMS, **options), deadline_seconds=7.0)


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_the_plan_for_fewer_lanes_is_that_of_the_mode(mode: str) -> None:
    left = (LANES[0], LANES[2], LANES[3])
    plan = elastic(replace(made(mode), max_staleness=1)).plan(left)
    assert plan == replace(
        build_plan(mode, GRPO, left, ITEMS), max_staleness=1, deadline_seconds=7.0
    )


def test_what_calls_take_of_memory_is_kept() -> None:
    plan = with_sizes(made("collocated"), {}, {"learner": 10**9})
    assert elastic(plan).plan(LANES[1:]).placements["learner"].working_bytes == 10**9


def test_a_mode_that_needs_more_lanes_gives_way() -> None:
    assert elastic(made("disaggregated")).plan(LANES[3:]).mode == "collocated"


@pytest.mark.parametrize(
    ("sizes", "left", "size"), [((2, 3, 4), 3, 3), ((2, 4), 3, 1), ((2, 4), 2, 2)]
)
def test_a_gang_is_of_as_many_lanes_as_divide_those_left(
    sizes: tuple[int, ...], left: int, size: int
) -> None:
    plan = made("collocated", layouts={"learner": Layout("fsdp4", 4)})
    spot = elastic(plan, Sharded(*sizes)).plan(LANES[:left]).placements["learner"]
    assert {len(gang) for gang in spot.replicas} == {size}
    assert spot.lanes == tuple(range(left))
    assert spot.layout == (f"fsdp{size}" if size > 1 else "one")


def test_a_plan_that_no_builder_makes_is_for_its_lanes_alone() -> None:
    plan = made("collocated")
    (name,) = [name for name, stage in plan.stages.items() if name.startswith("learner.train")]
    changed = replace(plan, stages={**plan.stages, name: replace(plan.stages[name], chunk=1)})
    for own in (changed, replace(plan, mode="mine")):
        with pytest.raises(
            UserError, match="is for all of its lanes, and names those that are los"
        ):
            elastic(own).plan(LANES[1:])


def test_a_worker_with_a_process_of_its_own_needs_the_lane_beside() -> None:
    plan = made("collocated", isolated={"score"})
    first, both = plan.lanes[:4], plan.lanes[4:]
    remade = elastic(plan, isolated="score").plan((first[1], both[1]))
    assert remade.placements["score"].lanes == (both[1].id,)
    assert remade.placements["learner"].lanes == (first[1].id,)
    with pytest.raises(UserError, match="score: must have a process of its own"):
        elastic(plan, isolated="score").plan((*first, *both[1:]))
    with pytest.raises(UserError, match="all that are left are reserved"):
        elastic(plan, isolated="score").plan(both)


# --- which lanes there are ------------------------------------------------------------------------


class Processes:
    """Those of a pool, as far as they are asked."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.awaited: set[int] = set()
        self.up: set[int] = set()

    def without_machine(self, lanes: Any) -> set[int]:
        return self.gone & set(lanes)

    @property
    def has_news(self) -> bool:
        return bool(self.up)


class Pool:
    """Lanes without processes."""

    can_restart = True

    def __init__(self) -> None:
        self.lanes, self.processes = LANES, Processes()
        self.lost: dict[int, tuple[str, float]] = {}
        self.missing: dict[int, tuple[str, float]] = {}
        self.world: tuple[int, ...] = ()
        self.all_positions = tuple(range(len(LANES)))
        self.calls: list[tuple[str, set[int]]] = []
        self.refusals: list[str] = []

    def lose(self, *lanes: int) -> RunFailed:
        self.lost |= dict.fromkeys(lanes, ("killed", 0.0))
        return RunFailed(f"lane {lanes[0]} was lost: killed")

    def restart(self, lanes: set[int]) -> None:
        self.calls.append(("restart", set(lanes)))
        if self.refusals:
            self.lose(*lanes)
            raise RunFailed(self.refusals.pop(0))
        for lane in lanes:
            self.lost.pop(lane, None)
        if len(lanes) == len(self.lanes):
            self.world = ()

    def is_here(self, lane: int) -> bool:
        return lane not in self.missing

    def give_up(self, lanes: Any) -> None:
        self.missing |= {lane: self.lost.pop(lane) for lane in lanes}
        self.lanes = tuple(lane for lane in self.lanes if lane.id not in lanes)
        self.all_positions = tuple(lane.id for lane in self.lanes)

    def call_back(self, lane: int) -> bool:
        self.calls.append(("call back", {lane}))
        if lane in self.processes.gone:
            return False
        self.processes.awaited.add(lane)
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def supervision(pool: Pool, restarts: int = 2, clock: Clock | None = None) -> Supervision:
    plan = elastic(made("collocated"))
    return Supervision(cast("Any", pool), restarts, plan, clock or Clock())


def test_a_lane_is_started_again_so_often() -> None:
    pool = Pool()
    watch = supervision(pool)
    for _ in range(2):
        watch.count(pool.lose(1))
        watch.bring_back(())
    assert pool.calls == [("restart", {1})] * 2
    watch.count(pool.lose(1))
    assert pool.missing.keys() == {1}
    watch.bring_back(())
    assert len(pool.calls) == 2, "nothing is left to be started"


def test_a_start_is_forgotten_after_so_many_steps_with_the_lane() -> None:
    """A lane lost once a week ended a run of a month, which had got on well each time."""
    pool = Pool()
    watch = Supervision(cast("Any", pool), 2, None, Clock())
    for _ in range(5):
        watch.count(pool.lose(1))
        watch.bring_back(())
        for _ in range(LASTING_STEPS):
            watch.step_is_over()
    for last in range(3):
        assert watch.may_begin(1, f"killed {last}") == (last < 2)
        watch.is_back(1)
        for _ in range(LASTING_STEPS - 1):
            watch.step_is_over()
    with pytest.raises(RunFailed, match=r"lane 1 was lost: killed 0\n.*fewer than 10 steps"):
        watch.count(pool.lose(1))


def test_lanes_with_process_groups_are_all_started_again_without_the_one_that_is_lost() -> None:
    pool = Pool()
    pool.world = (0, 1, 2, 3)
    watch = supervision(pool, restarts=0)
    watch.count(pool.lose(2))
    watch.bring_back(())
    assert pool.calls == [("restart", {0, 1, 3})]


def test_the_others_are_started_without_the_lane_that_does_not_come_up() -> None:
    pool = Pool()
    pool.world, pool.refusals = (0, 1, 2, 3), ["lanes have not started within 120 s"]
    watch = supervision(pool)
    watch.count(pool.lose(2))
    watch.bring_back(())
    assert pool.calls == [("restart", {0, 1, 2, 3}), ("restart", {0, 1, 3})]
    assert pool.missing.keys() == {2}


def test_a_start_that_fails_is_counted_for_the_lanes_that_were_lost_alone() -> None:
    """Lanes with process groups are ended together, and those that were up lost a restart each."""
    pool = Pool()
    pool.world = (0, 1, 2, 3)
    pool.refusals = ["lanes have not come up in 3 tries"]
    watch = Supervision(cast("Any", pool), 2, None, Clock())
    watch.count(pool.lose(2))
    with pytest.raises(RunFailed, match="3 tries") as caught:
        watch.bring_back(())
    watch.count(caught.value)
    watch.bring_back(())
    for _ in range(2):
        watch.count(pool.lose(0))
        watch.bring_back(())
    with pytest.raises(RunFailed, match=r"^lane 0 was lost"):
        watch.count(pool.lose(0))


def test_nobody_waits_between_steps_for_a_lane_that_may_not_be_started_again() -> None:
    """Its loss was taken for one of a lane that comes back, and its load was waited for."""
    mender: Any = Mender.__new__(Mender)
    mender._supervision = SimpleNamespace(may_begin=lambda *_: False)
    mender._coming = {1: _Coming("killed", 0.0, does="loads")}
    with pytest.raises(CannotHeal, match="lane 1 was lost: killed again"):
        mender.ended(1, "killed again")


@pytest.mark.parametrize("lost", [{2}, {0, 2}, {1, 2}])
def test_a_lane_does_not_come_back_alone_without_the_lane_whose_gpu_it_shares(
    lost: set[int],
) -> None:
    """A worker with a process of its own asks that lane's process which GPU it is."""
    lanes = (
        LaneSpec(0, "gpu", gpu=0),
        LaneSpec(1, "gpu", gpu=1),
        LaneSpec(2, "gpu", gpu=0, reserved_for="simulator"),
    )
    begun = list[int]()
    mender: Any = Mender.__new__(Mender)
    mender._plan = Plan("custom", lanes, {"simulator": Placement(((2,),))})
    mender._workers, mender._engines, mender.epochs, mender._coming = {}, {}, {}, {}
    mender._carrier = SimpleNamespace(graphs={}, forget=lambda lane: None)
    mender._supervision = SimpleNamespace(heals=True, may_begin=lambda *_: True)
    mender._may_heal = lambda: True
    mender._pool = SimpleNamespace(
        lost=dict.fromkeys(lost, ("killed", 0.0)),
        uses_groups=False,
        addresses=dict.fromkeys(range(3)),
        processes=SimpleNamespace(lanes=lanes),
        begin=begun.append,
    )
    event = mender.ended(2, "killed")
    assert event.comes_back == (0 not in lost)
    assert begun == ([2] if event.comes_back else [])
    mender._coming, mender._pool.addresses = {}, {1: None, 2: None}
    assert not mender.ended(2, "killed").comes_back, "that lane was given up"


def test_a_lane_whose_gpu_another_knew_cannot_be_started_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have ended, and only the end of one was heard of: no error of Ray's ends the run."""
    owner, lane = LaneSpec(0, "gpu", gpu=0), LaneSpec(1, "gpu", gpu=0, reserved_for="simulator")

    def dead(*_: object, **__: object) -> None:
        raise RayActorError

    processes: Any = LaneProcesses.__new__(LaneProcesses)
    processes.lanes, processes._nodes, processes.node = (owner, lane), ["here"], "here"
    processes._isolated, processes._per_process = {}, 1
    processes.spares = SimpleNamespace(take=lambda *_: None)
    asked = SimpleNamespace(visible_gpus=SimpleNamespace(remote=lambda: "asked"))
    processes.actors, processes.addresses = {0: asked}, {0: None}
    processes._serving, processes._awaited = {}, {}
    processes._make = lambda *_: "made"
    ended = list[str]()
    monkeypatch.setattr(processes_module, "options_of", lambda *_, **__: {})
    monkeypatch.setattr(processes_module, "ray", SimpleNamespace(get=dead, kill=ended.append))
    with pytest.raises(CannotHeal, match=r"^lane 1 cannot be started: the lane whose GPU"):
        processes.begin(lane)
    monkeypatch.setattr(processes, "without_machine", lambda lanes: set())
    monkeypatch.setattr(processes_module, "lacks", lambda *_: None)
    assert not processes.call_back(lane)
    assert ended == ["made"]
    assert not processes.awaited
    del processes.actors[0]
    with pytest.raises(CannotHeal, match="lane 0, whose GPU lane 1 shares, was given up"):
        processes.begin(lane)


def test_a_lane_is_called_back_now_and_then_and_so_often() -> None:
    pool, clock = Pool(), Clock()
    pool.refusals = ["no"]
    watch = supervision(pool, restarts=3, clock=clock)
    watch.count(pool.lose(1))
    watch.bring_back(())
    pool.calls = []
    assert not watch.has_news
    assert not pool.calls, "it was looked for too soon"
    for _ in range(5):
        clock.now += LOOK_SECONDS
        assert not watch.has_news
        assert not watch.has_news
        pool.processes.awaited.clear()  # it has ended
    assert pool.calls == [("call back", {1})] * 2, "the start at once was the first of three"


def test_a_machine_that_goes_and_comes_costs_no_restart() -> None:
    pool, clock = Pool(), Clock()
    watch = supervision(pool, restarts=0, clock=clock)
    pool.processes.gone = {1}
    watch.count(pool.lose(1))
    (loss,) = watch.losses([(1, "killed", 0.0)], made("collocated"), 0)
    assert loss.given_up == NO_MACHINE
    clock.now += LOOK_SECONDS
    assert not watch.has_news
    pool.processes.gone = set()
    clock.now += LOOK_SECONDS
    assert not watch.has_news, "it has not come up yet"
    assert pool.calls == [("call back", {1})] * 2
    pool.processes.up = {1}
    assert watch.has_news


def test_no_lane_is_left() -> None:
    pool = Pool()
    watch = supervision(pool, restarts=0)
    with pytest.raises(RunFailed, match=r"^lane 0 was lost: killed\n.*; no lane is left") as caught:
        watch.count(pool.lose(0, 1, 2, 3))
    assert "(`lane_restarts: 0`)" in str(caught.value)


def test_a_plan_on_some_of_the_lanes_is_kept_when_one_of_them_is_back() -> None:
    pool = Pool()
    own = replace(build_plan("collocated", GRPO, LANES[:2], ITEMS), mode="mine")
    watch = Supervision(cast("Any", pool), 2, elastic(own), Clock())
    watch.count(pool.lose(1))
    watch.bring_back(())
    assert watch.remade(own) is None


def test_lanes_that_an_earlier_run_has_given_up_are_left_alone() -> None:
    pool = Pool()
    pool.lose(2)
    pool.give_up([2])
    assert not supervision(pool).has_news
    assert pool.calls == []


def test_a_plan_is_made_again_where_the_last_one_was_for_lanes_that_are_gone() -> None:
    """One of them had come back, and no worker could be loaded on it."""
    pool = Pool()
    watch = supervision(pool, restarts=0)
    watch.count(pool.lose(2))
    there = watch.remade(made("collocated"))
    assert there is not None
    assert watch.remade(there) is None
    pool.lanes, pool.missing = LANES, {}
    assert watch.remade(there) is not None
    watch.count(pool.lose(2))
    assert watch.remade(there) is not None, "the pilot is told of the lanes that are left"
