"""The workloads that the planner is measured on are what they say."""

from __future__ import annotations

import ast
import hashlib
import importlib
import math
import statistics
from typing import Any

import pytest
import torch

from m2flow.plan import build_plan, parse_lanes, validate
from m2flow.plan.lanes import LaneSpec
from m2flow.runtime.driver.launch import launch
from tests.benchmarks.conftest import BENCHMARKS


@pytest.fixture(scope="module")
def common(_benchmarks: None) -> Any:
    return importlib.import_module("workloads.common")


@pytest.fixture(scope="module")
def poles(_benchmarks: None) -> Any:
    return importlib.import_module("workloads.poles")


def test_lengths_are_log_normal_and_belong_to_the_seed(common: Any) -> None:
    lengths = common.Lengths(median=20, spread=1.0, limit=10**9)
    drawn = [lengths.of(seed) for seed in range(4000)]
    assert drawn == [lengths.of(seed) for seed in range(4000)]
    assert statistics.median(drawn) == pytest.approx(20, rel=0.1)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(1.0, abs=0.1)
    assert max(common.Lengths(20, 1.0, 240).of(seed) for seed in range(4000)) == 240


def test_the_simulator_keeps_energy_where_nobody_pushes(poles: Any) -> None:
    """A pole that falls freely on a cart without friction: kinetic plus potential is constant."""

    def energy(state: torch.Tensor) -> float:
        _, speed, angle, rate = state[:, 0].tolist()
        half, pole, cart = poles.LENGTH, poles.POLE, poles.CART
        along = speed + half * rate * math.cos(angle)
        up = half * rate * math.sin(angle)
        turning = pole * half**2 * rate**2 / 6  # inertia of a rod of length 2 half: m half^2 / 3
        kinetic = cart * speed**2 / 2 + pole * (along**2 + up**2) / 2 + turning
        return kinetic + pole * poles.GRAVITY * half * math.cos(angle)

    state = torch.tensor([[0.0], [0.3], [0.1], [-0.2]], dtype=torch.float64)
    before = energy(state)
    for _ in range(45):
        state = poles.simulate_turn(state, torch.zeros(1))
    assert abs(state[2]) > 0.2, "it has fallen a good way"
    assert energy(state) == pytest.approx(before, rel=1e-6)


def test_a_push_to_the_right_tilts_the_pole_to_the_left(poles: Any) -> None:
    still = torch.zeros(4, 1, dtype=torch.float64)
    place, speed, angle, rate = poles.simulate_turn(still, torch.tensor([poles.FORCE]))
    assert place > 0
    assert speed > 0
    assert angle < 0
    assert rate < 0


def test_poles_move_as_if_each_were_alone(poles: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.rand(4, 7, dtype=torch.float64, generator=generator) / 5
    force = torch.tensor([1.0, -1.0] * 4)[:7] * poles.FORCE
    together = poles.simulate_turn(states, force)
    for n in range(7):
        alone = poles.simulate_turn(states[:, n : n + 1], force[n : n + 1])
        torch.testing.assert_close(together[:, n : n + 1], alone, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_every_mode_has_a_plan_of_the_loop(poles: Any, mode: str) -> None:
    workload = poles.cart_pole()
    graph = workload.make_flow().trace()
    lanes = (LaneSpec(0), LaneSpec(1))
    validate(build_plan(mode, graph, lanes, workload.items), graph, workload.items)
    assert len(workload.batch(0)) == workload.items


def test_poles_are_balanced_and_that_is_learnt_from(
    poles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poles, "SUBSTEPS", 1)
    monkeypatch.setattr(poles, "EPISODES", 16)
    threads = torch.get_num_threads()
    workload = poles.cart_pole()
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
        assert all(1 <= turns <= poles.MAX_TURNS for turns in rewards)
        assert len(set(rewards)) > 3, "episodes end when they end"
    assert [result.version for result in results] == [1, 2]


def test_the_first_poles_fall_as_the_later_ones_do(poles: Any) -> None:
    first = importlib.import_module("workloads.first_poles")
    state = [0.1, -0.2, 0.05, 0.3]
    together = poles.simulate_turn(
        torch.tensor([state], dtype=torch.float64).T, torch.tensor([poles.FORCE])
    )
    assert first.simulate_turn(state, first.FORCE) == pytest.approx(together[:, 0].tolist())


DIGESTS = {
    "frozen": "9de9585f122b34ab",
    "poles": "e0d9db358102f063",
    "first": "eb072a2f51877281",
    "first_poles": "75275421dffd0275",
}
"""Of each frozen file, less its imports and docstrings."""


@pytest.mark.parametrize("name", DIGESTS)
def test_frozen_workloads_are_as_they_were(name: str) -> None:
    """A workload that the planner is measured on is not changed to suit it. What only follows a
    renamed class may get a new digest; any other change needs a decision record with the figures
    before and after."""
    tree = ast.parse((BENCHMARKS / "workloads" / f"{name}.py").read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_words(one)]  # type: ignore[attr-defined]
    digest = hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]
    assert digest == DIGESTS[name]


def _is_words(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("module", ["frozen", "first"])
def test_a_reward_model_can_be_loaded(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It derives from a worker of the package, which may change."""
    from m2flow.flow import Place
    from m2flow.models.tokenizer import byte_tokenizer
    from m2flow.workloads.reasoning.workers import ModelSource

    monkeypatch.setattr(ModelSource, "tokenizer", lambda _: byte_tokenizer())
    judge = importlib.import_module(f"workloads.{module}").Judge(ModelSource("nowhere"))
    judge.load(Place())
    assert judge.judge.config.num_labels == 1
