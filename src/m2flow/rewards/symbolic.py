"""Are two written answers the same mathematics? math-verify, with its work bounded.

math-verify bounds its time with SIGALRM, which exists in the main thread alone, and a clock makes
a reward depend on how busy the machine is. Both are switched off here. Instead, `is_bounded`
refuses by its spelling an answer that could blow up inside a single operation (towers of powers,
huge numerals) or that leaves the work to the reader (sums, integrals, limits); what remains runs
under a budget of Python function calls, counted by a trace function of this thread alone.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
import threading
from functools import lru_cache
from types import FrameType
from typing import Any

from m2flow.rewards.number import MAX_ANSWER_CHARS, tidy

CALL_BUDGET = 1_000_000
"""Python calls that one comparison may make; ordinary ones make 10 to 200 thousand. About a second,
rarely ten, where the numbers are huge. The count varies a little with what the parser and sympy
have cached, so the budget is far from the ordinary."""

MAX_POWER = 100_000
"""Largest product of all numerals that stand in exponents of an expression of numbers."""

MAX_DEGREE = 500
"""The same for an expression with variables or functions: sympy may expand it, term by term."""

# What a finished answer is written with. A command that is not here is not handed to sympy, which
# would carry out `\sum`, `\gamma` or `\operatorname{eye}` whatever its size.
_COMMANDS = frozenset(
    """
    frac dfrac tfrac cfrac binom dbinom tbinom sqrt cdot times div pm mp ast circ degree prime
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp
    pi alpha beta delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho
    sigma tau phi varphi chi psi omega Delta Theta Lambda Xi Pi Sigma Phi Psi Omega infty emptyset
    varnothing ell Re Im imath
    le leq leqslant ge geq geqslant lt gt ne neq approx equiv in notin subset subseteq cup cap
    setminus mid vert lvert rvert Vert lVert rVert lfloor rfloor lceil rceil langle rangle lbrace
    rbrace lbrack rbrack land lor neg to rightarrow Rightarrow iff
    left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle quad qquad
    text textbf textit textrm textnormal mathrm mathbf mathit mathbb mathcal mbox overline bar hat
    vec angle triangle perp parallel begin end ldots dots cdots
    """.split()
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*\.?")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*(?:\{\s*(?:[0-9]{1,3}|[a-zA-Z])\s*\}){2}")
_FACTORIAL = re.compile(r"(?<![0-9!])(?:[0-9]{1,3}|[a-zA-Z])!(?!\s*!)")
_ROOT_INDEX = re.compile(r"(\\sqrt)\s*\[\s*(?:[0-9]{1,2}|[a-zA-Z])\s*\]")
_ARITHMETIC = re.compile(r"\\(?:[dtc]?frac|cdot|times|div|sqrt|left|right|pm)(?![a-zA-Z])")
_CARET = re.compile(r"\^|\*\*")
_EXPONENT = re.compile(
    r"\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\([^()]*\)|[-+]?[0-9]+|[a-zA-Z]|\\[a-zA-Z]++(?!\s*[{(\[0-9])|['*+])"
)
_TOWER = re.compile(r"\^|\*\*|!|binom")

# Compared once at the start: the parser learns its tables and sympy imports half of itself on
# first use, a million calls that must not count against the first answer.
_FIRST_USES = (
    ("x^2-1", "(x-1)(x+1)"),
    (r"\frac{\sqrt{2}}{2}", r"\sin\left(\frac{\pi}{4}\right)"),
    (r"(1,2)", r"\{1,2\}"),
)

# sympy gains nothing from threads, and the parser's tables are not guarded against them.
_one_at_a_time = threading.Lock()


class _BudgetSpentError(BaseException):
    """Not an `Exception`, so that the handlers inside math-verify and sympy let it through."""


def same_expression(gold: str, answer: str) -> bool:
    """Do the two spellings mean the same? Never raises; False where that cannot be told.

    Args:
        gold: the right answer; one made of words alone is compared as text.
        answer: the extracted answer.
    """
    gold_text, answer_text = _canonical(gold), _canonical(answer)
    if gold_text == answer_text:
        return bool(gold_text)
    if not gold_text or not answer_text or _WORDS.fullmatch(gold_text):
        return False
    if not (is_bounded(gold_text) and is_bounded(answer_text)):
        return False
    with _one_at_a_time:
        return _compare(gold_text, answer_text)


def is_bounded(expression: str) -> bool:
    """May this spelling be evaluated? Judged by its text alone, so the verdict is reproducible."""
    if len(expression) > MAX_ANSWER_CHARS or re.search(r"[0-9]{41}", expression):
        return False
    if not _COMMANDS.issuperset(_COMMAND.findall(expression)) or expression.count(r"\exp") > 2:
        return False
    rest = _FACTORIAL.sub("", _BINOMIAL.sub("", _ROOT_INDEX.sub(r"\1", expression)))
    if "binom" in rest or "!" in rest or re.search(r"\\sqrt\s*\[", rest):
        return False
    arithmetic = not re.search(r"[a-zA-Z]", _ARITHMETIC.sub("", expression))
    return _power_bound(expression) <= (MAX_POWER if arithmetic else MAX_DEGREE)


def _power_bound(expression: str) -> int:
    """The product of all numerals in exponents; beyond the limit for what may hide a tower."""
    product = 1
    for caret in _CARET.finditer(expression):
        match = _EXPONENT.match(expression, caret.end())
        if match is None:
            return MAX_POWER + 1
        exponent = match.group(1)
        inner = _TOWER.findall(exponent) if exponent[0] in "{(" else []
        # Of towers, only those of two small steps, such as e^{x^2}.
        if len(inner) > 1 or (inner and re.search(r"!|binom|[0-9]{2}|[5-9]", exponent)):
            return MAX_POWER + 1
        for numeral in re.findall(r"[0-9]+", exponent):
            product *= max(1, int(numeral))
        if product > MAX_POWER:
            return product
    return product


def _canonical(text: str) -> str:
    """A spelling fit for comparison as text: no delimiters, one kind of fraction, no spaces."""
    text = re.sub(r"\s+", " ", tidy(text))
    if _WORDS.fullmatch(text.strip("()")):
        return text.strip("().").casefold()
    text = re.sub(r"\\[dtc]frac", r"\\frac", text).replace("**", "^")
    return re.sub(r" (?![A-Za-z0-9])|(?<![A-Za-z0-9]) ", "", text)


def _compare(gold: str, answer: str) -> bool:
    """math-verify's verdict within the budget; False where the budget is spent."""
    grader = _math_verify()
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += 1
        # Not in a generator: what is raised while one is being closed is lost.
        if calls > CALL_BUDGET and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            raise _BudgetSpentError

    previous = sys.gettrace()
    sys.settrace(count)
    try:
        gold_parsed, answer_parsed = _parse(gold), _parse(answer)
        if not gold_parsed or not answer_parsed:
            return False
        return bool(grader.verify(gold_parsed, answer_parsed, timeout_seconds=None))
    except _BudgetSpentError:
        return False
    finally:
        sys.settrace(previous)


@lru_cache(maxsize=4096)
def _parse(expression: str) -> list[Any]:
    """math-verify's reading of one expression: nothing where it cannot be read."""
    return _read(_math_verify(), expression)


def _read(grader: Any, expression: str) -> list[Any]:
    return list(
        grader.parse(
            f"${expression}$",
            extraction_config=[grader.LatexExtractionConfig(boxed_match_priority=-1)],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
    )


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """Import on first use: it takes a second, and a run with plain numbers never needs it."""
    import math_verify

    # It warns that its timeouts are off; they are replaced here on purpose.
    for part in ("parser", "grader"):
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    for gold, answer in _FIRST_USES:
        math_verify.verify(
            _read(math_verify, gold), _read(math_verify, answer), timeout_seconds=None
        )
    return math_verify
