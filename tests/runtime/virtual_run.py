"""A run in virtual time: the simulator plays the plans of a pilot under a profile that is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.flow.batch import Batch
from m2flow.flow.graph import FlowGraph
from m2flow.plan.choose.judge import sized
from m2flow.plan.profile import Profile
from m2flow.plan.simulate_timing import ProfileTiming
from m2flow.runtime.driver.pilot import Pilot
from m2flow.runtime.driver.runner import StepResult
from m2flow.simulation.driver import Simulation


@dataclass
class VirtualRun:
    """Plays the steps of a pilot's plans.

    Attributes:
        truth: what things really take.
        plans: those of the steps.
        load_seconds: pause where workers move.
        fails: names a plan that cannot run, and why.
        loads: whether the workers of a plan can be brought up where they stand under it.
        fixed: workers that cannot move.
        unseen: stages that no item reaches.
    """

    graph: FlowGraph
    truth: Profile
    num_items: int
    load_seconds: float = 1.0
    fails: Callable[[Plan], str | None] = lambda plan: None
    loads: Callable[[Plan], bool] = lambda plan: True
    fixed: tuple[str, ...] = ()
    unseen: frozenset[str] = frozenset()
    now: float = 0.0
    seconds: list[float] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    _here: Plan = field(init=False)

    def movers(self, plan: Plan) -> tuple[str, ...]:
        here = self._here.placements
        return tuple(w for w, s in plan.placements.items() if not s.stands_as(here[w]))

    def pause_seconds(self, plan: Plan) -> float:
        return self.load_seconds if self.movers(plan) else 0.0

    def movable(self, worker: str) -> bool:
        return worker not in self.fixed

    def steps(self, pilot: Pilot, num_steps: int, *, looks: bool = True) -> None:
        """Run steps, and go over to the plans that the pilot wants; unless others are in flight."""
        while len(self.seconds) < num_steps:
            self._here = pilot.plan
            while (reason := self.fails(pilot.plan)) is not None:
                plan = pilot.instead(reason, self)
                assert plan is not None, "no plan is left"
                self._go_over(pilot, plan)
            self.plans.append(pilot.plan)
            known = sized(pilot.plan, self.graph, self.truth, self.num_items)
            pilot.note(self._step(known), known)
            while looks and pilot.wants_to_look:
                self._look(pilot)

    def _look(self, pilot: Pilot) -> None:
        plan = pilot.next_plan(self)
        if plan is not pilot.plan:
            self._go_over(pilot, plan)

    def _go_over(self, pilot: Pilot, plan: Plan) -> None:
        if self.movers(plan) and not self.loads(plan):
            pilot.refuse(plan, "cannot be loaded")
            return
        moved, pause = self.movers(plan), self.pause_seconds(plan)
        self.now += pause
        pilot.gone_over(plan, moved, pause)
        self._here = plan

    def _step(self, plan: Plan) -> StepResult:
        number = len(self.seconds)
        timing = ProfileTiming(self.graph, plan, self.truth, seed=number)
        played = Simulation(self.graph, plan, timing, detailed=True).run(self.num_items, 1)
        spans = [
            replace(one, start=one.start + self.now, end=one.end + self.now)
            for one in played.spans
            if one.name not in self.unseen
        ]
        seconds, started = played.step_ends[0], self.now
        self.now += seconds
        self.seconds.append(seconds)
        return result_of(number, spans, started, seconds)


def result_of(step: int, spans: list[Span], started: float, seconds: float) -> StepResult:
    """A step of which only the times matter."""
    return StepResult(step, Batch({}), {}, spans, started, seconds, step, None)
