"""Which workers a call needs on a lane under a memory limit, and which one will be needed next.

`Residency` knows who is resident; here it is asked for what a command needs. With a call on a lane
the worker that will be needed there next is brought as well, if there is room.
"""

from __future__ import annotations

from m2flow.engine.messages import (
    CallCommand,
    ExportWeights,
    InstallWeights,
    MoveState,
    RunCall,
    RunFinish,
)
from m2flow.engine.state import EngineState


def moves_before(engine: EngineState, command: CallCommand, lane: int) -> list[MoveState]:
    """Moves after which those are resident on a lane whom a command needs there."""
    match command:
        case RunCall(node=index) | RunFinish(node=index):
            return engine.residency.bring(engine.workers[index], lane, working=True)
        case ExportWeights(source=source):
            return engine.residency.bring((source,), lane)
        case InstallWeights(source=source, target=target, local=local):
            workers = (source, target) if local else (target,)
            return engine.residency.bring(workers, lane)


def early_onload(engine: EngineState, command: CallCommand, lane: int) -> MoveState | None:
    """The onload that may go on beside a call, whose own moves have been asked for.

    Offloads that make room for it become commands of the engine, before the call.
    """
    if not isinstance(command, RunCall | RunFinish):
        return None
    coming = _needed_next(engine, lane, command.node)
    if coming is None:
        return None
    moves = engine.residency.bring_early(coming, engine.workers[command.node], lane)
    engine.out += moves[:-1]
    return moves[-1] if moves else None


def _needed_next(engine: EngineState, lane: int, index: int) -> str | None:
    """The worker that will be needed on a lane after those of a call that starts there now.

    The lane's stages are gone through in the order of the flow, from the call's own onwards and
    around: the first that belongs to another worker and has work left in a step in flight says who
    it is. If there is none, it is who takes published weights on the lane, because every step in
    flight ends with that.
    """
    running = engine.workers[index]
    around = sorted(engine.nodes_on_lane[lane], key=lambda other: (other <= index, other))
    for other in around:
        worker = engine.graph.nodes[other].worker
        if worker not in running and any(
            state.ledgers[other].work_left for state in engine.steps.values()
        ):
            return worker
    for edge in engine.graph.weight_edges:
        if edge.target not in running and lane in engine.plan.placements[edge.target].lanes:
            return edge.target
    return None
