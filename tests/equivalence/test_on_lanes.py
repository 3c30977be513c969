"""The promise, on real lanes: whatever the plan, the result is that of the eager run.

Each flow is carried out under random plans on three lanes that stay up: other placements,
replicas, gangs, chunks, orders, limits of edges, fused and open loops, and limits of memory under
which states have to make way for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from m2flow.plan import LaneSpec
from m2flow.runtime.driver.pool import LanePool
from tests.equivalence import flows
from tests.equivalence.flows import (
    Scenario,
    check_same,
    eager_outcome,
    environment,
    grpo,
    outcome_of,
    toy,
)
from tests.equivalence.random_plans import random_plan

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(flows)  # lanes cannot import the tests

LANES = tuple(LaneSpec(number) for number in range(3))
PLANS = [12, pytest.param(50, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    """Lanes in a cluster of their own, for all the runs."""
    with LanePool(LANES) as lanes:
        yield lanes


@pytest.mark.parametrize("plans", PLANS)
@pytest.mark.parametrize("make", [toy, environment, grpo], ids=lambda make: make.__name__)
def test_random_plans_give_the_eager_result(
    make: object, plans: int, pool: LanePool, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    scenario: Scenario = grpo(tmp_path) if make is grpo else make()  # type: ignore[operator]
    eager = eager_outcome(scenario)
    torch.set_num_threads(threads)
    graph = scenario.make_flow().trace()
    switching = gangs = split = 0
    for seed in range(plans):
        plan = random_plan(
            graph,
            LANES,
            scenario.items_per_step,
            Random(seed),
            state_bytes=scenario.state_bytes,
            gangs_allowed=scenario.gangs_allowed,
        )
        there = outcome_of(scenario, plan=plan, lanes=pool)
        try:
            check_same(there, eager, scenario)
        except AssertionError as error:
            raise AssertionError(f"under the plan of seed {seed}: {error}\n{plan}") from error
        switching += there.num_switches > 0
        placements = plan.placements.values()
        gangs += any(len(gang) > 1 for spot in placements for gang in spot.replicas)
        split += any(len(spot.replicas) > 1 for spot in placements)
    assert min(switching, gangs, split) >= plans // 10, "the plans are too much alike"
