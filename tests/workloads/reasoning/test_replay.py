"""GRPO on two real lanes, replayed under the plan that it ran under."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest
from tests.reasoning.conftest import MakeRecipe

from m2flow.engine.plan import LaneSpec
from m2flow.plan.measured import Observed
from m2flow.plan.replay import replay_steps
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import grpo_flow
from m2flow.workloads.reasoning.workers import ModelSource
from tests.runtime.local_cluster import local_cluster

PROMPTS, STEPS, WARM_UP = 128, 9, 2
"""Steps of a few hundred milliseconds: what passes between the lanes' spans is little of them."""

WITHIN = 0.05


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with local_cluster(2), LanePool((LaneSpec(0), LaneSpec(1))) as two:
        yield two


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_step_takes_what_it_took(
    pool: LanePool, tiny_recipe: MakeRecipe, warmed: ModelSource, mode: str
) -> None:
    recipe = tiny_recipe(
        prompts_per_step=PROMPTS, samples_per_prompt=8, generation={"max_new_tokens": 24}
    )
    experiment = ReasoningExperiment(recipe)
    flow = grpo_flow(recipe, warmed, experiment.task)
    with launch(flow, items_per_step=PROMPTS, mode=mode, lanes=pool) as run:
        batches = [experiment.batch(step, warmed) for step in range(STEPS)]
        results = list(run.steps(batches))[WARM_UP:]
        graph, plan = run.graph, run.plan
    observed = Observed.of(plan, PROMPTS, results, warm=True)
    prediction, seconds = replay_steps(graph, observed, plan)
    ratios = [mine / one.seconds for mine, one in zip(seconds, results, strict=True)]
    assert statistics.median(ratios) == pytest.approx(1.0, rel=WITHIN)
    assert prediction.stages["generator.generate"] > 0
