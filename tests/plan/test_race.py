"""A race finds the fastest plan, in few steps, whatever the predictions said."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.plan.file import to_json
from m2flow.plan.race import Entrant, Race, tried


def plan(name: str, lanes: int = 1) -> Plan:
    """A plan on its first lanes; plans of one number of lanes have the same placements."""
    placements = {"worker": Placement(tuple((lane,) for lane in range(lanes)))}
    return Plan(name, tuple(LaneSpec(lane) for lane in range(lanes)), placements)


def entrants(*seconds: float) -> list[Entrant]:
    return [Entrant(f"plan {n}", plan(f"plan {n}"), one) for n, one in enumerate(seconds)]


def run(race: Race, seconds: dict[str, list[float]]) -> list[str]:
    """Run a race to its end: the names of the entrants in the order of their steps."""
    order = []
    while not race.over:
        name = race.current.name
        order.append(name)
        race.note(seconds[name].pop(0))
    return order


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6), st.randoms())
def test_the_fastest_wins_whatever_was_predicted(truth: list[float], random) -> None:
    predicted = random.sample(truth, len(truth))
    race = Race(entrants(*predicted), most_steps=100)
    run(race, {f"plan {n}": [one] * 100 for n, one in enumerate(truth)})
    assert truth[int(race.leader.name.split()[1])] == min(truth)
    assert race.current is race.leader


@given(st.lists(st.floats(1.0, 1.2), min_size=2, max_size=6), st.integers(1, 30))
def test_a_race_never_runs_more_steps_than_it_may(truth: list[float], most: int) -> None:
    race = Race(entrants(*truth), most_steps=most)
    order = run(race, {f"plan {n}": [one] * 100 for n, one in enumerate(truth)})
    assert len(order) <= most
    assert race.over


def test_a_clearly_slower_plan_drops_out_after_one_step() -> None:
    race = Race(entrants(1.0, 1.0, 1.0), most_steps=50)
    order = run(race, {"plan 0": [1.0] * 9, "plan 1": [2.0] * 9, "plan 2": [1.1] * 9})
    assert order.count("plan 1") == 1
    assert race.entrants[1].verdict == "2.00 times the seconds of the best"


def test_one_slow_step_does_not_decide_between_close_plans() -> None:
    """The first step of the better plan is 10 % slower by chance: the median mends that."""
    race = Race(entrants(1.0, 1.0, 1.0), most_steps=50)
    times = {"plan 0": [1.1, 0.9, 0.9, 0.9], "plan 1": [1.0] * 4, "plan 2": [1.2] * 4}
    run(race, times)
    assert race.leader.name == "plan 0"


def with_spread(spread: float, *predicted: float) -> list[Entrant]:
    plans = (plan(f"plan {n}") for n in range(len(predicted)))
    return [
        Entrant(one.mode, one, seconds, spread)
        for one, seconds in zip(plans, predicted, strict=True)
    ]


def test_a_lucky_step_does_not_beat_a_better_prediction() -> None:
    """Steps vary by a fifth; predictions are off by a tenth, and all of them by a half besides."""
    race = Race(with_spread(0.2, 1.0, 1.3), most_steps=2, error=0.1)
    run(race, {"plan 0": [1.6], "plan 1": [1.5]})
    assert race.leader.name == "plan 0"


def test_steps_beat_a_prediction_that_is_no_surer_than_they_are() -> None:
    race = Race(with_spread(0.1, 1.0, 1.03), most_steps=60, error=0.1)
    run(race, {"plan 0": [1.2] * 60, "plan 1": [1.0] * 60})
    assert race.leader.name == "plan 1"


def test_one_long_step_does_not_throw_a_plan_out() -> None:
    """1.4 times the best one's seconds, where steps vary as much, and predicted to be best."""
    race = Race(with_spread(0.4, 1.0, 1.1, 1.1), most_steps=50, error=0.1)
    run(race, {"plan 0": [1.4] + [0.9] * 9, "plan 1": [1.0] * 9, "plan 2": [1.05] * 9})
    assert race.leader.name == "plan 0"


def test_a_plan_that_cannot_run_is_ruled_out_and_the_step_goes_to_another() -> None:
    race = Race(entrants(1.0, 1.1), most_steps=50)
    race.rule_out(race.current, "lane 0 ran out of memory")
    assert race.over
    assert race.current.name == "plan 1"
    assert race.entrants[0].verdict == "lane 0 ran out of memory"


def test_plans_with_the_same_placements_run_one_after_the_other() -> None:
    names = [Entrant(f"plan {n}", plan(str(n), lanes=1 + n % 2), 1.0) for n in range(4)]
    race = Race(names, most_steps=50)
    order = run(race, {one.name: [1.0] * 50 for one in names})
    assert order[:4] == ["plan 0", "plan 2", "plan 1", "plan 3"]


def test_a_single_plan_needs_no_race() -> None:
    race = Race(entrants(1.0), most_steps=50)
    assert race.over
    assert race.current.name == "plan 0"


def test_sizes_do_not_tell_places_apart() -> None:
    """Plans whose calls take other memory were parted, and workers moved there and back."""

    def entrant(number: int) -> Entrant:
        one = plan(str(number), lanes=1 + number % 2)
        spots = {
            worker: replace(spot, working_bytes=number) for worker, spot in one.placements.items()
        }
        return Entrant(f"plan {number}", replace(one, placements=spots), 1.0)

    every = [entrant(number) for number in range(4)]
    order = run(Race(every, most_steps=50), {one.name: [1.0] * 50 for one in every})
    assert order[:4] == ["plan 0", "plan 2", "plan 1", "plan 3"]


def test_what_nobody_has_predicted_is_kept_as_nothing() -> None:
    """It was infinite, which no JSON can say, and told as "inf s predicted"."""
    (kept,) = tried([Entrant("guess", plan("guess"), math.inf, verdict="out of memory")])
    assert kept.predicted is None
    assert "Infinity" not in to_json(kept)
