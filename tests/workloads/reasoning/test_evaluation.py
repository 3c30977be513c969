"""Scoring a model on a file, in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import RunFailed, UserError
from m2flow.plan import parse_lanes
from m2flow.workloads.common import Examination
from m2flow.workloads.reasoning import evaluation
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.evaluation import (
    accuracy,
    answered,
    as_trained,
    majority,
    model_folder,
)
from m2flow.workloads.reasoning.workers import ModelSource

Answered = tuple[list[list[float]], dict[str, float]]
Evaluate = Callable[..., Answered]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{a}+{b}", "answer": a + b} for a in range(2, 6) for b in range(3, 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evaluate(warmed: ModelSource, data: Path, one_thread: None) -> Evaluate:
    def run(model: Path | str = warmed.path, **settings: Any) -> Answered:
        wanted: dict[str, Any] = {
            "max_new_tokens": 6,
            "template": "{question}=",
            "lanes": parse_lanes("cpu:1"),
        }
        return answered(Examination(Path(model), data, **{**wanted, **settings}))

    return run


def test_a_checkpoint_means_its_model(tmp_path: Path) -> None:
    assert model_folder(tmp_path) == tmp_path
    (tmp_path / "model").mkdir()
    assert model_folder(tmp_path) == tmp_path / "model"


def test_without_lanes_all_that_the_machine_has_are_taken(
    evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked for as `auto`; a machine of one core keeps the test in this process."""
    monkeypatch.setattr("m2flow.plan.lanes.available_cores", lambda: (0,))
    monkeypatch.setattr("m2flow.plan.lanes.visible_gpus", lambda: 0)
    assert len(evaluate(limit=3, lanes=())[0]) == 3


def test_rewards_stand_beside_their_problem(evaluate: Evaluate) -> None:
    """However many answers there are, and in whatever order they were finished."""
    one, _ = evaluate(limit=3)
    assert [len(rewards) for rewards in one] == [1, 1, 1]
    greedy, _ = evaluate(samples=3, temperature=0.0)
    assert [rewards[0] for rewards in greedy][:3] == [r for (r,) in one]
    assert all(len(set(rewards)) == 1 for rewards in greedy), "greedy answers are one"
    sampled, _ = evaluate(samples=8, temperature=1.0)
    assert [len(rewards) for rewards in sampled] == [8] * 12
    assert any(0 < sum(rewards) < 8 for rewards in sampled)


def test_a_problem_s_answers_do_not_depend_on_the_others(evaluate: Evaluate) -> None:
    some, _ = evaluate(samples=8, temperature=1.0, limit=4)
    every, _ = evaluate(samples=8, temperature=1.0)
    assert some == every[:4]
    assert evaluate(samples=8, temperature=1.0, seed=1)[0] != every


def test_lengths(evaluate: Evaluate) -> None:
    _, short = evaluate(max_new_tokens=1)
    assert (short["mean_tokens"], short["truncated_share"]) == (1.0, 1.0)
    _, longer = evaluate()
    assert 1 < longer["mean_tokens"] <= 6
    assert longer["truncated_share"] < 1
    assert longer["seconds"] > 0


def test_answers_are_scored_as_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Examination(Path("model"), None)
    assert as_trained(asked, None).reward == "math"
    monkeypatch.setattr(evaluation, "run_of", lambda _: Path("run"))
    for given, by in ((None, "math"), ("code", "code"), (["math", "code"], "math")):
        recipe = ReasoningRecipe.model_validate({"reward": given})
        monkeypatch.setattr(evaluation, "recipe_of", lambda _, recipe=recipe: recipe)
        assert as_trained(asked, None).reward == by
    assert as_trained(replace(asked, reward="mine:own"), None).reward == "mine:own"


