"""Cuts of the batch: they cover it, and they never cost more than not cutting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from m2flow.generation.segments import cut, waste

lengths_lists = st.lists(st.integers(1, 500), max_size=40)


def cost(lengths: list[int], segments: list[tuple[int, int, int]], overhead: int) -> int:
    return sum(lengths) + waste(lengths, segments) + overhead * len(segments)


def cheapest(lengths: list[int], overhead: int) -> int:
    """Dynamic programming over every cut."""
    best = [0]
    for end in range(1, len(lengths) + 1):
        best.append(
            min(
                best[begin] + (end - begin) * max(lengths[begin:end]) + overhead
                for begin in range(end)
            )
        )
    return best[-1]


@given(lengths_lists, st.integers(0, 3000))
def test_segments_cover_the_rows_with_windows_that_reach(lengths: list[int], overhead: int) -> None:
    segments = cut(lengths, overhead)
    assert [row for begin, end, _ in segments for row in range(begin, end)] == list(
        range(len(lengths))
    )
    assert all(window == max(lengths[begin:end]) for begin, end, window in segments)


@given(lengths_lists.filter(bool), st.integers(0, 3000))
def test_cutting_never_costs_more_than_one_segment(lengths: list[int], overhead: int) -> None:
    whole = [(0, len(lengths), max(lengths))]
    segments = cut(lengths, overhead)
    assert cheapest(lengths, overhead) <= cost(lengths, segments, overhead)
    assert cost(lengths, segments, overhead) <= cost(lengths, whole, overhead)


@given(lengths_lists.filter(bool), st.integers(1, 3000))
def test_sorted_rows_are_cut_nearly_as_well_as_can_be(lengths: list[int], overhead: int) -> None:
    lengths = sorted(lengths, reverse=True)
    assert cost(lengths, cut(lengths, overhead), overhead) <= 1.5 * cheapest(lengths, overhead)


@given(lengths_lists.filter(bool), st.integers(0, 3000), st.integers(1, 50))
def test_the_cut_stays_the_same_while_all_grow(
    lengths: list[int], overhead: int, grown: int
) -> None:
    now, later = cut(lengths, overhead), cut([n + grown for n in lengths], overhead)
    assert [(b, e, w + grown) for b, e, w in now] == later


def test_a_long_row_does_not_make_the_short_ones_pay() -> None:
    lengths = [400, 390] + [30] * 60
    assert cut(lengths, 300) == [(0, 2, 400), (2, 62, 30)]
    assert cut(lengths, 10**6) == [(0, 62, 400)]
    assert cut([], 300) == []
