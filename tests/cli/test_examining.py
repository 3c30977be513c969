"""What `m2flow eval` prints."""

from __future__ import annotations

import pytest

from m2flow.cli.examining import chat_options, figure_lines, markdown_table
from m2flow.errors import UserError

FOUND = [
    {
        "about": "30 problems of x/aime24.jsonl, 4 answer(s) each",
        "data": "x/aime24.jsonl",
        "accuracy": 0.25,
        "accuracy_low": 0.15,
        "accuracy_high": 0.37,
        "pass@4": 0.5,
        "maj@4": 0.3,
        "temperature": 1.0,
        "seconds": 12.345,
    },
    {
        "about": "198 problems of gpqa.csv, 4 answer(s) each",
        "data": "gpqa.csv",
        "accuracy": 0.35,
        "accuracy_low": 0.30,
        "accuracy_high": 0.40,
        "pass@4": 0.7,
        "maj@4": 0.4,
        "temperature": 1.0,
        "seconds": 60.0,
    },
]


def test_variables_of_the_chat_template_are_those_of_a_recipe() -> None:
    said = ["enable_thinking=false", "effort=low", "budget=3", "empty="]
    expected = {"enable_thinking": False, "effort": "low", "budget": 3, "empty": None}
    assert chat_options(said) == expected
    assert chat_options(None) is None
    for wrong in ("enable_thinking", "=false"):
        with pytest.raises(UserError, match=r"^--chat-option: is no variable .*expected KEY=VALUE"):
            chat_options([wrong])


def test_a_table_has_a_row_for_each_data_set_and_their_mean() -> None:
    assert markdown_table(FOUND) == [
        "| data | accuracy | pass@4 | maj@4 |",
        "| --- | ---: | ---: | ---: |",
        "| aime24 | 25.00 ± 11.00 | 50.00 | 30.00 |",
        "| gpqa | 35.00 ± 5.00 | 70.00 | 40.00 |",
        "| mean | 30.00 | 60.00 | 35.00 |",
    ]
    assert len(markdown_table(FOUND[:1])) == 3, "one data set has no mean"


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["d1/test.jsonl", "d2/test.jsonl", "x/aime.csv"], ["d1/test", "d2/test", "x/aime"]),
        (["test.jsonl", "/d/test.jsonl"], ["test", "d/test"]),
        (["d/test.jsonl", "d/test.csv"], ["test.jsonl", "test.csv"]),
        (["d/test.jsonl", "d/test.jsonl"], ["test", "test"]),
        (["x/aime24.v2.jsonl"], ["aime24.v2"]),
        (["."], ["."]),
    ],
)
def test_data_sets_of_one_name_are_told_apart(files: list[str], names: list[str]) -> None:
    found = [{"about": "", "data": file, "accuracy": 0.5} for file in files]
    _, _, *rows = markdown_table([*found, {"about": "20 episodes", "accuracy": 0.5}])
    called = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert called == [*names, "20 episodes", "mean"]


def test_figures_that_a_data_set_lacks_are_empty_cells() -> None:
    one = {"about": "a", "success": 0.5, "success/a/x": 0.25}
    two = {"about": "b", "success": 0.7, "success/b/y": 0.75}
    assert markdown_table([one, two]) == [
        "| data | success | success/a/x | success/b/y |",
        "| --- | ---: | ---: | ---: |",
        "| a | 50.00 | 25.00 |  |",
        "| b | 70.00 |  | 75.00 |",
        "| mean | 60.00 |  |  |",
    ]


def test_a_table_says_what_could_not_be_scored() -> None:
    whole, part = {**FOUND[0], "failed_share": 0.0}, {**FOUND[1], "failed_share": 0.125}
    assert "failed_share" not in markdown_table([whole])[0]
    table = markdown_table([whole, part])
    assert table[0].endswith("| maj@4 | failed_share |")
    assert [row.split("|")[-2].strip() for row in table[2:]] == ["0.00", "12.50", "6.25"]


def test_a_policy_has_no_file() -> None:
    success = {"about": "20 episodes", "success": 0.5, "success_low": 0.3, "success_high": 0.7}
    assert markdown_table([success])[2] == "| 20 episodes | 50.00 ± 20.00 |"


def test_figures_stand_one_a_line() -> None:
    lines = figure_lines(FOUND[0])
    assert lines[0] == FOUND[0]["about"]
    assert "  accuracy         0.2500" in lines
    assert "  seconds          60.00" in figure_lines(FOUND[1])
    assert not any("temperature" in line for line in lines)
