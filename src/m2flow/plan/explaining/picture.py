"""A predicted step as a Gantt picture of text: a row for each lane, a letter for each stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from m2flow.engine.plan import Plan
from m2flow.plan.explaining.rows import Row, Work, lane_names, rows, window
from m2flow.plan.explaining.seconds import brief
from m2flow.plan.prediction import Prediction

NARROWEST, LABEL, SHARE = 40, 14, 11
"""Columns of the whole picture at least; of the lanes' names at most; of the idle share."""


@dataclass(frozen=True)
class Marks:
    """The characters of a picture: of what is no stage, of idleness, and of the frame."""

    switch: str
    publish: str
    transfer: str
    wait: str
    idle: str
    side: str
    corner: str
    line: str
    tick: str

    def of(self, work: Work | None, letters: dict[str, str]) -> str:
        """The character of a column; a stage's `finish` is its small letter."""
        if work is None:
            return self.idle
        kind, name = work
        if kind in ("call", "finish"):
            letter = letters[name]
            return letter.lower() if kind == "finish" else letter
        return str(getattr(self, kind))


ASCII = Marks("~", "^", "-", ",", ".", "|", "+", "-", "+")
DRAWN = Marks("≈", "↑", "→", "˙", "·", "│", "└", "─", "┴")


def picture(
    prediction: Prediction, plan: Plan, stages: Sequence[str], width: int, ascii_only: bool = False
) -> list[str]:
    """The lines of a picture.

    Args:
        prediction: with the spans of a step; without any there is no picture.
        plan: whose lanes are shown.
        stages: names of the flow's stages, in its order.
        width: of a line, in characters; no line is wider than this, or than NARROWEST.
        ascii_only: where the terminal can show nothing else.
    """
    if not prediction.spans:
        return []
    marks = ASCII if ascii_only else DRAWN
    everybody = lane_names([lane.id for lane in plan.lanes])
    label = len(everybody) if len(plan.lanes) <= 2 else LABEL
    columns = max(width, NARROWEST) - label - SHARE - 3
    shown = rows(prediction, plan, columns)
    letters = stage_letters(stages)
    lines = []
    for row in shown:
        body = "".join(marks.of(work, letters) for work in row.columns)
        name = _shortened(lane_names(row.lanes), label)
        lines.append(f"{name:<{label}} {marks.side}{body}{marks.side} {row.idle:4.0%} idle")
    lines += _axis(window(prediction), columns, label, marks)
    lines += _legend(shown, letters, marks, max(width, NARROWEST))
    if not all(row.alike for row in shown):
        lines.append("lanes in one row differ a little: it shows what most of them do")
    return lines


def stage_letters(stages: Iterable[str]) -> dict[str, str]:
    """A capital letter for each stage: an initial of its method, else the next that is free."""
    found: dict[str, str] = {}
    for stage in stages:
        method = stage.rpartition(".")[2].upper()
        initials = [word[0] for word in method.split("_") if word]
        wanted = [*initials, *method, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
        free = (
            letter
            for letter in wanted
            if letter.isascii() and letter.isalpha() and letter not in found.values()
        )
        found[stage] = next(free, "?")
    return found


def _axis(seconds: float, columns: int, label: int, marks: Marks) -> list[str]:
    """A line with ticks at quarters, and their seconds below."""
    ticks = [round(columns * part / 4) for part in range(5)]
    line = "".join(marks.tick if n in ticks[1:4] else marks.line for n in range(columns))
    numbers = list(" " * (columns + SHARE + 2))
    for part, at in enumerate(ticks):
        text = brief(seconds * part / 4)
        start = min(max(0, at - (len(text) // 2 if part else 0)), columns + SHARE - len(text))
        numbers[start : start + len(text)] = text
    space = " " * (label + 1)
    return [f"{space}{marks.corner}{line}", f"{space} {''.join(numbers).rstrip()}"]


def _legend(shown: Sequence[Row], letters: dict[str, str], marks: Marks, width: int) -> list[str]:
    """What each character means, of those that are there."""
    seen = {work for row in shown for work in row.columns}
    kinds = {work[0] for work in seen if work}
    entries = [
        f"{letter} {stage}"
        for stage, letter in letters.items()
        if {("call", stage), ("finish", stage)} & seen
    ]
    if "finish" in kinds:
        entries.append("small letter: its finish")
    words = {
        "switch": "switching", "publish": "publishing", "transfer": "links", "wait": "waiting",
    }  # fmt: skip
    entries += [f"{getattr(marks, kind)} {word}" for kind, word in words.items() if kind in kinds]
    if None in seen:
        entries.append(f"{marks.idle} idle")
    lines = [""]
    for entry in entries:
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > width:
            lines.append("")
        lines[-1] += f"{'  ' if lines[-1] else ''}{entry}"
    return lines


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
