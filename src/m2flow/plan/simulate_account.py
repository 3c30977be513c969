"""From a simulated run to a `Prediction`: where the lanes' seconds went, a step.

Seconds of lanes are parted without rest: work hides what goes on beside it (an onload that runs
along with a call costs nothing), and what is left over is waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.plan.prediction import Prediction
from m2flow.plan.units import Bytes, Seconds
from m2flow.simulation.driver import SimulatedRun

TERMS = ("compute", "switching", "publishing", "links", "waiting")
TERM_OF = {
    "call": "compute",
    "finish": "compute",
    "switch": "switching",
    "publish": "publishing",
    "transfer": "links",
}

Window = tuple[float, float]


@dataclass
class _LaneAccount:
    """Seconds of one lane by term, and the times at which it did something."""

    terms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))
    busy: list[Window] = field(default_factory=list)
    beside: list[Window] = field(default_factory=list)

    def close(self, seconds: float) -> None:
        """Add what went on beside other things, where there was none, and the rest."""
        self.busy.sort()
        for start, end in _union(self.beside):
            self.terms["switching"] += _uncovered(start, end, self.busy)
        self.terms["waiting"] = max(0.0, seconds - sum(self.terms.values()))


def predicted(
    plan: Plan,
    run: SimulatedRun,
    counted: Sequence[int],
    peak_bytes: Mapping[int, Bytes],
    seconds: Sequence[float] | None = None,
) -> Prediction:
    """What a run says of a plan.

    Args:
        plan: what was played.
        run: all of it.
        counted: the steps that are spoken of, one after the other.
        peak_bytes: for lanes without a limit.
        seconds: of each of these steps, if they are more than the simulation knows of.
    """
    ends = run.step_ends
    start = ends[counted[0] - 1] if counted[0] else run.step_starts[counted[0]]
    window = (start, ends[counted[-1]])
    lanes, stages = _accounts(plan, run.spans, window)
    marks = [start, *(ends[step] for step in counted)]
    played = [b - a for a, b in pairwise(marks)]
    each = list(played if seconds is None else seconds)
    further = sum(each) - sum(played)  # between steps, all lanes wait
    for account in lanes.values():
        account.terms["waiting"] += further
    mean, count = statistics.fmean(each), len(counted)
    last = (marks[-2], marks[-1])
    lags = sum(run.staleness.values())
    return Prediction(
        seconds=Seconds(mean),
        spread=Seconds(statistics.pstdev(each)),
        idle={lane: _share(one.terms["waiting"], sum(each)) for lane, one in lanes.items()},
        terms={
            term: Seconds(sum(one.terms[term] for one in lanes.values()) / count) for term in TERMS
        },
        stages={name: Seconds(spent / count) for name, spent in stages.items()},
        peak_bytes={**peak_bytes, **{k: Bytes(v) for k, v in run.peak_bytes.items()}},
        staleness=sum(lag * n for lag, n in run.staleness.items()) / lags if lags else 0.0,
        spans=tuple(_shifted(run.spans, last)),
        num_events=run.num_events,
    )


def _accounts(
    plan: Plan, spans: Iterable[Span], window: Window
) -> tuple[dict[int, _LaneAccount], dict[str, float]]:
    lanes = {lane.id: _LaneAccount() for lane in plan.lanes}
    stages: dict[str, float] = {}
    for span in spans:
        start, end = max(span.start, window[0]), min(span.end, window[1])
        if end <= start:
            continue
        account = lanes[span.lane]
        if span.args.get("early"):
            account.beside.append((start, end))
            continue
        account.busy.append((start, end))
        account.terms[TERM_OF[span.kind]] += end - start
        if span.kind in ("call", "finish"):
            stages[span.name] = stages.get(span.name, 0.0) + end - start
    for account in lanes.values():
        account.close(window[1] - window[0])
    return lanes, stages


def _union(windows: Iterable[Window]) -> list[Window]:
    joined: list[Window] = []
    for start, end in sorted(windows):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _uncovered(start: float, end: float, busy: Sequence[Window]) -> float:
    """The part of a window outside of others, which do not overlap."""
    covered = sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy)
    return max(0.0, end - start - covered)


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def _shifted(spans: Iterable[Span], window: Window) -> list[Span]:
    """Spans of a window, cut to it and counted from its start."""
    start, end = window
    return [
        replace(span, start=max(span.start, start) - start, end=min(span.end, end) - start)
        for span in sorted(spans, key=lambda span: (span.start, span.lane))
        if span.end > start and span.start < end
    ]
