"""What is said when a run stops: who waits for whom, and which loop has no way out."""

from __future__ import annotations

from collections.abc import Iterable

from m2flow.engine.calls import Call
from m2flow.engine.messages import (
    CallCommand,
    ExportWeights,
    InstallWeights,
    RunCall,
    RunFinish,
)
from m2flow.engine.steps import StepState
from m2flow.errors import FlowError
from m2flow.flow.graph import FlowGraph


def call_name(graph: FlowGraph, command: CallCommand) -> str:
    """A call in words."""
    match command:
        case RunCall(node=node, step=step, call=call):
            return f"{graph.nodes[node].name} (step {step}, call {call})"
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


def unjudged(graph: FlowGraph, loop: int) -> FlowError:
    """What is wrong with a loop that nothing would ever leave."""
    return FlowError(
        f"no stage has given the column {graph.loops[loop].until!r} in a full turn, so nothing "
        "would ever leave",
        key=graph.loop_name(loop),
        hint="give the column, name another one by `until`, or set `max_turns`",
    )
