"""What it takes to go on with items that another call had begun, by the units they had grown by.

The call that gave them back says how far each had grown. The call that went on with them has handed
something on a while later: what that took beyond the rounds in between is the price.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m2flow.engine.facts import ids_of
from m2flow.engine.spans import Span
from m2flow.plan.measured.crowding import factor_at
from m2flow.plan.measured.curves import least_squares
from m2flow.plan.measured.gaps import pieces_of
from m2flow.plan.measured.streams import Rounds
from m2flow.plan.profile import Piecewise

FEWEST = 2
"""With fewer prices nothing is said."""


@dataclass(frozen=True)
class Taken:
    """An item that was begun elsewhere: its length in the end, and how far it had grown."""

    length: float
    grown: float


@dataclass(frozen=True)
class Resumed:
    """Begun items that came to a call, from what it handed on before to what it did after.

    Attributes:
        seconds: of all of it.
        waited: seconds until they came.
        reached: units that the call's own items had grown by at the start of it.
        running: items at work at the start of it.
        admitted: input items that were taken in at the start of it.
        taken: the begun items, together for each time that some came.
        own: lengths of those own items that are handed on at the end of it.
        others: the begun items that are handed on there.
        beside: how busy the other lanes were during the call.
    """

    seconds: float
    waited: float
    reached: float
    running: int
    admitted: int
    taken: tuple[tuple[Taken, ...], ...]
    own: tuple[float, ...]
    others: tuple[Taken, ...]
    beside: float

    def price(self, rounds: Rounds, alone: float) -> tuple[float, float]:
        """Units that the begun items had grown by, and the seconds that belong to no round."""
        slow = 1.0 / factor_at(alone, self.beside)
        waited, seconds = self.waited * slow, self.seconds * slow
        units = sum(one.grown for some in self.taken for one in some)
        pause = rounds.admit.at(self.admitted)
        clock = _grown(rounds, self.reached, waited - pause, self.running, self.own)
        ends = [*self.own]
        ends += [clock + one.length - one.grown for one in self.others]
        spent = max(waited, pause)
        running = self.running + sum(map(len, self.taken))
        for end in sorted(ends):
            if end > clock:
                spent += (end - clock) * rounds.round.at(running)
                clock = end
            running -= 1
        return units, seconds - spent


def _grown(
    rounds: Rounds, clock: float, seconds: float, running: int, ends: Sequence[float]
) -> float:
    """The units that items have grown by after so many seconds more, some of them ending."""
    seconds = max(0.0, seconds)
    for end in sorted(ends):
        spent = max(0.0, end - clock) * rounds.round.at(running)
        if spent > seconds:
            break
        clock, seconds, running = max(clock, end), seconds - spent, running - 1
    pace = rounds.round.at(running)
    return clock + seconds / pace if pace > 0 else clock


def changed_lanes(span: Span) -> bool:
    """Whether a streaming call gave items back, or went on with those that another had begun."""
    return bool(_rows(span, "resumed") or _rows(span, "given_back"))


def came_apart(span: Span) -> bool:
    """Whether a streaming call had not all its items from its own start to their end."""
    return _was_fed(span) or changed_lanes(span)


def _was_fed(span: Span) -> bool:
    taken = span.args.get("taken", [])
    return not isinstance(taken, list) or len(taken) > 1


def _rows(span: Span, name: str) -> list[Any]:
    value = span.args.get(name)
    return value if isinstance(value, list) else []


def grown_of(span: Span) -> dict[int, float]:
    """The output items that a call has given back, by how far each had grown, if it says so."""
    back = _rows(span, "given_back")
    return dict(zip(ids_of(back[1]), map(float, back[2]), strict=False)) if len(back) == 3 else {}


def resumed(
    span: Span, items: int, expands: int, beside: float, known: Mapping[int, float]
) -> Iterator[Resumed]:
    """What a call shows of going on with begun items; nothing where they came in no known state.

    Args:
        span: of the call.
        items: that it took, all at its start.
        expands: output items of each.
        beside: how busy the other lanes were.
        known: output items of the same step that other calls have given back: how far each was.
    """
    moments = [(float(when), ids_of(ids)) for when, ids in _rows(span, "resumed")]
    begun = {item for _, some in moments for item in some}
    pieces = pieces_of(span)
    lengths = {
        item: float(length)
        for _, ids, some in pieces
        for item, length in zip(ids_of(ids), some, strict=False)
    }
    if _was_fed(span) or _rows(span, "given_back") or not begun <= known.keys() & lengths.keys():
        return
    before, reached, running, admitted = 0.0, 0.0, items * expands, items
    for when, ids, _ in pieces:
        came = [moment for moment in moments if before <= moment[0] < when]
        outputs = [item for item in ids_of(ids) if item in lengths]
        own = tuple(lengths[item] for item in outputs if item not in begun)
        one = Resumed(
            when - before,
            came[0][0] - before if came else 0.0,
            reached,
            running,
            admitted,
            tuple(tuple(Taken(lengths[x], known[x]) for x in some) for _, some in came),
            own,
            tuple(Taken(lengths[x], known[x]) for x in outputs if x in begun),
            beside,
        )
        if came:
            yield one
        if not own:  # from here on only the begun items tell the time
            return
        before, reached, admitted = when, max(reached, *own), 0
        running += sum(len(some) for _, some in came) - len(outputs)


def fit_resume(seen: Sequence[Resumed], rounds: Rounds, alone: float) -> Piecewise | None:
    """See `StageCost.resume`: a price for each time, and one for each unit; None if unknown."""
    prices = [one.price(rounds, alone) for one in seen]
    largest = max((units for units, _ in prices), default=0.0)
    if len(prices) < FEWEST or largest <= 1:
        return None
    once, most = least_squares(
        [
            [float(len(one.taken)), units / largest]
            for one, (units, _) in zip(seen, prices, strict=True)
        ],
        [seconds for _, seconds in prices],
        [1.0] * len(prices),
    )
    return Piecewise(((1.0, once + most / largest), (largest, once + most)))
