"""The loop of turns and tools is planned as any cycle: priced for a cluster, measured on lanes."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow.models.shape import KNOWN_MODELS
from m2flow.workloads.agentic.workload import WORKLOAD
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.workload import NOTHING_ASSUMED, Assumed
from m2flow.workloads.reasoning.supported import known_shape
from m2flow.workloads.reasoning.workers import Learner
from tests.cli.conftest import run_command

RECIPES = Path(__file__).parents[3] / "recipes"


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "cluster", "mode"),
    [
        ("agentic-calculator", "1x2xCPU", "collocated"),
        ("qwen2.5-3b-grpo-search", "1x2xH100", "collocated"),
        pytest.param("agentic-calculator", "1x2xCPU", "auto", marks=SLOW),
        pytest.param("qwen2.5-3b-grpo-search", "1x8xH100", "auto", marks=SLOW),
        pytest.param("agentic-search", "1x2xCPU", "auto", marks=SLOW),
    ],
)
def test_a_recipe_is_planned_for_a_cluster(name: str, cluster: str, mode: str) -> None:
    words = [RECIPES / f"{name}.yaml", "prompts_per_step=8", "--cluster", cluster, "--mode", mode]
    done = run_command("plan", *words, "--json")
    assert done.code == 0, done.err
    assert '"generator.turn"' in done.out
    assert '"tools.call"' in done.out


def test_more_turns_and_longer_answers_cost_more() -> None:
    from m2flow.plan.profile.analytic import analytic_profile
    from m2flow.plan.profile.clusters import parse_cluster

    cluster = parse_cluster("1x8xH100")

    def turns_and_seconds(*changes: str, assumed: Assumed = NOTHING_ASSUMED) -> tuple[float, float]:
        recipe = read_recipe(RECIPES / "qwen2.5-3b-grpo-search.yaml", list(changes))
        graph = WORKLOAD.flow(recipe).trace()  # type: ignore[arg-type]
        pricer = WORKLOAD.prices(recipe, graph, assumed)  # type: ignore[arg-type]
        profile = analytic_profile(graph, cluster, pricer, recipe.items_per_step)
        found = profile.stages["generator.turn"]
        assert found.turns is not None
        return found.turns.mean, float(found.costs[0].call(64))

    turns, seconds = turns_and_seconds()
    assert turns == pytest.approx(2.5)
    assert turns_and_seconds("episode.max_turns=8")[0] > turns
    assert turns_and_seconds("generation.max_new_tokens=1024")[1] > 1.5 * seconds
    longer = Assumed(model="Qwen2.5-7B")
    assert turns_and_seconds(assumed=longer)[1] > seconds


def test_short_trajectories_under_a_long_limit_are_planned() -> None:
    """They were refused in the name of `--answer-tokens`, which nobody gave: 448 tokens in the mean
    of at most 32,768."""
    from m2flow.plan.profile.analytic import analytic_profile
    from m2flow.plan.profile.clusters import parse_cluster

    words = ["generation.max_new_tokens=256", "episode.max_result_tokens=256"]
    words += ["episode.max_tokens=32768"]
    recipe = read_recipe(RECIPES / "qwen2.5-3b-grpo-search.yaml", words)
    graph = WORKLOAD.flow(recipe).trace()  # type: ignore[arg-type]
    pricer = WORKLOAD.prices(recipe, graph, NOTHING_ASSUMED)  # type: ignore[arg-type]
    found = analytic_profile(graph, parse_cluster("1x8xH100"), pricer, recipe.items_per_step)
    assert "all that stands behind a prompt: 448 tokens in the mean" in found.assumptions


def test_a_search_takes_the_longer_the_larger_its_corpus(tmp_path: Path) -> None:
    """Of any corpus 5 ms were assumed, a tenth of what a search over a large one takes."""
    corpus = tmp_path / "corpus.jsonl"

    def told(num_bytes: int) -> str:
        with corpus.open("wb") as file:
            file.truncate(num_bytes)
        words = [f"tools=[{{tool: search, options: {{corpus: {corpus}}}}}]"]
        recipe = read_recipe(RECIPES / "qwen2.5-3b-grpo-search.yaml", words)
        graph = WORKLOAD.flow(recipe).trace()  # type: ignore[arg-type]
        pricer = WORKLOAD.prices(recipe, graph, NOTHING_ASSUMED)  # type: ignore[arg-type]
        (device,) = parse_cluster("1x8xH100").kinds.values()
        (line,) = [one for one in pricer(device, 8).assumptions if "of a tool's answer" in one]
        return line

    from m2flow.plan.profile.clusters import parse_cluster

    assert told(10**6).endswith("after 0.24 ms")
    assert told(10**10).endswith("after 400.2 ms")


def test_adapters_that_are_published_cost_less_than_a_model() -> None:
    from m2flow.plan.profile.clusters import parse_cluster

    def published(*changes: str) -> float:
        recipe = read_recipe(RECIPES / "qwen2.5-3b-grpo-search.yaml", list(changes))
        graph = WORKLOAD.flow(recipe).trace()  # type: ignore[arg-type]
        pricer = WORKLOAD.prices(recipe, graph, NOTHING_ASSUMED)  # type: ignore[arg-type]
        (device,) = parse_cluster("1x8xH100").kinds.values()
        return pricer(device, 8).workers["generator"].weight_bytes

    whole = published()
    assert published("model.lora_rank=16") == whole
    assert published("model.lora_rank=16", "model.lora_publish=adapter") < whole / 20


def test_turns_take_activations_and_logits_and_stay_on_one_lane() -> None:
    from m2flow.plan.profile.clusters import parse_cluster

    recipe = read_recipe(RECIPES / "qwen2.5-3b-grpo-search.yaml", [])
    graph = WORKLOAD.flow(recipe).trace()  # type: ignore[arg-type]
    pricer = WORKLOAD.prices(recipe, graph, Assumed(model="Qwen2.5-3B"))  # type: ignore[arg-type]
    (device,) = parse_cluster("1x8xH100").kinds.values()
    work = pricer(device, 8)
    (turn,) = work.stages["generator.turn"].layouts
    held = turn.working_bytes(64)
    assert isinstance(held, dict)
    assert held["keys and values"] == 40e9
    assert held["activations"] == 8192 * 2 * (6 * 2048 + 3 * 11008)
    assert held["logits"] == 28 * 64 * 151936
    assert not any("generation on several lanes" in line for line in work.assumptions)


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen3-30B-A3B"])
def test_layouts_are_those_of_the_model_that_is_planned(model: str) -> None:
    """They were checked against the recipe's own model, a tiny one where it names none."""
    recipe = read_recipe(RECIPES / "agentic-calculator.yaml", [])
    flow = WORKLOAD.flow(recipe, model)  # type: ignore[arg-type]
    learner = flow.workers["learner"]
    assert isinstance(learner, Learner)
    assert known_shape(learner.recipe, learner.planned_model) == KNOWN_MODELS[model]


def test_what_an_agent_takes_is_in_no_data_sheet(tmp_path: Path) -> None:
    recipe = tmp_path / "agent.yaml"
    recipe.write_text("workload: agentic\nagent: some:agent\nmodel: {path: Qwen2.5-3B}\n")
    done = run_command("plan", recipe, "--cluster", "1x1xH100")
    assert done.code == 2
    assert "measure it: m2flow profile RECIPE" in done.err
