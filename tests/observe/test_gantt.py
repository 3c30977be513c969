"""The picture of lanes: well-formed, to scale, small however many spans there are."""

from __future__ import annotations

import random
import re
from xml.etree import ElementTree as ET

from m2flow.engine.spans import Span
from m2flow.observe.gantt import MAX_ROWS, appearing_stages, gantt_svg, short_names
from m2flow.plan.gantt import lay_out

SVG = "{http://www.w3.org/2000/svg}"


def widths(svg: str) -> dict[str, float]:
    """Drawn width by fill, over all lanes."""
    found: dict[str, float] = {}
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        fill = rect.get("fill", "")
        if rect.get("width") != "11":
            found[fill] = found.get(fill, 0.0) + float(rect.get("width", "0"))
    return found


def test_pieces_are_to_scale() -> None:
    spans = [
        Span(0, "generator.generate", "call", 0.0, 6.0),
        Span(0, "learner", "switch", 6.0, 7.0),
        Span(1, "learner.train", "call", 2.0, 4.0),
    ]
    svg = gantt_svg(lay_out(spans, (0.0, 10.0)), standalone=True)
    drawn = widths(svg)
    assert drawn["var(--series-0)"] == 3 * drawn["var(--series-1)"] == 6 * drawn["var(--switch)"]
    assert "generate 30 %" in svg
    assert "train 10 %" in svg
    assert "idle 55 %" in svg
    assert "60 % busy" in svg


def test_very_many_spans_stay_small_and_keep_their_share() -> None:
    draw = random.Random(3)
    spans, now = [], 0.0
    for _ in range(20_000):
        length = draw.expovariate(100.0)
        stage = "env.step" if draw.random() < 0.75 else "policy.act"
        spans.append(Span(0, stage, "call", now, now + length))
        now += length + draw.expovariate(50.0)
    colours = {"env.step": "red", "policy.act": "blue"}
    svg = gantt_svg(lay_out(spans), colours=colours, standalone=True)
    assert len(svg) < 300_000
    drawn = widths(svg)
    whole = drawn["url(#gantt-idle)"]
    for stage, colour in colours.items():
        share = sum(span.end - span.start for span in spans if span.name == stage) / spans[-1].end
        assert abs(drawn[colour] / whole - share) < 0.01


def test_hostile_names_are_escaped() -> None:
    chart = lay_out([Span(0, '"><script>', "call", 0.0, 1.0)])
    svg = gantt_svg(chart, title="a < b", standalone=True)
    ET.fromstring(svg)
    assert "<script" not in svg


def test_degenerate_timelines_are_drawn() -> None:
    moment = [Span(0, "x", "call", 1.0, 1.0)]
    for svg in (gantt_svg(lay_out(spans), standalone=True) for spans in (moment, [])):
        ET.fromstring(svg)


def test_lanes_that_are_left_out_are_counted() -> None:
    spans = [Span(lane, "x", "call", 0.0, 1.0) for lane in range(MAX_ROWS + 5)]
    assert f"{MAX_ROWS} of {MAX_ROWS + 5} lanes" in gantt_svg(lay_out(spans))


def test_step_borders_are_named() -> None:
    spans = [Span(0, "x", "call", 0.0, 2.0)]
    svg = gantt_svg(lay_out(spans), steps=[(7, 0.0, 1.0), (8, 1.0, 2.0)])
    assert re.findall(r"step (\d), 1 s", svg) == ["7", "8"]


def test_names_are_short_where_that_is_clear() -> None:
    assert short_names(["a.step", "b.step", "b.train", "mean"]) == {
        "a.step": "a.step",
        "b.step": "b.step",
        "b.train": "train",
        "mean": "mean",
    }


def test_stages_appear_in_order_of_time() -> None:
    spans = [Span(0, "b", "call", 2, 3), Span(0, "a", "call", 1, 2), Span(0, "w", "switch", 0, 1)]
    assert appearing_stages(lay_out(spans)) == ["a", "b"]
