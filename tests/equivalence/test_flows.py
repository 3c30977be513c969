"""The three flows: the eager run is what it should be, and every random plan ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow.plan import LaneSpec, Plan, build_plan, to_json, validate
from m2flow.plan.builders import BUILDERS
from m2flow.plan.file import from_json
from tests.engine.audit import audit
from tests.engine.random_cases import Case
from tests.equivalence.flows import (
    MODULUS,
    WEIGHTS,
    Scenario,
    check_same,
    eager_outcome,
    environment,
    grpo,
    outcome_of,
    toy,
)
from tests.equivalence.random_plans import random_plan, random_plans

LANES = tuple(LaneSpec(n, cores=(n,)) for n in range(3))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scenario]:
    made = [toy(), environment(), grpo(tmp_path_factory.mktemp("model"))]
    return {scenario.name: scenario for scenario in made}


NAMES = ("toy", "environment", "grpo")


@pytest.mark.parametrize("name", NAMES)
def test_the_eager_run_is_deterministic_and_learns(
    name: str, scenarios: dict[str, Scenario]
) -> None:
    scenario = scenarios[name]
    once, again = eager_outcome(scenario), eager_outcome(scenario)
    check_same(again, once, replace(scenario, tolerance=0.0))
    assert once.metrics == again.metrics
    shorter = eager_outcome(replace(scenario, batches=scenario.batches[:1]))
    assert shorter.outputs == once.outputs[:1]
    with pytest.raises(AssertionError, match="state of learner"):
        check_same(shorter, replace(once, outputs=once.outputs[:1]), scenario)


def test_the_toy_flow_written_out(scenarios: dict[str, Scenario]) -> None:
    """The same numbers by plain arithmetic, one sample after the other."""
    outcome = eager_outcome(scenarios["toy"])
    w = list(range(1, WEIGHTS + 1))
    for step, output in enumerate(outcome.outputs):
        y, r = [], []
        for item in range(24):
            x = step * 8 + item // 3 + 1
            y.append((x * w[item % 4] + sum(w) + item) % MODULUS)
            tokens = [k * y[-1] % MODULUS for k in range(1 + y[-1] % 4)]
            score = y[-1] ** 2 + sum(tokens) * (y[-1] % 11) ** 3 + len(f"{x}/{item}")
            r.append(score % MODULUS)
        a = [(3 * r[i] - sum(r[i // 3 * 3 : i // 3 * 3 + 3])) % MODULUS for i in range(24)]
        old = [(one * w[0] + w[1]) % MODULUS for one in a]
        assert output["y"] == y
        assert output["old"] == old
        assert output["version"] == [step] * 24
        for half in (range(12), range(12, 24)):
            sums = [0] * WEIGHTS
            for i in half:
                sums[i % 4] += (old[i] + a[i] * w[2]) % MODULUS * (i + 1) % MODULUS
            w = [(w[k] ** 2 + sums[k] % MODULUS + w[k - 1] + 1) % MODULUS for k in range(4)]
    assert outcome.states[0]["w"].tolist() == w


def test_the_environment_written_out(scenarios: dict[str, Scenario]) -> None:
    """Episode by episode; they have different lengths, so that some leave the loop early."""
    scenario = scenarios["environment"]
    outcome = eager_outcome(scenario)
    assert len({n for output in outcome.outputs for n in output["turn"]}) > 3
    w = list(range(1, WEIGHTS + 1))
    for batch, output in zip(scenario.batches, outcome.outputs, strict=True):
        paths = []
        for seed, length in zip(batch["seed"].tolist(), batch["length"].tolist(), strict=True):
            place, path = seed, seed % 97 + 1
            for turn in range(length):
                move = (place * w[turn % 4] + seed + turn) % 1009
                place, path = (
                    (place * 31 + move) % MODULUS,
                    (path * 17 + place * (move + 1)) % MODULUS,
                )
            paths.append(path)
        assert output["path"] == paths
        assert output["turn"] == batch["length"].tolist()
        for half in (range(4), range(4, 8)):
            sums = [0] * WEIGHTS
            for i in half:
                sums[i % 4] += paths[i] * (i + 1) % MODULUS
            w = [(w[k] ** 2 + sums[k] % MODULUS + w[k - 1] + 1) % MODULUS for k in range(4)]
    assert outcome.states[0]["w"].tolist() == w


@pytest.mark.parametrize("name", NAMES)
def test_random_plans_of_one_process_give_the_same(
    name: str, scenarios: dict[str, Scenario]
) -> None:
    """With one copy of each worker, which is what one process holds: states move between calls."""
    scenario = scenarios[name]
    graph, eager = scenario.make_flow().trace(), eager_outcome(scenario)
    switches, num_plans = 0, 6 if name == "grpo" else 12
    for seed in range(num_plans):
        plan = random_plan(
            graph,
            LANES[: 1 + seed % 3],
            scenario.items_per_step,
            Random(seed),
            state_bytes=scenario.state_bytes,
        )
        single = {
            worker: replace(spot, replicas=spot.replicas[:1])
            for worker, spot in plan.placements.items()
        }
        plan = replace(plan, mode="eager", placements=single)
        there = outcome_of(scenario, plan=plan)
        check_same(there, eager, scenario)
        switches += there.num_switches
    assert switches > 2 * num_plans


def test_older_weights_do_not_go_unnoticed(scenarios: dict[str, Scenario]) -> None:
    """Two steps in flight give another result: equal results do say something."""
    scenario = scenarios["environment"]
    graph = scenario.make_flow().trace()
    plan = build_plan("disaggregated", graph, LANES[:2], scenario.items_per_step)
    plan = replace(plan, mode="eager")
    check_same(outcome_of(scenario, plan=plan), eager_outcome(scenario), scenario)
    ahead = outcome_of(scenario, plan=replace(plan, max_staleness=1))
    with pytest.raises(AssertionError, match="output of step 1"):
        check_same(ahead, eager_outcome(scenario), scenario)


@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_strategy_draws_the_same_kind_of_plan(
    data: st.DataObject, scenarios: dict[str, Scenario]
) -> None:
    scenario = scenarios["toy"]
    graph = scenario.make_flow().trace()
    plan = data.draw(
        random_plans(
            graph,
            LANES,
            scenario.items_per_step,
            state_bytes=scenario.state_bytes,
            working_bytes={"learner": 50},
            gangs_allowed=scenario.gangs_allowed,
            isolated={"judge"},
        )
    )
    validate(plan, graph, scenario.items_per_step, {"judge"})


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**9), count=st.integers(1, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_random_plan_ends(
    name: str, scenarios: dict[str, Scenario], seed: int, count: int
) -> None:
    scenario = scenarios[name]
    graph = scenario.make_flow().trace()
    plan = random_plan(
        graph,
        LANES[:count],
        scenario.items_per_step,
        Random(seed),
        state_bytes=scenario.state_bytes,
        gangs_allowed=scenario.gangs_allowed,
        isolated={"world"} & set(graph.workers) if seed % 3 == 0 else (),
    )
    assert from_json(Plan, to_json(plan), "plan") == plan
    audit(Case(graph, plan, scenario.items_per_step, len(scenario.batches), seed))


def test_plans_are_of_many_kinds(scenarios: dict[str, Scenario]) -> None:
    """Everything that may change under a plan is drawn often."""
    for scenario in scenarios.values():
        graph, seen = scenario.make_flow().trace(), Counter()
        plans = [
            random_plan(
                graph,
                LANES[:2],
                scenario.items_per_step,
                Random(seed),
                state_bytes=scenario.state_bytes,
                gangs_allowed=scenario.gangs_allowed,
            )
            for seed in range(60)
        ]
        for plan in plans:
            seen["switching"] += any(lane.memory_bytes is not None for lane in plan.lanes)
            spots = plan.placements.values()
            seen["gang"] += any(len(gang) > 1 for spot in spots for gang in spot.replicas)
            seen["replicas"] += any(len(spot.replicas) > 1 for spot in spots)
            seen["limit"] += any(edge.max_items for edge in plan.edges.values())
            seen["fed"] += any(stage.max_running for stage in plan.stages.values())
            seen["chunks"] += any(stage.chunk for stage in plan.stages.values())
            seen["order"] += bool(plan.order)
        assert len({to_json(plan) for plan in plans}) > 55
        fed = any(node.streaming for node in graph.nodes)
        for kind in ("switching", "gang", "replicas", "limit", "chunks", "order"):
            assert seen[kind] > 10, (scenario.name, kind, seen)
        assert (seen["fed"] > 10) == fed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", sorted(BUILDERS))
def test_every_mode_carries_the_flows_out(
    name: str, mode: str, scenarios: dict[str, Scenario]
) -> None:
    scenario = scenarios[name]
    graph = scenario.make_flow().trace()
    plan = build_plan(mode, graph, LANES, scenario.items_per_step)
    audit(Case(graph, plan, scenario.items_per_step, len(scenario.batches), 5))
