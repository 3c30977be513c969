"""The reward of programs: a completion's Python, run in a sandbox against a row's tests.

The program is what stands in the completion's last fenced block of Python. `row["tests"]`, or else
`row["answer"]`, has its tests, as JSON text or as such, in one of two forms:

    ["assert reverse('ab') == 'ba'", ...]               statements that follow the program
    {"inputs": ["3 4\\n", ...], "outputs": ["7\\n", ...]}  texts that it reads, and must write

Written texts are the same if their lines are, apart from white space at the ends of lines and of
the text. Statements run in the program's own process, which may tamper with what they compare
(`__eq__`); texts are compared outside of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from m2flow.rewards.reward import prepared_by, threaded
from m2flow.rewards.sandbox import LIMITS, Limits, find_way, run_python

Tests: TypeAlias = str | Sequence[tuple[str, str]]

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


@threaded
@prepared_by(find_way)
def code_reward(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """1.0 for a completion whose program passes all tests of its row, else 0.0.

    Raises:
        UserError: no sandbox can be made on this machine.
        ValueError: the tests of the row have none of the two forms.
    """
    tests = read_tests(row)
    source = program_in(completion)
    return float(source is not None and passes(source, tests))


def program_in(completion: str) -> str | None:
    """The last fenced block of Python in a completion, ended or not; None if there is none."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else None


def passes(source: str, tests: Tests, limits: Limits = LIMITS) -> bool:
    """Does a program pass all of the tests?

    Args:
        source: of the program.
        tests: statements that follow it, or pairs of what it reads and what it must write.
        limits: of each run: one for the statements, one for each pair.
    """
    if isinstance(tests, str):
        return run_python(source, after=tests, limits=limits).ok
    for read, wanted in tests:
        outcome = run_python(source, read, limits=limits)
        if not outcome.ok or _lines(outcome.stdout) != _lines(wanted):
            return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def read_tests(row: Mapping[str, Any]) -> Tests:
    """The tests of a row, as `passes` takes them.

    Raises:
        ValueError: they have none of the forms, or there are none.
    """
    tests = row["tests"] if "tests" in row else row["answer"]
    if isinstance(tests, str):
        tests = json.loads(tests)
    match tests:
        case {"inputs": [*inputs], "outputs": [*outputs]} if inputs and len(inputs) == len(outputs):
            return [(str(read), str(wanted)) for read, wanted in zip(inputs, outputs, strict=True)]
        case [*statements] if statements and all(isinstance(one, str) for one in statements):
            return "\n".join(statements)
    raise ValueError(f"tests are neither statements nor inputs with outputs: {str(tests)[:80]}")
