"""How much the control plane carries: events a second, and memory for each item in flight.

A step of 100,000 items runs through a flow of five stages on 1,024 simulated lanes: streaming
generation that is fed as its items finish, a verifier, a function on groups, training in four
mini-batches, and published weights. The simulation writes the events down; then they are told to a
fresh engine, whose CPU time alone is taken; telling it the time counts towards that, and not as an
event. Memory is what the engine holds, beyond what it holds for the lanes, when most items are in
flight: wait for a stage, are worked on, or are done out of turn. It must be linear in the items of
the step, and no more for each item in flight than where only these were held.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any, TypeAlias

from harness import Target, arguments, conclude, table

from m2flow.engine import Engine, LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.messages import (
    Command,
    Event,
    ExportWeights,
    InstallWeights,
    RunFinish,
    Tick,
)
from m2flow.flow import Flow, FlowGraph, StageNode, Stream, Worker, stage
from m2flow.simulation.driver import Simulation
from m2flow.simulation.timing import Admitted, Timing

Heard: TypeAlias = tuple[Event, ...]
"""Events that are told together."""

LANES = 1024
GROUP = 8
EVENTS_PER_SECOND = 50_000.0
LINEARITY = 0.8
"""Bytes per item of the step, of the smallest size over the most of any."""

BYTES_IN_FLIGHT = 112.0
"""The most bytes for each item in flight."""


class Generator(Worker):
    """Streams; every prompt becomes a group of samples."""

    @stage(streaming=True, expands=GROUP)
    def generate(self, prompts: Any) -> Any: ...


class Verifier(Worker):
    """Scores samples."""

    @stage
    def score(self, samples: Any) -> Any: ...


class Learner(Worker):
    """Trains on samples, in mini-batches."""

    @stage
    def logprobs(self, samples: Any) -> Any: ...

    @stage(accumulates=True, minibatches=4)
    def train(self, samples: Any) -> Any: ...

    @train.finish
    def train_finish(self) -> dict[str, float]:
        return {}


@stage(unit="group")
def normalise(samples: Any) -> Any: ...


class Training(Flow):
    """What a run of GRPO looks like to the engine."""

    generator: Generator
    verifier: Verifier
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        samples = self.verifier.score(self.generator.generate(prompts))
        return self.learner.train(self.learner.logprobs(normalise(samples)))

    def sync(self) -> None:
        self.learner.publish(self.generator)


class Steady(Timing):
    """Stage times of a step that takes minutes; lengths of answers vary eightfold."""

    def call(
        self, node: StageNode, step: int, lanes: Sequence[int], shares: Sequence[Sequence[int]]
    ) -> float:
        return 0.01 + 0.001 * max(map(len, shares))

    def admit(self, node: StageNode, step: int, lane: int, items: Sequence[int]) -> Admitted:
        outputs = [item * node.expands + k for item in items for k in range(node.expands)]
        return Admitted(0.0, [1.0 + (item * 2654435761 % 4096) / 585.0 for item in outputs])

    def finish(self, node: StageNode, command: RunFinish) -> float:
        return 0.5

    def publish(self, command: ExportWeights | InstallWeights, lane: int) -> float:
        return 0.2

    def item_bytes(self, node: StageNode) -> int:
        return 4096


def disaggregated(num_lanes: int, chunk: int = 16) -> Plan:
    """Half of the lanes generate, the others verify and train."""
    half = num_lanes // 2
    first = tuple((lane,) for lane in range(half))
    second = tuple((lane,) for lane in range(half, num_lanes))
    return Plan(
        "custom",
        tuple(LaneSpec(lane) for lane in range(num_lanes)),
        {
            "generator": Placement(first),
            "verifier": Placement(second),
            "normalise": Placement(second),
            "learner": Placement(second),
        },
        {
            "generator.generate": StagePlan(chunk=8, max_running=8),
            "verifier.score": StagePlan(chunk=chunk),
            "normalise": StagePlan(chunk=max(1, chunk // GROUP)),
            "learner.logprobs": StagePlan(chunk=chunk),
            "learner.train": StagePlan(chunk=chunk),
        },
        order=("learner.train", "learner.logprobs", "normalise", "verifier.score"),
        deadline_seconds=1e9,
    )


def written_down(graph: FlowGraph, plan: Plan, num_items: int) -> tuple[list[Heard], float]:
    """The events of one step of so many samples, and the CPU seconds of the whole simulation."""
    simulation = Simulation(graph, plan, Steady())
    events: list[Heard] = []
    handle = simulation.engine.handle

    def noting(*heard: Event) -> list[Command]:
        events.append(heard)
        return handle(*heard)

    simulation.engine.handle = noting  # type: ignore[method-assign]
    start = time.process_time()
    simulation.run(num_items // GROUP, 1)
    return events, time.process_time() - start


def engine_seconds(graph: FlowGraph, plan: Plan, events: list[Heard]) -> float:
    """CPU seconds in which an engine handles these events."""
    engine = Engine(graph, plan)
    gc.collect()
    gc.freeze()  # the events are not the engine's: the collector need not look at them
    start = time.process_time()
    for heard in events:
        engine.handle(*heard)
    seconds = time.process_time() - start
    gc.unfreeze()
    assert not engine.failed
    assert not engine.steps
    return seconds


def most_in_flight(graph: FlowGraph, plan: Plan, events: list[Heard]) -> tuple[int, int]:
    """Bytes that an engine holds for a step when most items are in flight, and how many are."""
    engine = Engine(graph, plan)
    gc.collect()
    tracemalloc.start()
    held = most = 0
    for number, heard in enumerate(events):
        engine.handle(*heard)
        if number % 1000 == 0:
            states = engine.steps.values()
            entries = sum(ledger.in_flight for state in states for ledger in state.ledgers)
            if entries > most:
                held, most = tracemalloc.get_traced_memory()[0], entries
    tracemalloc.stop()
    return held, most


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    sizes = (10_000, 20_000, 40_000) if options.quick else (25_000, 50_000, 100_000)
    graph = Training(generator=Generator(), verifier=Verifier(), learner=Learner()).trace()
    plan = disaggregated(LANES)
    rows, per_item, in_flight, rates, loads = [], [], [], [], []
    for num_items in sizes:
        events, simulated = written_down(graph, plan, num_items)
        news = sum(not isinstance(event, Tick) for heard in events for event in heard)
        seconds = min(engine_seconds(graph, plan, events) for _ in range(2))
        held, entries = most_in_flight(graph, plan, events)
        rates.append(news / seconds)
        loads.append(news / simulated)
        per_item.append(held / num_items)
        in_flight.append(held / entries)
        rows.append([num_items, news, seconds, rates[-1], loads[-1], held / 1e6, per_item[-1],
                     in_flight[-1], entries])  # fmt: skip
    table(
        ["items a step", "events", "engine CPU s", "events/s", "events/s with simulation",
         "MB held", "bytes each", "bytes in flight", "in flight"],
        rows,
    )  # fmt: skip
    conclude(
        "engine_scale",
        {
            "lanes": LANES,
            "items": list(sizes),
            "events": [row[1] for row in rows],
            "events_per_second": rates,
            "events_per_second_with_simulation": loads,
            "bytes_held": [row[5] * 1e6 for row in rows],
            "bytes_per_item": per_item,
            "bytes_per_item_in_flight": in_flight,
            "items_in_flight": [row[8] for row in rows],
        },
        [
            Target("events per second of the engine alone", rates[-1], EVENTS_PER_SECOND),
            Target("linearity of memory", per_item[0] / max(per_item), LINEARITY),
            Target("bytes for each item in flight", max(in_flight), BYTES_IN_FLIGHT, at_most=True),
        ],
        options,
    )


if __name__ == "__main__":
    main()
