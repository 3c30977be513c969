"""Adapters that are published alone: the same run, and links that carry nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason='needs the extra: pip install "m2flow[lora]"')

from m2flow.flow import Place
from m2flow.flow.worker import Layout
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.workers import ModelSource
from tests.workloads.reasoning.conftest import MakeRecipe

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
Run = tuple[list[Any], dict[str, torch.Tensor], dict[str, str]]
DIVIDED = {"generator": Layout("tp2", 2), "learner": Layout("fsdp2", 2)}


def recipe_of(make: MakeRecipe, publish: str, **changes: Any) -> Any:
    model = {"lora_rank": 4, "lora_publish": publish}
    return make(model=model, optimizer={"learning_rate": 1e-2}, **changes)


def run_of(
    make: MakeRecipe, model: ModelSource, publish: str, mode: str, lanes: LanePool, layouts: Any
) -> Run:
    """Answers of each step, the trained weights, and how weights were published."""
    recipe = recipe_of(make, publish)
    experiment = ReasoningExperiment(recipe, model)
    flow = recipe_flow(recipe, model, experiment.rewards)
    batches = [experiment.batch(step) for step in range(STEPS)]
    with launch(
        flow, items_per_step=4, mode=mode, lanes=lanes, num_threads=1, layouts=layouts or {}
    ) as run:
        outputs = [result.output for result in run.steps(batches)]
        weights = run.worker_call_everywhere("learner", "parameters")[0]
        ways = run.explain_publishing()
    answers = [(x["text"], x["num_tokens"], x["version"]) for x in outputs]
    return answers, weights, ways


@pytest.fixture(scope="module")
def run(tiny_recipe: MakeRecipe, warmed: ModelSource, two_lanes: LanePool) -> Callable[..., Run]:
    """A run by what is published and how, each done once."""
    done: dict[tuple[str, ...], Run] = {}

    def once(publish: str, mode: str, layouts: Any = None) -> Run:
        if (publish, mode) not in done:
            found = run_of(tiny_recipe, warmed, publish, mode, two_lanes, layouts)
            done[publish, mode] = found
        return done[publish, mode]

    return once


@pytest.mark.parametrize(
    ("mode", "layouts"),
    [
        ("eager", None),
        ("disaggregated", None),
        ("collocated", DIVIDED),
    ],
)
def test_a_run_is_the_same_whichever_is_published(
    run: Callable[..., Run], warmed: ModelSource, mode: str, layouts: Any
) -> None:
    """Token for token, weight for weight; the weights move, and so does what is drawn."""
    merged, trained, _ = run("merged", mode, layouts)
    alone, trained_alone, _ = run("adapter", mode, layouts)
    assert merged == alone
    assert all(torch.equal(trained_alone[name], x) for name, x in trained.items())
    assert len({str(texts) for texts, _, _ in merged}) == STEPS
    before = warmed.load("cpu").state_dict()
    assert any(not torch.equal(before[name], x) for name, x in trained.items())


def test_links_carry_adapters_alone(run: Callable[..., Run], warmed: ModelSource) -> None:
    whole = sum(x.nbytes for x in set(warmed.load("cpu").parameters()))
    found = {}
    for publish in ("merged", "adapter"):
        _, _, ways = run(publish, "disaggregated")
        ((way, size),) = ways.items()
        assert way.startswith("learner publishes to generator")
        found[publish] = size.partition(" MB")[0]
    sizes = (4 * (rows + columns) * 4 for rows, columns in ADAPTED)
    assert found == {"merged": f"{whole / 1e6:.3g}", "adapter": f"{sum(sizes) / 1e6:.3g}"}


ADAPTED = [(32, 32), (16, 32), (16, 32), (32, 32), (64, 32), (64, 32), (32, 64)]
"""Rows and columns of what is adapted of the one layer: queries, keys, values, and so on."""


def test_a_resumed_generator_adds_to_what_the_run_began_with(
    tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path
) -> None:
    """The checkpoint's model has the adapters added already."""
    recipe = recipe_of(tiny_recipe, "adapter")
    learner = recipe_flow(recipe, warmed).learner
    learner.load(Place(spill=tmp_path))
    for name, parameter in learner.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.5)
    saved = Path(learner.save_checkpoint(str(tmp_path / "run"), 1, 1))
    again = recipe_flow(recipe, warmed, checkpoint=saved).generator
    again.load(Place(spill=tmp_path))
    begun = [x.clone() for x in again.engine._decoder.weights.tensors()]
    again.install(learner.weights(), 2)
    assert all(map(torch.equal, begun, again.engine._decoder.weights.tensors()))


def test_another_engine_is_given_whole_weights(
    tiny_recipe: MakeRecipe, warmed: ModelSource, tmp_path: Path
) -> None:
    """Whatever generates, adapters are added before."""
    recipe = recipe_of(tiny_recipe, "adapter")
    flow = recipe_flow(recipe, warmed)
    flow.learner.load(Place(spill=tmp_path))
    generator, given = flow.generator, {}

    class Engine:
        def install(self, weights: Any, version: int) -> None:
            given.update({name: x.clone() for name, x in weights.items()})

    generator.load(Place(spill=tmp_path))
    generator.engine = Engine()  # type: ignore[assignment]
    generator.install(flow.learner.weights(), 1)
    merged = flow.learner.parameters()
    assert given.keys() == merged.keys()
    assert all(torch.equal(given[name], x) for name, x in merged.items())
