"""`Boundaries`: what follows when a mini-batch is done, and a worker has done its part of a step.

A stage's `finish` runs at the end of each mini-batch, once nobody reads the state that it changes.
A worker whose stages are complete sends its weights out, when those who run on them have done the
step as well; and in the order of steps, whichever of them was first.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.engine.lanes import Barrier
from m2flow.engine.messages import ExportWeights, InstallWeights, RunFinish
from m2flow.engine.state import EngineState
from m2flow.engine.steps import StepState
from m2flow.flow.graph import SOURCE, StageNode


class Boundaries:
    """Of the mini-batches and steps of one engine.

    Args:
        engine: the state that is read, and in which calls are asked for.
    """

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine

    def close_window(self, state: StepState, node: StageNode) -> None:
        """Where a mini-batch (or the stage's step) is done, run `finish`, or go on."""
        ledger = state.ledgers[node.index]
        if not ledger.window_complete or node.index in state.finishing:
            return
        if node.has_finish:
            if not self._engine.turns.may_finish(state, node):
                return
            state.finishing.add(node.index)
            lanes = self._engine.plan.placements[node.worker].lanes
            finish = RunFinish(0, node.index, state.step, ledger.window, lanes)
            self._engine.board.ask(Barrier(lanes, state.step, node.index, command=finish))
        else:
            self.next_window(state, node)

    def next_window(self, state: StepState, node: StageNode) -> None:
        """A window was closed; if it was the last one, others may have waited for this stage."""
        ledger = state.ledgers[node.index]
        ledger.next_window()
        self._engine.wake(state.step, node.index)
        if not ledger.complete:
            return
        state.node_done(node)
        for other in self._engine.nodes_of[node.worker]:
            self._engine.wake(state.step, other.index)
            if other.has_finish:
                self.close_window(state, other)
        if state.worker_done(node.worker):
            sources = [e.source for e in self._engine.graph.weight_edges if e.target == node.worker]
            for worker in (node.worker, *sources):
                self._settle(state, worker)

    def _settle(self, state: StepState, worker: str) -> None:
        """Send a worker's weights out once it, and those who run on them, have done the step.

        A step that overtakes another one waits for it: or its weights would be replaced by older.
        """
        steps = self._engine.steps.values()
        if any(one.step < state.step and worker not in one.settled for one in steps):
            return
        targets = [edge.target for edge in self._engine.graph.weight_edges if edge.source == worker]
        done = all(state.worker_done(one) for one in (worker, *targets))
        if done and worker not in state.settled:
            state.settled.add(worker)
            self.wake_worker(worker)
            self._publish(state, worker, targets)
            if (overtaken := self._engine.steps.get(state.step + 1)) is not None:
                self._settle(overtaken, worker)

    def _publish(self, state: StepState, source: str, targets: Sequence[str]) -> None:
        lanes = [lane for target in targets for lane in self._engine.plan.placements[target].lanes]
        state.installs += len(lanes)
        if not set(lanes) <= set(self._whole_copies(source)):
            gang = self._engine.plan.placements[source].replicas[0]
            export = ExportWeights(0, source, state.step + 1, gang)
            self._engine.board.ask(Barrier(gang, state.step, SOURCE, command=export))
        # Those beside the source at once: they take the weights that it has when it is their turn.
        self.ask_installs(state, source, local=True)

    def _whole_copies(self, worker: str) -> tuple[int, ...]:
        """Lanes that hold all of a worker's weights, and not a shard of them."""
        spot = self._engine.plan.placements[worker]
        return () if any(len(gang) > 1 for gang in spot.replicas) else spot.lanes

    def ask_installs(self, state: StepState, source: str, *, local: bool) -> None:
        """Have targets take a worker's weights, beside it or from its export."""
        home, version = self._whole_copies(source), state.step + 1
        for edge in self._engine.graph.weight_edges:
            if edge.source == source:
                for lane in self._engine.plan.placements[edge.target].lanes:
                    if (lane in home) != local:
                        continue
                    install = InstallWeights(0, source, edge.target, version, (lane,), local)
                    self._engine.board.ask(Barrier((lane,), state.step, SOURCE, command=install))

    def wake_worker(self, worker: str) -> None:
        for node in self._engine.nodes_of.get(worker, ()):  # none where it only takes weights
            self._engine.wake_in_all_steps(node.index)
