"""`m2flow eval`: figures that can be checked by hand, and mistakes in one line."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from m2flow.rewards import addition
from m2flow.workloads.reasoning.evaluation import pass_at_k

M2flow = Callable[..., Any]
Refused = Callable[..., str]

LANES = ["--lanes", "cpu:1"]
SHORT = ["--template", "{question}=", "--max-new-tokens", "6"]


@given(st.integers(1, 9), st.data())
def test_pass_at_k_against_trying_every_choice(num_samples: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    answers = [True] * num_correct + [False] * (num_samples - num_correct)
    choices = [any(choice) for choice in itertools.combinations(answers, k)]
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(choices) / len(choices))


@pytest.fixture
def problems(run: Path) -> Path:
    """Questions in the characters that the tiny model knows, behind no template of words."""
    path = Path("problems.jsonl")
    rows = [{"question": f"{a}+{b}", "answer": a + b} for a in range(2, 5) for b in range(3, 6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluated(m2flow: M2flow, model: Path, data: Path, *words: str) -> dict[str, Any]:
    outcome = m2flow("eval", model, "--data", data, *SHORT, *LANES, "--json", *words)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("\n") == 1
    figures: dict[str, Any] = json.loads(outcome.out)
    return figures


def greedy_by_hand(model: Path, data: Path) -> tuple[float, float]:
    """(accuracy, mean tokens), a whole forward pass of transformers for every token."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    right, tokens = 0, 0
    for row in rows:
        prompt = tokenizer(row["question"] + "=")["input_ids"]
        ids = list(prompt)
        while len(ids) < len(prompt) + 6 and ids[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
        tokens += len(ids) - len(prompt)
        numbers = re.findall(r"\d+", tokenizer.decode(ids[len(prompt) :]))
        right += bool(numbers) and int(numbers[-1]) == row["answer"]
    return right / len(rows), tokens / len(rows)


def test_greedy_against_a_loop(run: Path, problems: Path, m2flow: M2flow) -> None:
    model = run / "checkpoints" / "latest"
    figures = evaluated(m2flow, model, problems)
    accuracy, mean_tokens = greedy_by_hand(model / "model", problems)
    assert figures["accuracy"] == figures["pass@1"] == accuracy
    assert figures["mean_tokens"] == pytest.approx(mean_tokens)
    assert (figures["problems"], figures["samples"], figures["temperature"]) == (9, 1, 0)
    assert evaluated(m2flow, model / "model", problems)["accuracy"] == accuracy


def test_several_answers(run: Path, problems: Path, m2flow: M2flow) -> None:
    model = run / "warmup"
    figures = evaluated(m2flow, model, problems, "--samples", "6")
    assert figures["temperature"] == 1
    assert [key for key in figures if key.startswith("pass@")] == [
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@6",
    ]
    assert figures["pass@1"] == pytest.approx(figures["accuracy"])
    assert figures["pass@1"] < figures["pass@2"] < figures["pass@4"] < figures["pass@6"]
    again = evaluated(m2flow, model, problems, "--samples", "6")
    other = evaluated(m2flow, model, problems, "--samples", "6", "--seed", "1")
    without_time = {key for key in figures if key != "seconds"}
    assert all(again[key] == figures[key] for key in without_time)
    assert any(other[key] != figures[key] for key in without_time)


def test_several_greedy_answers_are_one(run: Path, problems: Path, m2flow: M2flow) -> None:
    words = ["--samples", "3", "--temperature", "0"]
    figures = evaluated(m2flow, run / "warmup", problems, *words)
    assert figures["pass@3"] == figures["accuracy"]
    assert figures["accuracy"] == evaluated(m2flow, run / "warmup", problems)["accuracy"]


def test_what_a_reward_prints_is_not_among_the_figures(
    run: Path, problems: Path, m2flow: M2flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = addition.addition_reward

    def score(*arguments: Any) -> float:
        print("scoring")
        return right(*arguments)

    monkeypatch.setattr(addition, "addition_reward", score)
    words = ["--data", problems, *LANES, *SHORT, "--reward", "addition"]
    for form in ("--json", "--markdown"):
        outcome = m2flow("eval", run / "warmup", *words, form)
        assert outcome.code == 0, outcome.err
        assert "scoring" not in outcome.out
        assert "scoring" in outcome.err


def test_only_the_first(run: Path, problems: Path, m2flow: M2flow) -> None:
    assert evaluated(m2flow, run / "warmup", problems, "--limit", "2")["problems"] == 2


def test_bad_rows(run: Path, problems: Path, m2flow: M2flow, refused: Refused) -> None:
    with problems.open("a") as file:
        file.write("{\n")
    words = ["eval", run / "warmup", "--data", problems, *LANES]
    line = refused(*words)
    assert line.startswith("problems.jsonl:10: is not valid JSON")
    figures = evaluated(m2flow, run / "warmup", problems, "--on-bad-row", "skip")
    assert figures["problems"] == 9


def test_columns_of_other_names(run: Path, problems: Path, m2flow: M2flow) -> None:
    expected = evaluated(m2flow, run / "warmup", problems)
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    renamed = [{"asked": row["question"], "right": {"answer": row["answer"]}} for row in rows]
    problems.write_text("".join(json.dumps(row) + "\n" for row in renamed))
    words = ["--question-column", "asked", "--answer-column", "right.answer"]
    found = evaluated(m2flow, run / "warmup", problems, *words)
    assert found | {"seconds": 0} == expected | {"seconds": 0}


def test_figures_for_people(run: Path, problems: Path, m2flow: M2flow) -> None:
    words = ["--data", problems, *LANES, *SHORT, "--samples", "2"]
    outcome = m2flow("eval", run / "warmup", *words)
    assert outcome.code == 0
    first, *lines = outcome.out.splitlines()
    assert first == "9 problems of problems.jsonl, 2 answer(s) each"
    names = [line.split()[0] for line in lines]
    assert names == [
        "accuracy", "accuracy_low", "accuracy_high", "pass@1", "pass@2", "maj@2", "mean_tokens",
        "truncated_share", "failed_share", "seconds",
    ]  # fmt: skip


def test_a_table_of_several_data_sets(run: Path, problems: Path, m2flow: M2flow) -> None:
    other = shutil.copy(problems, "others.jsonl")
    words = ["--data", problems, "--data", other, "--markdown", *LANES, *SHORT]
    outcome = m2flow("eval", run / "warmup", *words)
    assert outcome.code == 0, outcome.err
    header, _, *rows = outcome.out.splitlines()
    assert "accuracy" in header
    assert [row.split("|")[1].strip() for row in rows] == ["problems", "others", "mean"]
    assert rows[0].replace("problems", "others").split("|")[2] == rows[1].split("|")[2]


def test_a_reward_of_ones_own(run: Path, problems: Path, m2flow: M2flow, refused: Refused) -> None:
    """One that fails for some answers: these count as wrong, and are told."""
    Path("strict.py").write_text(
        "def graded(prompt, completion, completion_ids, row):\n"
        "    if int(row['answer']) % 2:\n"
        "        raise ValueError('odd')\n"
        "    return 1.0\n"
    )
    answers = [int(json.loads(line)["answer"]) for line in problems.read_text().splitlines()]
    odd = sum(answer % 2 for answer in answers) / len(answers)
    assert 0 < odd < 1
    figures = evaluated(m2flow, run / "warmup", problems, "--reward", "strict:graded")
    assert figures["failed_share"] == pytest.approx(odd)
    assert figures["accuracy"] == pytest.approx(1 - odd)
    line = refused("eval", run / "warmup", "--data", problems, *LANES, "--reward", "strict:grade")
    assert line.startswith("--reward")
    assert "did you mean 'graded'" in line


def test_where_none_could_be_scored_the_command_fails(
    run: Path, problems: Path, m2flow: M2flow
) -> None:
    words = ["--data", problems, *LANES, *SHORT, "--reward", "gym"]
    outcome = m2flow("eval", run / "warmup", *words)
    assert (outcome.code, outcome.out) == (1, "")
    assert "no answer could be scored: reward gym raised KeyError: 'dataset'" in outcome.err


# Mistakes


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--samples", "0"], ["--samples", "Invalid value"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens", "Invalid value"]),
        (["--limit", "0"], ["--limit", "Invalid value"]),
        (["--limit", "-1"], ["--limit", "Invalid value"]),
        (["--temperature", "-0.5"], ["--temperature", "Invalid value"]),
        (["--temperature", "nan"], ["--temperature"]),
        (["--min-p", "nan"], ["--min-p"]),
        (["--top-p", "nan"], ["--top-p"]),
        (["--cache-gb", "inf"], ["--cache-gb: is not finite"]),
        (["--deadline-seconds", "inf"], ["--deadline-seconds: is not finite"]),
        (["--temperature", "inf"], ["--temperature", "got inf"]),
        (
            ["--temperature", "0.001", "--engine", "vllm"],
            ["--temperature: vLLM draws at 0.01", "got 0.001", "at least 0.01"],
        ),
        (["--seed", "-1"], ["--seed", "Invalid value"]),
        (["--on-bad-row", "ignore"], ["--on-bad-row", "'ignore'", "fail or skip"]),
        (["--lanes", "cpu:64"], ["lanes", "'cpu:64'", "at most"]),
        (["--lanes", "fast"], ["lanes", "'fast'", "cpu:N"]),
        (["--template", "Answer!"], ["--template", "'Answer!'", "{question}"]),
        (["--data", "problem.jsonl"], ["problem.jsonl: no such file", "'problems.jsonl'"]),
        (["--data", "run"], ["run: holds files of"]),
        (["--data", "veRL.jsonl"], ["veRL.jsonl:1: no answer", "--answer-column names another"]),
        (["--answer-column", "right"], ["--answer-column: problems.jsonl:1 has no", "'right'"]),
        (["--max-new-tokens", "99"], ["problems.jsonl:1", "--max-new-tokens = 99", "= 64"]),
    ],
)
def test_a_mistake_is_one_line(
    run: Path, problems: Path, refused: Refused, words: list[str], parts: list[str]
) -> None:
    Path("veRL.jsonl").write_text('{"prompt": "1+1", "reward_model": {"ground_truth": "2"}}')
    data = [] if "--data" in words else ["--data", "problems.jsonl"]
    template = [] if "--template" in words else ["--template", "{question}="]
    line = refused("eval", run / "warmup", *data, *template, *words)
    for part in parts:
        assert part in line


