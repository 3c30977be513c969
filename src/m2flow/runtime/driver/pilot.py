"""`Pilot`: chooses the plan of a run's steps: a first guess, a race in the first steps, then watch.

Every plan trains the same weights, so plans are tried in steps that count. A run begins with the
best guess: what a known profile says, else the collocated plan. From the steps of that guess the
pilot learns a profile; the plans that the profile cannot tell from the best one race. What each
step takes corrects the profile, which is stored. The winner is watched: a drift that lasts leads to
another choice.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from m2flow.engine.plan import LaneSpec, Plan, StagePlan
from m2flow.errors import UserError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Layout
from m2flow.plan.builders import build_plan
from m2flow.plan.choose import choose
from m2flow.plan.choose.judge import shape, sized
from m2flow.plan.chunks import window_units
from m2flow.plan.memory import with_sizes
from m2flow.plan.prediction import Candidate, Decision, Prediction
from m2flow.plan.profile import Profile
from m2flow.plan.profile.evidence import Evidence
from m2flow.plan.profile.learning import fitted
from m2flow.plan.race import WON, Entrant, Race, tried
from m2flow.plan.units import Seconds
from m2flow.plan.watching import PATIENCE, TOLERANCE, Watch, pays
from m2flow.runtime.driver.auto import EFFORT, GUESSES, nowhere
from m2flow.runtime.driver.runner import StepResult

LEARNED_ERROR, KNOWN_ERROR = 0.10, 0.03
"""Relative error of predictions from a few steps or computed prices, and from a stored profile."""

ENTRANTS = 4
"""So many plans race at most."""

RACING_SHARE = 0.25
"""Share of the run's steps that a race may take."""

NO_ITEMS = Batch({})

SMALLER = " in smaller calls"

STEPS_VARY = 0.1
"""Share of a step's seconds that steps differ by at least, whatever the profile says of lengths."""

HOPEFUL = 1.01
"""A plan races if its predicted seconds are at most so many times those of the plan that runs."""


