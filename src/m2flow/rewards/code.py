"""The reward of programs: a completion's Python, run in a sandbox against a row's tests.

The program is what stands in the completion's last fenced block that is tagged as Python, or else
in its last one without a tag. `row["tests"]`, or else `row["answer"]`, has its tests, as JSON text
or as such, in one of two forms:

    ["assert reverse('ab') == 'ba'", ...]               statements that follow the program
    {"inputs": ["3 4\\n", ...], "outputs": ["7\\n", ...]}  texts that it reads, and must write

A text may be given as a number. Written texts are the same if their lines are, apart from white
space at the ends of lines and of the text. Statements run in the program's own process, which may
tamper with what they compare (`__eq__`); texts are compared outside of it, and each is read by a
process of its own. Before statements the program is imported, so that what it does
`if __name__ == "__main__"` is left out.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from m2flow.rewards.reward import prepared_by, seconds_left, threaded
from m2flow.rewards.sandbox import LIMITS, Limits, Sandbox, find_way

Tests: TypeAlias = str | Sequence[tuple[str, str]]

SHARE_OF_DEADLINE = 0.9
"""Of the seconds that a reward may take, for the program; the rest is for its end."""

PYTHON = ("python", "python3", "py")
"""Tags of fenced blocks that hold a program."""

_FENCED = re.compile(
    r"```[^\n`]+```"  # within a line: no block
    r"|```(?P<tag>[^\n`]*)\n(?P<inner>.*?)(?:^[ \t]*```|```[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)


@threaded
@prepared_by(find_way)
def code_reward(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """1.0 for a completion whose program passes all tests of its row, else 0.0.

    All tests together may take `SHARE_OF_DEADLINE` of the part's `deadline_seconds`: a program that
    is not done by then has not passed.

    Raises:
        UserError: no sandbox can be made on this machine.
        ValueError: the tests of the row have none of the two forms.
    """
    tests = read_tests(row)
    source = program_in(completion)
    seconds = SHARE_OF_DEADLINE * seconds_left()
    return float(source is not None and passes(source, tests, seconds=seconds))


def program_in(completion: str) -> str | None:
    """The last fenced block of a completion that is tagged as Python, ended or not.

    Without one it is the last block that has no tag; None if there is none either.
    """
    blocks = [(found["tag"].strip().lower(), found["inner"])
              for found in _FENCED.finditer(completion) if found["tag"] is not None]  # fmt: skip
    tagged = [inner for tag, inner in blocks if tag in PYTHON]
    untagged = [inner for tag, inner in blocks if not tag]
    return next(reversed(tagged or untagged), None)


def passes(
    source: str, tests: Tests, limits: Limits = LIMITS, *, seconds: float = math.inf
) -> bool:
    """Does a program pass all of the tests?

    Args:
        source: of the program.
        tests: statements that follow it, or pairs of what it reads and what it must write.
        limits: of each run: one for the statements, one for each pair.
        seconds: of all runs together.
    """
    deadline = time.monotonic() + seconds

    def seconds_of_run() -> float:
        return min(limits.seconds, deadline - time.monotonic())

    with Sandbox(limits) as sandbox:
        if isinstance(tests, str):
            return sandbox.run(source, after=tests, seconds=seconds_of_run()).ok
        for read, wanted in tests:
            outcome = sandbox.run(source, read, seconds=seconds_of_run())
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
        case {"inputs": [*inputs], "outputs": [*outputs], **others} if (
            inputs
            and len(inputs) == len(outputs)
            and not others  # such as the name of a function that is to be called
            and all(isinstance(one, str | int | float) for one in (*inputs, *outputs))
        ):
            return [(str(read), str(wanted)) for read, wanted in zip(inputs, outputs, strict=True)]
        case [*statements] if statements and all(isinstance(one, str) for one in statements):
            return "\n".join(statements)
    raise ValueError(f"tests are neither statements nor inputs with outputs: {str(tests)[:80]}")
