"""Which problems are asked: none is left out or asked twice, also by a run that goes on."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.plan.file import from_json, to_json
from m2flow.workloads.reasoning import sampler
from m2flow.workloads.reasoning.sampler import MEMORY, Asked, Curriculum, Sampler, SamplerState
from m2flow.workloads.reasoning.tasks.problem import generator

SLOTS, SPARES = 3, 2


def make(lag: int = 1, curriculum: Curriculum | None = None, seed: int = 0) -> Sampler:
    return Sampler(seed=seed, slots=SLOTS, spares=SPARES, lag=lag, curriculum=curriculum)


def through_json(sampler: Sampler, step: int, lag: int, **more: Any) -> Sampler:
    """Another sampler that goes on from the first one's state, as a resumed run has it."""
    other = make(lag, **more)
    other.restore(kept(sampler, step))
    return other


def kept(sampler: Sampler, step: int) -> SamplerState:
    """A sampler's state, as a checkpoint has it."""
    return from_json(SamplerState, to_json(sampler.state(step)), "sampler.json")


Counts = list[tuple[int, int, int]]
"""Of each step and slot how many problems were asked."""

counts = st.lists(st.tuples(*[st.integers(1, 1 + SPARES)] * SLOTS), min_size=1, max_size=12)


def run(sampler: Sampler, steps: Sequence[Sequence[int]], first: int = 0) -> list[list[list[int]]]:
    """Steps one after another; the numbers that each slot of each step was handed."""
    handed = []
    for step, counted in enumerate(steps, first):
        slots = sampler.asked(step)
        handed.append([[one.number for one in slot] for slot in slots])
        sampler.note(step, counted, [])
    return handed


@given(counts)
def test_no_problem_is_left_out_or_asked_twice(steps: Counts) -> None:
    """Those that were handed out and not asked wait, the lowest number first, for the next step."""
    sampler = make()
    asked: list[int] = []
    for slots, counted in zip(run(sampler, steps), steps, strict=True):
        in_order = [slot[place] for place in range(1 + SPARES) for slot in slots]
        assert in_order == sorted(in_order), "firsts before the spares that come after them"
        asked += [
            number for slot, count in zip(slots, counted, strict=True) for number in slot[:count]
        ]
    assert max(Counter(asked).values()) == 1
    following = sorted(one.number for slot in sampler.asked(len(steps)) for one in slot)
    never_asked = (number for number in count() if number not in asked)
    assert following == list(islice(never_asked, SLOTS * (1 + SPARES)))


@given(counts, st.integers(1, 4), st.data())
def test_a_run_that_goes_on_asks_the_same(steps: Counts, lag: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(steps)))
    straight = run(make(lag), steps)
    before = make(lag)
    first = run(before, steps[:stop])
    after = run(through_json(before, stop, lag), steps[stop:], stop)
    assert first + after == straight


@given(counts, st.integers(0, 2), st.data())
def test_when_results_are_told_changes_nothing(
    steps: Counts, staleness: int, data: st.DataObject
) -> None:
    """With staleness K, 2 K steps more may have been begun than there are results of."""
    lag = 1 + 2 * staleness
    in_time = run(make(lag), steps)
    sampler, told, late = make(lag), 0, []
    for step in range(len(steps)):
        due = max(told, step - lag + 1)
        until = data.draw(st.integers(due, step), label=f"told before step {step}")
        for earlier in range(told, until):
            sampler.note(earlier, steps[earlier], [])
        told = until
        late.append([[one.number for one in slot] for slot in sampler.asked(step)])
        if told == step:  # where a checkpoint may be
            make(lag).restore(kept(sampler, step))
    assert late == in_time


@given(counts, st.data())
def test_a_checkpoint_amid_steps_in_flight(steps: Counts, data: st.DataObject) -> None:
    """Steps after the checkpoint's have been begun; those that go on from it do not know."""
    lag, ahead = 3, 1
    straight = run(make(lag), steps)
    stop = data.draw(st.integers(0, len(steps)))
    sampler = make(lag)
    for step in range(min(stop + ahead, len(steps))):
        sampler.asked(step)
        if step >= ahead:
            sampler.note(step - ahead, steps[step - ahead], [])
    for step in range(max(0, min(stop + ahead, len(steps)) - ahead), stop):
        sampler.note(step, steps[step], [])
    assert run(through_json(sampler, stop, lag), steps[stop:], stop) == straight[stop:]


