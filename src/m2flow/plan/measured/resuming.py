"""What it takes to go on with items that another call had begun, by the units they had grown by.

No span says how far an item had grown when it was given back. But the call that gave it back let
all its items grow alike, so the rounds that it has had tell it. The call that went on with it has
handed something on a while later: what that took beyond the rounds in between is the price.
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

SAME_MOMENT = 1e-3
"""Seconds before it gives back in which a call hands on what happens to be finished: those items
may have ended before."""

FEWEST = 2
"""With fewer prices nothing is said."""


@dataclass(frozen=True)
class Progress:
    """How far items had grown when a call gave them back.

    Attributes:
        reached: units, when the call had last handed something on.
        seconds: from then, or from its start, until it gave back.
        running: items at work at their beginning.
        ended: lengths of the items that were finished in these.
        admitted: input items that were taken in in these.
        beside: how busy the other lanes were during the call.
    """

    reached: float
    seconds: float
    running: int
    ended: tuple[float, ...]
    admitted: int
    beside: float

    def units(self, rounds: Rounds, alone: float) -> float:
        """How many each of them had grown by."""
        seconds = self.seconds / factor_at(alone, self.beside) - rounds.admit.at(self.admitted)
        return _grown(rounds, self.reached, seconds, self.running, self.ended)


Taken = tuple[float, Progress]
"""An item that was begun elsewhere: its length in the end, and how far it had come."""


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
        units = sum(_units(one, rounds, alone) for some in self.taken for one in some)
        pause = rounds.admit.at(self.admitted)
        clock = _grown(rounds, self.reached, waited - pause, self.running, self.own)
        ends = [*self.own]
        ends += [clock + one[0] - _units(one, rounds, alone) for one in self.others]
        spent = max(waited, pause)
        running = self.running + sum(map(len, self.taken))
        for end in sorted(ends):
            if end > clock:
                spent += (end - clock) * rounds.round.at(running)
                clock = end
            running -= 1
        return units, seconds - spent


def _units(one: Taken, rounds: Rounds, alone: float) -> float:
    length, progress = one
    return min(length, progress.units(rounds, alone))


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


def progress_of(span: Span, items: int, expands: int, beside: float) -> dict[int, Progress]:
    """The output items that a call has given back; none where it cannot be said how far they were.

    Args:
        span: of the call.
        items: that it took, all at its start.
        expands: output items of each.
        beside: how busy the other lanes were.
    """
    back = _rows(span, "given_back")
    if not back or _was_fed(span) or _rows(span, "resumed"):
        return {}
    end = float(back[0])
    pieces = [piece for piece in pieces_of(span) if piece[0] < end - SAME_MOMENT]
    lengths = [float(length) for _, _, some in pieces for length in some]
    done = sum(len(ids_of(ids)) for _, ids, _ in pieces)
    if len(lengths) < done:
        return {}
    start = float(pieces[-1][0]) if pieces else 0.0
    ended = tuple(float(x) for _, _, some in pieces_of(span)[len(pieces) :] for x in some)
    running, admitted = items * expands - done, 0 if pieces else items
    progress = Progress(max(lengths, default=0.0), end - start, running, ended, admitted, beside)
    return dict.fromkeys(ids_of(back[1]), progress)


def resumed(
    span: Span, items: int, expands: int, beside: float, known: Mapping[int, Progress]
) -> Iterator[Resumed]:
    """What a call shows of going on with begun items; nothing where they came in no known state.

    Args:
        span, items, expands, beside: as for `progress_of`.
        known: output items of the same step that other calls have given back.
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
            tuple(tuple((lengths[x], known[x]) for x in some) for _, some in came),
            own,
            tuple((lengths[x], known[x]) for x in outputs if x in begun),
            beside,
        )
        if came:
            yield one
        if not own:  # from here on only the begun items tell the time
            return
        before, reached, admitted = when, max(reached, *own), 0
        running += sum(len(some) for _, some in came) - len(outputs)


def fit_resume(seen: Sequence[Resumed], rounds: Rounds, alone: float) -> Piecewise | None:
    """See `StageLayout.resume`: a price for each time, and one for each unit; None if unknown."""
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
