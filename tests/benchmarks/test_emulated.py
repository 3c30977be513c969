"""Emulated stages wait what their prices say, and the plans beside the modes are valid."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest

from m2flow.plan import validate
from m2flow.plan.profile.streaming import finish_times

STEPS = ("grpo_7b", "ppo_7b", "openvla")


@pytest.fixture(scope="module")
def steps(_benchmarks: None) -> Any:
    return importlib.import_module("emulated_steps").STEPS


def _to_the_end(rounds: Any) -> list[int]:
    finished: list[int] = []
    while rounds.busy:
        finished += rounds.play(rounds.next_end())
    return finished


def test_rounds_take_as_long_as_a_generation_that_is_played() -> None:
    workers = importlib.import_module("emulated_workers")
    price = workers.Price(0.005, 0.001)
    tokens = [random.Random(0).randint(1, 500) for _ in range(40)]
    rounds = workers._Rounds(price, 0.0, 16, now=100.0)
    rounds.take(list(enumerate(tokens)), 40)
    finished = _to_the_end(rounds)
    ends = finish_times(tokens, lambda running, _: price.seconds(running), 16)
    assert rounds.now - 100.0 == pytest.approx(max(ends))
    assert sorted(finished) == list(range(40))


def test_what_comes_while_a_round_runs_is_taken_in_after_it() -> None:
    workers = importlib.import_module("emulated_workers")
    rounds = workers._Rounds(workers.Price(1.0, 0.0), 0.5, 4, now=0.0)
    rounds.take([(0, 10)], 1)
    assert rounds.now == 0.5
    assert rounds.play(2.7) == []
    assert rounds.now == 3.5
    rounds.take([(1, 2)], 1)
    assert rounds.next_end() == 3.5 + 0.5 + 2
    assert rounds.play(6.0) == [1]
    assert _to_the_end(rounds) == [0]
    assert rounds.now == 0.5 + 10 + 0.5


@pytest.mark.parametrize("name", STEPS)
def test_plans_beside_the_modes_are_valid_and_enough(steps: Any, name: str) -> None:
    plans, emulated = importlib.import_module("emulated_plans"), importlib.import_module("emulated")
    step = steps[name](16, 1.0)
    found = plans.by_hand(step.graph, step.lanes, step.items)
    missing = max(emulated.RANDOM, emulated.OTHERS - len(found))
    found |= plans.at_random(step.graph, step.lanes, step.items, missing)
    assert len(found) >= emulated.OTHERS
    for plan in found.values():
        validate(plan, step.graph, step.items)


@pytest.mark.parametrize("name", STEPS)
def test_the_profile_knows_every_stage_and_worker(steps: Any, name: str) -> None:
    step = steps[name](16, 1.0)
    assert {node.name for node in step.graph.nodes} == set(step.profile.stages)
    assert set(step.profile.workers) <= set(step.graph.workers)
    assert len(step.batch(0)) == step.items
