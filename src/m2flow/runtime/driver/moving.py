"""Between two plans of a run: states of workers that move, and commands outside of any step."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future

from m2flow.engine.messages import (
    AbortCall,
    CallFailed,
    CallFinished,
    ExportWeights,
    InstallWeights,
    LaneLost,
)
from m2flow.engine.plan import Placement, Plan
from m2flow.errors import ProcessEnded, RunFailed, Stalled
from m2flow.flow.graph import FlowGraph
from m2flow.runtime.driver.pool import QUIET_SECONDS, LanePool
from m2flow.runtime.driver.runner import Carrier, Runner
from m2flow.runtime.lane.orders import STATES, CallMethod, DropStep, Fetch, MethodResult, Save
from m2flow.runtime.transport.listening import SILENT_SECONDS
from m2flow.runtime.transport.peering import PeerLost

LOSS_SECONDS = 1.0
"""How long to wait for the word that a lane is gone, where a peer has missed it. Of a lane on
another machine it may come as much later as either side takes to notice."""


def save_state(
    pool: LanePool, worker: str, gang: tuple[int, ...], number: int, seconds: float
) -> Fetch:
    """Have a worker save its state; where that then lies.

    Args:
        pool: the lanes.
        worker: whose state.
        gang: the lanes of one replica; all of them take part, and the first one keeps it.
        number: under which it is kept.
        seconds: longest that it may take.

    Raises:
        Exception: what the worker raised.
    """
    answers = pool.ask_all(dict.fromkeys(gang, lambda asked: Save(asked, worker, number)), seconds)
    for answer in answers.values():
        if answer.raised:
            raise pickle.loads(answer.value)
    return Fetch(gang[0], number)


def comes_of_a_loss(pool: LanePool, error: RunFailed) -> bool:
    """Whether an error may come of the loss of lanes; which ones `LanePool.lost` says.

    A lane whose worker has lost a process of its own counts as lost: who works with it may wait
    within a collective, and only the end of its process ends that.
    """
    ended = next((x for x in (error, error.__cause__) if isinstance(x, ProcessEnded)), None)
    if ended is not None and ended.lane is not None:
        pool.lost.setdefault(ended.lane, (str(ended).splitlines()[0], time.time()))
    here = all(pool.is_here(lane.id) for lane in pool.lanes)
    deadline = time.monotonic() + LOSS_SECONDS + (0 if here else SILENT_SECONDS)
    while not pool.lost and isinstance(error.__cause__, PeerLost):
        if time.monotonic() > deadline:
            break
        pool.receive(0.1)
    return bool(pool.lost)


def stopped(pool: LanePool, carrier: Carrier, runners: Mapping[str, Runner]) -> set[int]:
    """Have the lanes that are up stop what they do; those that do not in time.

    Lanes that have process groups may wait for one that is gone: they are not asked.
    """
    if pool.world:
        return set()
    return stop(pool, carrier, runners, {lane.id for lane in pool.lanes} - pool.lost.keys())


def stop(
    pool: LanePool,
    carrier: Carrier,
    runners: Mapping[str, Runner],
    lanes: Collection[int],
    seconds: float = QUIET_SECONDS,
) -> set[int]:
    """Withdraw all calls; those of `lanes` that do not stop in time."""
    for name, runner in runners.items():
        for number, call in runner.engine.calls.items():
            carrier.carry_out(name, AbortCall(number, tuple(call.running)))
    return pool.quiet(lanes, seconds)


def discard_later(pool: LanePool, worker: str, lanes: Sequence[int]) -> list[Future[MethodResult]]:
    """Have a worker drop what a step has left on lanes that is not over."""
    arguments = pickle.dumps(())
    return [
        pool.ask_later(lane, lambda asked: CallMethod(asked, worker, "discard", arguments))
        for lane in lanes
    ]


def drop_states(pool: LanePool) -> None:
    """Let go of what `save_state` has kept."""
    for lane in pool.lanes:
        pool.send(lane.id, DropStep("", STATES))


def carry_out_now(
    carrier: Carrier, command: ExportWeights | InstallWeights, seconds: float
) -> None:
    """Carry a command out while no step runs, and wait for its end.

    Raises:
        RunFailed: it failed, with what was raised as its cause; or it took longer than `seconds`.
    """
    carrier.carry_out("step", command)
    waiting = set(command.lanes)
    deadline = time.monotonic() + seconds
    while waiting:
        if time.monotonic() > deadline:
            what = f"lanes {sorted(waiting)} have not answered within {seconds:g} s"
            raise RunFailed(what) from Stalled(what)
        for report in carrier.wait(1.0):
            match report.event:
                case CallFinished(call=call, lane=lane) if call == command.call:
                    waiting.discard(lane)
                case CallFailed(lane=lane, error=error):
                    raise RunFailed(f"{command} failed on lane {lane}") from error
                case LaneLost(lane=lane, reason=reason):
                    raise RunFailed(f"lane {lane} was lost: {reason}")


def publish(
    carrier: Carrier,
    graph: FlowGraph,
    plan: Plan,
    placements: Mapping[str, Placement],
    moved: Collection[str],
    version: int,
    bring: Callable[[Sequence[str], str, Sequence[int]], None],
) -> None:
    """Bring workers that were moved to the weights on which they are to run.

    Args:
        carrier: carries the commands out.
        graph, plan: of the step.
        placements: of all workers.
        moved: these workers.
        version: of the weights.
        bring: has workers resident on lanes; called with the workers, for what, and the lanes.
    """
    edges, seconds = graph.weight_edges, plan.deadline_seconds
    for source in sorted({edge.source for edge in edges if edge.target in moved}):
        targets = [edge.target for edge in edges if edge.source == source]
        spot = placements[source]
        home = spot.lanes if all(len(gang) == 1 for gang in spot.replicas) else ()
        takers = [(name, lane) for name in targets for lane in placements[name].lanes]
        if not {lane for _, lane in takers} <= set(home):
            bring((source,), "weights", spot.replicas[0])
            export = ExportWeights(-1, source, version, spot.replicas[0])
            carry_out_now(carrier, export, seconds)
        for number, (target, lane) in enumerate(takers):
            local = lane in home
            bring((source, target) if local else (target,), "install", (lane,))
            install = InstallWeights(-2 - number, source, target, version, (lane,), local)
            carry_out_now(carrier, install, seconds)
