"""Events that come twice, late, in any order, from lanes that are lost: thousands of schedules.

Each schedule is drawn from a seed. What must hold stands in `chaos.py`: every item is done exactly
once, every payload is read from a lane that holds it, and the step ends with all of its output.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow.engine.directory import ANYWHERE, Homes
from m2flow.engine.ledger import StageLedger
from m2flow.flow import SOURCE, loop
from m2flow.flow.graph import StageNode
from tests.engine.chaos import ANYTHING, SCHEDULES, Toy, Wishes, without_memory
from tests.engine.random_cases import Case, cases
from tests.engine.toy_flows import graph_of, plan_of

ordinary = settings(
    deadline=None, suppress_health_check=tuple(HealthCheck), report_multiple_bugs=False
)


@given(cases(), st.integers(0, 2**32))
@settings(ordinary, max_examples=300)
def test_events_in_any_order_twice_and_late_change_nothing(case: Case, seed: int) -> None:
    wishes = Wishes(twice=0.4, late=0.1)
    assert Toy(without_memory(case), wishes, seed).run() is None


@given(cases(), st.integers(0, 2**32))
@settings(ordinary, max_examples=300)
def test_a_step_ends_right_although_lanes_are_lost(case: Case, seed: int) -> None:
    wishes = Wishes(twice=0.2, late=0.1, lose=0.03)
    Toy(without_memory(case), wishes, seed).run()


@given(cases(), st.integers(0, 2**32))
@settings(ordinary, max_examples=300)
def test_a_run_ends_right_whoever_is_lost(case: Case, seed: int) -> None:
    """Machines, lines that are half open, slow lanes, and the launcher with some rollouts."""
    Toy(without_memory(case), ANYTHING, seed).run()


@pytest.mark.parametrize("seed", range(30))
def test_weights_of_a_step_that_overtakes_another_one_wait_for_it(seed: int) -> None:
    """Version 2 was installed, and then version 1: with a source in a loop that runs ahead."""
    graph = graph_of(
        lambda a, b, c, x: b.score(loop(c.score, a.score, until="done")(x)),
        *("a", "b", "c"),
        publish=[("a", "b")],
    )
    plan = plan_of({"a": [0], "b": [0], "c": [1]}, max_staleness=1, fuse_loops=False)
    assert Toy(Case(graph, plan, 1, 3, seed), Wishes(), seed).run() is None


def test_a_skipped_unit_that_is_done_again_waits_for_what_is_gone_alone() -> None:
    """Recalled rollouts that were folded in on a lane that is lost, whose maker reads two stages.

    What arrives for a unit that need not be done was not noted: done again, it waited for ever.
    """
    node = StageNode(
        *(2, "actor.act", "actor", "act", (SOURCE, 1), "item", False, False, False, False),
        *(1, 1, 1, 1, None, {}),
    )
    ledger = StageLedger(node, 1, lambda _: ANYWHERE, Homes({}, [1]))
    ledger.skip([0])
    for stream in node.inputs:
        assert not ledger.arrive(stream, [0])
    ledger.reopen(0)
    assert ledger.ready() == 1, "both are there"
    ledger.depart(1, [0])
    assert ledger.ready() == 0
    assert ledger.arrive(1, [0])
    assert ledger.ready() == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(cases(max_calls=9, max_steps=4), st.integers(0, 2**32), st.sampled_from(SCHEDULES))
@settings(ordinary, max_examples=5_000)
def test_many_schedules_end_right(case: Case, seed: int, wishes: Wishes) -> None:
    Toy(without_memory(case), wishes, seed).run()
