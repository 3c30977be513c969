"""A Gantt chart as text keeps to its width and names what it shows."""

from __future__ import annotations

import pytest

from m2flow.plan.explain.picture import picture, stage_letters
from m2flow.plan.gantt import lay_out
from tests.plan.explain.cases import GEN, STAGES, TRAIN, span


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_a_picture_keeps_to_its_width(width: int) -> None:
    spans = [span(0, GEN, 0, 4), span(1, TRAIN, 4, 9), span(1, TRAIN, 9, 10, "finish")]
    lines = picture(lay_out(spans), STAGES, width)
    assert max(map(len, lines)) <= width
    assert "\n".join(lines).isascii()
    assert lines[0].startswith("lane 0")
    assert lines[0].count("G") == pytest.approx(0.4 * (len(lines[0]) - 20), abs=2)
    assert lines[0].endswith(" 60% idle")
    assert lines[1].count("T") > lines[1].count("t") > 0
    legend = " ".join(lines)
    for words in ("G gen.generate", "T learner.train", "small letter: its finish", ". idle"):
        assert words in legend
    assert "0 s" in legend
    assert "10 s" in legend


def test_overhead_has_marks_of_its_own() -> None:
    kinds = ("switch", "publish", "transfer", "wait")
    spans = [span(0, "gen", n, n + 1, kind) for n, kind in enumerate(kinds)]
    lines = picture(lay_out(spans), STAGES, 80)
    for mark, word in (("~", "switching"), ("^", "publishing"), ("-", "links"), (",", "waiting")):
        assert mark in lines[0]
        assert f"{mark} {word}" in lines[-1]


def test_no_spans_no_picture() -> None:
    assert picture(lay_out([]), STAGES, 80) == []


def test_letters_are_initials_where_these_are_free() -> None:
    names = ["gen.generate", "group_advantage", "a.train", "b.train", "c.train_2"]
    found = stage_letters(names)
    assert len(set(found.values())) == len(names)
    assert found["gen.generate"] == "G"
    assert found["group_advantage"] == "A"
    assert found["a.train"] == "T"
    many = stage_letters(f"stage{n}.run" for n in range(30))
    assert list(many.values()).count("?") == 4
