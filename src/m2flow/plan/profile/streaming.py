"""Prices of a streaming stage whose output items grow side by side, a unit a round.

A replica works on as many items at once as its limit allows, and takes the next one when one is
finished. `seconds` of a price are played to the last item; `round` and `admit` let a simulation
draw lengths and play the tail of every replica itself.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from m2flow.plan.profile import Quantiles, StageCost
from m2flow.plan.profile.hardware import Device
from m2flow.plan.profile.work import Rounds, curve, rising

MOST_PLAYED = 2048
"""Output items of one replica that are played; beyond them time goes on in proportion."""

LENGTHS = 400
"""Lengths of which the mean of their squares is taken."""


def stretches(
    lengths: Sequence[float], limit: int
) -> Iterator[tuple[float, float, int, list[int]]]:
    """Yield the rounds between which the same items are at work: from when, until when, how many
    items, and which of them are finished then.

    Args:
        lengths: units that each item grows by, one a round, in the order in which items are taken.
        limit: the most items at work at once.
    """
    assert limit >= 1
    at_work: list[tuple[float, int]] = []  # round of the item's finish; which
    taken, now = 0, 0.0
    while taken < len(lengths) or at_work:
        while taken < len(lengths) and len(at_work) < limit:
            heapq.heappush(at_work, (now + lengths[taken], taken))
            taken += 1
        running, end, finished = len(at_work), at_work[0][0], list[int]()
        while at_work and at_work[0][0] <= end + 1e-9:
            finished.append(heapq.heappop(at_work)[1])
        yield now, end, running, finished
        now = end


def finish_times(
    lengths: Sequence[float],
    round_seconds: Callable[[float, float], float],
    limit: int,
    start: float = 0.0,
) -> list[float]:
    """Return the seconds from the first round until each item is finished, by its position.

    All items at work grow by a unit a round, so between two finishes a round's seconds are linear
    in the units held, and the rounds between are summed exactly.

    Args:
        lengths: units that each item grows by, in the order in which items are taken in.
        round_seconds: of a round, by the items at work and the units that they hold together.
        limit: the most items at work at once.
        start: units that an item holds when it begins, such as its prompt's tokens.
    """
    finished = [0.0] * len(lengths)
    now, held, left = 0.0, 0.0, 0
    for first, last, running, ends in stretches(lengths, limit):
        held += (running - left) * start
        grown = running * (last - first)
        now += (last - first) * round_seconds(running, held + grown / 2)
        held += grown - sum(start + lengths[item] for item in ends)
        left = running - len(ends)
        for item in ends:
            finished[item] = now
    return finished


def limited(
    cost: StageCost,
    rounds: Rounds,
    lengths: Quantiles,
    expands: int,
    most: int,
    device: Device,
    room: float,
) -> Iterator[StageCost]:
    """Complete the price of a streaming stage for each of its limits that memory allows.

    A plan limits input items, a stage its output items. The stage's own limit, the largest, asks
    nothing of a plan unless memory holds less.

    Args:
        cost: without rounds.
        rounds: how output items grow.
        lengths: units that an output item grows by.
        expands: output items of an input item.
        most: input items that are priced, at most.
        device: of each lane.
        room: bytes of each lane for the units that items hold, no more than are reserved.
    """
    bytes_of_one = rounds.unit_bytes * (rounds.start + lengths.mean)
    squares = sum(lengths.at((n + 0.5) / LENGTHS) ** 2 for n in range(LENGTHS)) / LENGTHS
    held = rounds.start + squares / (2 * lengths.mean)
    counts = [n for n in rising(most) if n * expands <= MOST_PLAYED] or [1]

    def step(running: float, units: float) -> float:
        return rounds.round(running, units).on(device)

    def admit(inputs: int) -> float:
        return rounds.admit(inputs).on(device)

    def priced(limit: int, max_running: int | None) -> StageCost:
        def seconds(inputs: int) -> float:
            """Until so many input items have all their outputs."""
            count = inputs * expands
            drawn = [lengths.at((n + 0.5) / count) for n in range(count)]
            random.Random(0).shuffle(drawn)
            return admit(inputs) + max(finish_times(drawn, step, limit, rounds.start))

        def working(items: int) -> float:
            units = min(items * expands, limit) * bytes_of_one
            if rounds.reserved_bytes is not None:
                units = 0.0 if rounds.in_state else room
            return units + (cost.working.at(items) if cost.working else 0.0)

        return replace(
            cost,
            seconds=curve(seconds, counts),
            max_running=max_running,
            slots=limit,
            round=curve(lambda running: step(running, running * held), rising(limit)),
            admit=curve(admit, rising(most)),
            working=curve(working, rising(most)),
        )

    fitting, own = max(1, int(room / bytes_of_one)), max(rounds.limits)
    limits = {max(1, min(one, fitting) // expands): one for one in rounds.limits}
    for inputs in sorted(limits):
        if limits[inputs] == own <= fitting:
            yield priced(own, None)
        elif rounds.reserved_bytes is None:  # all outputs of an input are at work, come what may
            yield priced(inputs * expands, inputs)
        else:
            yield priced(min(inputs * expands, fitting), inputs)
