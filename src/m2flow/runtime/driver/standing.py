"""`FlowOnLanes`: a flow's workers on their lanes, under one plan after another.

Between two steps the workers may go over to another plan: those that stand elsewhere under it are
brought up anew, with their states. While a lane is on its way back (`Mender`), whatever is done
beside the steps waits for it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from m2flow.engine.plan import Plan
from m2flow.engine.residency import Residency
from m2flow.errors import NoPlanStands, NotLoaded, RunFailed, UserError
from m2flow.flow.worker import Worker, saves
from m2flow.plan.machine import usable_memory
from m2flow.runtime.driver.journal import Journal, Kept, nothing_kept
from m2flow.runtime.driver.methods import STEP, Methods, Plans, check_lanes
from m2flow.runtime.driver.recovery import LaneLoss, State
from m2flow.runtime.driver.runner import Runner

if TYPE_CHECKING:  # a run in one process does without Ray
    from m2flow.runtime.driver.loading import Moved
    from m2flow.runtime.driver.mending import Mender
    from m2flow.runtime.driver.pool import LanePool
    from m2flow.runtime.driver.supervision import Supervision
    from m2flow.runtime.lane.orders import Fetch


@dataclass(frozen=True, slots=True)
class Replanned:
    """What going over to another plan has taken.

    Attributes:
        moved: workers that stand elsewhere now, with others, or in another layout.
        seconds: for which no step could run.
    """

    moved: tuple[str, ...]
    seconds: float


class FlowOnLanes:
    """The workers of a run, and what carries its commands out.

    Args:
        methods, plans: what is run, and how to begin with.
        workers: the flow's.
        carrier: of the first plan.
        first_step: number of the first step; the workers were loaded with this version.
        pool: the lanes; None for one process.
        owns_pool: whether they end with the run.
        load_seconds: how long it took to bring the workers up.
        load_deadline_seconds: longest that a lane may take to bring one worker up.
        supervision: starts lanes that are lost; None where nobody does.
        losses: lanes that were lost so far.

    Attributes:
        plan: the plan of the steps.
        graph: their graph.
        load_seconds: the same.
        may_heal: asked when lanes are lost; where it says no, they end the run.
        heed: called between two events while steps are waited for; what it raises leaves them open.
    """

    def __init__(
        self,
        methods: Methods,
        plans: Plans,
        workers: Mapping[str, Worker],
        carrier: Any,
        first_step: int,
        *,
        pool: LanePool | None,
        owns_pool: bool,
        load_seconds: float,
        load_deadline_seconds: float,
        supervision: Supervision | None,
        losses: Sequence[LaneLoss],
    ) -> None:
        self.graph, self.load_seconds = methods.graphs[STEP], load_seconds
        self._methods, self._workers, self._pool = methods, workers, pool
        self._owns_pool, self._closed = owns_pool, False
        if pool is not None:
            pool.run = self
        self._load_deadline, self._supervision = load_deadline_seconds, supervision
        self._losses = list(losses)
        self.may_heal: Callable[[], bool] = lambda: True
        self.heed: Callable[[], None] = lambda: None
        self._journal: Journal | None = None
        self._mender: Mender | None = None
        self._loaded = first_step
        self._runners: dict[str, Runner] = {}
        self._take_up(plans, carrier, dict.fromkeys(methods.graphs, first_step))
        gc.freeze()  # what is there stays: to go through all of torch would stop the control loop

    def _take_up(self, plans: Plans, carrier: Any, next_steps: Mapping[str, int]) -> None:
        self.plan, self._plans, self._carrier = plans.by_method[STEP], plans, carrier
        self._stands = True  # lanes hold the workers as `_placements` has them
        self._published = True  # those that take weights have the present version
        self._placements = plans.everything.placements
        self._state_bytes = {w: spot.state_bytes for w, spot in self._placements.items()}
        self._residency = Residency(plans.everything)
        graphs = self._methods.graphs
        untold = [note for runner in self._runners.values() for note in runner.untold]
        self._runners = {
            name: Runner(
                name,
                graphs[name],
                plan,
                carrier,
                next_steps[name],
                self._residency,
                recall=self._recalled if name == STEP else nothing_kept,
                heal=self._supervision is not None and self._supervision.heals,
                heed=self._between_events,
            )
            for name, plan in plans.by_method.items()
        }
        self._runners[STEP].untold = untold
        if self._supervision is not None:
            self._mender = carrier.mender = self._new_mender(next_steps[STEP])
        if self._journal is not None:
            carrier.keep_rollouts(self._journal)

    def _new_mender(self, version: int) -> Mender:
        from m2flow.runtime.driver.mending import Mender

        assert self._supervision is not None
        return Mender(
            self._carrier,
            self._workers,
            {name: runner.engine for name, runner in self._runners.items()},
            self._supervision,
            loaded=self._loaded,
            version=version,
            load_seconds=self._load_deadline,
            may_heal=lambda: self.may_heal(),  # noqa: PLW0108 - it may be set later
            note=self._losses.append,
        )

    def _settle(self) -> None:
        """Wait for lanes that are on their way back."""
        while self._mender is not None and self._mender.busy:
            self._active.advance()

    def _between_events(self) -> None:
        """What is done while steps are waited for."""
        self._check_here()
        self.heed()

    @property
    def _active(self) -> Runner:
        return next((one for one in self._runners.values() if one.busy), self._runners[STEP])

    def keep_rollouts(self, journal: Journal) -> None:
        """Have lanes keep rollouts as they are finished, and take what is kept of further steps.

        Args:
            journal: of this run, and of an earlier one with the same flow, seeds and weights, which
                it goes on with.
        """
        self._journal = journal
        self._carrier.keep_rollouts(journal)

    def _recalled(self, step: int, num_items: int) -> Sequence[Kept]:
        if self._journal is None:
            return ()
        return self._journal.of_step(step, self.graph, num_items, self.plan.max_staleness)

    def explain_publishing(self) -> dict[str, str]:
        """Which way weights travel to other lanes -> their size, and why.

        There is one way for each worker that publishes and each distance, known as soon as a
        version has been published.
        """
        publisher = getattr(self._carrier, "publisher", None)
        return {} if publisher is None else dict(publisher.explain())

    def _bring(self, workers: Sequence[str], why: str, lanes: Sequence[int]) -> None:
        """Have workers' states resident on lanes that have a limit of memory."""
        for lane in lanes:
            if not self._residency.limited(lane):
                continue
            self._check_idle(f"{workers[-1]}.{why}")
            self._bring_idle(workers, [lane])

    def _bring_idle(self, workers: Sequence[str], lanes: Sequence[int]) -> None:
        """Have workers' states resident on lanes that are known to be idle."""
        for lane in lanes:
            for move in self._residency.bring(workers, lane):
                self._carrier.carry_out(STEP, move)

    def _check_here(self) -> None:
        """Refuse to go on where the workers are no longer this run's.

        Raises:
            UserError: the run is closed, or another one was launched on its lanes.
        """
        if self._closed or (self._pool is not None and self._pool.run is not self):
            later = "has ended, since another was launched on its lanes"
            why = "is closed" if self._closed else later
            raise UserError(why, key="run", hint="launch the flow again")

    def _check_idle(self, key: str) -> None:
        if any(runner.busy for runner in self._runners.values()):
            raise UserError(
                "steps are in flight", key=key, hint="take all results of `steps` before"
            )

    # --- another plan -----------------------------------------------------------------------------

    def replan(self, plan: Plan) -> Replanned:
        """Go on under another plan of the step, from the next one on.

        Workers that stand where they stood stay as they are. The others are brought up anew, with
        the state that they `save`; those that take published weights get the present version.

        Args:
            plan: for the lanes of this run.

        Raises:
            UserError: the run has ended; steps are in flight; this run has one process; the plan is
                for other lanes; or a worker would have to move that is trained and cannot save its
                state.
            PlanError: the plan does not fit.
            NotLoaded: a worker could not be brought up, or the states of all do not fit; what it
                raised is chained. The run stands as it did.
            NoPlanStands: likewise, and it does not stand: the plan before cannot be brought up
                again, or lanes wait within a collective for the one that has failed.
            RunFailed: a lane was lost, or did not answer.
        """
        self._check_here()
        return self._replanned(plan, falls_back=True)

    def _replanned(self, plan: Plan, *, falls_back: bool) -> Replanned:
        """Go on under another plan; without `falls_back` the one before is not brought up again."""
        start = time.perf_counter()
        self._check_idle("replan")
        self._settle()
        if self._pool is None:
            raise UserError("an eager run has one process and one plan", key="mode", value="eager")
        from m2flow.runtime.driver import moving
        from m2flow.runtime.driver.loading import Moved

        plans = self._methods.planned(plan)
        check_lanes(plans.everything, self._pool)
        moved = self.movers(plan)
        for worker in moved:
            if not self.movable(worker):
                raise UserError(
                    "is trained and does not say how its state is saved, so it cannot move",
                    key=worker,
                    hint="define `save` and `restore`, or let it stand where it stands",
                )
        self._check_room(plan, moved)
        kept = Moved(frozenset(self._placements) - set(moved), self._saved(moved))
        self._stands = False  # until all lanes have gone over
        next_steps = {name: runner.next_step for name, runner in self._runners.items()}
        refused = self._refusal(plans, next_steps, kept)
        if refused is not None:
            stands = falls_back and not self._pool.spoiled
            again = self._refusal(self._plans, next_steps, kept) if stands else refused
            if again is not None:
                raise NoPlanStands(not_loaded(plan, refused)) from cause_of(again)
        moving.drop_states(self._pool)
        self._publish_to(moved, self._runners[STEP].next_step)
        if refused is not None:
            raise NotLoaded(not_loaded(plan, refused)) from cause_of(refused)
        return Replanned(moved, time.perf_counter() - start)

    def _refusal(
        self,
        plans: Plans,
        next_steps: Mapping[str, int],
        kept: Moved | None = None,
        states: Mapping[str, State] = MappingProxyType({}),
    ) -> Exception | None:
        """Bring workers up under other plans, and take these up; what loading raises, or None.

        Args:
            plans: the plans.
            next_steps: of each method.
            kept: workers that stay as they are, and where the states of others lie; None to bring
                all of them up anew.
            states: what workers are to restore, where the launcher keeps it.

        Raises:
            RunFailed: a lane was lost, which is not the plan's fault.
        """
        from m2flow.runtime.driver import moving

        pool = self._pool
        assert pool is not None
        try:
            self._bring_up(plans, next_steps, kept, states)
        except RunFailed as error:
            if moving.comes_of_a_loss(pool, error):
                raise
            return error
        except Exception as error:
            if pool.lost:
                raise RunFailed(f"workers were not loaded: {error}") from error
            return error
        return None

    def _bring_up(
        self,
        plans: Plans,
        next_steps: Mapping[str, int],
        kept: Moved | None,
        states: Mapping[str, State],
    ) -> None:
        from m2flow.runtime.driver.carrier import RayCarrier

        assert self._pool is not None
        carrier = RayCarrier(
            self._pool,
            self._methods.graphs,
            plans.everything,
            self._workers,
            plans.by_method,
            next_steps[STEP],
            load_seconds=self._load_deadline,
            moved=kept,
            states=states,
            run=self,
        )
        sized = plans.sized(self._state_bytes | carrier.state_bytes, self._methods.graphs)
        self._take_up(sized, carrier, next_steps)

    def _check_room(self, plan: Plan, moved: Sequence[str]) -> None:
        """Refuse to move states that do not fit into host memory: each is gathered, and copied.

        Raises:
            NotLoaded: they do not.
        """
        assert self._pool is not None
        here = [
            self._state_bytes[worker] * len(gang)
            for worker in moved
            if worker in self._placements and self._saves(worker)
            for gang in self._placements[worker].replicas[:1]
            if self._pool.is_here(gang[0])
        ]
        free, _ = usable_memory()
        needed = sum(here) + max(here, default=0)
        if needed > free:
            raise NotLoaded(
                f"plan {plan.mode} cannot be loaded: to move the states of its workers takes "
                f"{needed / 1e9:.3g} GB of host memory, and {free / 1e9:.3g} are free"
            )

    def movers(self, plan: Plan) -> tuple[str, ...]:
        """Workers that a plan would have stand elsewhere, in another layout or other groups."""
        here, pool = self._placements, self._pool
        grouped = pool is not None and pool.world not in ((), pool.all_positions)
        return tuple(
            worker
            for worker, spot in self._methods.planned(plan).everything.placements.items()
            if worker not in here
            or not here[worker].stands_as(spot)
            or (grouped and len(spot.lanes) > 1)
        )

    def pause_seconds(self, plan: Plan) -> float:
        """Estimate for how long no step could run if the run went over to a plan."""
        loaded = any(worker in self._workers for worker in self.movers(plan))
        return self.load_seconds if loaded else 0.0

    def movable(self, worker: str) -> bool:
        """Whether a worker can be brought up elsewhere without losing what it has learnt."""
        learns = {edge.source for edge in self.graph.weight_edges}
        learns |= {node.worker for node in self.graph.nodes if node.accumulates}
        return worker not in learns or worker not in self._workers or self._saves(worker)

    def _saves(self, worker: str) -> bool:
        return worker in self._workers and saves(self._workers[worker])

    def _saved(self, moved: Sequence[str]) -> dict[str, Fetch]:
        """Have workers that are to move save their states; then nobody is resident any more."""
        from m2flow.runtime.driver import moving

        assert self._pool is not None
        savers = [name for name in moved if name in self._placements and self._saves(name)]
        fetches = {}
        for number, worker in enumerate(savers):
            gang = self._placements[worker].replicas[0]
            self._bring((worker,), "save", gang)
            fetches[worker] = moving.save_state(
                self._pool, worker, gang, number, self.plan.deadline_seconds
            )
        for lane in self._plans.everything.lanes:
            for move in self._residency.put_away(lane.id):
                self._carrier.carry_out(STEP, move)
        return fetches

    def _publish_to(self, moved: Sequence[str], version: int) -> None:
        """Bring workers that were moved to the weights on which they are to run."""
        from m2flow.runtime.driver import moving

        self._published = False
        moving.publish(
            self._carrier, self.graph, self.plan, self._placements, moved, version, self._bring
        )
        self._published = True

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the lanes, and the Ray cluster, if they were started for this run."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        gc.unfreeze()
        self._carrier.close()
        if self._pool is not None and self._owns_pool:
            self._pool.__exit__(*error)


def not_loaded(plan: Plan, error: Exception) -> str:
    """Say in words that a plan could not be loaded."""
    return f"plan {plan.mode} cannot be loaded: {str(error) or type(error).__name__}"


def cause_of(error: Exception) -> BaseException:
    """What has made an error; a run that has failed names the first cause."""
    return (error.__cause__ or error) if isinstance(error, RunFailed) else error
