"""Plain numbers as people and models write them, read exactly.

`1,234`, `$18`, `18.0`, `1/2`, `\\frac{1}{2}`, `2 1/2`, `3 \\times 10^5`, `50%`, `18 million`,
`18 \\text{ dollars}` and `x = 18` become a rational number. What is not a plain number (`18x`,
`\\sqrt{2}`, `18 or 19`) is None and somebody else's business. Knows nothing of completions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_ANSWER_CHARS = 256
"""A final answer longer than this is not one: it is never read, neither here nor by math-verify."""

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|(?<!\.)\.[0-9]+"
"""An unsigned decimal number, with or without thousands separators."""

FRAC = rf"\\[dtc]?frac\s*(?:\{{\s*-?(?:{DIGITS})\s*\}}\s*\{{\s*-?(?:{DIGITS})\s*\}}|[0-9]\s*[0-9])"
"""A LaTeX fraction of two numbers, the form without braces (`\\frac12`) included."""

SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number and how it was written.

    Args:
        value: the number; of `50%` it is 50.
        places: digits after the decimal point, 0 where it was not written as a decimal.
        percent: whether a percent sign or word followed.
    """

    value: Fraction
    places: int = 0
    percent: bool = False


_INTEGER = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(
    rf"""
    (?P<prefix> (?:[-+\s($€£¥₹]|US(?=\s*\$)|USD\s|Rs\.?\s)* )
    (?: (?P<whole>[0-9]{{1,9}}) \s* (?P<mixed_frac>{FRAC})
      | (?P<whole2>[0-9]{{1,9}}) \s+ (?P<mixed_top>[0-9]+) \s* / \s* (?P<mixed_bottom>[0-9]+)
      | (?P<frac>{FRAC})
      | (?P<top>{DIGITS}) \s* / \s* (?P<bottom>{DIGITS})
      | (?P<grouped>[0-9]{{1,3}}(?:\ [0-9]{{3}})+(?:\.[0-9]+)?)
      | (?P<digits>{DIGITS}) (?:[eE](?P<exponent>[-+]?[0-9]{{1,2}})
          | \s*(?:\\times|\\cdot|×|·|\*)\s*10\^
            (?:\{{(?P<power>[-+]?[0-9]{{1,2}})\}}|(?P<bare_power>[0-9]{{1,2}})))?
    )
    (?: \s* (?P<scale>(?:hundred|thousand|million|billion|trillion)\b) )?
    (?: \s* (?P<percent>%|(?:percent|per\ cent|pct)\b) )?
    (?P<rest>.*)
    """,
    re.VERBOSE | re.ASCII | re.DOTALL | re.IGNORECASE,
)

# What may follow a number without changing it. A word glued to the number, or a single letter, may
# be a factor (18x, 18 m n), so those must be units that everybody knows.
_SHORT_UNITS = frozenset(
    "m s g h l kg mg km cm mm ft in yd mi lb lbs oz ml min sec hr hrs am pm mph kph usd".split()
)
_NO_UNITS = frozenset(
    "and or to plus minus over divided squared cubed half halves third thirds quarter quarters "
    "hundred thousand million billion trillion percent mod point not if unless than pi sqrt sin "
    "cos tan log ln exp".split()
)
_UNIT = re.compile(r"\s*/?\s*[A-Za-z]+(?:[\s./-]+[A-Za-z]+){0,7}\s*(?:\^\{?[23]\}?|[²³])?[\s.)$]*")
_CLOSING = re.compile(r"[\s.)$€£¥₹]*")

_SPACING = re.compile(r"\\[,!;:>]|\\q?quad\b|\\left\b|\\right\b|\{\}")
_DEGREES = re.compile(r"(?:\^\{?\\circ\}?|°)\s*[CFK]?\b")
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boxed|fbox|bm)\s*\{([^{}]*)\}"
)
_EQUALS = re.compile(r"(?<![<>!≤≥≠:])=(?!=)")


def tidy(text: str) -> str:
    """Take off what carries no meaning: delimiters, bold, LaTeX spacing, a final full stop."""
    text = text.strip()
    if "\\" in text or "~" in text or "{" in text or "°" in text:
        text = text.replace("{,}", ",").replace(r"\%", "%").replace(r"\$", "$")
        text = _SPACING.sub("", text.replace(r"\ ", " ").replace("~", " "))
        text = _DEGREES.sub("", text)
    text = text.replace("−", "-").replace("–", "-")
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$")
    # `2**3` is a power: stars count as bold only at the ends.
    text = text.strip('*`"“” \t\r\n')
    while text[:2] in (r"\(", r"\[") and text[-2:] in (r"\)", r"\]"):
        text = text[2:-2].strip()
    return text.rstrip(".;,:*` \t\r\n")


