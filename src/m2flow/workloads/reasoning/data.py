"""Problems from rows: the one reader for the `jsonl` task and for `m2flow eval --data FILE`.

Each row has a question (`question`, `problem` or `prompt`) and an `answer`, or columns that the
caller names; of an answer with `####`, what stands after it counts, as in GSM8K, and of a worked
solution what stands in its last `\\boxed{}`, as in MATH. For the reward `code` the answer is tests,
which are kept as they are. A question may be a conversation, a list of
`{"role": ..., "content": ...}`, as veRL's data sets have it. Of GPQA's rows the four choices are
shuffled by a seed, and the right answer is a letter. What is wrong with a file is said with its
name and line. Knows nothing of tasks' order or splits.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias

from m2flow.errors import UserError, suggestion
from m2flow.rewards.code import read_tests
from m2flow.rewards.final_answer import last_box
from m2flow.rewards.number import MAX_ANSWER_CHARS, without_symbols
from m2flow.rewards.reward import path_of
from m2flow.rewards.symbolic import canonical
from m2flow.workloads.reasoning.rows import TO_TRAIN_ON, BadRowError, rows_of
from m2flow.workloads.reasoning.tasks.problem import Problem, generator

QUESTION_COLUMNS = ("question", "problem", "prompt", "Question", "Problem")
ANSWER_COLUMNS = ("answer", "Answer", "Correct Answer")
TESTS_COLUMN = "tests"
"""The answer's, where a reward runs programs and there is none of `ANSWER_COLUMNS`."""

WRONG_ANSWERS = tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))
"""Columns of GPQA (arXiv 2311.12022): a row that has them is a question with four choices."""

LETTERS = "ABCD"

DEFAULT_TEMPLATE = (
    "{question}\n\nThink step by step, then give the final answer in \\boxed{} or after ####.\n"
)
"""How a question becomes a prompt; `{question}` is replaced, all else is literal."""

OnBadRow: TypeAlias = Literal["fail", "skip"]

_CODE, _MATH = path_of("code"), path_of("math")

_log = logging.getLogger(__name__)


def read_problems(
    path: str | Path,
    *,
    template: str = DEFAULT_TEMPLATE,
    on_bad_row: OnBadRow = "fail",
    question: str | None = None,
    answer: str | None = None,
    column_key: str = "data.{}_column",
    seed: int = 0,
    splits: Sequence[str] = TO_TRAIN_ON,
    rewards: Sequence[str] = (),
) -> list[Problem]:
    """All problems of a data set, in order; blank lines do not count.

    Args:
        path: JSON lines (UTF-8), Parquet or Arrow, or a folder of such files.
        template: the prompt, with `{question}` where the question goes; a conversation is taken as
            it is.
        on_bad_row: "fail" stops at the first row that cannot be used; "skip" leaves such rows out
            and logs one warning with their number.
        question, answer: the columns, with dots into nested ones, as `reward_model.ground_truth`;
            None for the usual names.
        column_key: what sets `question` and `answer`, for messages, with `{}` for these words.
        seed: with the row's number it fixes the order of choices.
        splits: as of `rows_of`.
        rewards: the functions that judge, by short name or dotted path: for `code` an answer may
            be a list or an object, for `math` it may not be too long to be compared.

    Returns:
        Problems whose `metadata` holds the row's columns but the answer's, and `line`, its number
        from 1.

    Raises:
        UserError: no such file, nothing in it, a missing column, or a bad row, with file and line.
    """
    check_template(template)
    path = Path(path).expanduser()
    problems: list[Problem] = []
    columns: tuple[str, str] | None = None
    judges = {path_of(function) for function in rewards}
    of_tests = (TESTS_COLUMN,) if _CODE in judges else ()
    sought = (
        ("question", question, QUESTION_COLUMNS),
        ("answer", answer, (*ANSWER_COLUMNS, *of_tests)),
    )
    num_bad, first_bad = 0, ""
    for file, line, read in rows_of(path, splits):
        try:
            row = read()
            if columns is None:
                asked, told = (
                    _column(row, wanted, named, usual, f"{file}:{line}", column_key.format(wanted))
                    for wanted, named, usual in sought
                )
                columns = asked, told
            if WRONG_ANSWERS[0] in row:
                row = _lettered(row, *columns, generator("choices", seed, line))
            problem = _problem(row, *columns, template, judges)
        except BadRowError as reason:
            if on_bad_row == "fail":
                raise UserError(
                    str(reason),
                    key=f"{file}:{line}",
                    hint='mend the line, or set on_bad_row to "skip"',
                ) from reason.__cause__
            num_bad += 1
            first_bad = first_bad or f"line {line}: {reason}"
            continue
        problem.metadata.setdefault("line", line)
        problems.append(replace(problem, line=line))
    if num_bad:
        _log.warning("%s: left out %d unusable rows (first: %s)", path, num_bad, first_bad)
    if not problems:
        raise UserError(
            f"none of its {num_bad} rows can be used ({first_bad})" if num_bad else "has no rows",
            key=str(path),
            expected='lines such as {"question": "What is 2+3?", "answer": "5"}',
        )
    return problems


def final_answer(answer: str) -> str:
    """The right answer alone: what stands after the last `####`, else in the last box, else all."""
    _, marker, after = answer.rpartition("####")
    _, boxed = (False, None) if marker else last_box(answer)
    return (after if boxed is None else boxed).strip()


