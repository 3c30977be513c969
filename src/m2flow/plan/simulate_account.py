"""From a simulated run to a `Prediction`: where the lanes' seconds went, a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.plan.prediction import Prediction
from m2flow.plan.time_account import TERMS, Window, where_the_time_went
from m2flow.plan.units import Bytes, Seconds
from m2flow.simulation.driver import SimulatedRun


def predicted(
    plan: Plan, run: SimulatedRun, counted: Sequence[int], peak_bytes: Mapping[int, Bytes]
) -> Prediction:
    """What a run says of a plan.

    Args:
        plan: what was played.
        run: all of it.
        counted: the steps that are spoken of, one after the other.
        peak_bytes: for lanes without a limit.
    """
    ends = run.step_ends
    start = ends[counted[0] - 1] if counted[0] else run.step_starts[counted[0]]
    marks = [start, *(ends[step] for step in counted)]
    each, count = [b - a for a, b in pairwise(marks)], len(counted)
    spent = where_the_time_went(run.spans, (start, marks[-1]), [lane.id for lane in plan.lanes])
    stages: dict[str, float] = {}
    for lane in spent:
        for name, seconds in lane.stages.items():
            stages[name] = stages.get(name, 0.0) + seconds
    lags = sum(run.staleness.values())
    return Prediction(
        seconds=Seconds(statistics.fmean(each)),
        spread=Seconds(statistics.pstdev(each)),
        idle={lane.lane: min(1.0, lane.share(lane.waiting + lane.idle)) for lane in spent},
        terms={term: Seconds(sum(one.terms[term] for one in spent) / count) for term in TERMS},
        stages={name: Seconds(seconds / count) for name, seconds in stages.items()},
        peak_bytes={**peak_bytes, **{k: Bytes(v) for k, v in run.peak_bytes.items()}},
        staleness=sum(lag * n for lag, n in run.staleness.items()) / lags if lags else 0.0,
        spans=tuple(_shifted(run.spans, (marks[-2], marks[-1]))),
        num_events=run.num_events,
    )


def _shifted(spans: Iterable[Span], window: Window) -> list[Span]:
    """Spans of a window, cut to it and counted from its start."""
    start, end = window
    return [
        replace(span, start=max(span.start, start) - start, end=min(span.end, end) - start)
        for span in sorted(spans, key=lambda span: (span.start, span.lane))
        if span.end > start and span.start < end
    ]