class Movers(Protocol):
    """What a run says of going over to another plan."""

    def pause_seconds(self, plan: Plan) -> float: ...
    def movers(self, plan: Plan) -> tuple[str, ...]: ...
    def movable(self, worker: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Change:
    """Another plan that a run has gone over to.

    Attributes:
        before: number of the first step under it.
        why: "race", "won", "failed": the plan before could not run, or "lanes": they are others.
        mode: of the plan, as people tell it from others.
        was, becomes: seconds of a step before, and as they are expected from now on.
        moved: workers that stand elsewhere now.
        pause: seconds for which no step could run.
    """

    before: int
    why: str
    mode: str
    was: Seconds
    becomes: Seconds
    moved: tuple[str, ...]
    pause: Seconds


class Pilot:
    """The planner beside a run.

    Args:
        graph, lanes, num_items, max_staleness, isolated, layouts: as for `choose`.
        known: a stored or computed profile, if there is one.
        num_steps: of the whole run; None where nobody knows: it is then taken to be half done.
        deadline_seconds: longest that a call may take, whatever the plan.
        keep: stores a profile that was learned from steps of this run.

    Attributes:
        plan: the plan of the next step.
        profile: what is known; None while nothing is.
        decision: the last choice; None before the first.
        race: the last race; None before the first.
        watch: of the plan that has won; None while a plan is guessed or plans race.
        layouts: as given, or as other lanes can carry them.
        changes: plans that the run has gone over to.
    """

    def __init__(
        self,
        graph: FlowGraph,
        lanes: Sequence[LaneSpec],
        num_items: int,
        *,
        known: Profile | None = None,
        max_staleness: int = 0,
        isolated: Collection[str] = (),
        layouts: Mapping[str, Layout] = MappingProxyType({}),
        num_steps: int | None = None,
        deadline_seconds: float | None = None,
        keep: Callable[[Profile], object] = nowhere,
    ) -> None:
        self._graph, self._lanes, self._num_items = graph, tuple(lanes), num_items
        self._max_staleness, self._isolated = max_staleness, isolated
        self.layouts = layouts
        self._num_steps, self._deadline, self._keep = num_steps, deadline_seconds, keep
        self._evidence = Evidence(graph)
        self._last: deque[tuple[Plan, StepResult]] = deque(maxlen=PATIENCE)
        self._uncounted, self._seconds = 1, list[float]()
        self._in_a_row, self._short = 0, 0
        self._done, self._since, self._finer = 0, 0, False
        self._failed: list[Entrant] = []
        self._not_loaded: list[Plan] = []
        self._tried: list[tuple[Plan, list[float]]] = []
        trusted = known is not None and known.source == "measured"
        self._error = KNOWN_ERROR if trusted else LEARNED_ERROR
        self.profile = known
        self.decision: Decision | None = None
        self.race: Race | None = None
        self.watch: Watch | None = None
        self.changes: list[Change] = []
        if known is None:
            self.plan = self._as_run(self._guess())
        else:
            self.plan = self._as_run(self._best(known))

    # --- steps as they end ----------------------------------------------------------------------

    def note(self, result: StepResult, plan: Plan) -> None:
        """Take in a step that ran under the present plan, which `plan` is with known sizes."""
        self._done, self._since = result.step + 1, self._since + 1
        self._in_a_row += 1
        self._evidence.add(plan, [result], warm=self._since > 1)
        self._last.append((plan, replace(result, output=NO_ITEMS)))
        if self._uncounted:
            self._uncounted -= 1
            return
        self._seconds.append(result.seconds)
        if self.race is None:
            self._note_trial(result.seconds)
        if self.race is not None and not self.race.over:
            if self.race.current.plan is self.plan:  # or the step was in flight when its turn ended
                self.race.note(result.seconds)
        elif self.watch is not None:
            self.watch.note(result.seconds)

    @property
    def wants_to_look(self) -> bool:
        """Whether the pilot may want another plan for the next step; no step may be in flight."""
        if self.race is not None and self.watch is None:
            return self.race.over or self.race.current.plan is not self.plan
        if self.watch is not None:
            return self.watch.drift() is not None
        return bool(self._tried) and self._tried[-1][0] is self.plan and self._knows_all_stages

    @property
    def _knows_all_stages(self) -> bool:
        """Whether each stage has run or has a price: items may have left a loop before a member."""
        priced = {} if self.profile is None else self.profile.stages
        return all(
            node.name in priced or self._evidence.timed(node.name) for node in self._graph.nodes
        )

    def begins_with_none_in_flight(self, *, cold: bool = False) -> None:
        """Note that the next steps fill the pipeline anew, so that they take longer than others.

        Where it is emptied again and again before it was full, such as for a checkpoint of each
        step, there are no others, and these steps count.

        Args:
            cold: workers were brought up anew, for which the first step takes longer, too.
        """
        staleness = self.plan.max_staleness
        if self._in_a_row:
            self._short = self._short + 1 if self._in_a_row <= staleness else 0
        self._in_a_row = 0
        if cold or self._short < 2:
            self._uncounted = max(self._uncounted, staleness + cold)

    def next_plan(self, run: Movers) -> Plan:
        """The plan of the next step. To be asked when `wants_to_look`."""
        if self.race is None and not self._finer and not self._as_known():
            self._finer = True
            plan = finer(self.plan, self._graph, self._num_items)
            if not self._has_failed(plan):
                return plan
        if self.race is None:
            self._begin_race(run, self._error)
        elif self.watch is not None:
            self._look_again(run)
        assert self.race is not None
        if self.race.over and self.watch is None:
            self._settle(self.race)
        return self.race.current.plan

    def gone_over(
        self, plan: Plan, moved: tuple[str, ...], pause: float, lanes: bool = False
    ) -> Change:
        """Note that the run has gone over to a plan; `lanes`: because the lanes have changed."""
        was = Seconds(statistics.median(self._seconds[-5:]) if self._seconds else 0.0)
        failed = self._has_failed(self.plan)
        why = "failed" if failed else "race" if self.watch is None else "won"
        why = "lanes" if lanes else why
        becomes = Seconds(plan.predicted_seconds or was)
        if self.race is not None and not failed:
            becomes = Seconds(self.race.believed(self._entrant(plan)))
        change = Change(self._done, why, plan.mode, was, becomes, moved, Seconds(pause))
        self.changes.append(change)
        self.plan, self._since = plan, 0
        self._uncounted = plan.max_staleness + (1 if moved else 0)
        return change

    def on_lanes(self, lanes: Sequence[LaneSpec], layouts: Mapping[str, Layout]) -> Plan:
        """Begin anew on other lanes, with what is known of the stages; the plan to begin with.

        Args:
            lanes, layouts: as for `choose`.

        Raises:
            UserError: there is no plan for them.
        """
        self._lanes, self.layouts = tuple(lanes), layouts
        self.decision = self.race = self.watch = None
        self._tried, self._finer = [], False
        self._last.clear()
        try:
            plan = self._guess() if self.profile is None else self._best(self.profile)
        except UserError:  # what is known may be of gangs that these lanes cannot carry
            plan = self._guess()
        self.plan = self._as_run(plan)
        if self._has_failed(self.plan):
            self.plan = self.another() or self.plan
        return self.plan

    def instead(self, reason: str, run: Movers) -> Plan | None:
        """The plan under which to take a step again that failed under the present one.

        Args:
            reason: why it failed.
            run: which workers it can move.

        Returns:
            The next plan of the race, or the one that is best by what is known; None if every plan
            has failed that may be tried.
        """
        self._rule_out(self.plan, reason)
        return self.another(run)

    def another(self, run: Movers | None = None) -> Plan | None:
        """A plan beside those that have failed, as `instead` says; None if there is none.

        Args:
            run: which workers it can move; None where none stands anywhere yet.
        """
        if self.race is not None:
            return self.race.current.plan
        return next(
            (
                plan
                for plan in self._others()
                if not self._has_failed(plan)
                and (run is None or all(map(run.movable, run.movers(plan))))
            ),
            None,
        )

    @property
    def has_failed(self) -> bool:
        """Whether the present plan is one that has failed, or could not be loaded."""
        return self._has_failed(self.plan)

    def refuse(self, plan: Plan, reason: str) -> None:
        """Note that a plan could not be loaded; no plan is tried that has workers stand as it does.

        Args:
            plan: to which the run has not gone over.
            reason: why.
        """
        self._not_loaded.append(plan)
        self._rule_out(plan, reason)

    def begin_instead(self, reason: str) -> Plan | None:
        """Another plan to begin with, where the present one could not be loaded; None as above."""
        self.refuse(self.plan, reason)
        plan = self.another()
        if plan is not None:
            self.plan = plan
        return plan

    def _others(self) -> Iterator[Plan]:
        """Plans beside the present one: those that have run, those that were judged, guesses.

        Smaller calls take less memory, and end sooner.
        """
        yield from (plan for plan, _ in sorted(self._tried, key=lambda one: min(one[1])))
        if self.decision is not None:
            for one in (self.decision.chosen, *self.decision.others):
                yield self._as_run(one.plan)
        yield finer(self.plan, self._graph, self._num_items)
        for mode in GUESSES:
            with contextlib.suppress(UserError):  # it does not fit these lanes
                yield self._as_run(self._guess(mode))

    def _rule_out(self, plan: Plan, reason: str) -> None:
        """Note that a plan has failed; a race, over or not, goes on among those that are left."""
        predicted = plan.predicted_seconds or math.inf
        self._failed.append(Entrant(plan.mode, plan, predicted, verdict=reason))
        # Steps of it may have ended before: others were in flight, or it cannot be loaded again.
        self._tried = [one for one in self._tried if not self._has_failed(one[0])]
        race, self.watch = self.race, None
        if race is None:
            return
        for one in race.entrants:
            if one.verdict in ("", WON) and self._has_failed(one.plan):
                race.rule_out(one, reason)
        if not race.open:
            self.race = None

    def _has_failed(self, plan: Plan) -> bool:
        return any(shape(plan) == shape(one.plan) for one in self._failed) or any(
            plan.stands_as(other) for other in self._not_loaded
        )

    # --- choosing -------------------------------------------------------------------------------

    def _guess(self, mode: str = GUESSES[0]) -> Plan:
        return build_plan(
            mode, self._graph, self._lanes, self._num_items, self._isolated, self.layouts
        )

    def _choose(self, profile: Profile, beside: Sequence[Plan] = ()) -> Decision:
        self.profile = profile
        return choose(
            self._graph,
            profile,
            self._lanes,
            self._num_items,
            max_staleness=self._max_staleness,
            isolated=self._isolated,
            layouts=self.layouts,
            beside=beside,
            effort=EFFORT,
        )

    def _best(self, profile: Profile) -> Plan:
        self.decision = self._choose(profile)
        return self.decision.chosen.plan

    def _as_known(self) -> bool:
        """Whether the first steps took what the known profile says."""
        predicted = self.plan.predicted_seconds
        if predicted is None:
            return False
        return abs(self._seconds[-1] / predicted - 1) <= TOLERANCE

    def _learn(self) -> Profile:
        profile = fitted(self._evidence, self.profile)
        if self.race is not None:
            profile = replace(profile, race=tried(self.race.entrants))
        self._keep(profile)
        return profile

    def _begin_race(self, run: Movers, error: float) -> None:
        """Choose by what is known by now, and let the plans race that are close to the best."""
        profile = self._learn()
        tried = [self._as_it_ran(plan, profile) for plan, _ in self._tried]
        decision = self.decision = self._choose(profile, tried)
        entrants = [
            self._entrant_of(decision, *one) for one in self._tried if not self._has_failed(one[0])
        ]
        best = min(entrants, key=lambda one: one.seconds)
        expected = Seconds(min(best.predicted, best.seconds))
        for one in decision.shortlist(error, ENTRANTS):
            if self._has_failed(one.plan) or any(shape(one.plan) == shape(p) for p in tried):
                continue
            hopeful = one.prediction.seconds <= HOPEFUL * best.predicted
            hoped = Seconds(one.prediction.seconds * (1 - error))
            pause = Seconds(run.pause_seconds(one.plan))
            possible = all(run.movable(worker) for worker in run.movers(one.plan))
            if hopeful and possible and pays(expected, hoped, pause, self._steps_left):
                plan, name = self._as_run(one.plan), f"{one.plan.mode} {len(entrants)}"
                entrants.append(
                    Entrant(name, plan, float(one.prediction.seconds), _spread(one.prediction))
                )
        most = max(1, round(RACING_SHARE * self._steps_left))
        entrants += self._failed
        self.race = Race(sorted(entrants, key=lambda one: one.predicted), most, error)

    def _settle(self, race: Race) -> None:
        """Store what the race has taught, and watch the winner."""
        winner = race.leader
        winner.verdict = WON
        self.profile = self._learn()
        seconds = race.believed(winner)
        won = replace(winner.plan, predicted_seconds=seconds)
        if winner.plan is self.plan:
            self.plan = won
        winner.plan = won
        self.watch = Watch(Seconds(seconds))

    def _look_again(self, run: Movers) -> None:
        """After a drift, choose again by what the last steps took: those before it are history."""
        measured = statistics.median(self._seconds[-PATIENCE:])
        self._evidence = Evidence(self._graph)
        for plan, result in self._last:
            self._evidence.add(plan, [result])
        self.race, self.watch = None, None
        self._tried, self._seconds = [(self.plan, [measured])], [measured]
        self._begin_race(run, LEARNED_ERROR)

    def _as_it_ran(self, plan: Plan, profile: Profile) -> Plan:
        """A plan that has run, with the states that it does not tell, which may take turns.

        What calls take stays untold: they did fit.
        """
        known = sized(plan, self._graph, profile, self._num_items).placements
        untold = {w: known[w].state_bytes for w, x in plan.placements.items() if not x.state_bytes}
        return with_sizes(plan, untold, {})

    def _note_trial(self, seconds: float) -> None:
        """Keep what a step took under a plan that was run before any race."""
        if not self._tried or self._tried[-1][0] is not self.plan:
            self._tried.append((self.plan, []))
        self._tried[-1][1].append(seconds)

    @staticmethod
    def _entrant_of(decision: Decision, plan: Plan, seconds: list[float]) -> Entrant:
        """Return an entrant that has run already."""
        found, measured = _simulated(decision, plan), statistics.median(seconds)
        if found is None:
            return Entrant(plan.mode, plan, measured, STEPS_VARY * measured, list(seconds))
        spread = _spread(found.prediction)
        return Entrant(plan.mode, plan, float(found.prediction.seconds), spread, list(seconds))

    def _entrant(self, plan: Plan) -> Entrant:
        assert self.race is not None
        return next(one for one in self.race.entrants if shape(one.plan) == shape(plan))

    def _as_run(self, plan: Plan) -> Plan:
        """A plan with what the run asks of every plan."""
        if self._deadline is None:
            return plan
        return replace(plan, deadline_seconds=self._deadline)

    @property
    def _steps_left(self) -> int:
        if self._num_steps is None:
            return max(self._done, 1)
        return self._num_steps - self._done


def _spread(prediction: Prediction) -> float:
    """Standard deviation of a step's seconds."""
    return float(max(prediction.spread, STEPS_VARY * prediction.seconds))


def _simulated(decision: Decision, plan: Plan) -> Candidate | None:
    """What was predicted of a plan; None if it was ruled out."""
    every = (decision.chosen, *decision.others)
    return next((one for one in every if shape(one.plan) == shape(plan)), None)


def finer(plan: Plan, graph: FlowGraph, num_items: int) -> Plan:
    """The plan with calls half as large, of whatever stage takes several units."""
    stages = dict(plan.stages)
    for node in graph.nodes:
        stage, whole = stages.get(node.name, StagePlan()), window_units(node, num_items)
        stages[node.name] = replace(stage, chunk=max(1, -(-min(stage.chunk or whole, whole) // 2)))
    mode = plan.mode.removesuffix(SMALLER) + SMALLER
    return replace(plan, mode=mode, stages=stages)
