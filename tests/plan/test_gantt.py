"""The layout of Gantt charts: rows of lanes that are alike, columns that keep every share."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from m2flow.engine.spans import Span, SpanKind
from m2flow.plan.gantt import Gantt, folded, in_columns, joined, lane_names, lay_out


def call(lane: int, name: str, start: float, end: float, kind: SpanKind = "call") -> Span:
    return Span(lane, name, kind, start, end)


def test_a_lane_is_a_row_of_pieces_that_do_not_overlap() -> None:
    spans = [call(1, "a", 0, 10), call(1, "items", 2, 4, "transfer"), call(1, "b", 5, 6)]
    chart = lay_out(spans, (0.0, 20.0), lanes=(0, 1))
    assert [row.lanes for row in chart.rows] == [(0,), (1,)]
    assert [row.idle for row in chart.rows] == [1.0, 0.5]
    assert [(piece.name, piece.seconds) for piece in chart.rows[1].pieces] == [
        ("a", 5), ("b", 1), ("a", 4),
    ]  # fmt: skip


def test_lanes_that_look_alike_are_one_row() -> None:
    spans = [call(lane, "a", 0, 6) for lane in (0, 1, 2, 4)] + [call(3, "b", 5, 10)]
    found = folded(lay_out(spans, (0.0, 10.0), range(6)), 10).rows
    assert [lane_names(row.lanes) for row in found] == ["lanes 0-2, 4", "lane 3", "lane 5"]
    assert [(piece.start, piece.end) for piece in found[0].pieces] == [(0, 6)]
    assert [piece.start for piece in found[1].pieces] == [5]


def test_many_rows_are_folded_by_the_stages_that_ran() -> None:
    spans = [call(lane, "a", 0, 5 + lane / 10) for lane in range(30)]
    spans += [call(lane, "b", 6, 10) for lane in range(30, 40)]
    found = folded(lay_out(spans, (0.0, 10.0)), 100).rows
    assert [lane_names(row.lanes) for row in found] == ["lanes 0-29", "lanes 30-39"]
    assert sum(piece.seconds for piece in found[0].pieces) == pytest.approx(6.5, abs=0.2)


def test_what_is_short_is_shown_all_the_same() -> None:
    chart = lay_out([call(0, "a", 0, 9.99), call(0, "gen", 9.99, 10, "publish")])
    assert ("publish", "gen") in in_columns(chart.rows[0].pieces, chart, 20)


def test_a_picture_is_the_same_in_every_process() -> None:
    """Which of several short works got a column was up to the seed of Python's hashes."""
    code = (
        "from m2flow.plan.gantt import Gantt, Piece, in_columns\n"
        "row = [Piece('call', name, n / 99, (n + 1) / 99) for n, name in enumerate('abcd')]\n"
        "row.append(Piece('call', 'z', 4 / 99, 1.0))\n"
        "print(in_columns(row, Gantt(0.0, 1.0, ()), 5))\n"
    )
    shown = {
        subprocess.check_output(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": str(seed)}
        )
        for seed in range(4)
    }
    assert len(shown) == 1


def test_columns_keep_the_share_of_each_work() -> None:
    draw = random.Random(3)
    spans, now = [], 0.0
    for _ in range(5_000):
        length = draw.expovariate(100.0)
        spans.append(call(0, "a" if draw.random() < 0.75 else "b", now, now + length))
        now += length + draw.expovariate(50.0)
    chart = lay_out(spans)
    pieces = joined(in_columns(chart.rows[0].pieces, chart, 400), chart)
    for name in ("a", "b"):
        drawn = sum(piece.seconds for piece in pieces if piece.name == name)
        real = sum(span.seconds for span in spans if span.name == name)
        assert drawn == pytest.approx(real, abs=2 * chart.seconds / 400)


def test_pieces_that_end_where_a_column_ends_fill_their_columns() -> None:
    chart = lay_out([call(0, "a", 0, 3), call(0, "b", 3, 5), call(0, "a", 6, 10)])
    shown = in_columns(chart.rows[0].pieces, chart, 10)
    assert "".join(work[1] if work else "." for work in shown) == "aaabb.aaaa"


def test_charts_without_time_or_lanes() -> None:
    assert lay_out([]) == Gantt(0.0, 0.0, ())
    moment = lay_out([call(0, "x", 1, 1)])
    assert folded(moment, 10).rows[0].pieces == ()
