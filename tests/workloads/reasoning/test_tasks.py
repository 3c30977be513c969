"""Tasks: problems by index, held-out problems that never train, rewards, and clear refusals."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.rewards import addition_reward, gym_reward, math_reward
from m2flow.workloads.reasoning.tasks import DemonstratedTask, Problem, Task, jsonl, make_task
from m2flow.workloads.reasoning.tasks.addition import CHARACTERS, Addition, column_sums
from m2flow.workloads.reasoning.tasks.jsonl import Jsonl
from m2flow.workloads.reasoning.tasks.problem import generator


def sorted_operands(prompt: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in prompt.rstrip("=").split("+")))


def slow_column_sums(a: int, b: int) -> str:
    """As a child writes it: digit by digit, from the right."""
    width = max(len(str(a)), len(str(b)))
    top, bottom = str(a).zfill(width)[::-1], str(b).zfill(width)[::-1]
    written, carry = [], 0
    for x, y in zip(top, bottom, strict=True):
        total = int(x) + int(y) + carry
        written.append(f"0{total}" if total < 10 else str(total))
        carry = 1 if total > 9 else 0
    return ",".join(written)


class TestAddition:
    def test_the_example_of_the_format(self) -> None:
        assert column_sums(347, 285) == "12,13,06"
        assert column_sums(9999, 1) == "10,10,10,10"
        assert column_sums(5, 1234) == "09,03,02,01"

    @given(st.integers(0, 10**18), st.integers(0, 10**18))
    def test_column_sums_against_the_slow_way(self, a: int, b: int) -> None:
        columns = column_sums(a, b)
        assert columns == slow_column_sums(a, b)
        digits = [int(column) for column in columns.split(",")]
        carry = digits[-1] // 10
        value = sum(digit % 10 * 10**place for place, digit in enumerate(digits))
        assert value + carry * 10 ** len(digits) == a + b

    def test_a_vocabulary_of_18(self) -> None:
        task = Addition(seed=3)
        for index in range(200):
            prompt, completion = task.demonstration(index)
            assert set(prompt + completion) <= set(CHARACTERS)

    def test_problems_depend_on_seed_and_index_alone(self) -> None:
        backward = {index: Addition(seed=1).train(index) for index in reversed(range(50))}
        assert [Addition(seed=1).train(index) for index in range(50)] == [
            backward[index] for index in range(50)
        ]
        assert Addition(seed=1).train(0) != Addition(seed=2).train(0)
        assert Addition(seed=1).train(0) != Addition(seed=1).train(1)
        # The stream itself is part of what a seed promises.
        assert [Addition().train(index).prompt for index in range(3)] == FIRST_PROMPTS

    def test_operands_have_three_or_four_digits(self) -> None:
        lengths = [
            tuple(map(len, map(str, sorted_operands(Addition().train(index).prompt))))
            for index in range(400)
        ]
        assert set(lengths) == {(3, 3), (4, 4)}
        assert 120 < lengths.count((3, 3)) < 280
        mixed = Addition(equal_lengths=False)
        assert any(
            len({len(str(number)) for number in sorted_operands(mixed.train(index).prompt)}) == 2
            for index in range(50)
        )

    @pytest.mark.parametrize("digits", [(3, 4), (1, 2)])
    def test_held_out_sums_never_train_in_either_order(self, digits: tuple[int, int]) -> None:
        task = Addition(seed=5, min_digits=digits[0], max_digits=digits[1])
        held_out = task.held_out(300)
        operands = {sorted_operands(problem.prompt) for problem in held_out}
        assert len({problem.prompt for problem in held_out}) == len(held_out) == 300
        trained = {sorted_operands(task.train(index).prompt) for index in range(3000)}
        shown = {sorted_operands(task.demonstration(index)[0]) for index in range(3000)}
        assert not operands & (trained | shown)

    def test_held_out_is_the_same_for_every_seed_and_grows_at_its_end(self) -> None:
        assert Addition(seed=1).held_out(20) == Addition(seed=2).held_out(50)[:20]
        assert Addition().held_out(0) == []

    def test_tiny_numbers_have_few_held_out_sums(self) -> None:
        task = Addition(min_digits=1, max_digits=1)
        assert 0 < len(task.held_out(100)) < 20

    def test_demonstrations_are_right_and_half_of_them_think(self) -> None:
        task = Addition(seed=4)
        thoughtful = 0
        for index in range(400):
            prompt, completion = task.demonstration(index)
            a, b = (int(part) for part in prompt.rstrip("=").split("+"))
            row = {"answer": str(a + b), "finished": True}
            assert addition_reward(prompt, completion, (), row) == 1.0
            assert completion in (f"#{a + b}", f"{column_sums(a, b)}#{a + b}")
            thoughtful += not completion.startswith("#")
        assert 150 < thoughtful < 250
        assert task.demonstration(7) == Addition(seed=4).demonstration(7)

    @pytest.mark.parametrize(
        ("completion", "finished", "reward"),
        [
            ("#632", True, 1.0),
            ("12,13,06#632", True, 1.0),
            ("#632", False, 0.0),
            ("632", True, 0.0),
            ("#631", True, 0.0),
            ("#0632", True, 0.0),
            ("#632#", True, 0.0),
            ("#632#632", True, 0.0),
            ("#6321", True, 0.0),
            ("", True, 0.0),
            ("#", True, 0.0),
        ],
    )
    def test_reward_is_an_exact_match_with_an_end(
        self, completion: str, finished: bool, reward: float
    ) -> None:
        row = {"answer": "632", "finished": finished}
        assert addition_reward("347+285=", completion, (), row) == reward

    @pytest.mark.parametrize("digits", [(0, 3), (4, 3), (3, 19)])
    def test_impossible_digits(self, digits: tuple[int, int]) -> None:
        with pytest.raises(UserError, match="min_digits"):
            Addition(min_digits=digits[0], max_digits=digits[1])


FIRST_PROMPTS = ["7669+9549=", "886+851=", "3442+3584="]


def write_rows(path: Path, count: int, start: int = 0) -> Path:
    rows = [{"question": f"{x}+1?", "answer": str(x + 1)} for x in range(start, start + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class TestJsonl:
    def test_each_epoch_is_a_seeded_shuffle_of_all_rows(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "rows.jsonl", 40)
        task = Jsonl(path=path, held_out_rows=8, seed=1)
        assert task.num_train == 32
        epochs = [[task.train(32 * epoch + i).answer for i in range(32)] for epoch in range(3)]
        for epoch in epochs:
            assert sorted(epoch, key=int) == [str(x + 1) for x in range(32)]
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != [
            Jsonl(path=path, held_out_rows=8, seed=2).train(i).answer for i in range(32)
        ]

    def test_a_step_in_two_epochs_shuffles_each_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each slot of the step went back to the first epoch, which was shuffled again for it."""
        shuffled: list[int] = []

        def noted(*parts: Any) -> Any:
            shuffled.append(parts[-1])
            return generator(*parts)

        monkeypatch.setattr(jsonl, "generator", noted)
        task = Jsonl(path=write_rows(tmp_path / "rows.jsonl", 40), held_out_rows=8, seed=1)
        for first in (20, 52):
            for slot in range(6):
                for index in range(first + slot, first + 24, 6):
                    task.train(index)
        assert shuffled == [0, 1, 2]
        assert task.keep(lambda problem: problem.answer not in ("1", "40")) == (1, 1)
        assert len(task.held_out(99)) == 7
        task.train(0)
        assert shuffled == [0, 1, 2, 0]

    def test_other_rows_have_another_digest(self, tmp_path: Path) -> None:
        """Other answers, another order, or a row more or less; not others to hold out."""
        path = write_rows(tmp_path / "rows.jsonl", 40)
        lines = path.read_text().splitlines(keepends=True)
        more = '{"question": "40+1?", "answer": "41"}\n'

        def read(*rows: str, seed: int = 0) -> jsonl.RowsRead:
            path.write_text("".join(rows))
            return Jsonl(path=path, held_out_rows=8, seed=seed).rows_read()

        known = read(*lines)
        assert known.count == 32
        assert read(*lines, seed=1) == known
        assert read(*lines[:32], *lines[:31:-1]) == known
        others = [read(lines[1], lines[0], *lines[2:]), read(*lines[1:]), read(*lines, more)]
        others.append(read(lines[0].replace('"1"', '"2"'), *lines[1:]))
        assert [one.count for one in others] == [32, 31, 33, 32]
        assert len({known.digest, *(one.digest for one in others)}) == 5
        task = Jsonl(path=path, held_out_rows=8)
        task.keep(lambda problem: problem.answer != "5")
        assert task.rows_read().count == 31

    def test_a_resumed_walk_needs_only_the_index(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "rows.jsonl", 40)
        task = Jsonl(path=path, seed=1)
        walked = [task.train(index) for index in range(100)]
        for index in (99, 0, 50, 37, 36):
            assert Jsonl(path=path, seed=1).train(index) == walked[index]
            assert task.train(index) == walked[index]

    def test_the_last_rows_are_held_out(self, tmp_path: Path) -> None:
        task = Jsonl(path=write_rows(tmp_path / "rows.jsonl", 40), held_out_rows=8)
        assert [problem.answer for problem in task.held_out(3)] == ["33", "34", "35"]
        assert len(task.held_out(100)) == 8
        trained = {task.train(index).prompt for index in range(200)}
        assert not trained & {problem.prompt for problem in task.held_out(8)}

    def test_by_default_a_tenth_is_held_out(self, tmp_path: Path) -> None:
        task = Jsonl(path=write_rows(tmp_path / "rows.jsonl", 40))
        assert (task.num_train, len(task.held_out(100))) == (36, 4)

    def test_a_repeat_of_a_held_out_row_is_not_trained_on(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write_rows(tmp_path / "rows.jsonl", 10)
        path.write_text(path.read_text(encoding="utf-8") * 2, encoding="utf-8")
        task = Jsonl(path=path, held_out_rows=4)
        assert task.num_train == 12
        assert "dropped 4" in caplog.text
        assert not {"7", "8", "9", "10"} & {task.train(index).answer for index in range(12)}

    def test_conversations_that_end_alike_are_other_questions(self, tmp_path: Path) -> None:
        """All of them were dropped as repeats of the held-out ones."""
        path = tmp_path / "rows.jsonl"
        turns = [
            [
                {"role": "user", "content": f"{number}+1?"},
                {"role": "assistant", "content": "Shall I think first?"},
                {"role": "user", "content": "Yes."},
            ]
            for number in (1, 2, 3, 4, 4)
        ]
        path.write_text("\n".join(json.dumps({"prompt": one, "answer": "5"}) for one in turns))
        assert Jsonl(path=path, held_out_rows=1).num_train == 3

    def test_a_second_file_is_held_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        train, test = write_rows(tmp_path / "a.jsonl", 10), write_rows(tmp_path / "b.jsonl", 5, 100)
        task = Jsonl(path=train, eval_path=test)
        assert task.num_train == 10
        assert [problem.answer for problem in task.held_out(9)] == [f"10{x}" for x in range(1, 6)]
        assert not caplog.records
        with caplog.at_level(logging.WARNING):
            same = Jsonl(path=train, eval_path=train)
        assert same.num_train == 10
        assert "10 rows are also in" in caplog.text

    def test_a_single_row_is_told_what_it_lacks(self, tmp_path: Path) -> None:
        """It was told of a key that nobody had written, and to expect 0 to 0."""
        path = write_rows(tmp_path / "rows.jsonl", 1)
        with pytest.raises(UserError) as error:
            Jsonl(path=path)
        said = str(error.value)
        assert said.startswith(f"{path}: has a single row, which cannot be trained on and held out")
        assert "expected 2 rows or more" in said
        assert "data.eval_path, or data.options.held_out_rows: 0" in said
        assert Jsonl(path=path, held_out_rows=0).num_train == 1

    @pytest.mark.parametrize("held_out_rows", [-1, 10, 11])
    def test_something_must_be_left_to_train_on(self, tmp_path: Path, held_out_rows: int) -> None:
        path = write_rows(tmp_path / "rows.jsonl", 10)
        with pytest.raises(UserError, match=r"held_out_rows.*0 to 9"):
            Jsonl(path=path, held_out_rows=held_out_rows)
        one = write_rows(tmp_path / "one.jsonl", 1)
        with pytest.raises(UserError, match=r"held_out_rows.*its rows \(1\).*expected 0[,;]"):
            Jsonl(path=one, held_out_rows=held_out_rows)

    def test_settings_that_contradict(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "rows.jsonl", 10)
        with pytest.raises(UserError, match="one of the two"):
            Jsonl(path=path, eval_path=path, held_out_rows=3)

    def test_gsm8k(self, shared_data: Path) -> None:
        task = Jsonl(
            path=shared_data / "gsm8k_train.jsonl", eval_path=shared_data / "gsm8k_test.jsonl"
        )
        assert task.num_train == 7473
        assert len(task.held_out(5000)) == 1319
        for index in range(50):
            problem = task.train(index)
            row = {**problem.metadata, "answer": problem.answer}
            assert math_reward(problem.prompt, f"#### {problem.answer}", (), row) == 1.0


@pytest.fixture(scope="module")
def task() -> Any:
    pytest.importorskip("reasoning_gym", reason="needs the extra m2flow[gym]")
    return make_task("gym", dataset="chain_sum", seed=1, options={"max_terms": 3})


class TestGym:
    def test_problems_depend_on_seed_and_index_alone(self, task: Any) -> None:
        again = make_task("gym", dataset="chain_sum", seed=1, options={"max_terms": 3})
        assert [again.train(index) for index in (700, 3, 0)] == [
            task.train(index) for index in (700, 3, 0)
        ]
        other = make_task("gym", dataset="chain_sum", seed=2, options={"max_terms": 3})
        # reasoning-gym adds index to seed: seeds 1 and 2 must not be one stream, shifted.
        first = {task.train(index).prompt for index in range(300)}
        assert len(first & {other.train(index).prompt for index in range(300)}) < 10

    def test_held_out_questions_never_train(self) -> None:
        pytest.importorskip("reasoning_gym", reason="needs the extra m2flow[gym]")
        # Few enough different questions that drawing alone would repeat them.
        task = make_task(
            "gym",
            dataset="chain_sum",
            options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        )
        held_out = {problem.prompt for problem in task.held_out(30)}
        assert len(held_out) == 30
        assert not held_out & {task.train(index).prompt for index in range(2000)}

    def test_a_problem_that_cannot_be_made_is_passed_over(self) -> None:
        """It ended the run in the step that asked it, and so did every resume."""
        pytest.importorskip("reasoning_gym", reason="needs the extra m2flow[gym]")

        def make(least: int) -> Any:
            options = {"max_sides": 3, "min_angle": least}
            return make_task("gym", dataset="simple_geometry", seed=1, options=options)

        task, again = make(80), make(80)  # one in thirteen fails
        assert len(task.held_out(40)) == 40
        walked = [task.train(index) for index in range(100)]
        assert [again.train(index) for index in reversed(range(100))] == walked[::-1]
        for ask in (lambda: make(100).train(0), lambda: make(100).held_out(3)):
            with pytest.raises(UserError, match=r"^data\.options: simple_geometry can make no"):
                ask()

    def test_its_own_score_on_the_extracted_answer(self, task: Any) -> None:
        problem = task.train(0)

        def score(completion: str) -> float:
            return gym_reward(problem.prompt, completion, (), problem.metadata)

        assert score(f"<answer>1</answer> no: <answer> {problem.answer} </answer>") == 1.0
        assert score(rf"hence \boxed{{{problem.answer}}}") == 1.0
        assert score(f"#### {problem.answer}") == 1.0
        assert score("<answer>no idea</answer>") < 1.0
        assert score("") == 0.0

    def test_unknown_names_and_options(self) -> None:
        pytest.importorskip("reasoning_gym", reason="needs the extra m2flow[gym]")
        with pytest.raises(UserError, match="did you mean 'chain_sum'"):
            make_task("gym", dataset="chain_summ")
        with pytest.raises(UserError, match=r"max_termz.*did you mean 'max_terms'"):
            make_task("gym", dataset="chain_sum", options={"max_termz": 3})
        with pytest.raises(UserError, match="refuses these options"):
            make_task("gym", dataset="chain_sum", options={"min_terms": 9, "max_terms": 2})

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "reasoning_gym", None)
        with pytest.raises(UserError, match=r"m2flow\[gym\]"):
            make_task("gym", dataset="chain_sum")


