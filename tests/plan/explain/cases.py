"""A flow of two stages, plans of it, predictions made by hand, and a profile."""

from __future__ import annotations

from collections.abc import Iterable

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.spans import Span, SpanKind
from m2flow.plan.prediction import Prediction
from m2flow.plan.profile import (
    ByReplicas,
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageCost,
    StageProfile,
    WorkerCost,
)
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds

GEN, TRAIN = "gen.generate", "learner.train"
STAGES = (GEN, TRAIN)


def lanes(count: int) -> tuple[LaneSpec, ...]:
    return tuple(LaneSpec(n, cores=(n,)) for n in range(count))


def plan_of(mode: str, gen: Iterable[int], learner: Iterable[int], count: int = 2) -> Plan:
    where = {"gen": gen, "learner": learner}
    spots = {name: Placement(tuple((lane,) for lane in on)) for name, on in where.items()}
    return Plan(mode, lanes(count), spots, {GEN: StagePlan(8), TRAIN: StagePlan(16)})


def predicted(seconds: float, *spans: Span, count: int = 2) -> Prediction:
    busy = dict.fromkeys(range(count), 0.0)
    for one in spans:
        busy[one.lane] += one.seconds
    idle = {lane: 1 - min(1.0, spent / seconds) for lane, spent in busy.items()}
    waiting = Seconds(sum(idle.values()) * seconds)
    return Prediction(
        Seconds(seconds),
        Seconds(0.0),
        idle,
        {"compute": Seconds(count * seconds - waiting), "waiting": waiting},
        {},
        spans=spans,
        window=(0.0, seconds),
    )


def span(lane: int, name: str, start: float, end: float, kind: SpanKind = "call") -> Span:
    return Span(lane, name, kind, start, end)


def profile(
    generate: float = 1.0, train: float = 1.0, publish: float = 0.05, spread: bool = False
) -> Profile:
    """Seconds in proportion to items; lengths that differ if `spread`."""
    each = generate / 16
    generating = StageCost(
        1,
        Piecewise(((1.0, each), (16.0, generate))),
        done=Piecewise(((0.0, 0.0), (1.0, 1.0))),
        round=Piecewise(((1.0, each / 20), (64.0, each / 10))) if spread else None,
    )
    training = StageCost(
        1,
        Piecewise(((1.0, train / 64), (64.0, train))),
        finish=ByReplicas(((1.0, 0.01), (2.0, 0.02))),
    )
    lengths = Quantiles((1.0, 10.0, 40.0)) if spread else None
    return Profile(
        {
            GEN: StageProfile((generating,), Bytes(64), lengths),
            TRAIN: StageProfile((training,)),
        },
        {"learner": (WorkerCost(1, Bytes(100)),), "gen": (WorkerCost(1, Bytes(50)),)},
        tuple(PublishCost("learner", "gen", place, Seconds(publish)) for place in ("same", "node")),
        {"node": LinkCost(Seconds(1e-3), BytesPerSecond(1e6))},
        key={"model": {"path": "tiny"}},
    )
