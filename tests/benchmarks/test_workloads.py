"""The workloads that the planner is measured on are what they say."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.plan import build_plan, parse_lanes, validate
from m2flow.plan.lanes import LaneSpec
from m2flow.runtime.driver.launch import launch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def workloads() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import workloads

        yield workloads
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_lengths_are_log_normal_and_belong_to_the_seed(workloads: Any) -> None:
    lengths = workloads.Lengths(median=20, spread=1.0, limit=10**9)
    drawn = [lengths.of(seed) for seed in range(4000)]
    assert drawn == [lengths.of(seed) for seed in range(4000)]
    assert statistics.median(drawn) == pytest.approx(20, rel=0.1)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(1.0, abs=0.1)
    assert max(workloads.Lengths(20, 1.0, 240).of(seed) for seed in range(4000)) == 240


def test_the_simulator_keeps_energy_where_nobody_pushes(workloads: Any) -> None:
    """A pole that falls freely on a cart without friction: kinetic plus potential is constant."""

    def energy(state: torch.Tensor) -> float:
        _, speed, angle, rate = state[:, 0].tolist()
        half, pole, cart = workloads.LENGTH, workloads.POLE, workloads.CART
        along = speed + half * rate * math.cos(angle)
        up = half * rate * math.sin(angle)
        turning = pole * half**2 * rate**2 / 6  # inertia of a rod of length 2 half: m half^2 / 3
        kinetic = cart * speed**2 / 2 + pole * (along**2 + up**2) / 2 + turning
        return kinetic + pole * workloads.GRAVITY * half * math.cos(angle)

    state = torch.tensor([[0.0], [0.3], [0.1], [-0.2]], dtype=torch.float64)
    before = energy(state)
    for _ in range(45):
        state = workloads.simulate_turn(state, torch.zeros(1))
    assert abs(state[2]) > 0.2, "it has fallen a good way"
    assert energy(state) == pytest.approx(before, rel=1e-6)


def test_a_push_to_the_right_tilts_the_pole_to_the_left(workloads: Any) -> None:
    still = torch.zeros(4, 1, dtype=torch.float64)
    place, speed, angle, rate = workloads.simulate_turn(still, torch.tensor([workloads.FORCE]))
    assert place > 0
    assert speed > 0
    assert angle < 0
    assert rate < 0


def test_poles_move_as_if_each_were_alone(workloads: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.rand(4, 7, dtype=torch.float64, generator=generator) / 5
    force = torch.tensor([1.0, -1.0] * 4)[:7] * workloads.FORCE
    together = workloads.simulate_turn(states, force)
    for n in range(7):
        alone = workloads.simulate_turn(states[:, n : n + 1], force[n : n + 1])
        torch.testing.assert_close(together[:, n : n + 1], alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_every_mode_has_a_plan_of_the_loop(workloads: Any, mode: str) -> None:
    workload = workloads.cart_pole()
    graph = workload.make_flow().trace()
    lanes = (LaneSpec(0), LaneSpec(1))
    validate(build_plan(mode, graph, lanes, workload.items), graph, workload.items)
    assert len(workload.batch(0)) == workload.items


def test_poles_are_balanced_and_that_is_learnt_from(
    workloads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "SUBSTEPS", 1)
    monkeypatch.setattr(workloads, "EPISODES", 16)
    threads = torch.get_num_threads()
    workload = workloads.cart_pole()
    try:
        with launch(
            workload.make_flow(), items_per_step=16, lanes=parse_lanes("cpu:1"), num_threads=1
        ) as run:
            results = list(run.steps(workload.batch(step) for step in range(2)))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        rewards = result.output["reward"]
        assert len(rewards) == 16
        assert all(1 <= turns <= workloads.MAX_TURNS for turns in rewards)
        assert len(set(rewards)) > 3, "episodes end when they end"
    assert [result.version for result in results] == [1, 2]