def test_a_vocabulary_that_has_no_letters(run: Path, problems: Path, refused: Refused) -> None:
    model = shutil.copytree(run / "warmup", "published")  # of which no run says the template
    line = refused("eval", model, "--data", problems, *LANES)
    assert line.startswith("problems.jsonl: the model's tokenizer cannot encode the prompts")


@pytest.mark.parametrize(
    ("break_it", "parts"),
    [
        (shutil.rmtree, ["run/warmup", "does not exist"]),
        (lambda model: (model / "config.json").unlink(), ["config.json", "missing"]),
        (lambda model: (model / "config.json").write_text("{}"), ["config.json"]),
        (lambda model: (model / "tokenizer_config.json").unlink(), ["tokenizer_config.json"]),
        (lambda model: (model / "model.safetensors").unlink(), ["weights are missing"]),
        (
            lambda model: os.truncate(model / "model.safetensors", 1000),
            ["model.safetensors is cut off or damaged"],
        ),
    ],
)
def test_a_model_that_is_not_whole(
    run: Path,
    problems: Path,
    refused: Refused,
    break_it: Callable[[Path], object],
    parts: list[str],
) -> None:
    break_it(run / "warmup")
    words = ["--data", problems, *LANES, *SHORT]
    line = refused("eval", run / "warmup", *words)
    for part in parts:
        assert part in line
