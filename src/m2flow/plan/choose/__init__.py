"""`choose`: from a graph, a profile and lanes to the plan that is run, and what it was chosen from.

Every structure is laid out, the ones that look best in closed form are simulated, and the best of
these are changed one thing at a time. The simulator judges: it is the engine itself, and prices
chosen plans, fixed modes and plans of others alike. Of those that are as good as the fastest one
that plan is taken that asks for less: fewer steps of staleness, then the plan of a fixed mode.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Layout
from m2flow.plan.builders import BUILDERS, build_plan, first_that_divides
from m2flow.plan.choose.descent import Descent
from m2flow.plan.choose.draft import AUTO, Draft, draft_of, obstacle, to_plan
from m2flow.plan.choose.folding import fold_of, folded, unfolded
from m2flow.plan.choose.judge import Judge, Shape, shape, sized
from m2flow.plan.choose.problem import PlanningProblem
from m2flow.plan.choose.structures import starts
from m2flow.plan.isolation import isolate
from m2flow.plan.prediction import AS_GOOD, Candidate, Decision
from m2flow.plan.profile import Profile

EFFORT = 100
"""Simulations of one step, for each staleness."""

FEW_LANES = 12
"""On so many lanes a quarter of the effort goes to plans that leave one of each kind idle."""

FINALISTS = 6
"""So many of the best plans are compared in the end, for each staleness."""

STEPS, MANY_EVENTS, NEAR = 3, 3000, 0.1
"""Steps of such a simulation; one, where that has more events, or where a plan is slower in one
step than the fastest by more than this share."""

MODES = tuple(mode for mode in BUILDERS if mode != "eager")


def choose(
    graph: FlowGraph,
    profile: Profile,
    lanes: Sequence[LaneSpec],
    num_items: int,
    *,
    max_staleness: int = 0,
    isolated: Collection[str] = (),
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    instead: Mapping[str, Sequence[Layout]] = MappingProxyType({}),
    beside: Sequence[Plan] = (),
    effort: int = EFFORT,
) -> Decision:
    """The best plan of a step.

    Args:
        graph, profile: the flow, and what is known of its stages on such lanes.
        lanes: what there is. Those that are reserved for a worker are only for it; where there are
            none for a worker that must be isolated, they are added.
        num_items: source items of a step.
        max_staleness: how many steps generation may run ahead; a budget, not a wish.
        isolated: workers that get lanes of their own.
        layouts: for the plans of the fixed modes, as in `build_plan`.
        instead: by worker, the layouts that take the place of the one in `layouts` in a mode whose
            lanes it does not divide, the best first.
        beside: further plans to be judged, such as the one that runs.
        effort: plans that are simulated for each staleness.

    Raises:
        UserError: no plan keeps the limits, or the profile does not know a stage.
    """
    start = time.perf_counter()
    problem = PlanningProblem(
        graph, profile, [x for x in lanes if x.reserved_for is None], num_items
    )
    options = {worker: (one, *instead.get(worker, ())) for worker, one in layouts.items()}
    choice = _Choice(problem, tuple(lanes), isolated, options)
    found = [
        candidate
        for staleness in range(max_staleness + 1)
        for candidate in choice.candidates(staleness, effort)
    ]
    judged = (choice.whole.candidate(plan, plan.mode, STEPS) for plan in beside)
    found += [candidate for candidate in judged if candidate is not None]
    each: dict[Shape, Candidate] = {}
    for one in found:
        each.setdefault(shape(one.plan), one)
    ranked = sorted(each.values(), key=lambda one: one.prediction.seconds)
    if not ranked:
        free = (why for name, why in choice.judge.ruled_out.items() if name not in MODES)
        raise nothing_fits(problem, free)
    chosen = _best(ranked)
    return Decision(
        chosen,
        tuple(other for other in ranked if other is not chosen),
        profile,
        num_items,
        time.perf_counter() - start,
        _frontier(ranked, max_staleness),
        {**choice.judge.ruled_out, **choice.whole.ruled_out},
        choice.judge.num_simulated + choice.whole.num_simulated,
        choice.fold,
    )


class _Choice:
    """The choice on a part of equal lanes, and its plans on all of them."""

    def __init__(
        self,
        problem: PlanningProblem,
        lanes: tuple[LaneSpec, ...],
        isolated: Collection[str],
        layouts: Mapping[str, Sequence[Layout]],
    ) -> None:
        self.problem, self.lanes, self.isolated, self.layouts = problem, lanes, isolated, layouts
        self.fold = fold_of(problem)
        self.small = folded(problem, self.fold)
        self.judge = Judge(problem.graph, self.small.profile, self.small.num_items, isolated)
        self.whole = Judge(problem.graph, problem.profile, problem.num_items, isolated)
        self._descent = Descent(self.small, self.judge)

    def candidates(self, staleness: int, effort: int) -> Iterator[Candidate]:
        """The best plans for a staleness, and those of the fixed modes."""
        fixed, descent = list(self._fixed(staleness)), self._descent
        parts = [part for _, part, _ in fixed if part is not None]
        known = [x for part in parts if (x := draft_of(self.small, part)) is not None]
        known += self._on_one_kind(staleness)
        known += [replace(x, staleness=staleness) for x in descent.best(FINALISTS, staleness - 1)]
        if len(self.small.lanes) <= FEW_LANES:  # one more lane shall not lead to less
            descent.search(starts(self.small, staleness, spare=1), effort // 4)
            known += descent.best(FINALISTS, staleness)
            effort -= effort // 4
        descent.search(starts(self.small, staleness), effort, known)
        each = self.judge.num_events / max(1, self.judge.num_simulated)
        free = (
            (AUTO, to_plan(self.small, draft), to_plan(self.problem, draft.times(self.fold)))
            for draft in descent.best(FINALISTS, staleness)
        )
        plans = [*fixed, *free]
        judged = [self._judged(name, part, whole) for name, part, whole in plans]
        least = min((one.prediction.seconds for one in judged if one is not None), default=0.0)
        for (name, part, whole), found in zip(plans, judged, strict=True):
            near = found is not None and found.prediction.seconds <= least * (1 + NEAR)
            if near and each <= MANY_EVENTS:
                found = self._judged(name, part, whole, STEPS)
            if found is not None:
                plan = isolate(replace(whole, lanes=self.lanes), self.isolated)
                told = found.prediction
                if part is not None:
                    told = unfolded(told, self.problem, self.small, plan, self.fold)
                plan = replace(plan, predicted_seconds=float(told.seconds))
                yield Candidate(plan, told, None if part is None else found.plan)

    def _judged(
        self, name: str, part: Plan | None, whole: Plan, steps: int = 1
    ) -> Candidate | None:
        """The plan on a part of the lanes with its prediction, or where there is none the whole."""
        judge, plan = (self.whole, whole) if part is None else (self.judge, part)
        return judge.candidate(isolate(plan, self.isolated), name, steps)

    def _fixed(self, staleness: int) -> Iterator[tuple[str, Plan | None, Plan]]:
        """The fixed modes that fit, with their plans on the part of the lanes and on all lanes."""
        for mode in MODES:
            built = partial(self._built, mode, staleness)
            try:
                part, whole = first_that_divides(built, self.layouts)
            except UserError as error:
                self.judge.ruled_out.setdefault(mode, f"{error}")
                continue
            yield mode, part, whole

    def _on_one_kind(self, staleness: int) -> Iterator[Draft]:
        """The collocated plan on the lanes of each kind, where there are several: other lanes
        beside them shall not lead to less."""
        kinds = [[x for x in self.small.lanes if x.kind == kind] for kind in self.small.ids]
        for lanes in kinds if len(kinds) > 1 else ():
            built = partial(_plan_of, "collocated", self.small, lanes, staleness)
            try:
                draft = draft_of(self.small, first_that_divides(built, self.layouts))
            except UserError:  # no layout divides them
                continue
            if draft is not None:
                yield draft

    def _built(
        self, mode: str, staleness: int, layouts: Mapping[str, Layout]
    ) -> tuple[Plan | None, Plan]:
        """The plans of a mode on the part of the lanes and on all of them, in the same layouts;
        None where these divide all lanes alone."""

        whole = _plan_of(mode, self.problem, self.problem.lanes, staleness, layouts)
        try:
            return _plan_of(mode, self.small, self.small.lanes, staleness, layouts), whole
        except UserError:
            return None, whole


def _plan_of(
    mode: str,
    problem: PlanningProblem,
    lanes: Sequence[LaneSpec],
    staleness: int,
    layouts: Mapping[str, Layout],
) -> Plan:
    """The plan of a mode on some lanes of a problem, with the sizes that the profile knows."""
    plan = build_plan(mode, problem.graph, lanes, problem.num_items, layouts=layouts)
    plan = sized(plan, problem.graph, problem.profile, problem.num_items)
    return replace(plan, max_staleness=staleness)


def _best(ranked: Sequence[Candidate]) -> Candidate:
    """Return, of the plans as good as the fastest, one of least staleness, a fixed mode's first."""
    most = min(one.prediction.seconds for one in ranked) * (1 + AS_GOOD)
    as_good = [one for one in ranked if one.prediction.seconds <= most]
    return min(as_good, key=lambda one: (one.plan.max_staleness, one.plan.mode == AUTO))


