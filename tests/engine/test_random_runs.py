"""Random flows under random plans, with random costs and orders of completion, audited.

What is checked stands in `audit.py`; `random_cases.py` says what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from m2flow.simulation.driver import Simulation
from tests.engine.audit import audit, simulate
from tests.engine.random_cases import Case, cases

QUIET = tuple(HealthCheck)
ordinary = settings(deadline=None, suppress_health_check=QUIET, report_multiple_bugs=False)


@given(cases())
@settings(ordinary, max_examples=300)
def test_a_random_run_keeps_every_promise(case: Case) -> None:
    audit(case)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(cases(max_calls=10, max_steps=6))
@settings(ordinary, max_examples=5_000)
def test_many_random_runs_keep_every_promise(case: Case) -> None:
    audit(case)


@given(cases())
@settings(ordinary, max_examples=60)
def test_the_same_seed_gives_the_same_commands(case: Case) -> None:
    assert simulate(case)[2] == simulate(case)[2]


@given(cases(max_steps=2))
@settings(ordinary, max_examples=60)
def test_events_alone_decide(case: Case) -> None:
    """A fresh engine that is told the same events gives the same commands: runs can be replayed."""
    log = simulate(case)[2]
    engine = Simulation(case.graph, case.plan, case.costs()).engine
    for events, commands in log:
        assert engine.handle(*events) == commands


def footprint(thing: Any, apart_from: Iterable[Any]) -> int:
    """How many entries all containers hold that can be reached from here."""
    seen = {id(other) for other in apart_from}
    pending, entries = [thing], 0
    while pending:
        here = pending.pop()
        if id(here) in seen or isinstance(here, str | bytes | int | float | None.__class__ | type):
            continue
        seen.add(id(here))
        if isinstance(here, dict):
            inner = [*here.keys(), *here.values()]
        elif isinstance(here, list | tuple | set | frozenset) or type(here).__name__ == "deque":
            inner = list(here)
        else:
            names = [n for c in type(here).__mro__ for n in getattr(c, "__slots__", ())]
            inner = [getattr(here, name) for name in names if hasattr(here, name)]
            inner += list(vars(here).values()) if hasattr(here, "__dict__") else []
            inner = [value for value in inner if not callable(value)]
        entries += len(inner)
        pending += inner
    return entries


@given(cases(max_steps=1))
@settings(ordinary, max_examples=30)
def test_an_engine_does_not_grow_with_the_steps(case: Case) -> None:
    sizes = []
    for steps in (2, 8, 14):
        case.num_steps = steps
        engine = simulate(case)[0].engine
        assert not engine.steps
        assert not engine.calls
        sizes.append(footprint(engine, [case.graph, case.plan, *case.graph.nodes]))
    # What the last event left to be sent, and sizes that were learnt, may differ by a little.
    assert sizes[2] <= sizes[0] + 60
    assert sizes[2] <= sizes[1] + 60
