"""Reading JSON lines: aliases, golds, and one clear line for whatever is wrong with a file."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.rewards.code import read_tests
from m2flow.rewards.mathematics import verify
from m2flow.workloads.reasoning.data import DEFAULT_TEMPLATE, final_answer, read_problems
from m2flow.workloads.reasoning.rows import TO_HOLD_OUT


def write(folder: Path, *lines: str, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = '{"question": "2+3?", "answer": "2+3=<<2+3=5>>5\\n#### 5"}'


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gsm8k_train.jsonl", 7473),
        ("gsm8k_test.jsonl", 1319),
        ("aime24.jsonl", 30),
        ("multiarith.jsonl", 600),
    ],
)
def test_real_files_read_whole(shared_data: Path, name: str, rows: int) -> None:
    problems = read_problems(shared_data / name)
    assert len(problems) == rows
    for problem in problems:
        assert problem.answer
        assert "####" not in problem.answer
        assert verify(problem.answer, f"#### {problem.answer}") == 1.0


@pytest.mark.parametrize(
    ("column", "answer"),
    [("question", "answer"), ("problem", "answer"), ("prompt", "answer"), ("Problem", "Answer")],
)
def test_column_aliases(tmp_path: Path, column: str, answer: str) -> None:
    """AIME 2024 is published with the last, AIME 2025 with the second; answers are numbers."""
    path = write(tmp_path, f'{{"id": 1, "{column}": "How many?", "{answer}": 7}}')
    [problem] = read_problems(path, template="Q: {question} A:")
    assert problem.prompt == "Q: How many? A:"
    assert problem.answer == "7"
    asked = {"id": 1, column: "How many?", "line": 1}
    assert problem.metadata == asked, "a reward may ask for any column but the answer's"


def test_a_column_that_is_called_line_is_what_the_row_says(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, '{"question": "3+4?", "answer": "7", "line": "Jubilee"}')
    first, second = read_problems(path)
    assert (first.metadata["line"], first.line) == (1, 1)
    assert (second.metadata["line"], second.line) == ("Jubilee", 2)


def test_gold_is_what_stands_after_the_marker(tmp_path: Path) -> None:
    [problem] = read_problems(write(tmp_path, GOOD))
    assert problem.answer == "5"
    assert problem.prompt == DEFAULT_TEMPLATE.replace("{question}", "2+3?")
    assert r"\boxed{}" in problem.prompt
    assert final_answer("1,234") == "1,234"


def test_gold_of_a_worked_solution_is_its_last_box(tmp_path: Path) -> None:
    """As in MATH, whose column `solution` was compared whole: never equal past 256 characters."""
    solution = r"So $x = \boxed{3}$, " + "we add, " * 50 + r"and $y = \boxed{\frac{1}{2}}$."
    path = write(tmp_path, json.dumps({"problem": "y?", "solution": solution}))
    [problem] = read_problems(path, answer="solution", rewards=["math"])
    assert problem.answer == r"\frac{1}{2}"
    assert final_answer(r"so \boxed{4} #### 5") == "5"
    assert final_answer(r"never \boxed{closed") == r"never \boxed{closed"


def test_an_answer_that_is_too_long_to_be_compared_is_a_bad_row(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, json.dumps({"question": "?", "answer": "We add 1, " * 40}))
    for name in ("math", "m2flow.rewards.mathematics:math_reward"):
        with pytest.raises(UserError, match=r"rows\.jsonl:2: .* more than the 256 that are"):
            read_problems(path, rewards=["format", name])
    assert len(read_problems(path, on_bad_row="skip", rewards=["math"])) == 1
    assert len(read_problems(path, rewards=["mine:own"])) == 2
    spaced = write(tmp_path, json.dumps({"question": "?", "answer": "5 +" + " " * 300 + "6"}))
    assert len(read_problems(spaced, rewards=["math"])) == 1


STATEMENTS = ["assert f('####') == 4", "assert f('ä') == 1"]
TEXTS = {"inputs": ["1 ####\n", 3], "outputs": ["7", 1.5]}


@pytest.mark.parametrize("tests", [STATEMENTS, TEXTS])
@pytest.mark.parametrize("column", ["answer", "tests"])
def test_tests_of_programs_are_kept_as_they_are(tmp_path: Path, column: str, tests: object) -> None:
    for written in (tests, json.dumps(tests)):
        path = write(tmp_path, json.dumps({"question": "f?", column: written}))
        for name in ("code", "m2flow.rewards.code:code_reward"):
            [problem] = read_problems(path, rewards=[name])
            assert json.loads(problem.answer) == tests
            row = problem.metadata | {"answer": problem.answer}
            assert read_tests(row) == read_tests({"answer": tests})


def test_tests_may_stand_beside_an_answer(tmp_path: Path) -> None:
    row = {"question": "f?", "tests": STATEMENTS, "answer": "four #### 4"}
    [problem] = read_problems(write(tmp_path, json.dumps(row)), rewards=["code", "math"])
    assert problem.answer == "4"
    assert problem.metadata["tests"] == STATEMENTS


@pytest.mark.parametrize("tests", [[], 3, None, "no JSON", "[" * 100_000, {"inputs": ["1"]}])
def test_what_are_no_tests_is_a_bad_row(tmp_path: Path, tests: object) -> None:
    path = write(tmp_path, json.dumps({"question": "f?", "answer": tests}))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: 'answer' holds no tests of a program"):
        read_problems(path, rewards=["code"])


def test_tests_are_an_answer_for_programs_alone(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"question": "f?", "answer": STATEMENTS}))
    with pytest.raises(UserError, match="'answer' is neither a text nor a number"):
        read_problems(path, rewards=["math"])
    path = write(tmp_path, json.dumps({"question": "f?", "tests": STATEMENTS}))
    with pytest.raises(UserError, match="no answer column"):
        read_problems(path, rewards=["math"])


def test_blank_lines_and_a_byte_order_mark_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n\n  \n" + GOOD.encode())
    assert [problem.metadata["line"] for problem in read_problems(path)] == [1, 4]


def test_braces_in_a_question_stay(tmp_path: Path) -> None:
    path = write(tmp_path, r'{"question": "What is \\frac{1}{2}{answer}?", "answer": "0.5"}')
    [problem] = read_problems(path, template="{question}!")
    assert problem.prompt == r"What is \frac{1}{2}{answer}?!"


BAD_ROWS = [
    ("{not json", "not valid JSON"),
    ("[1, 2]", "JSON list"),
    ("[", "begins a JSON list, and not an object of one line"),
    ('{"question": "", "answer": "5"}', "'question' is not a text"),
    ('{"question": ["2+3?"], "answer": "5"}', "'question' is not a text"),
    ('{"question": "2+3?"}', "has no 'answer', only 'question'"),
    ('{"question": "2+3?", "answer": NaN}', "'answer' is not finite"),
    (
        r'{"question": "2+\ud8003?", "answer": "5"}',
        r"'question' holds '\ud800', which is no character",
    ),
    (r'{"question": "2+3?", "answer": "5\udfff"}', r"'answer' holds '\udfff'"),
    ('{"question": "2+3?", "answer": null}', "'answer' is neither"),
    ('{"question": "2+3?", "answer": true}', "'answer' is neither"),
    ('{"question": "2+3?", "answer": "so it is ####  "}', "no final answer"),
    ('{"question": "2+3?", "answer": ""}', "no final answer"),
    ("[" * 100_000, "not valid JSON"),
    ('{"question": "2+3?", "answer": ' + "9" * 5000 + "}", "not valid JSON"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: str, reason: str) -> None:
    path = write(tmp_path, GOOD, row, GOOD)
    with pytest.raises(UserError) as caught:
        read_problems(path)
    assert f"{path}:2: " in str(caught.value)
    assert reason in str(caught.value)
    assert "skip" in str(caught.value)


def test_bad_rows_are_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, GOOD, *(row for row, _ in BAD_ROWS), GOOD)
    with caplog.at_level(logging.WARNING):
        problems = read_problems(path, on_bad_row="skip")
    assert [problem.metadata["line"] for problem in problems] == [1, len(BAD_ROWS) + 2]
    [record] = caplog.records
    assert f"left out {len(BAD_ROWS)} unusable rows (first: line 2:" in record.getMessage()


def test_a_cell_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"question,answer\n{'x' * 200_000},5\n", encoding="utf-8")
    [problem] = read_problems(path)
    assert len(problem.prompt) > 200_000


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"question": "caf\xe9", "answer": "1"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl:2: is not UTF-8"):
        read_problems(path)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl"])
@pytest.mark.parametrize("on_bad_row", ["fail", "skip"])
@pytest.mark.parametrize(
    "begins",
    [b"\x1f\x8b\x08", b"BZh9", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"],
    ids=["gzip", "bzip2", "xz", "zstd", "zip"],
)
def test_a_compressed_file_is_said_to_be_one(
    tmp_path: Path, name: str, on_bad_row: Any, begins: bytes
) -> None:
    """It was a row that is not UTF-8 text, which was to be mended or left out."""
    path = tmp_path / name
    path.write_bytes(begins + b"\x00\xff\n\xfe")
    with pytest.raises(UserError, match=r"is compressed.*unpack it") as caught:
        read_problems(path, on_bad_row=on_bad_row)
    assert "skip" not in str(caught.value)


def test_only_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD[:-3], "x")
    with pytest.raises(UserError, match="none of its 2 rows can be used"):
        read_problems(path, on_bad_row="skip")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="has no rows"):
        read_problems(path)


@pytest.mark.parametrize(
    ("row", "missing", "found"),
    [
        ('{"text": "2+3?", "answer": "5"}', "question", "'text', 'answer'"),
        ('{"question": "2+3?", "solution": "5"}', "answer", "'question', 'solution'"),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["fail", "skip"])
def test_a_missing_column_names_those_found(
    tmp_path: Path, row: str, missing: str, found: str, on_bad_row: str
) -> None:
    with pytest.raises(UserError) as caught:
        read_problems(write(tmp_path, row), on_bad_row=on_bad_row)  # type: ignore[arg-type]
    assert f"no {missing} column" in str(caught.value)
    assert f"columns found: {found}" in str(caught.value)


def test_a_missing_file_suggests_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, GOOD, name="gsm8k_train.jsonl")
    write(tmp_path, GOOD, name="other.txt")
    with pytest.raises(UserError, match=r"did you mean '.*gsm8k_train\.jsonl'"):
        read_problems(tmp_path / "gsm8k_trian.jsonl")
    with pytest.raises(UserError, match=r"no such file$"):
        read_problems(tmp_path / "zzzzzzzz")
    with pytest.raises(UserError, match="there is no folder"):
        read_problems(tmp_path / "nowhere" / "rows.jsonl")
    (tmp_path / "gsm8k_train.jsonl").unlink()
    with pytest.raises(UserError, match="holds no data"):
        read_problems(tmp_path)


def test_bad_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(UserError, match="template: has no place"):
        read_problems(path, template="answer this")


VERL_ROW = {
    "data_source": "sums",
    "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}],
    "reward_model": {"style": "rule", "ground_truth": "5"},
}


def test_columns_may_be_nested_and_questions_conversations(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(VERL_ROW))
    [problem] = read_problems(path, answer="reward_model.ground_truth")
    assert (problem.prompt, problem.answer) == ("2+3?", "5")
    assert problem.before == ({"role": "system", "content": "Add."},)
    assert problem.metadata["data_source"] == "sums"
    assert problem.metadata["prompt"] == VERL_ROW["prompt"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            "reward_model.ground_trut",
            "data.answer_column: .*ground_truth",
        ),
        ("reward_mode", "data.answer_column: .*'reward_model'"),
        ("data_source.x", "data.answer_column: .* has no such column"),
    ],
)
def test_a_column_that_is_not_there(tmp_path: Path, answer: str, said: str) -> None:
    path = write(tmp_path, json.dumps(VERL_ROW))
    with pytest.raises(UserError, match=said):
        read_problems(path, answer=answer)


@pytest.mark.parametrize(
    "question",
    [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}],
        ["2+3?"],
    ],
)
def test_what_is_no_conversation_is_a_bad_row(tmp_path: Path, question: object) -> None:
    path = write(tmp_path, json.dumps({"question": question, "answer": "5"}))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: 'question' is not a text"):
        read_problems(path)


def test_a_folder_of_files_is_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for name, answer in (("train-1.jsonl", 2), ("train-0.jsonl", 1)):
        write(folder / "data", json.dumps({"question": "?", "answer": answer}), name=name)
    (folder / "README.md").write_text("about it")
    assert [problem.answer for problem in read_problems(folder)] == ["1", "2"]
    (folder / "more.parquet").write_text("")
    with pytest.raises(UserError, match=r"set: holds files of \.jsonl, \.parquet"):
        read_problems(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no data"):
        read_problems(tmp_path / "empty")


@pytest.mark.parametrize(
    ("names", "read", "held"),
    [
        (("train-1-of-2.jsonl", "train-0-of-2.jsonl", "test-0-of-1.jsonl"), (1, 0), (2,)),
        (("data/train/0.jsonl", "data/validation/0.jsonl", "data/test/0.jsonl"), (0,), (2,)),
        (("train.jsonl", "valid.jsonl"), (0,), (1,)),
        (("sums_train.jsonl", "sums.eval.jsonl", "more.jsonl"), (0,), (1,)),
        (("sums.jsonl", "sums_test.jsonl"), (0,), (1,)),
        (("train/a/0.jsonl", "train/b/0.jsonl", "test/0.jsonl"), (0, 1), (2,)),
        (("train_part1/0.jsonl", "train_part2/0.jsonl", "test/0.jsonl"), (0, 1), (2,)),
        (("train/unit-test-0.jsonl", "test/unit-test-0.jsonl"), (0,), (1,)),
        (("train.jsonl", "more.jsonl"), (1, 0), ()),
        (("train/a.jsonl", "train/b.jsonl"), (0, 1), ()),
        (("main/test.jsonl", "more/test.jsonl"), (0, 1), ()),
        (("contest.jsonl", "trainer.jsonl", "train.jsonl"), (0, 2, 1), ()),
    ],
)
def test_of_a_folder_with_splits_the_one_to_train_on_is_read(
    tmp_path: Path, names: tuple[str, ...], read: tuple[int, ...], held: tuple[int, ...]
) -> None:
    """What is to be held out is not trained on because it lies in the same folder."""
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path, json.dumps({"question": "?", "answer": number}), name=name)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [problem.answer for problem in read_problems(tmp_path)] == [str(n) for n in read]
    held_out = [problem.answer for problem in read_problems(tmp_path, splits=TO_HOLD_OUT)]
    assert held_out == [str(n) for n in (held or read)]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("test.jsonl", "val.jsonl"), "holds the splits test, validation"),
        (
            ("main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl"),
            "holds several data sets: main, socratic",
        ),
    ],
)
def test_a_folder_that_leaves_open_what_to_train_on_is_refused(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, json.dumps({"question": "?", "answer": 1}), name=name)
    with pytest.raises(UserError, match=f"{words}.*subfolders"):
        read_problems(tmp_path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_text("")
    with pytest.raises(UserError, match=r'read by pyarrow.*pip install "m2flow\[data\]"'):
        read_problems(tmp_path / "rows.parquet")


def test_parquet_and_arrow_say_what_json_lines_say(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{**VERL_ROW, "reward_model": {"ground_truth": str(n)}} for n in range(2500)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    saved = tmp_path / "saved"  # as `datasets.save_to_disk` leaves it
    saved.mkdir()
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text("{}")
    with (
        pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=900)
    lines = write(tmp_path, *map(json.dumps, rows))
    expected = read_problems(lines, answer="reward_model.ground_truth")
    for path in (tmp_path / "rows.parquet", saved):
        found = read_problems(path, answer="reward_model.ground_truth")
        assert [(p.prompt, p.answer, p.metadata["line"], p.before) for p in found] == [
            (p.prompt, p.answer, p.metadata["line"], p.before) for p in expected
        ]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cut\.parquet: is no whole Parquet file"):
        read_problems(tmp_path / "cut.parquet")


def test_numbers_of_a_table_are_what_was_written_into_it(tmp_path: Path) -> None:
    """0.1 as float32 was the answer 0.10000000149011612, which 0.1 is not; and a decimal number
    was said to be no number."""
    pa = pytest.importorskip("pyarrow")
    from decimal import Decimal

    import pyarrow.parquet as pq

    texts = ["0.1", "-2.5", "33.3", "16777216.0", "1e-30"]
    columns = {
        "float32": pa.array(map(float, texts), pa.float32()),
        "float64": pa.array(map(float, texts)),
        "decimal": pa.array([Decimal(text) for text in texts[:4]] + [None]),
    }
    for name, column in columns.items():
        table = pa.table({"question": ["which?"] * len(texts), "answer": column})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        found = read_problems(tmp_path / f"{name}.parquet", on_bad_row="skip")
        wanted = texts[: len(found)]
        assert len(found) >= 4
        assert [float(problem.answer) for problem in found] == [float(text) for text in wanted]
        right = [verify(p.answer, text) for p, text in zip(found, wanted, strict=True)]
        assert right == [1.0] * len(found), name


def test_a_column_of_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """It was a traceback: a time after the year 9999, a part of a microsecond, no UTF-8."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {
        "far": pa.array([2**55], pa.timestamp("ms")),
        "text": pa.array([b"\xff\xfe"]).view(pa.string()),
    }
    if importlib.util.find_spec("pandas") is None:
        columns["fine"] = pa.array([1], pa.timestamp("ns"))
    for name, column in columns.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"question": ["a?"], "answer": ["1"], name: column}), path)
        with pytest.raises(UserError, match=rf"{name}\.parquet: its column '{name}' holds"):
            read_problems(path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """The last one's answers were the right ones, and nobody was told."""
    path = write(tmp_path, "question,answer,answer", "a?,1,2", name="rows.csv")
    with pytest.raises(UserError, match=r"rows\.csv: has two columns 'answer'"):
        read_problems(path)
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = [pa.array(["a?"]), pa.array(["1"]), pa.array(["2"])]
    table = pa.Table.from_arrays(columns, names=["question", "answer", "answer"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet: has two columns 'answer'"):
        read_problems(tmp_path / "rows.parquet")


GPQA = (
    "Record ID,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
    'r1,"Which, of these,\nis even?",2,1,3,5\n'
    "r2,Which is odd?,7,2,4,6\n"
)


def test_questions_with_choices_have_a_letter_for_answer(tmp_path: Path) -> None:
    path = tmp_path / "gpqa.csv"
    path.write_text(GPQA)
    orders = set()
    for seed in range(40):
        first, second = read_problems(path, template="{question}", seed=seed)
        assert read_problems(path, template="{question}", seed=seed)[0] == first
        for problem, question, right in (
            (first, "Which, of these,\nis even?", "2"),
            (second, "Which is odd?", "7"),
        ):
            assert problem.prompt.startswith(f"{question}\n\nA) ")
            assert f"\n{problem.answer}) {right}\n" in problem.prompt
            assert problem.metadata["Question"] == problem.prompt
            assert "Correct Answer" not in problem.metadata
            said = f"So it is \\boxed{{{problem.answer}) {right}}}."
            assert verify(problem.answer, said) == 1.0
            assert verify(problem.answer, f"So it is \\boxed{{{problem.answer}}}.") == 1.0
        orders.add((first.answer, second.answer))
    assert len(orders) > 10, "the two rows are shuffled apart"
    assert {answer for answer, _ in orders} == set("ABCD")


def test_a_choice_that_is_missing_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "gpqa.csv"
    path.write_text(GPQA + "r3,Which?,7,,4,6\nr4,Which?,7\nr5, ,7,2,4,6\n")
    with pytest.raises(UserError, match=r"gpqa\.csv:5: one of its four choices"):
        read_problems(path)
    assert len(read_problems(path, on_bad_row="skip")) == 2


def test_a_row_of_choices_without_a_question_is_a_bad_row(tmp_path: Path) -> None:
    good = {"Question": "?", "Correct Answer": "1"} | {
        f"Incorrect Answer {n}": str(n + 1) for n in (1, 2, 3)
    }
    for question in ({}, {"Question": None}, {"Question": 3}):
        bad = {name: value for name, value in good.items() if name != "Question"} | question
        path = write(tmp_path, json.dumps(good), json.dumps(bad))
        with pytest.raises(UserError, match=r"rows\.jsonl:2: 'Question' is not a text"):
            read_problems(path)


def test_a_path_may_begin_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a recipe names passed the check of files, and was not found then."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path, GOOD)
    assert read_problems(f"~/{path.name}") == read_problems(path)


def test_what_programs_leave_in_a_folder_is_not_read(tmp_path: Path) -> None:
    """Rows that `datasets` keeps beside saved ones, and a notebook's copies, counted twice."""
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"question": ["?"], "answer": ["1"]})
    for name in ("data-00000-of-00001.arrow", "cache-1a2b3c.arrow"):
        with (
            pa.OSFile(str(tmp_path / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    write(tmp_path / ".ipynb_checkpoints", '{"question": "?", "answer": 2}', name="a.jsonl")
    assert [problem.answer for problem in read_problems(tmp_path)] == ["1"]
