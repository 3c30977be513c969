"""A run that goes back to a snapshot where the workers cannot be brought up: another plan, or a
clear end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from m2flow.engine.messages import RunCall
from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import RunFailed
from m2flow.flow import SOURCE
from m2flow.plan.race import Entrant
from m2flow.runtime.driver import loading
from m2flow.runtime.driver.pilot import Pilot
from m2flow.runtime.driver.recovery import Recovery
from m2flow.runtime.driver.runner import StepResult
from tests.engine.toy_flows import plan_of
from tests.runtime.crash_schedules import CrashSchedule, Stateful, Stateless
from tests.runtime.test_crash_schedules import CASE
from tests.runtime.virtual_lanes import LaneProcess
from tests.runtime.virtual_pool import CrashedRun, launched, virtual_time
from tests.runtime.virtual_world import Faults, World

LANES = tuple(map(LaneSpec, (0, 1)))
APART = replace(plan_of({"a": [0], "b": [1]}), mode="apart")
TOGETHER = replace(plan_of({"a": [1], "b": [1]}), mode="together")
TURNED = replace(plan_of({"a": [1], "b": [0]}), mode="turned")

Loads = Callable[[Plan], Exception | None]


class Listed(Pilot):
    """Chooses among given plans, in order; what its steps take does not matter."""

    def __init__(self, *plans: Plan) -> None:
        super().__init__(CASE.graph, LANES, CASE.num_items)
        self._plans = plans
        self.plan = plans[0]

    @property
    def refused(self) -> list[Entrant]:
        return self._failed

    @property
    def wants_to_look(self) -> bool:
        return False

    def note(self, result: StepResult, plan: Plan) -> None: ...

    def _others(self) -> Iterator[Plan]:
        yield from self._plans


@dataclass
class Played:
    """A run on virtual lanes: its world, what loading a plan raises, and the steps' modes."""

    run: CrashedRun
    world: World
    monkeypatch: pytest.MonkeyPatch

    def batches(self, steps: range) -> list[Any]:
        return [self.world.batch(SOURCE, step, range(CASE.num_items)) for step in steps]

    def loads(self, raised: Loads) -> None:
        """Have loading raise what this says of the plan that is loaded."""
        real = LOADED

        def loaded(*given: Any) -> Any:
            sizes = real(*given)
            error = raised(self.world.plan)
            if error is not None:
                raise error
            return sizes

        self.monkeypatch.setattr(loading, "_loaded", loaded)


LOADED = loading._loaded


@contextmanager
def played(patch: pytest.MonkeyPatch, *plans: Plan, seed: int = 0) -> Iterator[Played]:
    """A run under the first of some plans, of which a pilot knows if there are several."""
    patch.setattr(Recovery, "is_due", lambda *_: False)
    world = CrashSchedule(replace(CASE, plan=plans[0]), Faults(), seed).world
    with virtual_time(world):
        workers = {"a": Stateless(), "b": Stateful()}
        run = launched(world, LANES, plans[0], workers, 0, 8, None)
        if len(plans) > 1:
            run.pilot = Listed(*plans)
        yield Played(run, world, patch)


def lose_learner(game: Played) -> None:
    """The learner's lane is lost in the midst of a step."""
    game.world.after(0.01, partial(game.world.lanes[1].die, "killed"))


def test_a_worker_that_cannot_be_loaded_on_the_way_back_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had raised came out of the run as it was."""
    with played(monkeypatch, APART) as game:
        assert [result.step for result in game.run.steps(game.batches(range(2)))] == [0, 1]
        lose_learner(game)
        game.loads(lambda _: FileNotFoundError("the weights are gone"))
        with pytest.raises(RunFailed) as caught:
            list(game.run.steps(game.batches(range(2, 4))))
    assert str(caught.value) == "plan apart cannot be loaded: the weights are gone"
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_lane_is_lost_while_others_raise_on_the_way_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they raise comes of the loss."""
    with played(monkeypatch, APART) as game:
        given = [result.step for result in game.run.steps(game.batches(range(2)))]
        lose_learner(game)

        def once(_: Plan) -> Exception:
            game.monkeypatch.setattr(loading, "_loaded", LOADED)
            game.run._pool.lost[0] = "killed", game.world.now  # type: ignore[union-attr]
            game.world.lanes[0].die("killed")
            return RuntimeError("a peer has left")

        game.loads(once)
        given += [result.step for result in game.run.steps(game.batches(range(2, 4)))]
    assert given == [0, 1, 2, 3]


