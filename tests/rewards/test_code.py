"""Rewards of programs and of form."""

from __future__ import annotations

import json
import math
import subprocess
import threading
from dataclasses import replace
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.rewards import code, code_reward, format_reward, sandbox
from m2flow.rewards.code import program_in, read_tests
from m2flow.rewards.reward import Judged, WeightedReward, weighted_sum

try:
    sandbox.find_way()
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

RIGHT = "So:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = RIGHT.replace("+", "-")
ASSERTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
READS = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
PATIENT = replace(sandbox.LIMITS, seconds=120.0)
PAIRS = {"inputs": ["3 4\n", "10 -2\n"], "outputs": ["7\n", "8"]}


def reward(completion: str, row: dict[str, Any]) -> float:
    return code_reward("", completion, [], row)


@pytest.mark.parametrize(
    ("completion", "tests", "expected"),
    [
        (RIGHT, ASSERTS, 1.0),
        (WRONG, ASSERTS, 0.0),
        (WRONG + RIGHT, ASSERTS, 1.0),  # the last block counts
        (RIGHT + WRONG, ASSERTS, 0.0),
        (RIGHT.split("```\n", maxsplit=1)[0].rstrip(), ASSERTS, 1.0),  # cut off after the program
        ("return a + b", ASSERTS, 0.0),
        ("```python\nimport os; os._exit(0)\n```", ASSERTS, 0.0),
        ("```python\ndef add(a, b): raise SystemExit\n```", ASSERTS, 0.0),
        ("```\ndef add(a, b): return a + b\n```", ASSERTS, 1.0),
        (READS, PAIRS, 1.0),
        (READS.replace("+", "*"), PAIRS, 0.0),
        (READS.replace("print(a + b)", "print(f'{a + b}  ', end='')"), PAIRS, 1.0),
        (READS.replace("print(a + b)", "print(7)"), PAIRS, 0.0),
        (READS.replace("print(a + b)", "print(a + b); 1 / 0"), PAIRS, 0.0),
    ],
)
def test_a_program_must_pass_all_tests(completion: str, tests: Any, expected: float) -> None:
    assert reward(completion, {"answer": "", "tests": tests}) == expected
    assert reward(completion, {"answer": json.dumps(tests)}) == expected


@pytest.mark.parametrize(
    "tests",
    [
        "[]", "[1]", '{"inputs": ["1"], "outputs": []}', "3", "{}",
        '{"fn_name": "add", "inputs": ["1"], "outputs": ["1"]}',
        '{"inputs": [[1, 2]], "outputs": ["3"]}',
        '{"inputs": ["1"], "outputs": [[3]]}',
    ],
)  # fmt: skip
def test_tests_in_another_form_are_refused(tests: str) -> None:
    with pytest.raises(ValueError, match="neither statements nor inputs"):
        read_tests({"answer": tests})


def test_a_bad_row_and_a_program_that_hangs_cost_one_answer_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They had taken the rewards of all answers that were scored along with them."""
    passes, over = code.passes, threading.Event()

    def hanging(source: str, tests: Any, seconds: float) -> bool:
        return bool(over.wait(60)) if "while True" in source else passes(source, tests)

    monkeypatch.setattr(code, "passes", hanging)
    endless = "```python\nwhile True:\n    pass\n```"
    tests = json.dumps(ASSERTS)
    rows = [{"answer": tests}, {"answer": "3"}, {"answer": tests}, {"answer": tests}]
    completions = [RIGHT, RIGHT, endless, WRONG]
    judged = Judged(range(4), [""] * 4, completions, [[]] * 4, rows)
    scores = weighted_sum([WeightedReward("code", deadline_seconds=20.0)], judged)
    over.set()
    assert scores.rewards == [1.0, 0.0, 0.0, 0.0]
    bad, late = scores.failures[1:3]
    assert "neither statements nor inputs" in bad
    assert "gave nothing within 20 s" in late
    assert scores.failures[0] == scores.failures[3] == ""


def test_the_many_tests_of_a_row_share_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had one of its own: a right program came to the deadline, a wrong one to its reward."""
    started, popen = [], subprocess.Popen

    def counted(*given: Any, **options: Any) -> Any:
        started.append(given)
        return popen(*given, **options)

    monkeypatch.setattr(sandbox.subprocess, "Popen", counted)
    pairs = {"inputs": [f"{n} 1" for n in range(20)], "outputs": list(range(1, 21))}
    source, tests = program_in(READS), read_tests({"tests": pairs})
    assert source is not None
    assert code.passes(source, tests, PATIENT)
    assert len(started) == 1
    assert not code.passes(source, [*tests[:19], ("20 1", "7")], PATIENT)


@pytest.mark.parametrize(
    "trace",
    [
        "import pathlib\npathlib.Path('/tmp/x').touch(exist_ok=False)\n",
        "import os, time\nif os.fork() == 0: time.sleep(60)\n",
    ],
)
def test_a_test_finds_nothing_of_those_before_it(trace: str) -> None:
    assert code.passes(f"{trace}{program_in(READS)}", read_tests({"tests": PAIRS}), PATIENT)


