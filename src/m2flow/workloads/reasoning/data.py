"""Problems from JSON lines: the one reader for the `jsonl` task and for `m2flow eval --data FILE`.

Each line is an object with a question (`question`, `problem` or `prompt`) and an `answer`; of an
answer with `####`, what stands after it counts, as in GSM8K. What is wrong with a file is said
with its name and line. Knows nothing of tasks' order, seeds or splits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from m2flow.errors import UserError, nearest
from m2flow.workloads.reasoning.tasks.problem import Problem

QUESTION_COLUMNS = ("question", "problem", "prompt")
ANSWER_COLUMNS = ("answer",)

DEFAULT_TEMPLATE = (
    "{question}\n\nThink step by step, then give the final answer in \\boxed{} or after ####.\n"
)
"""How a question becomes a prompt; `{question}` is replaced, all else is literal."""

OnBadRow: TypeAlias = Literal["fail", "skip"]

_log = logging.getLogger(__name__)


class _BadRowError(Exception):
    """Why one row cannot be used."""


def read_problems(
    path: str | Path, *, template: str = DEFAULT_TEMPLATE, on_bad_row: OnBadRow = "fail"
) -> list[Problem]:
    """All problems of a JSON lines file, in order; blank lines do not count.

    Args:
        path: the file (UTF-8).
        template: the prompt, with `{question}` where the question goes.
        on_bad_row: "fail" stops at the first row that cannot be used; "skip" leaves such rows out
            and logs one warning with their number.

    Returns:
        Problems whose `metadata` holds the row's other columns and `line`, its number from 1.

    Raises:
        UserError: no such file, nothing in it, a missing column, or a bad row, with file and line.
    """
    check_template(template)
    path = Path(path)
    problems: list[Problem] = []
    columns: tuple[str, str] | None = None
    num_bad, first_bad = 0, ""
    for line_number, line in _lines(path):
        try:
            row = _parse_row(line)
            columns = columns or _find_columns(row, f"{path}:{line_number}")
            question, answer = _read_row(row, *columns)
        except _BadRowError as reason:
            if on_bad_row == "fail":
                raise UserError(
                    str(reason),
                    key=f"{path}:{line_number}",
                    hint='mend the line, or set on_bad_row to "skip"',
                ) from reason.__cause__
            num_bad += 1
            first_bad = first_bad or f"line {line_number}: {reason}"
            continue
        prompt = template.replace("{question}", question)
        others = {name: value for name, value in row.items() if name not in columns}
        problems.append(Problem(prompt, answer, {**others, "line": line_number}))
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
    """The right answer alone: what stands after the last `####`, or all of it."""
    return answer.rpartition("####")[2].strip()


def check_template(template: str, key: str = "data.template") -> None:
    """Refuse a prompt template that has no place for the question, under the name `key`."""
    if "{question}" not in template:
        raise UserError(
            "has no place for the question",
            key=key,
            value=template,
            expected="a text with {question} in it",
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of each line that is not blank."""
    if not path.exists():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, names)
        hint = f"did you mean {str(path.parent / close)!r}?" if close else None
        if not path.parent.is_dir():
            hint = f"there is no folder {str(path.parent)!r}"
        raise UserError("no such file", key=str(path), hint=hint)
    if path.is_dir():
        raise UserError("is a folder", key=str(path), expected="a file of JSON lines")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", key=str(path)) from error


def _parse_row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _BadRowError("is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"is not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise _BadRowError(f"is a JSON {type(row).__name__}, not an object")
    return row


def _find_columns(row: dict[str, Any], where: str) -> tuple[str, str]:
    """(question column, answer column) of the file, from its first row."""
    found = []
    for wanted, aliases in (("question", QUESTION_COLUMNS), ("answer", ANSWER_COLUMNS)):
        column = next((alias for alias in aliases if alias in row), None)
        if column is None:
            raise UserError(
                f"no {wanted} column",
                key=where,
                expected=" or ".join(aliases),
                hint=f"columns found: {', '.join(map(repr, row)) or 'none'}",
            )
        found.append(column)
    return found[0], found[1]


def _read_row(row: dict[str, Any], question_column: str, answer_column: str) -> tuple[str, str]:
    question, answer = row.get(question_column), row.get(answer_column)
    if not isinstance(question, str) or not question.strip():
        raise _BadRowError(f"{question_column!r} is not a text: {question!r}")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str):
        raise _BadRowError(f"{answer_column!r} is neither a text nor a number: {answer!r}")
    gold = final_answer(answer)
    if not gold:
        raise _BadRowError(f"{answer_column!r} holds no final answer: {answer[-80:]!r}")
    return question, gold
