"""Are two written answers the same mathematics? math-verify, in processes whose work is bounded.

A short answer can ask for any amount of work: `(1+\\sqrt{2}+\\sqrt{3})^{99999}`. So expressions are
compared in processes of their own, which math-verify's clock interrupts (SIGALRM reaches a main
thread alone), whose memory is limited, and which are killed when both fail. An answer that is not
compared in time is not the right one. Any thread may ask; so many are answered at once as
there are cores that this process may use.
"""

from __future__ import annotations

import atexit
import logging
import re
import resource
import subprocess
import sys
import threading
from decimal import Decimal
from functools import cached_property, lru_cache
from multiprocessing.connection import Connection, Pipe
from typing import Any

from m2flow.errors import RunFailed
from m2flow.plan.machine import available_cores
from m2flow.rewards.number import (
    LEAST_DIGITS,
    LEAST_PLACES,
    MAX_ANSWER_CHARS,
    read_number,
    read_numeral,
    tidy,
    unwrapped,
)
from m2flow.signals import end_with_pipe, leave_the_end_to_the_parent

SECONDS = 3
"""Longest that a process may parse an expression, or compare two; most take 1 to 100 ms."""

DEADLINE_SECONDS = 4.0 * SECONDS
"""A process that has not answered by then, because no clock interrupts it, is killed."""

START_SECONDS = 120.0
MEMORY_BYTES = 2 << 30
"""Address space of a process; math-verify itself takes a quarter of it."""

_EXPONENT = re.compile(r"-?[0-9]+(?:\.[0-9]*)?e[-+]?[0-9]{1,3}", re.ASCII | re.IGNORECASE)
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*\.?")


def same_expression(gold: str, answer: str) -> bool:
    """Do the two spellings mean the same? False where that cannot be told.

    Args:
        gold: the right answer; one made of words alone is compared as text.
        answer: the extracted answer.

    Raises:
        RunFailed: no process for comparing can be started.
    """
    gold_text, answer_text = canonical(gold), canonical(answer)
    if gold_text == answer_text:
        return bool(gold_text)
    if not gold_text or not answer_text or _WORDS.fullmatch(gold_text):
        return False
    if max(len(gold_text), len(answer_text)) > MAX_ANSWER_CHARS:
        return False
    same = _same_numeral(gold_text, answer_text)
    return _processes.compare(gold_text, answer_text) if same is None else same


def _same_numeral(gold: str, answer: str) -> bool | None:
    """Whether numerals are the same, of which one at least names its base; None where none does.

    math-verify does not read bases. An answer may leave out the base of the right one, which the
    question has named; where the right answer has none, it is decimal.
    """
    right, said = read_numeral(gold), read_numeral(answer)
    if right is not None and said is not None:
        return right == said
    if right is not None:
        return True if right[0] == answer.lstrip("0") else None
    if said is not None:
        try:
            return int(said[0] or "0", said[1]) == int(gold)
        except ValueError:  # no base, digits that it does not have, or nothing decimal
            return False
    return None


def canonical(text: str) -> str:
    """A spelling fit for comparison as text: no delimiters, one kind of fraction, no spaces."""
    text = re.sub(r"\s+", " ", unwrapped(tidy(text)))
    if _WORDS.fullmatch(text.strip("()")):
        return text.strip("().").casefold()
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("**", "^")
    text = text.replace(r"\varnothing", r"\emptyset")
    return re.sub(r" (?![A-Za-z0-9])|(?<![A-Za-z0-9]) ", "", text)


# --- asking ---------------------------------------------------------------------------------------


class _ComparingProcess:
    """A process that compares one pair after another."""

    def __init__(self) -> None:
        self._line, theirs = Pipe()
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from m2flow.rewards.symbolic import serve; "
            f"serve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        if self._reply(START_SECONDS) is None:
            self.kill()
            raise RunFailed(
                f"the process that runs math-verify did not start within {START_SECONDS:g} s; "
                "its own words are on standard error"
            )

    def compare(self, gold: str, answer: str) -> bool | None:
        """Whether they are the same; None where the process is of no more use."""
        try:
            self._line.send((gold, answer))
        except OSError:
            return None
        return self._reply(DEADLINE_SECONDS)

    def _reply(self, seconds: float) -> bool | None:
        try:
            return bool(self._line.recv()) if self._line.poll(seconds) else None
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._line.close()


class _Processes:
    """As many processes as there are cores for them, each started when it is first needed."""

    def __init__(self) -> None:
        self._idle: list[_ComparingProcess] = []

    @cached_property
    def _turns(self) -> threading.BoundedSemaphore:
        """On first use: a lane is bound to its cores after it has imported this."""
        return threading.BoundedSemaphore(len(available_cores()))

    def compare(self, gold: str, answer: str) -> bool:
        with self._turns:
            process = self._idle.pop() if self._idle else _ComparingProcess()
            same = process.compare(gold, answer)
            if same is None:
                process.kill()
            else:
                self._idle.append(process)
        return bool(same)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


_processes = _Processes()
atexit.register(_processes.close)


# --- answering, in a process of its own -----------------------------------------------------------


def serve(descriptor: int) -> None:
    """Answer the pairs that come over a connection until it ends, or standard input does."""
    leave_the_end_to_the_parent()
    end_with_pipe(sys.stdin.fileno())
    line = Connection(descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    compare("x^2-1", "(x-1)(x+1)")  # the parser learns its tables
    line.send(True)
    while True:
        try:
            gold, answer = line.recv()
        except EOFError:
            return
        line.send(compare(gold, answer))


def compare(gold: str, answer: str) -> bool:
    """math-verify's verdict on two expressions; to be called in the main thread of a process.

    Floating-point numbers are equal if they are so when rounded to `_places(gold)`.
    """
    try:
        read = _parsed(_without_exponent(gold)), _parsed(answer)
        rounding = {"float_rounding": _places(gold), "timeout_seconds": SECONDS}
        return all(read) and bool(_math_verify().verify(*read, **rounding))
    except Exception:  # noqa: BLE001, on spellings that nobody foresaw: not equal
        return False


def _places(gold: str) -> int:
    """Decimal places that an answer must agree in: more for a small number, of whose digits
    `LEAST_PLACES` would leave too few.
    """
    number, places = read_number(gold), LEAST_PLACES
    if number is not None and number.value:
        while abs(number.value) * 10**places < 10 ** (LEAST_DIGITS - 1):
            places += 1
    return places


def _without_exponent(gold: str) -> str:
    """`5e-05` as `0.00005`: math-verify reads the `e` as Euler's number."""
    return f"{Decimal(gold):f}" if _EXPONENT.fullmatch(gold) else gold


@lru_cache(maxsize=4096)
def _parsed(expression: str) -> list[Any]:
    """math-verify's reading of one expression: nothing where it cannot be read."""
    grader = _math_verify()
    return list(
        grader.parse(
            f"${expression}$",
            extraction_config=[grader.LatexExtractionConfig(boxed_match_priority=-1)],
            fallback_mode="no_fallback",
            parsing_timeout=SECONDS,
        )
    )


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """Imported on first use: it takes seconds, and a run with plain numbers never needs it."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a time that ran out is a verdict
    return math_verify
