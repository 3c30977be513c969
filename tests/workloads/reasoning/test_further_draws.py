"""Dynamic sampling that draws again: other prompts in place of those whose groups say nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from m2flow.errors import UserError
from m2flow.flow import Batch, Place
from m2flow.observe.progress import Quiet
from m2flow.observe.run_directory import read_metrics
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import parse_cluster
from m2flow.rewards.reward import WeightedReward
from m2flow.workloads.common import train
from m2flow.workloads.common.planning import flow_of
from m2flow.workloads.common.reading import validated
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.work import prices
from m2flow.workloads.reasoning.workers import Generator, ModelSource, Verifier
from m2flow.workloads.reasoning.workers.further_draws import equal_rows, rates

MakeRecipe = Any

GROUP, DRAWS = 4, 2


@pytest.fixture(autouse=True)
def threads(one_thread: None) -> None:
    """All of this file computes in this process."""


@pytest.fixture
def experiment(tiny_recipe: MakeRecipe, warmed: ModelSource) -> ReasoningExperiment:
    recipe = tiny_recipe(
        prompts_per_step=6, algorithm={"name": "dapo", "further_draws": DRAWS}, minibatches=1
    )
    return ReasoningExperiment(recipe, warmed)


def loaded(worker: Any) -> Any:
    worker.load(Place())
    return worker


def in_order(samples: Batch) -> Batch:
    return samples.take(sorted(samples.ids))


def drawn(generator: Generator, prompts: Batch) -> Batch:
    pieces = [piece for piece in generator.generate(prompts) if len(piece)]
    return in_order(Batch.concat(pieces))


def test_a_group_that_says_nothing_makes_room_for_the_next_prompt(
    experiment: ReasoningExperiment, warmed: ModelSource
) -> None:
    """Its answers are those that the prompt would have had in the first place; others stay."""
    generator = loaded(Generator(warmed, samples_per_prompt=GROUP, max_new_tokens=6))
    verifier = loaded(Verifier(warmed, (WeightedReward("addition"),)))
    prompts = experiment.batch(0)
    assert prompts["problem"] == [0, 1, 2, 3, 4, 5]
    assert [[one["problem"] for one in some] for some in prompts["spares"]] == [
        [6 + slot, 12 + slot] for slot in range(6)
    ]
    before = verifier.score(drawn(generator, prompts))
    rewards = [float(row // GROUP % 3 == 1 or row % GROUP == 0) for row in range(len(before))]
    before = before.with_columns(reward=rewards)
    equal = equal_rows(before, GROUP)
    assert [row // GROUP for row in equal] == [1] * GROUP + [4] * GROUP
    again = generator.draw_again(before, draw=0)
    assert [row for row, new in enumerate(again["again"]) if new] == equal
    after = verifier.score_again(again)
    assert "again" not in after
    assert after.ids == before.ids
    spares = [some[0]["problem"] for some in prompts["spares"]]
    for row in range(len(before)):
        slot = row // GROUP
        if row in equal:
            assert after["problem"][row] == spares[slot]
            assert after["prompt"][row] == experiment.task.train(spares[slot]).prompt
            assert after["tried"][row] == ((slot, rates(before, GROUP)[row]),)
        else:
            for name in before.columns:
                one, other = before[name][row], after[name][row]
                assert one.equal(other) if hasattr(one, "equal") else one == other, name
    firsts = [prompts["spares"][row // GROUP][0] for row in equal[::GROUP]]
    asked = Batch(
        {
            **{name: [first[name] for first in firsts] for name in ("prompt", "answer", "seed")},
            "metadata": [{} for _ in firsts],
            "prompt_ids": [first["prompt_ids"] for first in firsts],
        },
        [row // GROUP for row in equal[::GROUP]],
    )
    import torch

    from m2flow.flow import Ragged

    ids = Ragged.from_rows([torch.tensor(row) for row in asked["prompt_ids"]])
    alone = verifier.score(drawn(generator, asked.with_columns(prompt_ids=ids)))
    fresh = after.select(equal)
    assert fresh.ids == alone.ids
    for name in ("completion_ids", "behaviour_logprobs"):
        assert fresh[name].values.equal(alone[name].values)
    assert fresh["reward"] == alone["reward"]
    assert not generator.engine.busy


def test_nothing_is_drawn_where_all_groups_say_something(
    experiment: ReasoningExperiment, warmed: ModelSource
) -> None:
    generator = loaded(Generator(warmed, samples_per_prompt=GROUP, max_new_tokens=6))
    samples = drawn(generator, experiment.batch(0))
    differing = samples.with_columns(
        reward=[float(row % 2) for row in range(len(samples))], failure=[""] * len(samples)
    )
    again = generator.draw_again(differing, draw=0)
    assert not any(again["again"])
    assert again["completion_ids"].values.equal(samples["completion_ids"].values)
    assert len(generator.draw_again(differing.select([]), draw=0)) == 0, "a lane without items"


# In a run


def recipe_of(**more: Any) -> dict[str, Any]:
    return {
        "workload": "reasoning",
        "steps": 4,
        "prompts_per_step": 6,
        "samples_per_prompt": GROUP,
        "mode": "eager",
        "model": {
            "dtype": "float64", "hidden_size": 32, "num_hidden_layers": 1,
            "intermediate_size": 64, "max_position_embeddings": 64,
        },
        "data": {"options": {"min_digits": 1, "max_digits": 1, "thinking_share": 0}},
        "warmup": {"steps": 40, "samples_per_step": 32, "learning_rate": 2e-2},
        "optimizer": {"learning_rate": 3e-3},
        "generation": {"max_new_tokens": 6},
        "evaluation": {"problems": 0},
        "samples_logged_per_step": 24,
        "algorithm": {"name": "dapo", "further_draws": DRAWS},
        **more,
    }  # fmt: skip


def rollouts_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


class Notes(Quiet):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def test_the_batch_is_filled_and_what_it_took_is_counted(tmp_path: Path) -> None:
    notes = Notes()
    run = train(recipe_of(), run_dir=tmp_path / "run", progress=notes)
    figures = [row for row in read_metrics(run) if row["step"] > 0]
    once = {**recipe_of(), "algorithm": {"name": "dapo", "further_draws": 0}}
    without = train(once, run_dir=tmp_path / "once", progress=Quiet())
    at_once = [row for row in read_metrics(without) if row["step"] > 0]
    assert sum(row["sampling/prompts"] for row in figures) > 4 * 6
    for row in figures:
        assert 6 <= row["sampling/prompts"] <= 6 * (1 + DRAWS)
        assert row["sampling/unfilled_share"] == pytest.approx(row["reward/zero_variance_share"])
        assert row["train/samples"] == 6 * GROUP / 2 * (1 - row["sampling/unfilled_share"])
    left = sum(row["sampling/unfilled_share"] for row in figures)
    assert left < sum(row["reward/zero_variance_share"] for row in at_once)
    full = all(row["sampling/unfilled_share"] == 0 for row in figures)
    assert full or any("the batch is not full" in text for text in notes.said)
    assert "sampling/prompts" not in at_once[0]


def test_a_limit_that_is_reached_is_said(tmp_path: Path) -> None:
    """Nothing is ever right: each slot has its draws, and the run says that it is not full."""
    (tmp_path / "always.py").write_text("def wrong(prompt, completion, ids, row): return 0.0\n")
    notes = Notes()
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        run = train(
            recipe_of(steps=2, reward="always:wrong"), run_dir=tmp_path / "run", progress=notes
        )
    finally:
        sys.path.remove(str(tmp_path))
    figures = [row for row in read_metrics(run) if row["step"] > 0]
    assert [row["sampling/prompts"] for row in figures] == [6 * (1 + DRAWS)] * 2
    assert [row["sampling/unfilled_share"] for row in figures] == [1.0, 1.0]
    said = [text for text in notes.said if "the batch is not full" in text]
    assert len(said) == 1
    assert "100% of the groups" in said[0]
    assert f"after {DRAWS} other prompts" in said[0]


def test_a_run_that_goes_on_asks_what_it_would_have_asked(tmp_path: Path) -> None:
    recipe = recipe_of(checkpoint={"every": 2})
    straight = rollouts_of(train(recipe, run_dir=tmp_path / "straight", progress=Quiet()))
    parts = tmp_path / "parts"
    train({**recipe, "steps": 2}, run_dir=parts, progress=Quiet())
    saved = json.loads((parts / "checkpoints" / "step_000002" / "sampler.json").read_text())
    assert saved["told"] or saved["returned"], "some spares were not asked"
    train({**recipe, "steps": 4}, run_dir=parts, resume=True, progress=Quiet())
    gone_on = rollouts_of(parts)
    assert len(straight) == len(gone_on) == 4 * 24
    assert gone_on == straight


def test_where_the_data_stood_is_wrong(tmp_path: Path) -> None:
    experiment = ReasoningExperiment(ReasoningRecipe.model_validate(recipe_of()))
    with pytest.raises(UserError, match=r"^sampler.json: there is no such .* another checkpoint$"):
        experiment.resume_data(tmp_path)
    (tmp_path / "sampler.json").write_text("{}")
    with pytest.raises(UserError, match=r"sampler.json: .* is missing; go on from another"):
        experiment.resume_data(tmp_path)


def test_a_curriculum_in_a_run(tmp_path: Path) -> None:
    """It is fed with what the policy does, kept with the checkpoint, and goes on."""
    data = tmp_path / "sums.jsonl"
    lines = [
        json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)})
        for a in range(6)
        for b in range(4)
    ]
    data.write_text("\n".join(lines))
    words = recipe_of(
        data={
            "task": "jsonl", "path": str(data), "template": "{question}",
            "options": {"held_out_rows": 2}, "curriculum": {"band": [0.1, 0.9], "outside": 0.05},
        },
        warmup={"steps": 0}, checkpoint={"every": 2}, algorithm={"name": "grpo"},
    )  # fmt: skip
    straight = train(words, run_dir=tmp_path / "straight", progress=Quiet())
    parts = tmp_path / "parts"
    train({**words, "steps": 2}, run_dir=parts, progress=Quiet())
    state = json.loads((parts / "checkpoints" / "step_000002" / "sampler.json").read_text())
    assert len(state["rates"]) + len(state["told"]["1"]["rates"]) >= 6
    train({**words, "steps": 4}, run_dir=parts, resume=True, progress=Quiet())
    assert rollouts_of(parts) == rollouts_of(straight)
    figures = [row for row in read_metrics(straight) if row["step"] > 0]
    assert figures[0]["sampling/known_share"] == 0.0
    assert figures[-1]["sampling/known_share"] > 0.0
    assert all(row["sampling/prompts"] == 6 for row in figures)
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    assert all(f"`{name}`" in page for name in figures[-1] if name.startswith("sampling/"))


@pytest.fixture
def no_cluster_left() -> Iterator[None]:
    yield
    ray.shutdown()
    logging.getLogger("ray").setLevel(logging.WARNING)


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster_left")
@pytest.mark.parametrize(
    "placed",
    [
        {"mode": "disaggregated"},
        {"mode": "collocated", "layouts": {"generator": "tp2"}},
    ],
    ids=["disaggregated", "on a gang"],
)
def test_every_plan_asks_the_same(tmp_path: Path, placed: dict[str, Any]) -> None:
    """The promise: a plan changes nothing."""
    words = recipe_of(steps=3)
    placed = {**words, "lanes": "cpu:2", **placed}
    here = rollouts_of(train(words, run_dir=tmp_path / "here", progress=Quiet()))
    there = rollouts_of(train(placed, run_dir=tmp_path / "there", progress=Quiet()))
    assert len(here) == len(there) == 3 * 24
    for one, other in zip(here, there, strict=True):
        for name in ("step", "item", "prompt", "completion", "reward"):
            assert one[name] == other[name], name


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster_left")
def test_steps_that_overlap_lose_no_problem(tmp_path: Path) -> None:
    """What was handed out was asked, or waits: steps in flight take nothing along."""
    words = recipe_of(steps=6, mode="disaggregated", lanes="cpu:2", max_staleness=1)
    run = train(words, run_dir=tmp_path / "run", progress=Quiet())
    figures = [row for row in read_metrics(run) if row["step"] > 0]
    assert max(row["staleness/mean"] for row in figures) > 0
    state = json.loads((run / "checkpoints" / "latest" / "sampler.json").read_text())
    waiting = [*state["returned"], *(n for told in state["told"].values() for n in told["unasked"])]
    asked = sum(row["sampling/prompts"] for row in figures)
    assert len(waiting) == len(set(waiting)) == state["next"] - asked


def test_further_draws_are_planned() -> None:
    words = {**recipe_of(), "model": {}, "generation": {"max_new_tokens": 512}}
    recipe = ReasoningRecipe.model_validate(words)
    graph = flow_of(recipe).trace()
    names = [node.name for node in graph.nodes if node.worker == "generator"]
    assert names == ["generator.generate", "generator.draw_again", "generator.draw_again#2"]
    priced = prices(recipe, graph, "Qwen2.5-7B")
    found = analytic_profile(graph, parse_cluster("1x4xH100"), priced, 6)
    first, second = (found.cost(name, "one", 1, "gpu").call(64) for name in names[1:])
    assert 0 < second <= first
    assert any("30% of the groups" in line for line in found.assumptions)


# What is refused, and what is the default


def test_dapo_draws_again_and_others_do_not(tiny_recipe: MakeRecipe) -> None:
    assert tiny_recipe(algorithm={"name": "dapo"}).further_draws == 3
    assert tiny_recipe(algorithm={"name": "dapo", "equal_groups": "keep"}).further_draws == 0
    assert tiny_recipe().further_draws == 0
    wanted = {"equal_groups": "drop", "further_draws": 2}
    assert tiny_recipe(algorithm=wanted).further_draws == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"algorithm": {"further_draws": 2}}, r"^algorithm\.further_draws: .*equal_groups to drop"),
        (
            {"algorithm": {"name": "ppo", "further_draws": 2}, "samples_per_prompt": 1},
            r"^algorithm\.further_draws: ppo has no use for it",
        ),
        (
            {
                "reward": [],
                "judge": {"path": "x"},
                "algorithm": {"name": "dapo", "further_draws": 1},
            },
            r"^algorithm\.further_draws: .*there are none",
        ),
        (
            {
                "reward": [],
                "judge": {"path": "x"},
                "data": {"task": "jsonl", "path": "x", "curriculum": {}},
            },
            r"^data\.curriculum: .*there are none",
        ),
        ({"data": {"curriculum": {}}}, r"^data\.curriculum: addition has no use for it"),
        (
            {"data": {"task": "jsonl", "path": "x", "curriculum": {"band": [0.8, 0.2]}}},
            r"^data\.curriculum\.band: begins above its end",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        validated({"workload": "reasoning", **words})


def test_other_answers_give_signs_while_they_are_drawn(
    experiment: ReasoningExperiment, warmed: ModelSource
) -> None:
    """A call that took longer than it may ended the run, though each token was progress."""
    generator, heard = Generator(warmed, samples_per_prompt=GROUP, max_new_tokens=6), list[int]()
    generator.load(Place(goes_on=lambda: heard.append(0)))
    samples = drawn(generator, experiment.batch(0))
    equal = samples.with_columns(reward=[1.0] * len(samples), failure=[""] * len(samples))
    heard.clear()
    found = generator.draw_again(equal, draw=0)
    assert all(found["again"])
    assert len(heard) >= max(found["completion_ids"].lengths) - 1 > 0
