"""Plain numbers as people and models write them, read exactly.

`1,234`, `$18`, `18.0`, `1e5`, `3 \\times 10^{-5}`, `1/2`, `\\frac{1}{2}`, `2 1/2`, `50%`,
`18 million`, `18万元`, `0.1\\overline{6}`, `x = 18` and `18 \\text{ dollars}` become a rational
number. What is not a plain number (`18x`, `\\sqrt{2}`, `18 or 19`) is None and math-verify's
business. Knows nothing of completions.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_ANSWER_CHARS = 256
"""A final answer longer than this is not one: it is never read, neither here nor by math-verify."""

DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|(?<!\.)\.[0-9]+"
"""An unsigned decimal number, with or without thousands separators: `0,100` is none."""

TIMES = r"(?:\\times|\\cdot|[x×·⋅*])"
"""What stands between the factor and the power of ten in scientific notation."""

LEAST_PLACES, LEAST_DIGITS = 6, 5
"""A decimal may stand for the number that it shortens if it has so many decimal places and so many
significant digits: by its places alone 0.000001 would stand for 0.0000012."""

SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "万": 10**4,
    "萬": 10**4,
    "亿": 10**8,
    "億": 10**8,
}
"""What may stand behind a number and multiplies it."""

_SCALE_WORDS = (rf"{word}\b" if word.isascii() else word for word in SCALES)
SCALE = f"(?:{'|'.join(_SCALE_WORDS)})"
"""One of them, as a regular expression."""


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
_SPACED = rf"[0-9]{{1,3}}(?:\ [0-9]{{3}})+(?:\.[0-9]+)?|{DIGITS}"
_NUMBER = re.compile(
    rf"""
    (?P<prefix> (?:[-+\s($€£¥₹]|US(?=\s*\$)|USD\s|Rs\.?\s)* )
    (?: (?:(?P<whole>[0-9]{{1,9}})\s+)? (?P<top>{DIGITS}) \s*/\s* (?P<bottom>-?(?:{DIGITS}))
      | (?:(?P<factor>{_SPACED}) \s* {TIMES} \s*)?
        10 \s* (?:\^|\*\*) \s* [{{(]? \s* (?P<power>[-+]?[0-9]{{1,3}}) \s* [}})]?
      | (?P<digits>{_SPACED}) (?:e(?P<exponent>[-+]?[0-9]{{1,3}}))? )
    (?: \s* (?P<scale>{SCALE}) )?
    (?: \s* (?P<percent>%|(?:percent|per\ cent|pct)\b) )?
    (?P<rest>.*)
    """,
    re.VERBOSE | re.ASCII | re.DOTALL | re.IGNORECASE,
)

# Words that may not follow a number; neither may a single letter, which may be a factor (18 m n).
_NO_UNITS = frozenset(
    "and or to plus minus times over divided squared cubed factorial choose half halves third "
    "thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth "
    "eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths hundred "
    "thousand million billion trillion percent mod point not if unless than pi sqrt sin cos tan "
    "log ln exp".split()
)
_UNIT_IN_CHINESE = re.compile(
    r"[\s(]*(?:千(?=[米克瓦卡焦]))?(?P<words>[\u4e00-\u9fff]{1,8})[\s)$]*"  # 元, 平方米, 千克
)
# Of its characters these say another number, or that there are several.
_NO_UNITS_IN_CHINESE = frozenset(
    "一二三四五六七八九十百千万萬亿億兆半多余餘几幾上下或和与與到至加减減乘除"
)
_UNIT = re.compile(
    r"\s*/?\s*\(?[A-Za-z]+(?:[\s./-]+[A-Za-z]+){0,7}\s*(?:\^\{?[23]\}?|[²³])?[\s.)$]*"
)
_CLOSING = re.compile(r"[\s.)$€£¥₹]*")
# `(1,234)` is two numbers, `($1,234)` is one.
_PAIR = re.compile(r"[-+\s($€£¥₹]*\([-+\s]*[0-9][^()$€£¥₹]*,", re.ASCII)

_SPACING = re.compile(r"(?<!\\)\\[,!;:>]|\\q?quad\b|\\left\b|\\right\b|\{\}")
_SPACE = re.compile(r"(?<!\\)\\ |~")
_DEGREES = re.compile(r"(?:\^\{?\\circ\}?|°|\^?\{?\\degree\b\}?)(?:\s*[CFK]\b)?")
_REPEATING = re.compile(
    r"(?<![0-9,.])(?P<whole>[0-9]*)\.(?P<few>[0-9]*)\\(?:overline|bar|dot)\s*"
    r"\{?(?P<again>(?<=\{)[0-9]+(?=\})|(?<!\{)[0-9])\}?(?![0-9\\])"
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|boxed|fbox|bm)\s*\{([^{}]*)\}"
)
_FRAC = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}|([0-9])\s*([0-9]))"
)
_NUMERAL = re.compile(
    r"\(?(?P<digits>[0-9A-Z]*[0-9][0-9A-Z]*)\)?_\{?\(?(?P<base>[0-9]{1,2})\)?\}?", re.ASCII
)
_EQUALS = re.compile(r"(?<![<>!≤≥≠:])=(?!=)")

_FULL_WIDTH = {0xFEE0 + code: chr(code) for code in range(ord("!"), ord("~") + 1)}
_FULL_WIDTH[ord("，")] = ", "  # between two numbers, and not within one

_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_SYMBOL = re.compile(
    rf"(?P<raised>[{_RAISED}]+)|(?P<lowered>[{_LOWERED}]+)|(?P<fraction>[¼-¾⅐-⅞])"
    r"|√\s*(?:\((?P<under>[^()]*)\)|(?P<few>[0-9]+(?:\.[0-9]+)?|[A-Za-z])|(?=\{))"
)


def without_symbols(text: str) -> str:
    """Unicode's raised and lowered figures, fractions and roots in LaTeX: `x²` is `x^{2}`.

    What is as wide as a Chinese character is what it stands for: `（1，2）` is `(1, 2)`.
    """

    def written(symbol: re.Match[str]) -> str:
        plain = unicodedata.normalize("NFKC", symbol[0]).replace("\N{MINUS SIGN}", "-")
        if symbol["raised"]:
            return f"^{{{plain}}}"
        if symbol["lowered"]:
            return f"_{{{plain}}}"
        if symbol["fraction"]:
            top, _, bottom = plain.partition("\N{FRACTION SLASH}")
            return rf"\frac{{{top}}}{{{bottom}}}"
        under = symbol["under"] or symbol["few"]
        return rf"\sqrt{{{under}}}" if under else r"\sqrt"

    return _SYMBOL.sub(written, text.translate(_FULL_WIDTH))


def _repeated(decimal: re.Match[str]) -> str:
    """`0.1\\overline{6}`, whose last digits go on without end, as a fraction."""
    few, again = decimal["few"], decimal["again"]
    start = int(decimal["whole"] + few or "0")
    nines = 10 ** len(again) - 1
    return f"{start * nines + int(again)}/{nines * 10 ** len(few)}"


def tidy(text: str) -> str:
    """Take off what carries no meaning: delimiters, bold, LaTeX spacing, a final full stop."""
    text = text.strip()
    if "\\" in text or "~" in text or "{" in text or "°" in text:
        text = text.replace("{,}", ",").replace(r"\%", "%").replace(r"\$", "$")
        text = _SPACING.sub("", _SPACE.sub(" ", text))
        text = _DEGREES.sub("", text)
    text = text.replace("−", "-").replace("–", "-")
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text.strip("$")
    # `2**3` is a power: stars count as bold only at the ends.
    text = text.strip('*`"“” \t\r\n')
    while text[:2] in (r"\(", r"\[") and text[-2:] in (r"\)", r"\]"):
        text = text[2:-2].strip()
    return text.rstrip(".;,:*`。 \t\r\n")


def unwrapped(text: str) -> str:
    """What stands in `\\text{}`, `\\mathrm{}` and the like, where nothing stands beside it."""
    while wrapper := _WRAPPER.fullmatch(text):
        text = wrapper[1].strip()
    return text


def without_wrappers(text: str) -> str:
    """Take `\\text{}`, `\\mathrm{}` and the like off, wherever they stand."""
    return _WRAPPER.sub(r" \1 ", text)


def sides(text: str) -> list[str]:
    """What stands between the equals signs of an answer."""
    return _EQUALS.split(text)


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
    if "\\" in text:
        text = tidy(without_wrappers(_FRAC.sub(_in_line, _REPEATING.sub(_repeated, text))))
    *before, last = sides(text)
    last = last.strip()
    match = _NUMBER.fullmatch(last)
    if match is None or not _harmless(match["rest"]) or not all(map(_equated, before)):
        return None
    if _PAIR.match(last):
        return None
    value, places = _decimal(match["digits"] or match["top"] or match["factor"] or "1")
    if match["bottom"]:
        bottom, _ = _decimal(match["bottom"])
        if bottom == 0:
            return None
        value, places = value / bottom + int(match["whole"] or 0), 0
    if exponent := match["exponent"] or match["power"]:
        value, places = value * Fraction(10) ** int(exponent), 0
    if match["prefix"].count("-") > 1:
        return None
    if "-" in match["prefix"]:
        value = -value
    if match["scale"]:
        value *= SCALES[match["scale"].lower()]
    return PlainNumber(value, places, percent=match["percent"] is not None)


def read_numeral(text: str) -> tuple[str, int] | None:
    """The digits and the base of a numeral such as `2516_8`, or None where `text` is none."""
    match = _NUMERAL.fullmatch(text)
    return match and (match["digits"].lstrip("0"), int(match["base"]))


def same_number(gold: PlainNumber, answer: PlainNumber) -> bool:
    """Are the two numbers equal, as a reader would judge?

    Exactly equal; or one is a decimal of at least `LEAST_PLACES` and `LEAST_DIGITS` that rounds or
    cuts off the other (0.333333 for 1/3). Where one of them carries a percent sign, `p%` may stand
    for p (the question asked for a percentage) or for p/100.
    """
    if _agree(gold.value, gold.places, answer.value, answer.places):
        return True
    if gold.percent == answer.percent:
        return False
    if gold.percent:
        return _agree(gold.value / 100, gold.places + 2, answer.value, answer.places)
    return _agree(gold.value, gold.places, answer.value / 100, answer.places + 2)


def rounds(decimal: PlainNumber, value: PlainNumber) -> bool:
    """Is the first a decimal that rounds the second, to however few places?

    Of two thirds `0.67` is one, and so is `66.7%`.
    """
    rounded, places = decimal.value, decimal.places
    if decimal.percent and not value.percent:
        rounded, places = rounded / 100, places + 2
    return places > 0 and 2 * abs(rounded - value.value) * 10**places <= 1


def _agree(a: Fraction, a_places: int, b: Fraction, b_places: int) -> bool:
    return a == b or _shortens(a, a_places, b) or _shortens(b, b_places, a)


def _shortens(decimal: Fraction, places: int, value: Fraction) -> bool:
    """Is a decimal of enough places and digits the rounded or the cut-off value?"""
    scale = 10**places
    if places < LEAST_PLACES or abs(decimal * scale) < 10 ** (LEAST_DIGITS - 1):
        return False
    return decimal * scale in (round(value * scale), int(value * scale))


def _in_line(frac: re.Match[str]) -> str:
    """`\\frac{1}{2}` as `1/2`, so that a whole number before it makes a mixed one."""
    top, bottom = frac[1] or frac[3], frac[2] or frac[4]
    return f" {top}/{bottom}"


def _decimal(digits: str) -> tuple[Fraction, int]:
    """`-1,234.50` as an exact fraction, and its number of decimal places."""
    digits = digits.replace(",", "").replace(" ", "")
    whole, _, decimals = digits.partition(".")
    value = Fraction(int((whole + decimals).replace("-", "") or "0"), 10 ** len(decimals))
    return (-value if whole.startswith("-") else value), len(decimals)


def _equated(side: str) -> bool:
    """May this stand before `= 18`? A variable or a sum, and not a second answer."""
    return not re.search(r"[,;](?:\s|[a-z])|\b(?:and|or)\b", side)


def _harmless(rest: str) -> bool:
    """May this text follow a number without changing it (units, closing punctuation)?"""
    if _CLOSING.fullmatch(rest):
        return True
    if unit := _UNIT_IN_CHINESE.fullmatch(rest):
        return _NO_UNITS_IN_CHINESE.isdisjoint(unit["words"])
    if not _UNIT.fullmatch(rest):
        return False
    words = re.findall(r"[a-z]+", rest.lower())
    glued = rest[0].isalpha()  # as a factor would be
    return not glued and all(w not in _NO_UNITS and (len(w) > 1 or w == "a") for w in words)
