"""The recorder is bounded, its account covers every step, the trace opens in viewers."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from m2flow.engine.spans import Span
from m2flow.errors import UserError
from m2flow.observe.timeline import Timeline
from m2flow.observe.trace import StepSpans, Trace, read_trace, write_trace
from m2flow.simulation.time_account import extent, where_the_time_went
from tests.simulation.test_time_account import spans_on_a_grid


def test_the_recorder_keeps_first_and_last_steps_and_accounts_for_all() -> None:
    timeline = Timeline(keep_first=1, keep_last=2)
    for step in range(10):
        spans = [Span(0, "train", "call", step, step + 0.5, {"items": 8})]
        if step == 4:
            spans.append(Span(1, "train", "call", step, step + 1.0))
        timeline.add(step, spans, step, step + 1.0)
    assert [step.step for step in timeline.steps] == [0, 8, 9]
    first, second = timeline.totals()
    assert first.stages == {"train": 5.0}
    assert (first.idle, first.seconds) == (5.0, 10.0)
    assert second.stages == {"train": 1.0}
    assert (second.idle, second.seconds) == (9.0, 10.0)


def test_a_step_of_too_many_spans_says_what_it_dropped() -> None:
    timeline = Timeline(max_spans_per_step=3)
    spans = [Span(0, "step", "call", index, index + 1) for index in range(6)]
    timeline.add(1, spans[:5], 0, 5)
    timeline.add(2, spans[5:], 5, 6)
    assert [(len(step.spans), step.dropped) for step in timeline.steps] == [(3, 2), (1, 0)]


def test_all_spans_of_a_step_are_accounted_for_however_few_are_kept() -> None:
    timeline = Timeline(max_spans_per_step=1)
    timeline.add(1, [Span(0, "step", "call", index, index + 1) for index in range(6)], 0, 8)
    (lane,) = timeline.totals()
    assert (lane.stages, lane.idle) == ({"step": 6.0}, 2.0)


def test_a_call_counts_in_full_where_it_begins_in_an_earlier_step() -> None:
    """Its part before the step in which it ends was lost: with staleness most of a generation."""
    timeline = Timeline()
    timeline.add(1, [Span(0, "g", "call", 0, 10)], 0, 15)
    timeline.add(2, [Span(0, "g", "call", 10, 20)], 15, 25)
    (lane,) = timeline.totals()
    assert (lane.stages, lane.idle, lane.seconds) == ({"g": 20.0}, 5.0, 25.0)


def test_a_moment_of_an_earlier_step_counts_once() -> None:
    """A call that ends in the next step hides the transfer that was known of before."""
    timeline = Timeline()
    timeline.add(1, [Span(0, "x", "transfer", 0, 8)], 0, 10)
    timeline.add(2, [Span(0, "g", "call", 4, 15), Span(0, "x", "transfer", 12, 18)], 10, 20)
    (lane,) = timeline.totals()
    assert (lane.stages, lane.beside["links"], lane.idle) == ({"g": 11.0}, 4.0 + 3.0, 2.0)


def test_the_account_of_many_steps_is_that_of_the_whole_time() -> None:
    """Calls of two lanes that end up to three steps after the one in which they begin."""
    timeline, ends = Timeline(), [3.0, 4.0, 9.0, 11.0, 14.0, 20.0, 21.0, 29.0, 30.0, 36.0]
    calls = [
        Span(lane, f"stage {number % 3}", "call", begin, begin + length)
        for lane, length in ((0, 4.5), (1, 1.25))
        for number, begin in enumerate(index * length for index in range(int(36 / length)))
    ]
    for step, (start, end) in enumerate(pairwise([0.0, *ends])):
        timeline.add(step, [span for span in calls if start < span.end <= end], start, end)
    for found, whole in zip(timeline.totals(), where_the_time_went(calls, (0, 36)), strict=True):
        assert found.stages == pytest.approx(whole.stages)
        assert (found.lane, found.seconds) == (whole.lane, whole.seconds)


def test_the_trace_reads_back(tmp_path: Path) -> None:
    timeline = Timeline()
    spans = [
        Span(0, "generate", "call", 100.0, 100.5, {"items": 4}),
        Span(1, "weights", "publish", 100.5, 100.625),
    ]
    timeline.add(1, spans, 99.5, 101.0)
    timeline.write(tmp_path / "timeline.json")
    trace = read_trace(tmp_path / "timeline.json")
    (step,) = trace.steps
    assert (step.step, step.start, step.end) == (1, 0.0, 1.5)
    assert list(step.spans) == [
        Span(0, "generate", "call", 0.5, 1.0, {"items": 4}),
        Span(1, "weights", "publish", 1.0, 1.125),
    ]
    assert trace.totals == timeline.totals()
    assert trace.num_steps == 1


def test_a_trace_of_nothing_is_a_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", Trace())
    assert read_trace(tmp_path / "trace.json").steps == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": [], "otherData": {}}'])
def test_a_foreign_trace_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(UserError, match="cannot be read as a timeline"):
        read_trace(tmp_path / "trace.json")


def check_chrome_trace(document: dict[str, Any]) -> None:
    """What Perfetto's importer of JSON traces needs."""
    named = set()
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for event in document["traceEvents"]:
        assert event["ph"] in "MX"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            named |= {event["tid"]} if event["name"] == "thread_name" else set()
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            ends = round(event["ts"] + event["dur"], 3)
            by_thread.setdefault(event["tid"], []).append((event["ts"], ends))
    assert set(by_thread) <= named
    for intervals in by_thread.values():
        open_ends: list[float] = []
        for start, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "spans of a thread overlap partly"
            open_ends.append(end)


@given(spans=spans_on_a_grid)
def test_any_spans_make_a_valid_chrome_trace(
    tmp_path_factory: pytest.TempPathFactory, spans: list[Span]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(path, Trace([StepSpans(0, *extent(spans), spans)] if spans else []))
    check_chrome_trace(json.loads(path.read_text()))
    (back,) = read_trace(path).steps or [None]
    if spans:
        assert back is not None
        origin = extent(spans)[0]
        moved = [(s.lane, s.name, s.kind, s.start - origin, s.end - origin) for s in spans]
        assert [(s.lane, s.name, s.kind, s.start, s.end) for s in back.spans] == moved


def test_a_whole_run_makes_a_valid_chrome_trace(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    document = json.loads((fake_run(tmp_path / "run") / "timeline.json").read_text())
    check_chrome_trace(document)
    names = {event["args"].get("name") for event in document["traceEvents"] if event["ph"] == "M"}
    assert {"m2flow", "steps", "lane 0", "lane 1"} <= names
    starts = [
        event["ts"] for event in document["traceEvents"] if event.get("tid") == 0 and "ts" in event
    ]
    assert all(left < right for left, right in pairwise(starts))
