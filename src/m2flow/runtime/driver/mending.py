"""`Mender`: brings lost lanes back while the steps go on.

A lane that is lost gets a new process, its workers, and the weights that it had, one after the
other, while the other lanes work; then the engines hear that it is up, and give it what was leased
to it once more. Nobody else goes back. `comes_back_alone` says for which lanes that is enough; what
becomes of a run that has lost another one is `Run`'s to say.

Nobody waits here: a carrier hands over what is heard of such a lane, and asks for news.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from m2flow.engine.core import Engine
from m2flow.engine.messages import (
    CallFailed,
    CallFinished,
    InstallWeights,
    LaneLost,
    LaneRestarted,
    MoveState,
)
from m2flow.engine.plan import Plan
from m2flow.errors import CannotHeal, ProcessEnded
from m2flow.flow.graph import FlowGraph
from m2flow.flow.worker import Worker, saves
from m2flow.runtime.driver.loading import LoadOrder
from m2flow.runtime.driver.methods import STEP
from m2flow.runtime.driver.placing import gpus_beside
from m2flow.runtime.driver.processes import START_SECONDS, START_TRIES
from m2flow.runtime.driver.recovery import LaneLoss
from m2flow.runtime.driver.supervision import Supervision
from m2flow.runtime.lane.orders import Execute, FromLane, Loaded, Loading, Reports
from m2flow.runtime.lane.reports import Report

if TYPE_CHECKING:
    from m2flow.runtime.driver.carrier import RayCarrier


def comes_back_alone(
    lane: int, plan: Plan, graphs: Iterable[FlowGraph], workers: Mapping[str, Worker]
) -> bool:
    """Whether a lane can be brought back while the others go on.

    It can if everything that it held can be had again without them: its workers have no state but
    published weights, which another lane has, and none of them shares its calls with other lanes of
    a gang. A worker that learns, or that saves a state of its own, goes back to a snapshot instead,
    and all others with it.
    """
    graphs = list(graphs)
    learn = {node.worker for graph in graphs for node in graph.nodes if node.accumulates}
    learn |= {edge.source for graph in graphs for edge in graph.weight_edges}
    return not any(
        name in learn or len(spot.replicas[0]) > 1 or (name in workers and saves(workers[name]))
        for name, spot in plan.placements.items()
        if lane in spot.lanes
    )


@dataclass(slots=True)
class _Coming:
    """A lane on its way back.

    Attributes:
        reason, at: why it was lost, and when, in seconds since the epoch.
        does: what it is at: "ends", "starts", "loads", "waits" or "installs".
        until: when that must have gone on, in seconds of the monotonic clock.
        started: what is known of its process.
        tries: how often a process has ended before it was up.
        load: number of the order to load.
        installs: calls that have not ended.
    """

    reason: str
    at: float
    does: str = "ends"
    until: float = 0.0
    started: object = None
    tries: int = 0
    load: int = 0
    installs: set[int] = field(default_factory=set)


class Mender:
    """Of the lanes of one run, under one plan.

    Args:
        carrier: of the plan; it tells what is heard of lanes.
        workers: the flow's.
        engines: of the run's methods, by name.
        supervision: counts the starts of lanes.
        loaded: the version of the weights that workers are loaded with.
        version: the version that the carrier began with.
        load_seconds: longest that a lane may take to bring one worker up.
        may_heal: asked when a lane is lost.
        note: called with each lane that is back.

    Attributes:
        epochs: by lane, of the process that it has, or is about to have; 0 where not named.
    """

    def __init__(
        self,
        carrier: RayCarrier,
        workers: Mapping[str, Worker],
        engines: Mapping[str, Engine],
        supervision: Supervision,
        *,
        loaded: int,
        version: int,
        load_seconds: float,
        may_heal: Callable[[], bool],
        note: Callable[[LaneLoss], None],
    ) -> None:
        self._carrier, self._pool, self._plan = carrier, carrier.pool, carrier.plan
        self._workers, self._engines, self._supervision = workers, engines, supervision
        self._loaded, self._version, self._load_seconds = loaded, version, load_seconds
        self._may_heal, self._note = may_heal, note
        self._coming: dict[int, _Coming] = {}
        self.epochs: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Whether a lane is on its way back."""
        return bool(self._coming)

    def has_all(self, lanes: Iterable[int]) -> bool:
        """Whether all of these are on their way back; who waited for a lane may have kept its end
        to themselves."""
        return self._coming.keys() >= set(lanes)

    # --- lanes that are lost ----------------------------------------------------------------------

    def ended(self, lane: int, reason: str) -> LaneLost | None:
        """The process of a lane has ended. What engines are to hear of it, if they have not.

        Raises:
            CannotHeal: it was on its way back, and may not be started again; or it shares the GPU
                of a lane that is gone.
        """
        coming = self._coming.get(lane)
        if coming is None:
            return self._lost(lane, reason, ended=True)
        if coming.does != "ends" and not self._supervision.may_begin(lane, reason):
            raise CannotHeal(f"lane {lane} was lost: {reason}")
        self._begin(lane, coming)
        return None

    def instead_of(self, failed: CallFailed) -> CallFailed | LaneLost:
        """What engines are to hear in place of a call's failure: where a worker has lost a process
        of its own, its lane counts as lost if it can come back."""
        lane, error = failed.lane, failed.error
        if not isinstance(error, ProcessEnded) or lane in self._coming:
            return failed
        event = self._lost(lane, str(error).splitlines()[0], ended=False)
        return event if event.comes_back else failed

    def _lost(self, lane: int, reason: str, *, ended: bool) -> LaneLost:
        epoch = self.epochs.get(lane, 0)
        graphs = self._carrier.graphs.values()
        alone = comes_back_alone(lane, self._plan, graphs, self._workers)
        if not (
            alone
            and not self._keeps_store(lane)
            and not self._shares_gpu_of_lost(lane)
            and self._supervision.heals
            and self._may_heal()
            and self._supervision.may_begin(lane, reason)
        ):
            return LaneLost(lane, reason, epoch, comes_back=False)
        if not ended:
            self._pool.end(lane, reason)
        why, at = self._pool.lost[lane]
        coming = self._coming[lane] = _Coming(why, at, until=time.monotonic() + START_SECONDS)
        self.epochs[lane] = epoch + 1
        self._carrier.forget(lane)
        lost = LaneLost(lane, reason, epoch)
        self._tell(lost)
        if ended:
            self._begin(lane, coming)
        return lost

    def _keeps_store(self, lane: int) -> bool:
        """Whether the process groups of others hang on a lane."""
        return self._pool.uses_groups and self._pool.positions([lane]) == (self._pool.keeper,)

    def _shares_gpu_of_lost(self, lane: int) -> bool:
        """Whether the lane is gone whose GPU this one shares, which says which GPU that is."""
        owner = gpus_beside(self._pool.processes.lanes).get(lane)
        return owner is not None and (owner in self._pool.lost or owner not in self._pool.addresses)

    def _tell(self, event: LaneLost | LaneRestarted) -> None:
        """Tell the engines at rest, which have nothing to say to it; the others hear a report."""
        for engine in self._engines.values():
            if not engine.steps:
                engine.handle(event)

    # --- lanes that come back ---------------------------------------------------------------------

    def _begin(self, lane: int, coming: _Coming) -> None:
        coming.does, coming.until = "starts", time.monotonic() + START_SECONDS
        coming.installs.clear()  # asked of a process before this one
        coming.started = self._pool.begin(lane)

    def takes(self, lane: int, message: FromLane) -> bool:
        """Whether a message is of a lane on its way back, and needs not be heard by others.

        Raises:
            CannotHeal: a worker cannot be loaded there, or takes no weights.
        """
        coming = self._coming.get(lane)
        match message:
            case Loading(number=number) if coming is not None and number == coming.load:
                coming.until = time.monotonic() + self._load_seconds
            case Loaded(number=number, error=raised) if coming and number == coming.load:
                if raised is not None:
                    error = pickle.loads(raised)
                    why = (
                        f"lane {lane} was lost ({coming.reason}); nothing is loaded there: {error}"
                    )
                    raise CannotHeal(why) from error
                coming.does, coming.until = "waits", self._deadline()
            case Reports(reports=reports) if coming is not None and coming.installs:
                for report in reports:
                    match report.event:
                        case CallFinished(call=call):
                            coming.installs.discard(call)
                        case CallFailed(error=error):
                            why = f"lane {lane} is up again, and cannot take its weights over"
                            raise CannotHeal(why) from error
            case _:
                return False
        return True

    def news(self) -> list[Report]:
        """Go on with what can go on; reports of the lanes that are back.

        Raises:
            CannotHeal: a lane does not come up, makes no progress, or its weights are nowhere.
        """
        reports = []
        for lane, coming in list(self._coming.items()):
            if coming.does == "starts":
                self._look_at_start(lane, coming)
            if coming.does == "waits":
                self._install(lane, coming)
            if coming.does == "installs" and not coming.installs:
                reports.append(self._back(lane, coming))
            elif coming.until < time.monotonic():
                raise CannotHeal(
                    f"lane {lane} was lost ({coming.reason}); it {coming.does} too long"
                )
        return reports

    def _look_at_start(self, lane: int, coming: _Coming) -> None:
        """Once its process is up, have a lane load its workers."""
        if not ray.wait([coming.started], timeout=0)[0]:
            return
        try:
            self._pool.meet(lane, coming.started)
        except (RayError, OSError) as error:
            coming.tries += 1
            if coming.tries == START_TRIES:
                first_line, *_ = str(error).splitlines()
                raise CannotHeal(
                    f"lane {lane} has not come up in {START_TRIES} tries: {first_line}"
                ) from error
            self._begin(lane, coming)
            return
        carrier = self._carrier
        order = LoadOrder(self._pool, carrier.graphs, self._plan, self._workers, self._version)
        coming.does, coming.until = "loads", time.monotonic() + self._load_seconds
        coming.load = order.number
        self._pool.send(lane, order.of(lane))
        carrier.greet(lane)

    def _install(self, lane: int, coming: _Coming) -> None:
        """Have the weights installed that the lane had, as soon as they are to be had.

        Where newer ones are asked for already, or about to be, they will do.
        """
        publisher, orders = self._carrier.publisher, list[Execute]()
        for (source, target), version in self._engines[STEP].weights_on(lane).items():
            if version is None:
                continue
            exports = publisher.copies(source, version)
            if exports is not None:
                call = -(1 << 30) - self._pool.new_number()  # no engine's
                install = InstallWeights(call, source, target, version, (lane,), local=False)
                orders.append(Execute(STEP, install, exports=exports))
            elif publisher.has_published(source):
                return  # a newer version is on its way out
            elif version != self._loaded:
                why = f"version {version} of {source}'s weights is nowhere"
                raise CannotHeal(f"lane {lane} was lost ({coming.reason}): {why}")
        coming.does, coming.until = "installs", self._deadline()
        limited = any(one.id == lane and one.memory_bytes is not None for one in self._plan.lanes)
        for order in orders:
            assert isinstance(order.command, InstallWeights)
            there = MoveState("onload", order.command.target, lane)
            if limited:
                self._pool.send(lane, Execute(STEP, there))
            self._pool.send(lane, order)
            if limited:  # nobody is resident on a lane that has begun anew
                self._pool.send(lane, Execute(STEP, replace(there, what="offload")))
            coming.installs.add(order.command.call)

    def _deadline(self) -> float:
        return time.monotonic() + self._plan.deadline_seconds

    def _back(self, lane: int, coming: _Coming) -> Report:
        del self._coming[lane]
        self._supervision.is_back(lane)
        loss = LaneLoss(lane, coming.reason, coming.at, time.time() - coming.at, 0, healed=True)
        self._note(loss)
        restarted = LaneRestarted(lane, self.epochs[lane])
        self._tell(restarted)
        return Report(restarted, (loss.span(),))