def test_a_program_has_so_many_seconds_for_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up with its reward open, and its other tests went on."""
    now, given = [0.0], []

    def run(self: sandbox.Sandbox, source: str, *texts: str, **how: Any) -> sandbox.ProgramOutcome:
        given.append(how["seconds"])
        now[0] += 4.0
        in_time = how["seconds"] >= 4.0
        return sandbox.ProgramOutcome("7", "", 0) if in_time else sandbox.ProgramOutcome("", "", 1)

    monkeypatch.setattr(sandbox.Sandbox, "run", run)
    monkeypatch.setattr(code.time, "monotonic", lambda: now[0])
    assert code.passes("", [("", "7")] * 5, seconds=20.0)
    assert given == [10.0, 10.0, 10.0, 8.0, 4.0]
    given.clear()
    assert not code.passes("", [("", "7")] * 20, seconds=20.0)
    assert given == [10.0, 10.0, 10.0, 8.0, 4.0, 0.0]
    assert not code.passes("", "assert True", seconds=3.0)
    assert given[-1] == 3.0


def test_the_seconds_of_a_program_are_those_of_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(code, "passes", lambda *_, seconds: given.append(seconds) or True)
    judged = Judged([0], [""], [READS], [[]], [{"answer": "", "tests": PAIRS}])
    assert weighted_sum([WeightedReward("code", deadline_seconds=500.0)], judged).rewards == [1.0]
    assert 400.0 < given[0] <= 450.0
    assert reward(READS, {"tests": PAIRS}) == 1.0
    assert given[1] == math.inf


def test_what_a_completion_has_for_a_program() -> None:
    assert program_in("no program") is None
    assert program_in("```PY  \nx = 1\n```") == "x = 1\n"
    assert program_in("So: ```python\nx = 1```  \nDone") == "x = 1"


THREE = "```python\nprint(3)\n```\n"


@pytest.mark.parametrize(
    "completion",
    [
        "```text\n1 2\n```\n\n" + THREE,
        THREE + "```bash\npython it.py\n```\n",
        THREE + "It prints\n```\n3\n```\n",
        "```\nprint(2)\n```\n" + THREE,
        "1. So:\n   ```text\n   3\n   ```\n" + THREE,
        "Call ```print```\n" + THREE,
        THREE.replace("python", "python3"),
        THREE.replace("python", "Python "),
        "```text\n1 2\n```\n```\nprint(3)\n```\n",
    ],
)
def test_other_blocks_of_a_completion_hide_no_program(completion: str) -> None:
    """Where one of another tag came before, what stood between two blocks was the program."""
    assert program_in(completion) == "print(3)\n"


def test_a_fence_within_a_programs_line_does_not_end_it() -> None:
    source = "parts = input().split('```')\nprint(len(parts))\n"
    assert program_in(f"```python\n{source}```") == source


def test_of_tests_that_are_read_numbers_are_texts() -> None:
    assert read_tests({"tests": {"inputs": [3], "outputs": [1.5]}}) == [("3", "1.5")]


def test_where_no_sandbox_can_be_made_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = sandbox.Way("none", lambda limits: ["/nonexistent"])
    monkeypatch.setattr(sandbox, "WAYS", (nothing,))
    sandbox.find_way.cache_clear()
    try:
        with pytest.raises(UserError, match="no sandbox"):
            WeightedReward("code").load()
    finally:
        sandbox.find_way.cache_clear()


def test_a_recipe_names_them() -> None:
    rows = [{"answer": json.dumps(ASSERTS)}] * 2
    judged = Judged([0, 1], ["", ""], [RIGHT, WRONG], [[], []], rows)
    scores = weighted_sum([WeightedReward("code"), WeightedReward("format", 0.5)], judged)
    assert scores.rewards == [1.0, 0.0]
    assert scores.failures == ["", ""]


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("", "<think>a</think><answer>b</answer>", 1.0),
        ("", "\n<think>\na\n</think>\n\n<answer> b </answer>\n", 1.0),
        ("", "<think>a</think>b", 0.0),
        ("", "<think></think><answer>b</answer>", 0.0),
        ("", "<think>a</think><answer> </answer>", 0.0),
        ("", "x <think>a</think><answer>b</answer>", 0.0),
        ("", "<think>a</think><answer>b</answer> and more", 0.0),
        ("", "<think>a<think>b</think><answer>c</answer>", 0.0),
        ("", "<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("Solve it.\n<think>\n", "a</think><answer>b</answer>", 1.0),
        ("Solve it.", "a</think><answer>b</answer>", 0.0),
    ],
)
def test_form(prompt: str, completion: str, expected: float) -> None:
    assert format_reward(prompt, completion, [], {}) == expected


def test_where_the_chat_template_opens_the_thoughts_they_go_on() -> None:
    """The prompt is what the user said; its end is what the model goes on from."""
    row = {"prompt_end": "<|im_start|>assistant\n<think>\n"}
    assert format_reward("Solve it.", "a</think><answer>b</answer>", [], row) == 1.0
    assert format_reward("Solve it.", "<think>a</think><answer>b</answer>", [], row) == 0.0
