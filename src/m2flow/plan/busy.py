"""How busy other lanes are while a stage is at work: lanes of a machine slow each other down."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from m2flow.engine.spans import Span
from m2flow.plan.profile import Profile, StageCost


class BusyLanes:
    """When each lane was at work on a stage.

    Args:
        spans: what the lanes did.
        lanes: all lanes there are; a span may name another one.
    """

    def __init__(self, spans: Iterable[Span], lanes: Iterable[int]) -> None:
        self._ends: dict[int, list[float]] = defaultdict(list)
        self._starts: dict[int, list[float]] = defaultdict(list)
        self._before: dict[int, list[float]] = defaultdict(lambda: [0.0])
        for number in lanes:
            self._before[number] = [0.0]
        for span in sorted(spans, key=lambda one: one.start):
            starts, ends, before = (x[span.lane] for x in (self._starts, self._ends, self._before))
            if span.kind in ("call", "finish"):
                start = max(span.start, ends[-1]) if ends else span.start
                starts.append(start)
                ends.append(max(start, span.end))
                before.append(before[-1] + ends[-1] - start)

    def _until(self, lane: int, moment: float) -> float:
        """Seconds at work up to a moment."""
        index = bisect_right(self._starts[lane], moment)
        if not index:
            return 0.0
        over = max(0.0, self._ends[lane][index - 1] - moment)
        return self._before[lane][index] - over

    def beside(self, span: Span, own: Sequence[int]) -> float:
        """How busy the lanes that have no part in a call were during it; 1 if there are none."""
        others = [lane for lane in self._before if lane not in own]
        if not others or span.seconds <= 0:
            return 1.0
        spent = sum(self._until(x, span.end) - self._until(x, span.start) for x in others)
        return float(spent / span.seconds / len(others))


def mean_beside(spans: Sequence[Span], lanes: Iterable[int]) -> dict[str, float]:
    """For each stage how busy the other lanes are while it works, from 0 (all idle) to 1."""
    busy = BusyLanes(spans, lanes)
    seconds: dict[str, float] = defaultdict(float)
    weighted: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.kind == "call":
            seconds[span.name] += span.seconds
            weighted[span.name] += span.seconds * busy.beside(span, (span.lane,))
    return {name: weighted[name] / total for name, total in seconds.items() if total > 0}


def is_crowded(profile: Profile) -> bool:
    """Whether it matters to any stage what the other lanes do."""
    return any(lay.alone < 1 for stage in profile.stages.values() for lay in stage.costs)


def as_beside(profile: Profile, shares: Mapping[str, float]) -> Profile:
    """The profile with all seconds of stages as they are while other lanes are so busy.

    Args:
        profile: what is known.
        shares: by stage, from 0 to 1; a stage left out keeps its seconds.
    """
    stages = {}
    for name, stage in profile.stages.items():
        share = shares.get(name, 1.0)
        layouts = tuple(_beside(layout, share) for layout in stage.costs)
        stages[name] = replace(stage, costs=layouts)
    return replace(profile, stages=stages)


def _beside(layout: StageCost, share: float) -> StageCost:
    """With so large a share of the other lanes at work; a `finish` is at work on its own ones."""
    return replace(layout.times(layout.beside(share)), finish=layout.finish, alone=1.0)