@given(st.lists(st.sets(st.integers(0, SLOTS - 1)), min_size=1, max_size=12), st.data())
def test_what_is_carried_over_comes_first_and_comes_back(
    steps: list[set[int]], data: st.DataObject
) -> None:
    """Asked until it has ended, with the turn that it had; and so by a run that goes on."""
    lag, stop = data.draw(st.integers(1, 3)), data.draw(st.integers(0, len(steps)))

    def go(sampler: Sampler, first: int, last: int) -> list[list[Asked]]:
        found = []
        for step in range(first, last):
            found.append([slot[0] for slot in sampler.asked(step)])
            last_asked = sampler.note(step, [1] * SLOTS, [], steps[step])
            assert last_asked == found[-1]
        return found

    def without_spares() -> Sampler:
        return Sampler(seed=0, slots=SLOTS, spares=0, lag=lag)

    straight = go(without_spares(), 0, len(steps))
    before = without_spares()
    first = go(before, 0, stop)
    waiting = [
        first[at][slot].turn for at in range(max(0, stop - lag), stop) for slot in sorted(steps[at])
    ]
    assert before.carried(stop) == waiting
    after = without_spares()
    after.restore(kept(before, stop))
    assert first + go(after, stop, len(steps)) == straight
    for at, slots in enumerate(straight):
        told = sorted(steps[at - lag]) if at >= lag else []
        assert slots[: len(told)] == [straight[at - lag][slot] for slot in told]
    ended = [
        one.number
        for slots, carried in zip(straight, steps, strict=True)
        for slot, one in enumerate(slots)
        if slot not in carried
    ]
    assert len(ended) == len(set(ended))


def test_batches_may_be_taken_without_results() -> None:
    """As a profile does: each problem is then taken for asked."""
    sampler = make()
    numbers = [one.number for step in range(3) for slot in sampler.asked(step) for one in slot]
    assert sorted(numbers) == list(range(3 * SLOTS * (1 + SPARES)))


WHOLE = {
    "applied": 0, "next": 1, "returned": [], "rates": {"4": 0.5}, "carried": [], "step": 2,
    "told": {"1": {"unasked": [3], "rates": [[0, 1.0]], "carried": [[0, 1]]}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"applied": "x"}, "applied: is of the wrong type"),
        ({"applied": "0"}, "applied: is of the wrong type"),
        ({"next": 1.5}, "next: is of the wrong type"),
        ({"returned": 3}, "returned: is of the wrong type"),
        ({"told": {"1": {"unasked": []}}}, "told.1.rates: is missing"),
    ],
)
def test_a_state_that_says_nothing(change: dict[str, Any], where: str) -> None:
    """Numbers were read from strings, and cut off."""
    assert from_json(SamplerState, json.dumps(WHOLE), "sampler.json").rates == {4: 0.5}
    with pytest.raises(UserError, match=rf"^sampler\.json: {where}"):
        from_json(SamplerState, json.dumps(WHOLE | change), "sampler.json")
    for name in WHOLE:
        less = {key: value for key, value in WHOLE.items() if key != name}
        with pytest.raises(UserError, match=rf"^sampler\.json: {name}: is missing"):
            from_json(SamplerState, json.dumps(less), "sampler.json")


# A curriculum

ROWS = 90
BAND = Curriculum(ROWS, 0.2, 0.8, 0.1)


def true_rate(number: int) -> float:
    """A third of the problems is always solved, a third never, and a third every other time."""
    return (1.0, 0.5, 0.0)[number % 3]


def simulated(sampler: Sampler, steps: range, group: int = 8) -> list[list[int]]:
    """The problems of each step; answers are right as often as chance, seeded, has it."""
    asked = []
    for step in steps:
        slots = sampler.asked(step)
        numbers = [slot[0].number for slot in slots]
        random = generator("answers", step)
        rates = [
            (number, sum(random.random() < true_rate(number) for _ in range(group)) / group)
            for number in numbers
        ]
        sampler.note(step, [1] * SLOTS, rates)
        asked.append(numbers)
    return asked