def check_template(template: str, key: str = "data.template") -> None:
    """Refuse a prompt template that has no place for the question, under the name `key`."""
    if "{question}" not in template:
        raise UserError(
            "has no place for the question",
            key=key,
            value=template,
            expected="a text with {question} in it",
        )


def _column(
    row: Mapping[str, Any],
    wanted: str,
    named: str | None,
    usual: tuple[str, ...],
    where: str,
    key: str,
) -> str:
    """The column of the data set that holds questions, or answers, from its first row."""
    if named is not None:
        inner: Any = row
        for part in named.split("."):
            if not isinstance(inner, Mapping) or part not in inner:
                known = list(inner) if isinstance(inner, Mapping) else []
                raise UserError(
                    f"{where} has no such column",
                    key=key,
                    value=named,
                    hint=suggestion(part, known) if known else None,
                )
            inner = inner[part]
        return named
    found = next((name for name in usual if name in row), None)
    if found is None:
        raise UserError(
            f"no {wanted} column",
            key=where,
            expected=" or ".join(usual),
            hint=f"columns found: {', '.join(map(repr, row)) or 'none'}; {key} names another",
        )
    return found


def _value(row: Mapping[str, Any], column: str) -> Any:
    """What a column holds; None where the row does not have it."""
    inner: Any = row
    for part in column.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner


def _lettered(
    row: Mapping[str, Any], question: str, answer: str, order: random.Random
) -> dict[str, Any]:
    """A row with its choices written below the question, and the right one's letter for answer."""
    asked = row.get(question)
    if not isinstance(asked, str) or not asked.strip():
        raise BadRowError(f"{question!r} is not a text: {asked!r}")
    right, wrong = row.get(answer), [row.get(name) for name in WRONG_ANSWERS]
    if not all(isinstance(one, str) and one.strip() for one in (right, *wrong)):
        raise BadRowError("one of its four choices is not a text")
    choices = [(str(right).strip(), True), *((str(one).strip(), False) for one in wrong)]
    order.shuffle(choices)
    lines = [f"{letter}) {text}" for letter, (text, _) in zip(LETTERS, choices, strict=True)]
    letter = next(
        letter for letter, (_, is_right) in zip(LETTERS, choices, strict=True) if is_right
    )
    asked = "\n".join((f"{asked}\n", *lines, "\nAnswer with the letter of the right choice."))
    return {**row, question: asked, answer: letter}


def _tests(column: str, tests: Any) -> str:
    """The tests of a program as the row has them, a list or an object as JSON text."""
    try:
        text = tests if isinstance(tests, str) else json.dumps(tests, ensure_ascii=False)
        read_tests({"answer": text})
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRowError(f"{column!r} holds no tests of a program: {error}") from None
    return text


def _gold(column: str, answer: Any, judges: Collection[str]) -> str:
    """The right answer as it is compared."""
    if isinstance(answer, float) and not math.isfinite(answer):
        raise BadRowError(f"{column!r} is not finite: {answer}")
    if isinstance(answer, int | float | Decimal) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str):
        raise BadRowError(f"{column!r} is neither a text nor a number: {answer!r}")
    gold = final_answer(answer)
    if not gold:
        raise BadRowError(f"{column!r} holds no final answer: {answer[-80:]!r}")
    if _MATH in judges and (length := len(canonical(without_symbols(gold)))) > MAX_ANSWER_CHARS:
        raise BadRowError(
            f"{column!r} holds a final answer of {length} characters, more than the "
            f"{MAX_ANSWER_CHARS} that are compared: {gold[:80]!r}"
        )
    return gold


def _problem(
    row: Mapping[str, Any],
    question_column: str,
    answer_column: str,
    template: str,
    judges: Collection[str],
) -> Problem:
    question, answer = _value(row, question_column), _value(row, answer_column)
    turns = _turns(question)
    if not turns and (not isinstance(question, str) or not question.strip()):
        raise BadRowError(f"{question_column!r} is not a text: {question!r}")
    if answer_column.partition(".")[0] not in row:
        raise BadRowError(f"has no {answer_column!r}, only {', '.join(map(repr, row))}")
    if _CODE in judges and (answer_column == TESTS_COLUMN or TESTS_COLUMN not in row):
        gold = _tests(answer_column, answer)
    else:
        gold = _gold(answer_column, answer, judges)
    prompt = turns[-1]["content"] if turns else template.replace("{question}", question)
    _check_characters(question_column, prompt, *(turn["content"] for turn in turns))
    _check_characters(answer_column, gold)
    others = {name: value for name, value in row.items() if name != answer_column}
    return Problem(prompt, gold, others, turns[:-1])


def _check_characters(column: str, *texts: str) -> None:
    """Refuse half a surrogate pair, which JSON can say and no encoding can."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            wrong = text[error.start]
            raise BadRowError(f"{column!r} holds {wrong!r}, which is no character") from None


def _turns(question: Any) -> tuple[dict[str, str], ...]:
    """The turns of a question that is a conversation and ends with the user's; else none."""
    if not isinstance(question, list) or not question:
        return ()
    for turn in question:
        if not isinstance(turn, Mapping) or not all(
            isinstance(turn.get(name), str) for name in ("role", "content")
        ):
            return ()
    turns = tuple({name: turn[name] for name in ("role", "content")} for turn in question)
    return turns if turns[-1]["role"] == "user" and turns[-1]["content"].strip() else ()