@lru_cache(maxsize=8192)
def read_number(text: str) -> PlainNumber | None:
    """The number that `text` spells and nothing else, or None.

    Args:
        text: an answer, such as the content of a box; units and currency may surround the number.
    """
    if _INTEGER.fullmatch(text):
        return PlainNumber(Fraction(int(text)))
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = tidy(text)
    if "\\" in text and "{" in text:
        text = tidy(_WRAPPER.sub(r" \1 ", text))
    sides = _EQUALS.split(text)
    match = _NUMBER.fullmatch(sides[-1].strip())
    if match is None or not _harmless(match["rest"]):
        return None
    value, places = _value(match)
    if value is None:
        return None
    if match["prefix"].count("-") > 1:
        return None
    if "-" in match["prefix"]:
        value = -value
    if match["scale"]:
        value *= SCALES[match["scale"].lower()]
    return PlainNumber(value, places, percent=match["percent"] is not None)


def same_number(gold: PlainNumber, answer: PlainNumber) -> bool:
    """Are the two numbers equal, as a reader would judge?

    Exactly equal; or one is a decimal of six or more places that rounds or cuts off the other
    (0.333333 for 1/3). Where one of them carries a percent sign, `p%` may stand for p (the
    question asked for a percentage) or for p/100.
    """
    if _agree(gold.value, gold.places, answer.value, answer.places):
        return True
    if gold.percent == answer.percent:
        return False
    if gold.percent:
        return _agree(gold.value / 100, gold.places + 2, answer.value, answer.places)
    return _agree(gold.value, gold.places, answer.value / 100, answer.places + 2)


def _agree(a: Fraction, a_places: int, b: Fraction, b_places: int) -> bool:
    if a == b:
        return True
    if max(a_places, b_places) < 6:
        return False
    # Let b be the decimal, or the shorter one of two.
    if b_places < 6 or 6 <= a_places < b_places:
        a, a_places, b, b_places = b, b_places, a, a_places
    scale: int = 10**b_places
    missing = (a - b) * scale
    cut_off = missing if b > 0 else -missing
    return abs(missing) <= Fraction(1, 2) or 0 < cut_off < 1


def _value(match: re.Match[str]) -> tuple[Fraction | None, int]:
    """Value and decimal places of a match of `_NUMBER`; no value where a denominator is zero."""
    digits = match["digits"] or match["grouped"]
    if digits:
        value, places = _decimal(digits)
        power = match["exponent"] or match["power"] or match["bare_power"]
        if power is None:
            return value, places
        return value * Fraction(10) ** int(power), 0
    whole = match["whole"] or match["whole2"]
    if match["frac"] or match["mixed_frac"]:
        top, bottom = _frac_parts(match["frac"] or match["mixed_frac"])
    elif whole:
        top, bottom = Fraction(match["mixed_top"]), Fraction(match["mixed_bottom"])
    else:
        top, bottom = _decimal(match["top"])[0], _decimal(match["bottom"])[0]
    if bottom == 0:
        return None, 0
    return top / bottom + (int(whole) if whole else 0), 0


def _frac_parts(frac: str) -> tuple[Fraction, Fraction]:
    body = frac[frac.index("frac") + 4 :].strip()
    if "{" not in body:
        return Fraction(body[0]), Fraction(body[-1])
    top, bottom = re.findall(r"\{([^}]*)\}", body)
    return _decimal(top)[0], _decimal(bottom)[0]


def _decimal(digits: str) -> tuple[Fraction, int]:
    """`-1,234.50` as an exact fraction, and its number of decimal places."""
    digits = digits.replace(",", "").replace(" ", "")
    whole, _, decimals = digits.partition(".")
    value = Fraction(int((whole + decimals).replace("-", "") or "0"), 10 ** len(decimals))
    return (-value if whole.startswith("-") else value), len(decimals)


def _harmless(rest: str) -> bool:
    """May this text follow a number without changing it (units, closing punctuation)?"""
    if _CLOSING.fullmatch(rest):
        return True
    if not _UNIT.fullmatch(rest):
        return False
    words = re.findall(r"[a-z]+", rest.lower())
    if any(word in _NO_UNITS for word in words):
        return False
    glued = rest[0].isalpha()
    return (not glued or words[0] in _SHORT_UNITS) and all(
        len(word) > 1 or word in _SHORT_UNITS or (word == "a" and not glued) for word in words
    )
