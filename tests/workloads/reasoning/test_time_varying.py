"""The promise under a switch point: answers change lanes half drawn, and nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from m2flow.engine.plan import Plan
from m2flow.flow.worker import Layout
from m2flow.plan import LaneSpec, build_plan
from m2flow.plan.switching import with_switch_points
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import grpo_flow
from m2flow.workloads.reasoning.workers import ModelSource
from tests.runtime.local_cluster import local_cluster

STEPS = 2
PAIRS = {"generator": Layout("tp2", 2), "learner": Layout("fsdp2", 2)}
RECIPE: dict[str, Any] = {
    "steps": STEPS,
    "prompts_per_step": 8,
    "samples_per_prompt": 4,
    "minibatches": 2,
    "model": {
        "dtype": "float64",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
    },
    "data": {"options": {"min_digits": 1, "max_digits": 1}},
    "warmup": {"steps": 40},
    "training": {"tokens_per_microbatch": 256},
    "generation": {"max_new_tokens": 200, "temperature": 1.6},
}
"""So hot that some answers run on and on, while most end after a handful of tokens."""


class Parity:
    """Rewards texts of odd length: half of them, however long they are."""

    def score(self, answer: str, completion: str, **_: Any) -> float:
        return float(len(completion) % 2)


@pytest.fixture(scope="module")
def lanes() -> Iterator[LanePool]:
    """Four lanes for all runs of this file, in a cluster of their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import the tests
    try:
        with local_cluster(4), LanePool(tuple(map(LaneSpec, range(4)))) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def experiment() -> ReasoningExperiment:
    return ReasoningExperiment(ReasoningRecipe.model_validate(RECIPE))


@pytest.fixture(scope="module")
def model(experiment: ReasoningExperiment, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return experiment.prepare(tmp_path_factory.mktemp("warm-up"))


@dataclass(frozen=True)
class Outcome:
    """What a run leaves, how many samples changed lanes half drawn, and how many calls were fed."""

    rewards: list[list[float]]
    texts: list[list[str]]
    lengths: list[list[int]]
    replicas: list[dict[str, Tensor]]
    given_back: int
    fed: int


def outcome_of(experiment: ReasoningExperiment, model: ModelSource, **how: Any) -> Outcome:
    recipe = experiment.recipe
    flow = grpo_flow(recipe, model, Parity())
    batches = [experiment.batch(step, model) for step in range(STEPS)]
    with launch(flow, items_per_step=recipe.prompts_per_step, num_threads=1, **how) as run:
        results = list(run.steps(batches))
        replicas = run.worker_call_everywhere("learner", "parameters")
    spans = [span for result in results for span in result.spans]
    return Outcome(
        rewards=[result.output["reward"] for result in results],
        texts=[result.output["text"] for result in results],
        lengths=[result.output["num_tokens"] for result in results],
        replicas=replicas,
        given_back=sum(
            int(str(span.args["items"])) for span in spans if span.name.startswith("give back")
        ),
        fed=sum(len(span.args.get("taken", [])) > 1 for span in spans),
    )


@pytest.fixture(scope="module")
def eager(experiment: ReasoningExperiment, model: ModelSource) -> Outcome:
    return outcome_of(experiment, model, mode="eager", lanes="cpu:1")


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to the tensor's largest entry."""
    assert some.keys() == others.keys()
    return max(
        float((tensor - others[name]).abs().max() / others[name].abs().max())
        for name, tensor in some.items()
    )


def plans(experiment: ReasoningExperiment, model: ModelSource) -> dict[str, Plan]:
    recipe = experiment.recipe
    graph = grpo_flow(recipe, model, Parity()).trace()
    items = recipe.prompts_per_step
    collocated = build_plan("collocated", graph, [LaneSpec(0), LaneSpec(1)], items)
    shares = (0.5, 0.85)
    early, late = with_switch_points(collocated, graph, shares, num_items=items, pieces=(4,))
    four = list(map(LaneSpec, range(4)))
    pairs = build_plan("collocated", graph, four, items, layouts=PAIRS)
    (gangs,) = with_switch_points(pairs, graph, (0.5,), num_items=items, pieces=(4,))
    generate = replace(gangs.stages["generator.generate"], max_running=3)
    fed = replace(gangs, stages={**gangs.stages, "generator.generate": generate})
    return {"early": early, "late": late, "gangs": gangs, "gangs that are fed": fed}


def test_lengths_have_a_long_tail(eager: Outcome) -> None:
    """Else there is nothing to hand over."""
    for lengths, rewards in zip(eager.lengths, eager.rewards, strict=True):
        assert max(lengths) >= 3 * sorted(lengths)[len(lengths) // 2]
        assert 0 < sum(rewards) < len(rewards)


@pytest.mark.parametrize("which", ["early", "late", "gangs", "gangs that are fed"])
def test_a_switch_point_changes_nothing(
    which: str,
    lanes: LanePool,
    eager: Outcome,
    experiment: ReasoningExperiment,
    model: ModelSource,
) -> None:
    there = outcome_of(experiment, model, plan=plans(experiment, model)[which], lanes=lanes)
    assert there.given_back > 0
    assert (there.fed > 0) == (which == "gangs that are fed")
    assert there.texts == eager.texts
    assert there.rewards == eager.rewards
    assert there.lengths == eager.lengths
    for weights in there.replicas:
        assert distance(weights, eager.replicas[0]) < 1e-9
