"""The account of lanes' time is a partition: every moment of a lane counts once."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.engine.spans import Span
from m2flow.simulation.time_account import PRECEDENCE, TERM_OF, TERMS, where_the_time_went

spans_on_a_grid = st.lists(
    st.builds(
        lambda lane, name, kind, start, length: Span(lane, name, kind, start, start + length),
        st.integers(0, 2),
        st.sampled_from(["generate", "train"]),
        st.sampled_from(sorted(PRECEDENCE)),
        st.integers(0, 12),
        st.integers(0, 8),
    ),
    max_size=14,
)


def account_by_seconds(spans: list[Span], window: tuple[int, int]) -> dict[tuple[Any, ...], int]:
    """The oracle: look at every second of every lane and ask which span it counts for."""
    account: dict[tuple[Any, ...], int] = {}
    for lane in {span.lane for span in spans}:
        for second in range(*window):
            running = [
                (PRECEDENCE[span.kind], -span.start, -index, span)
                for index, span in enumerate(spans)
                if span.lane == lane and span.start <= second < span.end
            ]
            key: tuple[Any, ...] = (lane, "idle")
            if running:
                best = min(running, key=lambda entry: entry[:2])
                tied = [entry[3] for entry in running if entry[:2] == best[:2]]
                span = tied[0]
                key = (lane, span.name if span.kind in ("call", "finish") else span.kind)
            account[key] = account.get(key, 0) + 1
    return account


@given(spans=spans_on_a_grid, start=st.integers(-2, 8), length=st.integers(0, 20))
@settings(max_examples=200)
def test_the_account_agrees_with_looking_at_every_second(
    spans: list[Span], start: int, length: int
) -> None:
    window = (start, start + length)
    expected = account_by_seconds(spans, window)
    for lane in where_the_time_went(spans, window):
        found = {**lane.stages, "idle": lane.idle}
        found |= {kind: lane.beside[term] for kind, term in TERM_OF.items()}
        positive = {(lane.lane, key): value for key, value in found.items() if value}
        assert positive == {key: value for key, value in expected.items() if key[0] == lane.lane}
        assert sum(found.values()) == lane.seconds == length


def test_work_hides_what_overlaps_it() -> None:
    spans = [
        Span(0, "generate", "call", 0.0, 10.0),
        Span(0, "payload", "transfer", 2.0, 4.0),
        Span(0, "score", "call", 5.0, 6.0),
        Span(0, "items", "wait", 8.0, 12.0),
    ]
    (lane,) = where_the_time_went(spans, (0.0, 20.0))
    assert lane.stages == {"generate": 9.0, "score": 1.0}
    assert (lane.beside["links"], lane.beside["waiting"], lane.idle) == (0.0, 2.0, 8.0)
    assert lane.share(lane.terms["compute"]) == 0.5


def test_no_spans_no_account() -> None:
    assert where_the_time_went([]) == []


def test_the_terms_add_up_to_the_window() -> None:
    spans = [Span(0, "a", "call", 0, 3), Span(0, "b", "switch", 2, 5), Span(0, "b", "wait", 6, 7)]
    (lane,) = where_the_time_went(spans, (0, 10))
    assert tuple(lane.terms) == TERMS
    assert lane.terms == {
        "compute": 3, "switching": 2, "publishing": 0, "links": 0, "waiting": 5,
    }  # fmt: skip


def test_lanes_without_spans_are_idle() -> None:
    lanes = where_the_time_went([Span(2, "a", "call", 0, 1)], lanes=(0, 1, 2))
    assert [(lane.lane, lane.idle) for lane in lanes] == [(0, 1), (1, 1), (2, 0)]
