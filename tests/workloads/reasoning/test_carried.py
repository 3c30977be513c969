"""Answers that go on in a later step: cut by their tokens alone, none lost, all trained on once."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from m2flow.errors import UserError
from m2flow.flow import Batch, Place
from m2flow.observe.progress import Quiet
from m2flow.observe.run_directory import read_metrics
from m2flow.plan import parse_lanes
from m2flow.runtime.driver.launch import launch
from m2flow.runtime.driver.runner import StepResult
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import validated
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.sampler import Sampler
from m2flow.workloads.reasoning.workers import Generator, ModelSource
from m2flow.workloads.reasoning.workers.carried import BEGUN, OPEN, BegunAnswer, read, write

GROUP, PROMPTS, MOST, SHARE = 4, 6, 6, 2

WORDS: dict[str, Any] = {
    "workload": "reasoning",
    "steps": 6,
    "prompts_per_step": PROMPTS,
    "samples_per_prompt": GROUP,
    "mode": "eager",
    "model": {
        "dtype": "float64", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
    "data": {"options": {"min_digits": 1, "max_digits": 1, "thinking_share": 0}},
    "warmup": {"steps": 20, "samples_per_step": 32, "learning_rate": 1e-2},
    "optimizer": {"learning_rate": 3e-3},
    "generation": {"max_new_tokens": MOST, "tokens_per_step": SHARE},
    "evaluation": {"problems": 5},
    "samples_logged_per_step": PROMPTS * GROUP,
}  # fmt: skip


@pytest.fixture(autouse=True)
def threads(one_thread: None) -> None:
    """All of this file computes in this process."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Batch], list[StepResult]]:
    """Prompts and results of the steps of a run."""
    experiment = ReasoningExperiment(ReasoningRecipe.model_validate(WORDS))
    experiment.prepare(tmp_path_factory.mktemp("model"))
    batches, found = [], []
    with launch(
        experiment.flow(), items_per_step=PROMPTS, mode="eager", lanes=parse_lanes("cpu:1")
    ) as run:
        for step in range(WORDS["steps"]):
            batches.append(experiment.batch(step))
            found.append(run.step(batches[-1]))
            experiment.note(found[-1])
    return batches, found


def slots_of(result: StepResult) -> list[Batch]:
    return [
        result.output.select(range(first, first + GROUP))
        for first in range(0, PROMPTS * GROUP, GROUP)
    ]


def is_carried(slot: Batch) -> bool:
    """Whether a group goes on; all of it or nothing."""
    (carried,) = {begun is not None for begun in slot[BEGUN]}
    assert carried == (OPEN in slot["finish_reason"])
    return carried


def test_no_problem_is_lost_and_each_is_trained_on_once(
    results: tuple[list[Batch], list[StepResult]],
) -> None:
    """Those that go on come first in the next step; others follow in their order."""
    going_on: list[int] = []
    ended: list[int] = []
    following = 0
    for batch, result in zip(*results, strict=True):
        new = PROMPTS - len(going_on)
        assert batch["problem"] == [*going_on, *range(following, following + new)]
        assert [bool(there) for there in batch[BEGUN]] == [True] * len(going_on) + [False] * new
        following += new
        going_on = [slot["problem"][0] for slot in slots_of(result) if is_carried(slot)]
        ended += [slot["problem"][0] for slot in slots_of(result) if not is_carried(slot)]
        trained = (PROMPTS - len(going_on)) * GROUP
        assert result.metrics["samples"] * 2 == trained, "of two mini-batches, in the mean"
    assert len(ended) > PROMPTS
    assert sorted([*ended, *going_on]) == list(range(following))


def test_an_answer_goes_on_where_it_was(results: tuple[list[Batch], list[StepResult]]) -> None:
    """Its tokens stay, with the log-probabilities and versions that they were drawn with."""
    batches, found = results
    spans = set()
    for step, (batch, result) in enumerate(zip(batches, found, strict=True)):
        before = dict(zip(batch["problem"], batch[BEGUN], strict=True))
        for slot in slots_of(result):
            for row, (begun, text, version) in enumerate(
                zip(slot[BEGUN], slot["text"], slot["version"], strict=True)
            ):
                there: tuple[BegunAnswer, ...] = before[slot["problem"][0]]
                old = there[row] if there else BegunAnswer((), (), (), OPEN)
                assert version[1] <= step
                if not old.token_ids or old.finish_reason == OPEN:
                    assert version[1] == step
                if not is_carried(slot):
                    spans.add(version[1] - version[0])
                    continue
                count = len(old.token_ids)
                assert list(begun.token_ids[:count]) == list(old.token_ids)
                assert list(begun.logprobs[:count]) == list(old.logprobs)
                assert list(begun.versions) == [
                    *old.versions,
                    *[step] * (len(begun.versions) - count),
                ]
                assert len(begun.token_ids) - count <= SHARE
                assert text or not begun.token_ids
    assert max(spans) > 0, "some answer was drawn by several versions"


