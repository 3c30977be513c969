"""A streaming stage played to the last item: against a slow oracle and what must never happen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.plan.profile import Piecewise, Quantiles, StageCost
from m2flow.plan.profile.hardware import device_named
from m2flow.plan.profile.streaming import finish_times, limited
from m2flow.plan.profile.work import Rounds, Work
from m2flow.plan.units import Items


def unit_by_unit(lengths: list[int], start: int, limit: int) -> list[float]:
    """Seconds of each finish, one round after another: the obvious oracle."""
    waiting, running, now, done = list(enumerate(lengths)), [], 0.0, [0.0] * len(lengths)
    while waiting or running:
        while waiting and len(running) < limit:
            item, length = waiting.pop(0)
            running.append([item, length, start])
        # The cost of a round is that of its middle.
        now += price(len(running), sum(held for *_, held in running) + len(running) / 2)
        for request in running:
            request[1] -= 1
            request[2] += 1
        for item, left, _ in running:
            if left == 0:
                done[item] = now
        running = [request for request in running if request[1]]
    return done


def price(running: float, held: float) -> float:
    return 0.01 + 0.001 * running + 0.0001 * held


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 6), st.integers(0, 9))
def test_a_stage_is_the_sum_of_its_rounds(lengths: list[int], limit: int, start: int) -> None:
    played = finish_times(lengths, price, limit, start)
    assert played == pytest.approx(unit_by_unit(lengths, start, limit))


def test_the_tail_costs_more_than_the_mean() -> None:
    even = max(finish_times([100.0] * 16, price, 8, 10))
    tailed = sorted(finish_times([60.0] * 15 + [700.0], price, 8, 10))
    assert tailed[-1] > 2 * even
    assert tailed[math.ceil(0.9 * 16) - 2] < even


@pytest.mark.parametrize(("fitting", "slots"), [(0.5, 1), (6, 6), (8, 8), (20, 16)])
def test_no_more_outputs_are_at_work_than_a_reserved_cache_holds(
    fitting: float, slots: int
) -> None:
    """A group larger than the cache was priced as if all of it ran at once."""

    def priced(answers: float) -> StageCost:
        rounds = Rounds(
            admit=lambda _groups: Work(),
            round=lambda running, held: Work(seconds=price(running, held)),
            start=10.0,
            longest=110.0,
            unit_bytes=1.0,
            limits=(16, 64),
            reserved_bytes=1e9,
        )
        cost, lengths = StageCost(1, Piecewise(((1.0, 1.0),))), Quantiles((100.0, 100.0))
        room = answers * (10.0 + lengths.mean)
        (found,) = limited(cost, rounds, lengths, 8, 16, device_named("H100"), room)
        return found

    assert priced(fitting).slots == slots
    waves = -(-8 // min(slots, 8))
    alone = max(finish_times([100.0] * 8, price, slots, 10.0))
    assert priced(fitting).call(Items(1)) == pytest.approx(alone)
    assert (waves > 1) == (priced(fitting).call(Items(1)) > 1.1 * priced(8).call(Items(1)))
