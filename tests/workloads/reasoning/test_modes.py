"""The promise: for a given seed every mode draws the same samples and trains the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from m2flow.flow.worker import Layout
from m2flow.models.causal_lm import load_model
from m2flow.plan import build_plan
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.workers import ModelSource

STEPS = 3
GANGS = {"generator": Layout("tp2", 2), "learner": Layout("fsdp2", 2)}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def experiment_of(algorithm: str) -> ReasoningExperiment:
    """Sums of two digits, by a model that has seen them for long enough to get some right."""
    return ReasoningExperiment(
        ReasoningRecipe.model_validate(
            {
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
                },
                "data": {"options": {"min_digits": 1, "max_digits": 1}},
                "warmup": {"steps": 200},
                "training": {"tokens_per_microbatch": 128},
                "algorithm": {"name": algorithm},
            }
        )
    )


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: rewards of each step's samples, and the weights of every replica."""

    rewards: list[list[float]]
    texts: list[list[str]]
    staleness: list[float | None]
    replicas: list[dict[str, Tensor]]
    critics: list[dict[str, Tensor]]


def outcome_of(
    experiment: ReasoningExperiment,
    model: ModelSource,
    mode: str,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    lanes: str | LanePool = "cpu:2",
) -> Outcome:
    recipe = experiment.recipe
    flow = recipe_flow(recipe, model, experiment.rewards)
    batches = [experiment.batch(step) for step in range(STEPS)]
    with launch(
        flow,
        items_per_step=recipe.prompts_per_step,
        mode=mode,
        lanes=lanes,
        num_threads=1,
        layouts=layouts,
    ) as run:
        results = list(run.steps(batches))
        replicas = run.worker_call_everywhere("learner", "parameters")
        critics = []
        if "critic" in flow.workers:
            critics = run.worker_call_everywhere("critic", "parameters")
    return Outcome(
        rewards=[result.output["reward"] for result in results],
        texts=[result.output["text"] for result in results],
        staleness=[result.staleness for result in results],
        replicas=replicas,
        critics=critics,
    )


Scene = tuple[ReasoningExperiment, ModelSource, Outcome]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    """By algorithm the experiment, the model it starts from and its eager outcome, made once."""

    @cache
    def scene(algorithm: str) -> Scene:
        experiment = experiment_of(algorithm)
        model = experiment.prepare(tmp_path_factory.mktemp("warm-up"))
        return experiment, model, outcome_of(experiment, model, "eager")

    return scene


@pytest.fixture(params=["grpo", "ppo"])
def scene(request: pytest.FixtureRequest, scenes: Callable[[str], Scene]) -> Scene:
    return scenes(request.param)


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to the tensor's largest entry."""
    assert some.keys() == others.keys()
    return max(
        float((tensor - others[name]).abs().max() / others[name].abs().max())
        for name, tensor in some.items()
    )


def test_eager_run_has_something_to_learn_from(scene: Scene) -> None:
    """Else equal weights would say nothing."""
    _, model, eager = scene
    for rewards in eager.rewards:
        assert 0 < sum(rewards) < len(rewards)
    before = load_model(Path(model.path), torch.float64).state_dict()
    assert distance(eager.replicas[0], before) > 1e-3


@pytest.mark.parametrize(
    ("scene", "mode", "num_replicas", "layouts"),
    [
        ("grpo", "collocated", 2, {}),
        ("grpo", "disaggregated", 1, {}),
        ("grpo", "hybrid", 2, {}),
        ("grpo", "collocated", 2, {"generator": Layout("tp2", 2)}),
        ("grpo", "collocated", 2, GANGS),
        ("grpo", "collocated", 2, {"learner": Layout("tp2", 2)}),
        ("grpo", "collocated", 2, {"learner": Layout("cp2", 2)}),
        ("ppo", "collocated", 2, {}),
        ("ppo", "disaggregated", 1, {}),
        ("ppo", "hybrid", 2, {}),
        ("ppo", "collocated", 2, {"generator": Layout("tp2", 2)}),
        ("ppo", "collocated", 2, GANGS),
        ("ppo", "collocated", 2, {"learner": Layout("tp2", 2)}),
        ("ppo", "collocated", 2, {"learner": Layout("cp2", 2)}),
    ],
    indirect=["scene"],
)
def test_mode_changes_nothing(
    mode: str,
    num_replicas: int,
    layouts: dict[str, Layout],
    scene: Scene,
    two_lanes: LanePool,
) -> None:
    experiment, model, eager = scene
    there = outcome_of(experiment, model, mode, layouts, two_lanes)
    assert there.texts == eager.texts
    assert there.rewards == eager.rewards
    assert there.staleness == [0.0] * STEPS
    assert len(there.replicas) == num_replicas
    for found, expected in ((there.replicas, eager.replicas), (there.critics, eager.critics)):
        assert len(found) == num_replicas * len(expected)
        for weights in found:
            assert distance(weights, expected[0]) < 1e-9
            assert all(torch.equal(weights[name], found[0][name]) for name in weights)


