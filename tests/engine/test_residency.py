"""Context switching: who is resident, who makes way, and what is brought before it is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m2flow.engine import Engine, LaneSpec, Placement, Plan
from m2flow.engine.messages import Command, MoveState, RunCall, StepSubmitted
from m2flow.engine.residency import Residency
from m2flow.errors import PlanError
from tests.engine.toy_flows import finish, graph_of, plan_of


def plan(limit: int | None, **workers: tuple[int, int]) -> Plan:
    """Everything on lane 0; each worker with its bytes of state and of work."""
    spots = {name: Placement(((0,),), *sizes) for name, sizes in workers.items()}
    return Plan("custom", (LaneSpec(0, memory_bytes=limit),), spots)


def words(moves: list[MoveState]) -> list[str]:
    return [f"{move.what} {move.worker}" for move in moves]


def test_without_a_limit_nobody_is_moved() -> None:
    residency = Residency(plan(None, a=(10, 0), b=(10, 0)))
    assert residency.bring(["a"], 0) == []


def test_nothing_is_resident_at_the_start_and_nobody_without_state_makes_way() -> None:
    residency = Residency(plan(10, a=(10, 0), b=(10, 0), light=(0, 0)))
    assert words(residency.bring(["light"], 0)) == ["onload light"]
    assert words(residency.bring(["a"], 0)) == ["onload a"]
    assert words(residency.bring(["b"], 0)) == ["offload a", "onload b"]
    assert words(residency.bring(["light"], 0)) == []


def test_a_call_has_room_to_work_in() -> None:
    residency = Residency(plan(20, a=(10, 3), b=(10, 0)))
    residency.bring(["b"], 0)
    assert words(residency.bring(["a"], 0)) == ["onload a"]
    assert words(residency.bring(["a"], 0, working=True)) == ["offload b"]


def test_the_rooms_of_workers_that_take_turns_do_not_add_up() -> None:
    residency = Residency(plan(23, a=(10, 3), b=(10, 2)))
    assert words(residency.bring(["a", "b"], 0, working=True)) == ["onload a", "onload b"]


def test_what_cannot_fit_is_named_with_its_bytes_and_lane() -> None:
    residency = Residency(plan(12, a=(10, 3), b=(10, 0)))
    with pytest.raises(PlanError, match=r"a does not fit on lane 0 with 3 bytes .*got 13.*12"):
        residency.bring(["a"], 0, working=True)
    with pytest.raises(PlanError, match=r"a and b cannot be resident together on lane 0.*got 20"):
        residency.bring(["a", "b"], 0)


def play(engine: Engine, items: int = 1, step: int = 0) -> list[Command]:
    commands = engine.handle(StepSubmitted(step, items))
    while engine.calls:
        commands += finish(engine, next(iter(engine.calls.values())).command)
    return commands


def story(engine: Engine, commands: list[Command]) -> list[str]:
    told = []
    for c in commands:
        if isinstance(c, MoveState):
            told += words([c])
        elif isinstance(c, RunCall):
            told += [engine.graph.nodes[c.node].name]
    return told


CHAIN3 = graph_of(lambda a, b, c, x: c.score(b.score(a.score(x))), "a", "b", "c")


def test_where_there_is_no_room_for_two_they_make_way_for_each_other() -> None:
    engine = Engine(CHAIN3, plan(20, a=(10, 5), b=(10, 5), c=(10, 5)))
    assert story(engine, play(engine)) == [
        "onload a", "a.score",
        "offload a", "onload b", "b.score",
        "offload b", "onload c", "c.score",
    ]  # fmt: skip


def test_who_takes_the_weights_comes_back_after_the_last_call() -> None:
    graph = graph_of(lambda a, b, x: b.log(a.score(x)), "a", "b", publish=[("b", "a")])
    engine = Engine(graph, plan(20, a=(10, 0), b=(10, 10)))
    assert story(engine, play(engine)) == ["onload a", "a.score", "offload a", "onload b",
                                           "b.log", "onload a"]  # fmt: skip
    engine = Engine(graph, plan(22, a=(10, 0), b=(10, 2)))
    assert story(engine, play(engine)) == ["onload a", "a.score", "onload b", "b.log"]


def test_engines_of_one_run_share_what_is_resident() -> None:
    spots = plan(10, a=(10, 0), b=(10, 0), c=(10, 0))
    residency = Residency(spots)
    steps = Engine(CHAIN3, spots, residency=residency)
    assert story(steps, play(steps))[-2:] == ["onload c", "c.score"]
    other = graph_of(lambda c, x: c.score(x), "c")
    evaluation = Engine(other, plan_of({"c": [0]}), residency=residency)
    assert story(evaluation, play(evaluation)) == ["c.score"]
    alone = Engine(other, replace(spots, placements={"c": spots.placements["c"]}))
    assert story(alone, play(alone)) == ["onload c", "c.score"]