def _frontier(ranked: Sequence[Candidate], max_staleness: int) -> tuple[Candidate, ...]:
    """The best for each staleness, where it is faster than with one less."""
    kept: list[Candidate] = []
    for staleness in range(max_staleness + 1):
        allowed = [one for one in ranked if one.plan.max_staleness <= staleness]
        if not allowed:
            continue
        best = _best(allowed)
        if not kept or best.prediction.seconds < kept[-1].prediction.seconds * (1 - AS_GOOD):
            kept.append(best)
    return tuple(kept)


def check_fits(
    graph: FlowGraph, profile: Profile, lanes: Sequence[LaneSpec], num_items: int
) -> None:
    """Refuse lanes whose limits no plan keeps, without simulating any.

    Raises:
        UserError: no plan does, or the profile does not know a stage.
    """
    problem = PlanningProblem(graph, profile, lanes, num_items)
    small, reasons = folded(problem, fold_of(problem)), list[str]()
    for draft in starts(small):
        reason = obstacle(small, draft)
        if reason is None:
            return
        reasons.append(reason)
    raise nothing_fits(problem, reasons)


def nothing_fits(problem: PlanningProblem, reasons: Iterable[str]) -> UserError:
    """The error where no plan keeps the limits, with the first reason."""
    why = next(iter(reasons), "no layout of a worker fits on them")
    lanes = {kind: len(ids) for kind, ids in problem.ids.items()}
    return UserError(
        f"no plan keeps the limits of these lanes: {why}",
        key="lanes",
        value=lanes,
        hint="more lanes, more memory for each, or layouts over several lanes",
    )