def test_problems_of_middling_difficulty_are_asked_more_often() -> None:
    """A weight of 0.1 beside 1: of as many known problems of each kind 10 in 12."""
    asked = simulated(make(curriculum=BAND), range(600))
    once_all_are_known = Counter(number % 3 for step in asked[150:] for number in step)
    easy, middling, hard = (once_all_are_known[kind] for kind in range(3))
    assert middling > 5 * easy
    assert middling > 5 * hard
    assert min(easy, hard) > 0, "they are asked again now and then: a policy gets better"
    first = [number for step in asked[:20] for number in step]
    assert len(set(first)) > 45, "what was never asked is asked like what is in the band"


def test_problems_outside_the_band_share_what_is_asked_whatever_their_weight() -> None:
    """By powers of a small weight's inverse all keys were 0, and the first rows were asked."""
    sampler, found = make(curriculum=Curriculum(ROWS, 0.2, 0.8, 1e-4)), set[int]()
    for step in range(60):
        found |= {slot[0].number for slot in sampler.asked(step)}
        sampler.note(step, [1] * SLOTS, [(number, 0.0) for number in range(ROWS)])
    assert len(found) > ROWS / 2


def test_a_curriculum_goes_on_as_it_was() -> None:
    straight = simulated(make(curriculum=BAND), range(40))
    before = make(curriculum=BAND)
    first = simulated(before, range(25))
    after = simulated(through_json(before, 25, 1, curriculum=BAND), range(25, 40))
    assert first + after == straight
    forgetful = simulated(make(curriculum=BAND), range(25, 26))
    assert forgetful != straight[25:26], "or the state would prove little"


def test_rates_run_along_and_no_problem_is_asked_twice_in_a_step() -> None:
    sampler = make(curriculum=Curriculum(9, 0.2, 0.8, 0.1))
    for step in range(3):
        slots = sampler.asked(step)
        assert len({one.number for slot in slots for one in slot}) == 9
        sampler.note(step, [1, 1, 1], [(4, 1.0 if step else 0.0)])
    sampler.asked(3)
    assert sampler.state(3).rates == {4: 0.75}, f"half of the weight: {MEMORY}"
    assert sampler.figures_of(3) == {
        "sampling/known_share": pytest.approx(1 / 3 if 4 in firsts_of(sampler, 3) else 0.0),
        "sampling/in_band_share": pytest.approx(1 / 3 if 4 in firsts_of(sampler, 3) else 0.0),
    }


def firsts_of(sampler: Sampler, step: int) -> list[int]:
    return [slot[0].number for slot in sampler._handed[step]]


def test_a_step_neither_sorts_all_rows_nor_copies_their_rates_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A data set may have millions of rows, and a step asks some hundreds."""
    curriculum = Curriculum(rows=500, low=0.2, high=0.8, outside=0.1)
    chosen = make(curriculum=curriculum)
    for step in range(3):
        random = generator("curriculum", 0, step)
        with monkeypatch.context() as patched:
            patched.setattr(sampler, "sorted", None, raising=False)
            patched.setattr("copy.deepcopy", None)
            slots = chosen.asked(step)
        rates = chosen.state(step).rates
        keys = [math.log(random.random()) / curriculum.weight(rates.get(row)) for row in range(500)]
        best = sorted(range(500), key=lambda row: keys[row], reverse=True)[: SLOTS * (1 + SPARES)]
        assert [slots[place % SLOTS][place // SLOTS].number for place in range(len(best))] == best
        chosen.note(step, [1] * SLOTS, [(slot[0].number, 0.1) for slot in slots])
    assert rates, "those of steps before"


def test_what_is_drawn_again_later_is_drawn_anew() -> None:
    """A problem that comes back does not bring its seed along."""
    sampler = make(curriculum=Curriculum(9, 0.2, 0.8, 0.1))
    turns = [one.turn for step in range(4) for slot in sampler.asked(step) for one in slot]
    assert sorted(turns) == list(range(36))
