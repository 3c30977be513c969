"""`Call`: a call in progress, as the engine knows it; and in words, for when a run stops."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from m2flow.engine.messages import (
    CallCommand,
    ExportWeights,
    InstallWeights,
    RunCall,
    RunFinish,
)
from m2flow.engine.steps import StepState
from m2flow.flow.graph import FlowGraph


@dataclass(slots=True)
class Call:
    """A call in progress.

    Attributes:
        command: what was started.
        running: lanes that have not finished their part.
        heard: when it was started or last gave, or was given, items, in seconds of the engine's
            clock.
        step: of which step it is.
        units: units of a stage leased to it (of a streaming call those that it was started with).
        left: for a call of a streaming stage or of a loop, unit to the outputs that are still to
            come, as a bit set.
        epochs: lanes on which it runs or from which it reads, and their epochs at that time; noted
            by an engine that heals.
        disturbed: units of the stage are done again, or items of a loop begin anew, that it works
            on: it is fed no more, lest it get a unit twice, and may fail.
        void: outputs of the stage that the call's lanes were told to let go of while it ran: if it
            makes them again, nobody knows whether they are still there.
        withdrawn: its items are no longer its own; its lanes are still to answer.
    """

    command: CallCommand
    running: set[int]
    heard: float
    step: int
    units: list[int] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    disturbed: bool = False
    void: set[int] = field(default_factory=set)
    withdrawn: bool = False

    def take(self, units: Sequence[int], expands: int, without: Collection[int] = ()) -> None:
        """Owe all outputs of further units, less those that are there."""
        self.left.update(dict.fromkeys(units, (1 << expands) - 1))
        for item in without:
            unit, place = divmod(item, expands)
            if unit in self.left:
                self.left[unit] &= ~(1 << place)

    def hand_on(self, outputs: Sequence[int], expands: int) -> tuple[list[int], list[int]]:
        """Count outputs that have come.

        Returns:
            Those that had not come before, and the units of which the last output has come.
        """
        new, done = [], []
        for item in outputs:
            unit, place = divmod(item, expands)
            left, bit = self.left.get(unit, 0), 1 << place
            if left & bit:
                new.append(item)
                if left == bit:
                    del self.left[unit]
                    done.append(unit)
                else:
                    self.left[unit] = left ^ bit
        return new, done


def call_name(graph: FlowGraph, command: CallCommand) -> str:
    """A call in words."""
    match command:
        case RunCall(node=node, step=step, call=call):
            loop = graph.nodes[node].loop if command.fused else None
            name = graph.nodes[node].name if loop is None else graph.loop_name(loop)
            return f"{name} (step {step}, call {call})"
        case RunFinish(node=node, step=step, minibatch=minibatch):
            return f"{graph.nodes[node].name}.finish (step {step}, mini-batch {minibatch})"
        case ExportWeights(source=source, version=version):
            return f"export of {source}'s weights (version {version})"
        case InstallWeights(source=source, target=target, version=version):
            return f"install of {source}'s weights in {target} (version {version})"


def who_waits(graph: FlowGraph, calls: Iterable[Call], steps: Iterable[StepState]) -> list[str]:
    """One line for each call in progress and each stage that is not complete."""
    lines = [
        f"  running: {call_name(graph, call.command)} on lanes {sorted(call.running)}"
        for call in calls
    ]
    for state in steps:
        for node in graph.nodes:
            ledger = state.ledgers[node.index]
            if not ledger.complete:
                lines.append(
                    f"  waiting: {node.name} (step {state.step}): {ledger.low} of "
                    f"{ledger.num_units} {node.unit}s done, {ledger.ready()} ready, "
                    f"{ledger.leased} leased"
                )
    return lines
