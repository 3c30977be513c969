"""Which part of a completion is its final answer.

The last answer wins: the last `\\boxed{}`; without a box, what stands after the last `####`;
without either, the last number (numeric golds) or the last formula or phrase (other golds). An
earlier mention of the right number never counts. Work per completion: a few searches for fixed
strings over the whole text, regular expressions only over its last stretch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from m2flow.rewards.number import (
    DIGITS,
    MAX_ANSWER_CHARS,
    SCALE,
    TIMES,
    read_number,
    tidy,
    unwrapped,
    without_wrappers,
)

# How much text around the last number, or before the end, may hold the final answer.
_WINDOW_CHARS = 1000

# Digits glued to a letter (H2O, cm^2) belong to a name or a unit; 2^10 is one answer.
_DIGITS = rf"[0-9]{{1,3}}(?:(?:\{{,\}}|\\!,|\\,)[0-9]{{3}})+(?![0-9])|{DIGITS}"
_FRAC = rf"\\[dtc]?frac\s*(?:\{{\s*-?(?:{DIGITS})\s*\}}\s*\{{\s*-?(?:{DIGITS})\s*\}}|[0-9]\s*[0-9])"
_TOKEN = re.compile(
    rf"""
    (?: (?<![0-9A-Za-z)\]}}]) [-−] (?=[\\$€£¥₹0-9.]) )?    # a sign, not a subtraction
    (?: \\?[$€£¥₹] )?
    (?: {_FRAC}
      | (?<![0-9A-Za-z_^]) (?<!\^\{{) (?<![0-9]\.) (?:{_DIGITS})
        (?: \s?/\s?(?:{_DIGITS}) | \^\{{?-?[0-9]+\}}?
          | [eE][-+]?[0-9]{{1,3}}(?![0-9A-Za-z])
          | \s?{TIMES}\s?10\s?(?:\^|\*\*)\s?[{{(]?\s?[-−+]?[0-9]+\s?[}})]? )?
    )
    (?: \s? {SCALE} )?
    (?: \s? (?:\\?%|percent\b) )?
    """,
    re.VERBOSE | re.ASCII,
)
# A point, an interval or a list is one answer; `(2,500)` is a number that explains another.
_TUPLE = re.compile(rf"[(\[]\s*[-−]?(?>{DIGITS})(?:\s*,\s*[-−]?(?>{DIGITS}))+\s*[)\]]", re.ASCII)
# Inline dollars as pandoc reads them, so that `$5 and $6` is money: no space inside the
# delimiters, no digit after the closing one.
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|(?<![\\$])\$(?![\s$])([^$\n]*?[^\s$\\])\$(?![0-9$])|\\\((.+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
# After a comma no other choice may follow: `B, C`.
_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s+)?"
    r"\(?([A-Z])(?:\)?\s*|(?:[).:]{1,2}\s+|\)?,\s+(?!\(?[A-Z]\b))(\S.*))"
)
# In the text of a choice: `or C) 5`, `4 or C`.
_OTHER_CHOICE = re.compile(r"(?:and|or)\b|(?:.*\W)?or\s+\(?[A-Z]\b|(?:.*[\s,;])?\(?[A-Z][):]")
_PHRASE = re.compile(r"(?i:\banswer\b)(?:\s+(?:is|was|equals)\b)?\s*[:=]?\s*([^\n]+)")
# `the correct option is (B)`; several may begin in one line.
_CHOICE_PHRASE = re.compile(
    r"(?:(?i:\b(?:answer|the|my|our|correct|right|best|final)\s+(?:option|choice)\b)"
    r"(?:\s+(?:is|was)\b\s*:?|\s*[:=])"
    r"|(?i:\banswer\b)(?:\s+(?:is|was|equals)\b)?\s*[:=]?)\s*(?=([^\n]+))"
)
_CONCLUSION = re.compile(r"\W*(?i:therefore|thus|hence|so)\b,?\s*(.+)")


def extract_answer(completion: str, *, numeric: bool = True, choice: bool = False) -> str | None:
    """The final answer as it was written, or None where there is none.

    Args:
        completion: the whole text.
        numeric: whether the right answer is a plain number: decides what is looked for in a text
            without a box and without `####`. Where there are `<answer>` tags, that text is what
            stands in the last ones.
        choice: whether it is the letter of a choice, which `answer is B) $4.5$` names.
    """
    has_box, boxed = last_box(completion)
    if has_box:
        return boxed
    if (tagged := last_tagged(completion)) is not None:
        completion = tagged
    before, marker, after = completion.rpartition("####")
    if marker:
        after = after[:_WINDOW_CHARS].strip()
        line = after.partition("\n")[0].strip()
        if not numeric or read_number(line) is not None:
            return line or None
        # A markdown heading (`#### Step 3`) or a sentence: what counts is the end of what follows,
        # and never what stood before.
        completion = completion[len(before) + len(marker) :]
    return _last_number(completion) if numeric else _last_phrase(completion, choice=choice)


def last_tagged(text: str) -> str | None:
    """What stands in the last `<answer>` tags; None where there are none that are closed."""
    found, begin = None, text.find("<answer>")
    while begin >= 0 and (end := text.find("</answer>", begin)) >= 0:
        found = text[begin + len("<answer>") : end]
        begin = text.find("<answer>", end)
    return found


def right_letter(gold: str) -> str | None:
    """The letter of the right choice, or None where the right answer is not a capital letter."""
    letter = unwrapped(tidy(gold)).strip("()")
    return letter if re.fullmatch("[A-Z]", letter) else None


def chosen_letter(answer: str) -> str | None:
    """The letter of the choice that an answer names, or None where it does not name just one.

    Args:
        answer: the final answer, such as `(B)`, `B) 4.5 eV`, `\\textbf{(B)} 4.5` or `Option B`.
    """
    choice = _CHOICE.fullmatch(tidy(without_wrappers(tidy(answer.replace("**", "")))))
    if choice is None or _OTHER_CHOICE.match(choice[2] or ""):
        return None
    return choice[1]


def last_box(text: str) -> tuple[bool, str | None]:
    """(is there a box, content of the last one that is not empty).

    A box that was opened and not closed is a cut-off answer: a box without content.
    """
    end = len(text)
    while True:
        start = max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))
        if start < 0:
            return False, None
        content = _box_content(text, start + (6 if text[start + 1] == "b" else 5))
        if content is None or content.strip():
            return True, content
        end = start


def _box_content(text: str, start: int) -> str | None:
    """The braced group (or bare word) that begins at `start`, or None where it does not end."""
    tail = text[start : start + _WINDOW_CHARS]
    body = tail.lstrip()
    if not body.startswith("{"):
        return re.split(r"[\s$.,]", body, maxsplit=1)[0]
    depth = 0
    for at, char in enumerate(body):
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return body[1:at]
    return None


def _last_number(text: str) -> str | None:
    """The last number of a text, with its sign and percent sign, or what holds it: the formula, or
    numbers in brackets.
    """
    last_digit = max(text.rfind(digit) for digit in "0123456789")
    if last_digit < 0:
        return None
    start = max(0, last_digit - _WINDOW_CHARS)
    if text.find("$", start) >= 0 or text.find("\\", start) >= 0:
        for formula in _FORMULA.finditer(text, start, last_digit + _WINDOW_CHARS):
            if formula.start() <= last_digit < formula.end():
                return _content(formula)
    around = max(0, last_digit - 100), last_digit + 32
    for several in _TUPLE.finditer(text, *around):
        if several.start() <= last_digit < several.end():
            return several.group()
    token = _last(_TOKEN.finditer(text, *around))
    return token.group() if token else None


def _last(matches: Iterator[re.Match[str]]) -> re.Match[str] | None:
    last = None
    for match in matches:
        last = match
    return last


def _content(formula: re.Match[str]) -> str:
    """What stands between the delimiters of a match of `_FORMULA`."""
    return next(group for group in formula.groups() if group is not None)


def _choice_phrase(text: str) -> str | None:
    """The last phrase that names a choice in the last line where one could; else what the last
    line concludes (`Therefore, B`), where that is a choice; else None.
    """
    phrases = [(phrase.end(1), phrase[1]) for phrase in _CHOICE_PHRASE.finditer(text)]
    named = [area for end, area in phrases if end == phrases[-1][0] and chosen_letter(area)]
    if named:
        return named[-1]
    conclusion = _CONCLUSION.fullmatch(text.rstrip().rpartition("\n")[2])
    return conclusion[1] if conclusion and chosen_letter(conclusion[1]) else None


def _last_phrase(text: str, *, choice: bool) -> str | None:
    """What stands after the last "answer is", else the last formula, else the last line.

    Of the first where it has a formula the formula alone, unless it names a `choice`.
    """
    tail = text[-_WINDOW_CHARS:]
    if choice and (named := _choice_phrase(tail)):
        return named
    phrase = _last(_PHRASE.finditer(tail))
    area = phrase.group(1) if phrase else tail
    formula = _last(_FORMULA.finditer(area))
    if formula is not None:
        return _content(formula)
    lines = [line for line in area.splitlines() if line.strip()]
    return lines[-1].strip()[-MAX_ANSWER_CHARS:] if lines else None
