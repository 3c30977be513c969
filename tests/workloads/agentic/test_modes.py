"""The promise: for a given seed every mode makes the same trajectories and the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m2flow.errors import UserError
from m2flow.flow.worker import Gang, Place
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.reasoning.workers import ModelSource

MakeRecipe = Any
STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def experiment(tiny_recipe: MakeRecipe, warmed: ModelSource) -> AgenticExperiment:
    recipe = tiny_recipe(
        model={"dtype": "float64"},
        turn_reward=[{"function": f"{__name__}:short", "weight": 0.1}],
        episode={"credit": "turn"},
    )
    return AgenticExperiment(recipe, ModelSource(warmed.path, "float64"))


def short(prompt: str, completion: str, completion_ids: Any, row: Any) -> float:
    """Of turns: those of few tokens are worth more."""
    return 1.0 / (1 + len(completion_ids)) - float(row["errors"])


Outcome = tuple[list[list[str]], list[list[float]], dict[str, Tensor]]


def outcome_of(
    experiment: AgenticExperiment, mode: str, lanes: str | LanePool = "cpu:2"
) -> Outcome:
    batches = [experiment.batch(step) for step in range(STEPS)]
    with launch(experiment.flow(), items_per_step=4, mode=mode, lanes=lanes, num_threads=1) as run:
        results = list(run.steps(batches))
        weights = run.worker_call_everywhere("learner", "parameters")[0]
    return (
        [result.output["text"] for result in results],
        [result.output["advantage"] for result in results],
        weights,
    )


@pytest.fixture(scope="module")
def eager(experiment: AgenticExperiment) -> Outcome:
    return outcome_of(experiment, "eager")


def test_a_gang_is_refused_before_the_engine_is_made(experiment: AgenticExperiment) -> None:
    """Each lane drew its part of every token, of items that only one of the lanes had."""
    generator = experiment.flow().generator
    with pytest.raises(UserError, match=r"TurnGenerator: has no layout of 2 lanes; .*of 1 lane$"):
        generator.load(Place(gang=Gang(rank=1, size=2)))
    assert not hasattr(generator, "engine")


def test_the_eager_run_uses_tools_and_learns(eager: Outcome, warmed: ModelSource) -> None:
    from m2flow.models.causal_lm import load_model

    texts, advantages, weights = eager
    assert any("{" in text for text in texts[0])
    assert any(any(step) for step in advantages)
    before = load_model(Path(warmed.path), torch.float64).state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_mode_changes_nothing(
    mode: str, experiment: AgenticExperiment, eager: Outcome, two_lanes: LanePool
) -> None:
    texts, advantages, weights = outcome_of(experiment, mode, two_lanes)
    assert texts == eager[0]
    for found, wanted in zip(advantages, eager[1], strict=True):
        assert found == pytest.approx(wanted, abs=1e-9)
    for name, tensor in weights.items():
        assert float((tensor - eager[2][name]).abs().max()) < 1e-9, name