class TestRegistry:
    def test_a_task_by_name(self, tmp_path: Path) -> None:
        task = make_task("addition", seed=9, max_digits=3)
        assert isinstance(task, Task)
        assert isinstance(task, DemonstratedTask)
        assert task.train(2) == Addition(seed=9, max_digits=3).train(2)
        assert isinstance(task.train(0), Problem)
        rows = make_task("jsonl", path=write_rows(tmp_path / "rows.jsonl", 10))
        assert isinstance(rows, Task)
        assert not isinstance(rows, DemonstratedTask)

    def test_what_is_wrong_is_named(self) -> None:
        with pytest.raises(UserError, match=r"max_digit:.*did you mean 'max_digits'"):
            make_task("addition", max_digit=3)
        with pytest.raises(UserError, match=r"data\.path.*needs it"):
            make_task("jsonl")
        with pytest.raises(UserError, match=r"rows: .* no such option; valid names: held_out_rows"):
            make_task("jsonl", rows=3)

    @pytest.mark.parametrize(
        ("task", "option", "value", "expected"),
        [
            ("addition", "min_digits", "two", "a valid integer"),
            ("addition", "min_digits", 1.5, "a valid integer"),
            ("addition", "min_digits", True, "a valid integer"),
            ("addition", "thinking_share", "half", "a valid number"),
            ("addition", "equal_lengths", "maybe", "a valid boolean"),
            ("jsonl", "held_out_rows", "ten", "a valid integer"),
        ],
    )
    def test_an_option_of_another_type_is_refused_by_its_name(
        self, tmp_path: Path, task: str, option: str, value: object, expected: str
    ) -> None:
        """1.5 ended in a traceback, and any text was as good as true."""
        path = {"path": write_rows(tmp_path / "rows.jsonl", 10)} if task == "jsonl" else {}
        said = rf"^data\.options\.{option}: is wrong \(got {value!r}\); expected {expected}$"
        with pytest.raises(UserError, match=said):
            make_task(task, **path, **{option: value})