def test_cutting_changes_nothing_but_when(warmed: ModelSource) -> None:
    """Under the same weights an answer is the same in pieces; its group waits for the longest."""
    recipe = ReasoningRecipe.model_validate(
        {**WORDS, "model": {"path": warmed.path}, "warmup": {"steps": 0}}
    )
    experiment = ReasoningExperiment(recipe, warmed)

    def generator(share: int | None) -> Generator:
        made = Generator(
            warmed, samples_per_prompt=GROUP, max_new_tokens=MOST, tokens_per_step=share
        )
        made.load(Place())
        return made

    def drawn(one: Generator, prompts: Batch) -> Batch:
        samples = Batch.concat([piece for piece in one.generate(prompts) if len(piece)])
        return samples.take(sorted(samples.ids))

    prompts = experiment.batch(0)
    whole = drawn(generator(None), prompts.without(BEGUN))
    pieces = generator(SHARE)
    for turn in range(-(-MOST // SHARE)):
        samples = drawn(pieces, prompts)
        is_open = [reason == OPEN for reason in samples["finish_reason"]]
        longest = max(samples["completion_ids"].lengths)
        assert longest <= (turn + 1) * SHARE
        there = [
            BegunAnswer(ids.tolist(), logprobs.tolist(), versions.tolist(), reason)
            for ids, logprobs, versions, reason in zip(
                samples["completion_ids"].rows(), samples["behaviour_logprobs"].rows(),
                samples["token_versions"].rows(), samples["finish_reason"], strict=True,
            )
        ]  # fmt: skip
        groups = [tuple(there[at : at + GROUP]) for at in range(0, len(there), GROUP)]
        prompts = prompts.with_columns(**{BEGUN: groups})
    assert not any(is_open)
    assert samples["finish_reason"] == whole["finish_reason"]
    for name in ("completion_ids", "behaviour_logprobs"):
        assert samples[name].lengths == whole[name].lengths
    assert samples["completion_ids"].values.equal(whole["completion_ids"].values)
    one, other = (some["behaviour_logprobs"].values for some in (samples, whole))
    assert one.allclose(other, atol=1e-5)


def test_answers_come_back_from_a_file(tmp_path: Path) -> None:
    answers = {
        7: (
            BegunAnswer((1, 2), (-0.5, -1.25), (3, 3), OPEN),
            BegunAnswer((5,), (-2.0,), (4,), "stop"),
        ),
        2: (
            BegunAnswer((), (), (), OPEN),
            BegunAnswer((9, 8, 7), (-1.0,) * 3, (1, 2, 3), "length"),
        ),
    }
    write(tmp_path / "answers", answers)
    found = read(tmp_path / "answers")
    assert found.keys() == answers.keys()
    for turn, group in answers.items():
        for one, other in zip(group, found[turn], strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            assert list(one.logprobs) == list(other.logprobs)
            assert list(one.versions) == list(other.versions)
            assert one.finish_reason == other.finish_reason
    with pytest.raises(UserError, match="does not hold the answers that go on"):
        read(tmp_path / "nowhere")


# In a run


def rollouts_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def carried_of(run: Path) -> dict[str, dict[int, list[tuple[list[int], str]]]]:
    """By checkpoint and turn the tokens of the answers that go on, and why they ended."""
    return {
        path.parent.name: {
            turn: [(list(one.token_ids), one.finish_reason) for one in group]
            for turn, group in read(path).items()
        }
        for path in (run / "checkpoints").glob("step_*/carried.safetensors")
    }


def test_a_run_that_goes_on_carries_the_same_over(tmp_path: Path) -> None:
    words = {**WORDS, "checkpoint": {"every": 3}}
    straight = train(words, run_dir=tmp_path / "straight", progress=Quiet())
    parts = tmp_path / "parts"
    train({**words, "steps": 3}, run_dir=parts, progress=Quiet())
    assert (parts / "checkpoints" / "step_000003" / "carried.safetensors").is_file()
    train(words, run_dir=parts, resume=True, progress=Quiet())
    assert rollouts_of(parts) == rollouts_of(straight)
    assert carried_of(parts) == carried_of(straight)
    figures = [row for row in read_metrics(straight) if row["step"] > 0]
    shown = Counter(row["step"] for row in rollouts_of(straight))
    assert OPEN not in {row["finish_reason"] for row in rollouts_of(straight)}
    assert all(shown[row["step"]] == row["samples"] for row in figures), "those that have ended"
    shares = [row["sampling/carried_share"] for row in figures]
    assert max(shares) > 0
    assert min(shares) < 1
    assert "sampling/unfilled_share" not in figures[0]
    ended = [row for row in figures if row["sampling/carried_share"] < 1]
    assert all(("reward/mean" in row) == (row in ended) for row in figures)
    ages = [row["staleness/oldest_token"] for row in ended]
    assert 0 < max(ages) <= ReasoningRecipe.model_validate(words).oldest_token == MOST // SHARE - 1
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text()
    assert "`sampling/carried_share`" in page
    assert "`staleness/oldest_token`" in page


@pytest.fixture
def no_cluster_left() -> Iterator[None]:
    yield
    ray.shutdown()
    logging.getLogger("ray").setLevel(logging.WARNING)


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster_left")
@pytest.mark.parametrize("mode", ["disaggregated", "collocated"])
def test_every_plan_cuts_at_the_same_place(tmp_path: Path, mode: str) -> None:
    words = {**WORDS, "steps": 4, "checkpoint": {"every": 1, "keep": 4}}
    straight = train(words, run_dir=tmp_path / "here", progress=Quiet())
    placed = {**words, "lanes": "cpu:2", "mode": mode}
    run = train(placed, run_dir=tmp_path / "there", progress=Quiet())
    here, there = rollouts_of(straight), rollouts_of(run)
    ended = sum(row.get("samples", 0) for row in read_metrics(straight))
    going_on = carried_of(straight)
    left = sum(len(group) for turns in going_on.values() for group in turns.values())
    assert len(here) == len(there) == ended == 4 * PROMPTS * GROUP - left
    assert carried_of(run) == going_on
    for one, other in zip(here, there, strict=True):
        for name in ("step", "item", "prompt", "completion", "reward", "finish_reason"):
            assert one[name] == other[name], name


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_how_old_a_token_may_be(staleness: int) -> None:
    """Answers of as many pieces as there may be, the first of each on the oldest weights."""
    recipe = ReasoningRecipe.model_validate({**WORDS, "max_staleness": staleness})
    sampler = Sampler(seed=0, slots=2, spares=0, lag=recipe.feedback_lag)
    drawn: dict[int, list[int]] = {}  # by problem, the versions of its pieces
    ages, asked = set(), {}
    for step in range(40):
        asked[step] = [slot[0].number for slot in sampler.asked(step)]
        for number in asked[step]:
            drawn.setdefault(number, []).append(max(0, step - staleness))
        done = step - 2 * staleness  # whose result is told, at the latest
        if done < 0:
            continue
        open_slots = []
        for slot, number in enumerate(asked[done]):
            if len(drawn[number]) < MOST // SHARE:
                open_slots.append(slot)
            else:
                ages.add(done - drawn[number][0])
        sampler.note(done, [1, 1], [], open_slots)
    assert max(ages) == recipe.oldest_token == staleness + 2 * (1 + 2 * staleness)


def test_a_bound_that_a_recipe_cannot_keep_is_refused() -> None:
    for staleness, oldest in ((0, 2), (1, 7)):
        words = {**WORDS, "max_staleness": staleness}
        validated({**words, "generation": {**WORDS["generation"], "max_versions": oldest}})
        words["generation"] = {**WORDS["generation"], "max_versions": oldest - 1}
        with pytest.raises(UserError, match=rf"^generation\.max_versions: .* at least {oldest};"):
            validated(words)
    with pytest.raises(UserError, match=r"^generation\.max_versions: .* at least 1;"):
        validated({"workload": "agentic", "max_staleness": 1, "generation": {"max_versions": 0}})


# What is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"generation": {"max_new_tokens": 6, "tokens_per_step": 6}},
            "less than generation.max_new_tokens = 6",
        ),
        ({"generation": {**WORDS["generation"], "engine": "vllm"}}, "generation.engine: native"),
        ({"algorithm": {"name": "ppo"}, "samples_per_prompt": 1}, "algorithm.name: one of grpo"),
        ({"algorithm": {"name": "dapo"}}, "algorithm.further_draws: 0"),
        ({"data": {"task": "jsonl", "path": "x", "curriculum": {}}}, "no data.curriculum"),
        ({"workload": "agentic", "data": {}}, "is for answers of one turn"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"^generation\.tokens_per_step.*{said}"):
        validated({**WORDS, **changes})
