"""A Gantt chart as plain ASCII text: a line for each row, a letter for each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from m2flow.plan.gantt import Gantt, Work, in_columns, lane_names
from m2flow.plan.sizes import brief
from m2flow.simulation.time_account import TERM_OF, WORK

NARROWEST, LABEL, SHARE = 40, 14, 11
"""Columns of the whole picture at least; of the lanes' names at most; of the idle share."""

MARKS = {"switch": "~", "publish": "^", "transfer": "-", "wait": ",", "idle": "."}
"""The characters of work that is no stage's, and of idleness."""


def picture(chart: Gantt, stages: Sequence[str], width: int) -> list[str]:
    """The lines of a picture; none for a chart without work.

    Args:
        chart: what is drawn.
        stages: names of the flow's stages, in its order.
        width: of a line, in characters; no line is wider than this, or than NARROWEST.
    """
    if not any(row.pieces for row in chart.rows):
        return []
    lanes = [lane for row in chart.rows for lane in row.lanes]
    label = len(lane_names(lanes)) if len(lanes) <= 2 else LABEL
    columns = max(width, NARROWEST) - label - SHARE - 3
    letters = stage_letters(stages)
    shown = [in_columns(row.pieces, chart, columns) for row in chart.rows]
    lines = []
    for row, works in zip(chart.rows, shown, strict=True):
        body = "".join(_mark(work, letters) for work in works)
        name = lane_names(row.lanes)
        name = name if len(name) <= label else f"{name[: label - 3]}..."
        lines.append(f"{name:<{label}} |{body}| {row.idle:4.0%} idle")
    lines += _axis(chart.seconds, columns, " " * (label + 1))
    seen = {work for works in shown for work in works}
    lines += _legend(seen, letters, max(width, NARROWEST))
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


def _mark(work: Work | None, letters: Mapping[str, str]) -> str:
    """The character of a column; a stage's `finish` is its small letter."""
    kind, name = work or ("idle", "")
    letter = letters.get(name, "?")
    return MARKS.get(kind) or (letter.lower() if kind == "finish" else letter)


def _axis(seconds: float, columns: int, space: str) -> list[str]:
    """A line with ticks at quarters, and their seconds below."""
    ticks = [round(columns * part / 4) for part in range(5)]
    drawn = "".join("+" if n in ticks[1:4] else "-" for n in range(columns))
    numbers = list(" " * (columns + SHARE + 2))
    for part, at in enumerate(ticks):
        text = brief(seconds * part / 4)
        start = min(max(0, at - (len(text) // 2 if part else 0)), columns + SHARE - len(text))
        numbers[start : start + len(text)] = text
    return [f"{space}+{drawn}", f"{space} {''.join(numbers).rstrip()}"]


def _legend(seen: set[Work | None], letters: Mapping[str, str], width: int) -> list[str]:
    """What each character means, of those that are there."""
    kinds = {work[0] for work in seen if work}
    stages = {work[1] for work in seen if work and work[0] in WORK}
    entries = [f"{letter} {stage}" for stage, letter in letters.items() if stage in stages]
    entries += ["small letter: its finish"] if "finish" in kinds else []
    entries += [f"{MARKS[kind]} {word}" for kind, word in TERM_OF.items() if kind in kinds]
    entries += [f"{MARKS['idle']} idle"] if None in seen else []
    lines = [""]
    for entry in entries:
        if lines[-1] and len(lines[-1]) + 2 + len(entry) > width:
            lines.append("")
        lines[-1] += f"{'  ' if lines[-1] else ''}{entry}"
    return lines