def test_minibatches_by_arrival_are_of_the_same_samples(scene: Scene, two_lanes: LanePool) -> None:
    """Of those of a step; from the second one on other weights draw them."""
    experiment, model, eager = scene
    other = experiment.recipe.model_copy(update={"minibatch_order": "arrival"})
    there = copy(experiment)
    there.recipe = other
    graph = recipe_flow(other, model, experiment.rewards).trace()
    trains = [node for node in graph.nodes if node.accumulates]
    assert [node.by_arrival for node in trains] == [True] * (1 + len(eager.critics))
    found = outcome_of(there, model, "disaggregated", lanes=two_lanes)
    assert found.texts[0] == eager.texts[0]
    assert [len(texts) for texts in found.texts] == [len(texts) for texts in eager.texts]
    before = load_model(Path(model.path), torch.float64).state_dict()
    assert distance(found.replicas[0], before) > 1e-3


@pytest.mark.parametrize("scene", ["grpo", "ppo"], indirect=True)
def test_a_run_goes_over_to_gangs_and_back(scene: Scene, two_lanes: LanePool) -> None:
    experiment, model, eager = scene
    recipe = experiment.recipe
    flow = recipe_flow(recipe, model, experiment.rewards)
    graph, lanes, items = flow.trace(), two_lanes.lanes, recipe.prompts_per_step
    single = build_plan("collocated", graph, lanes, items)
    gangs = build_plan("collocated", graph, lanes, items, layouts=GANGS)
    other = GANGS | {"learner": Layout("tp2", 2)}
    divided = build_plan("collocated", graph, lanes, items, layouts=other)
    texts = []
    with launch(flow, items_per_step=items, plan=single, lanes=two_lanes, num_threads=1) as run:
        for step, plan in enumerate((single, gangs, single)):
            if step:
                assert {"generator", "learner"} <= set(run.replan(plan).moved)
            texts.append(run.step(experiment.batch(step)).output["text"])
            if plan is gangs:
                assert run.replan(divided).moved == ("learner",), "on the lanes where it stands"
        replicas = run.worker_call_everywhere("learner", "parameters")
    assert texts == eager.texts
    for weights in replicas:
        assert distance(weights, eager.replicas[0]) < 1e-9


def test_a_mixture_divided_by_its_experts_trains_the_same_weights(
    tmp_path: Path, two_lanes: LanePool
) -> None:
    """In single precision, for which experts have grouped products."""
    sizes: dict[str, object] = {"dtype": "float32"}
    words = {
        "steps": STEPS,
        "prompts_per_step": 8,
        "samples_per_prompt": 4,
        "model": sizes,
        "data": {"options": {"min_digits": 1, "max_digits": 1}},
        "warmup": {"steps": 0},
        "optimizer": {"learning_rate": 1e-4},
    }
    dense = ReasoningExperiment(ReasoningRecipe.model_validate(words))
    tokenizer = dense.prepare(tmp_path / "dense").tokenizer()
    torch.manual_seed(0)
    mixture = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    mixture.save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    words["warmup"], sizes["path"] = {"steps": 300}, str(tmp_path / "mixture")
    experiment = ReasoningExperiment(ReasoningRecipe.model_validate(words))
    model = experiment.prepare(tmp_path / "warm")
    alone = outcome_of(experiment, model, "eager")
    assert any(0 < sum(rewards) < len(rewards) for rewards in alone.rewards)
    before = load_model(Path(model.path)).state_dict()
    assert distance(alone.replicas[0], before) > 1e-4
    experts = {"learner": Layout("ep2", 2)}
    divided = outcome_of(experiment, model, "collocated", experts, two_lanes)
    assert divided.texts == alone.texts
    for weights in divided.replicas:
        assert distance(weights, alone.replicas[0]) < 1e-5
