"""What two parts cost together, by the rules of `tree`: in turn on the same lanes, or apart."""

from __future__ import annotations

from typing import NamedTuple

from m2flow.plan.search.tree import Cost


class Held(NamedTuple):
    """What a node counts once for the workers that it holds.

    Attributes:
        resident: share of a lane's memory.
        swap: seconds to bring and take away.
        states: bytes over all lanes.
    """

    resident: float = 0.0
    swap: float = 0.0
    states: float = 0.0


NOTHING = Held()


def in_turn(x: Cost, y: Cost, publishing: float, switched: bool, held: Held = NOTHING) -> Cost:
    """Both parts on the same lanes, in turn for each chunk.

    Args:
        x, y: the parts, asked for rounds of one chunk.
        publishing: seconds of the weight edges that meet here.
        switched: whether the state of one part goes while the other one works.
        held: what this node holds for both.
    """
    share, swap, size = held
    states, pay = x.states + y.states, x.publishing + y.publishing + publishing
    cores = x.cores if x.cores >= y.cores else y.cores
    if switched:
        first = x.first + y.first + x.swap + y.swap
        return Cost(
            first,
            first,
            max(x.resident, y.resident) + share,
            max(x.peak, y.peak) + share,
            max(x.swap, y.swap) + swap,
            pay,
            cores,
            max(x.host, y.host) + states,
            states + size,
        )
    first = x.first + y.first
    return Cost(
        first,
        first,
        x.resident + y.resident + share,
        max(x.peak + y.resident, x.resident + y.peak) + share,
        x.swap + y.swap + swap,
        pay,
        cores,
        max(x.host, y.host),
        states + size,
    )


def apart(x: Cost, y: Cost, first: float, period: float, publishing: float) -> Cost:
    """Two parts on disjoint lanes, whose first chunk and period together are known.

    Args:
        x, y: the parts.
        first, period: seconds of both.
        publishing: seconds of the weight edges that meet here.
    """
    return Cost(
        first,
        period,
        x.resident if x.resident >= y.resident else y.resident,
        x.peak if x.peak >= y.peak else y.peak,
        x.swap if x.swap >= y.swap else y.swap,
        x.publishing + y.publishing + publishing,
        x.cores + y.cores,
        x.host + y.host,
        x.states + y.states,
    )


def pipelined(x: Cost, y: Cost, joined: bool, link: float) -> tuple[float, float]:
    """First chunk and period of two parts on disjoint lanes.

    Args:
        x, y: the parts.
        joined: whether the second reads from the first.
        link: seconds of a chunk on its way from the first to the second.
    """
    if joined:
        return x.first + y.first + link, max(x.period, y.period, link)
    return max(x.first, y.first), max(x.period, y.period)