def test_a_plan_that_cannot_be_loaded_on_the_way_back_is_ruled_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with played(monkeypatch, APART, TOGETHER) as game:
        given = [result.step for result in game.run.steps(game.batches(range(2)))]
        lose_learner(game)
        game.loads(lambda plan: MemoryError("too much") if plan.mode == "apart" else None)
        given += [result.step for result in game.run.steps(game.batches(range(2, 4)))]
    pilot = game.run.pilot
    assert isinstance(pilot, Listed)
    assert given == [0, 1, 2, 3]
    assert game.run.plan.mode == pilot.plan.mode == "together"
    assert [(one.name, one.verdict) for one in pilot.refused] == [
        ("apart", "plan apart cannot be loaded: too much")
    ]


def test_where_no_plan_can_be_loaded_on_the_way_back_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with played(monkeypatch, APART, TOGETHER, TURNED) as game:
        list(game.run.steps(game.batches(range(2))))
        lose_learner(game)
        game.loads(lambda _: MemoryError("too much"))
        with pytest.raises(RunFailed, match=r"^plan turned cannot be loaded: too much$"):
            list(game.run.steps(game.batches(range(2, 4))))
    assert isinstance(game.run.pilot, Listed)
    assert [one.name for one in game.run.pilot.refused] == ["apart", "together", "turned"]


def test_a_worker_that_raises_on_a_lane_that_comes_back_alone_sends_all_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had raised came out of the run as it was."""
    load = LaneProcess._load

    def fails_once(self: LaneProcess, order: Any) -> None:
        monkeypatch.setattr(LaneProcess, "_load", load)
        self.line.say(loading.Loaded(order.number, {}, loading.pickle.dumps(OSError("no room"))))
        self.free()

    with played(monkeypatch, APART) as game:
        given = [result.step for result in game.run.steps(game.batches(range(2)))]
        monkeypatch.setattr(LaneProcess, "_load", fails_once)
        game.world.after(0.01, partial(game.world.lanes[0].die, "killed"))
        given += [result.step for result in game.run.steps(game.batches(range(2, 4)))]
    assert given == [0, 1, 2, 3]


def run_out_of_memory(game: Played, step: int, mode: str) -> list[int]:
    """Have the learner's calls of a step fail under a plan; the steps of all its calls since."""
    call, steps = LaneProcess._call, list[int]()

    def fails(self: LaneProcess, order: Any, command: RunCall) -> None:
        if game.world.plan.mode == mode:
            steps.append(command.step)
            if command.step == step and self.world.graph.nodes[command.node].worker == "b":
                self._failed(command.call, MemoryError("no room"), begun=True)
                return
        call(self, order, command)

    game.monkeypatch.setattr(LaneProcess, "_call", fails)
    return steps


def test_no_step_is_taken_again_under_a_plan_that_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run went over to a plan that could not be loaded, and nor could the one before: it went
    back under the one before, which had run out of memory, and took all done steps again."""
    with played(monkeypatch, APART, TURNED, TOGETHER) as game:
        given = [result.step for result in game.run.steps(game.batches(range(2)))]
        steps = run_out_of_memory(game, 2, "apart")
        refusals = iter(("turned", "apart"))
        left = [next(refusals)]

        def refuse(plan: Plan) -> Exception | None:
            if plan.mode != left[0]:
                return None
            left[0] = next(refusals, "")
            return MemoryError("too much")

        game.loads(refuse)
        given += [result.step for result in game.run.steps(game.batches(range(2, 4)))]
    pilot = game.run.pilot
    assert isinstance(pilot, Listed)
    assert given == [0, 1, 2, 3]
    assert set(steps) == {2}, "under the plan that has failed"
    assert game.run.plan.mode == pilot.plan.mode == "together"
    assert [one.name for one in pilot.refused] == ["apart", "turned"]


def test_where_every_plan_has_failed_no_step_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with played(monkeypatch, APART, TURNED) as game:
        list(game.run.steps(game.batches(range(2))))
        steps = run_out_of_memory(game, 2, "apart")
        game.loads(lambda _: MemoryError("too much"))
        with pytest.raises(RunFailed, match=r"^plan turned cannot be loaded: too much$"):
            list(game.run.steps(game.batches(range(2, 4))))
    assert set(steps) == {2}