@pytest.mark.parametrize(
    ("model", "generation", "engine", "dtype"),
    [
        ("float64", None, "native", "float64"),
        ("float32", "bfloat16", "native", "bfloat16"),
        ("auto", None, "native", "auto"),
        ("float64", None, "vllm", None),  # which does not compute in it
    ],
)
def test_answers_are_computed_in_the_dtype_of_the_run(
    model: str, generation: str | None, engine: str, dtype: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    parts = {"model": {"dtype": model}, "generation": {"dtype": generation}}
    recipe = ReasoningRecipe.model_validate(parts)
    asked = Examination(Path("model"), None, engine=engine)
    assert as_trained(asked, None).dtype is None
    monkeypatch.setattr(evaluation, "run_of", lambda _: Path("run"))
    monkeypatch.setattr(evaluation, "recipe_of", lambda _: recipe)
    assert as_trained(asked, None).dtype == dtype
    assert as_trained(replace(asked, dtype="bfloat16"), None).dtype == "bfloat16"


def test_lanes_may_share_a_model(evaluate: Evaluate) -> None:
    """As one that no lane can hold by itself."""
    alone, _ = evaluate(limit=4)
    shared, _ = evaluate(limit=4, lanes=parse_lanes("cpu:2"), layout="tp2")
    assert shared == alone
    for lanes, layout in (("cpu:1", "tp2"), ("cpu:2", "tp4"), ("cpu:2", "whole")):
        with pytest.raises(UserError, match=r"^--layout: generator"):
            evaluate(lanes=parse_lanes(lanes), layout=layout)


def test_what_does_not_fit_is_said_in_words_of_the_command_line(
    evaluate: Evaluate, data: Path
) -> None:
    with pytest.raises(UserError) as caught:
        evaluate(max_new_tokens=61)
    assert str(caught.value).startswith(f"{data}:1: a prompt of 4 tokens, and 11 more like it,")
    assert "--max-new-tokens = 61" in str(caught.value)
    assert len(evaluate(max_new_tokens=60)[0]) == 12, "64 positions hold 4 and 60"


@pytest.mark.parametrize(
    ("gold", "texts", "winner"),
    [
        ("3", ["It is 4.", r"\boxed{3}", "so 3.0", "It is 4", "3"], 1),
        ("3", ["It is 4.", "It is 3.", "nothing"], 0),
        ("3", ["nothing", ""], None),
        (
            r"\frac{\pi}{2}",
            [r"\boxed{\pi}", r"\boxed{\dfrac{\pi}{2}}", r"\boxed{\frac{\pi}{2}}"],
            1,
        ),
        ("C", [r"\boxed{A}", r"\boxed{\text{C}}", r"\boxed{(C)}"], 1),
        ("C", [r"\boxed{A}", r"\boxed{C) 4.5 eV}", r"\boxed{Option C}"], 1),
        ("C", [r"\boxed{A}", "The answer is C) $4.5$", r"\boxed{Option C}"], 1),
        ("x²", [r"\boxed{x}", r"\boxed{x²}", r"\boxed{x^{2}}"], 1),
        ("50", [r"\boxed{50\%}", r"\boxed{50}", r"\boxed{7}", r"\boxed{7}"], 0),
        ("50", [r"\boxed{7}", r"\boxed{50\%}", r"\boxed{7}", "50", "50.0"], 1),
        ("1/3", [r"\boxed{0.333333}", r"\boxed{1/3}", r"\boxed{3}", r"\boxed{3}"], 0),
        (r"2\sqrt{3}", [r"\boxed{2\sqrt{3}}", r"\boxed{\sqrt{12}}", r"\boxed{7}", "$7$"], 0),
        ("C", [r"\boxed{A}", "The answer is C, since it is", "So the correct option is (C)"], 1),
    ],
)
def test_the_answer_that_most_give(gold: str, texts: list[str], winner: int | None) -> None:
    assert majority(texts, gold) == winner


@pytest.mark.parametrize(
    ("texts", "winner"),
    [
        (["9 9\n3 4", "8 8\n3 4", "1 2\n5 6", "1 2\n5 6"], 2),  # their last lines
        (["3, 1, 2", "2, 1, 3", "1, 2, 3", "1, 2, 3"], 2),  # of mathematics one set
        (["4 3\n2 1", "1 3\n2 4", "1 2\n3 4", "1  2\n3 4"], 2),  # and one product
        (["7.50", "8", "7.5", "8.0", "7.5"], 0),
        (["", "", "7"], 2),
    ],
)
def test_the_answer_that_most_give_to_a_data_set_of_a_gym(texts: list[str], winner: int) -> None:
    """Its answers are in tags, of several lines, and in an order: lists, grids, boards. The vote
    read the last lines alone, and took lists of the same numbers for one answer."""
    said = [f"I think\n<answer>{text}</answer> is 5" for text in texts]
    assert majority(said, "1 2\n3 4", by="gym") == winner


@pytest.mark.parametrize("temperature", [1e-310, 1e-9])
def test_a_temperature_that_a_recipe_may_not_have_is_refused(
    evaluate: Evaluate, temperature: float
) -> None:
    """One over the first is infinite: tokens were drawn from no distribution."""
    with pytest.raises(UserError, match="--temperature: is too low to divide by"):
        evaluate(temperature=temperature)


def test_where_no_answer_can_be_scored_there_are_no_figures(evaluate: Evaluate) -> None:
    """Such as of a run on a reasoning-gym data set, whose scorer asks for columns of its own."""
    said = r"^no answer could be scored: reward gym raised KeyError: 'dataset' \(gym\.py:"
    with pytest.raises(RunFailed, match=said):
        evaluate(limit=2, reward="gym")


def test_why_some_answers_could_not_be_scored_is_said_once(
    evaluate: Evaluate,
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "only_even_sums.py").write_text(
        "def graded(prompt, completion, completion_ids, row):\n"
        "    return {0: 1.0}[int(row['answer']) % 2]\n"
    )
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, "m2flow"):
        _, figures = evaluate(reward="only_even_sums:graded")
    [said] = [one.getMessage() for one in caplog.records if "could not" in one.getMessage()]
    assert said.startswith(f"{data}: 6 of 12 answers could not be scored (first: reward ")
    assert "KeyError: 1 (only_even_sums.py:2)" in said
    assert figures["failed_share"] == 0.5


def test_of_rewards_without_a_final_answer_none_is_the_most_frequent(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that ended in programs had one spelling between them: the end of their block."""
    (tmp_path / "even_lengths.py").write_text(
        "def graded(prompt, completion, completion_ids, row):\n"
        "    return float(len(completion_ids) % 2 == 0)\n"
    )
    monkeypatch.chdir(tmp_path)
    _, figures = evaluate(limit=2, samples=2, reward="even_lengths:graded")
    assert "maj@2" not in figures
    _, figures = evaluate(limit=2, samples=2, reward="m2flow.rewards.mathematics:math_reward")
    assert "maj@2" in figures


def test_figures_of_answers() -> None:
    figures = accuracy([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]], 2)
    assert figures["accuracy"] == figures["pass@1"] == 0.5
    assert figures["pass@2"] == pytest.approx(2 / 3)
    assert 0 <= figures["accuracy_low"] < 0.5 < figures["accuracy_high"] <= 1


def test_most_answers_are_right_about_a_share_of_the_problems(evaluate: Evaluate) -> None:
    rewards, figures = evaluate(samples=8, temperature=1.0)
    assert 0 <= figures["maj@8"] <= 1
    assert figures["maj@8"] >= sum(sum(one) > 4 for one in rewards) / len(rewards)
