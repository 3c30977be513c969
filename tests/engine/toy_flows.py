"""Flows whose stages are never called, plans for them, and a driver's events in few words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from m2flow.engine import Engine, LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.messages import CallFinished, Command, ItemsProduced, RunCall
from m2flow.flow import Flow, FlowGraph, Worker, stage

T = TypeVar("T")
Lanes = Mapping[str, Iterable[Any]]


def nothing(*batches: Any) -> Any:
    """What the stages of these tests would do."""


class Model(Worker):
    """Stages of every kind; none of them is ever called."""

    @stage(streaming=True)
    def roll(self, b: Any) -> Any: ...

    @stage(streaming=True, expands=2)
    def sample(self, b: Any) -> Any: ...

    @stage
    def score(self, b: Any) -> Any: ...

    @stage(sticky=True)
    def act(self, b: Any) -> Any: ...

    @stage(waits=True)
    def pause(self, b: Any) -> Any:
        yield

    @stage(accumulates=True)
    def log(self, b: Any) -> Any: ...

    @stage(accumulates=True, minibatches=2)
    def train(self, b: Any) -> Any: ...

    @train.finish
    def train_finish(self) -> dict[str, float]: ...


@stage(unit="group")
def normalise(b: Any) -> Any: ...


def graph_of(
    step: Callable[..., Any], *workers: str, publish: Iterable[tuple[str, str]] = ()
) -> FlowGraph:
    """The graph of a flow with these workers and weight edges; `step` takes them and the stream."""
    made = {name: Model() for name in workers}

    def sync(self: Flow) -> None:
        for source, target in publish:
            made[source].publish(made[target])

    body = {
        "__annotations__": dict.fromkeys(workers, Model),
        "step": lambda self, x: step(*made.values(), x),
        "sync": sync,
    }
    return type("Toy", (Flow,), body)(**made).trace()


def plan_of(
    lanes: Mapping[str, Iterable[int | tuple[int, ...]]], memory: int | None = None, **more: Any
) -> Plan:
    """A plan from worker to the lanes (or gangs) of its replicas."""
    replicas = {
        worker: tuple((spot,) if isinstance(spot, int) else spot for spot in spots)
        for worker, spots in lanes.items()
    }
    used = sorted({lane for gangs in replicas.values() for gang in gangs for lane in gang})
    state = more.pop("state_bytes", 0)
    placements = {worker: Placement(gangs, state) for worker, gangs in replicas.items()}
    specs = tuple(LaneSpec(lane, memory_bytes=memory) for lane in used)
    return Plan("custom", specs, placements, **more)


def only(kind: type[T], commands: Iterable[Command]) -> T:
    """The one command of this kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__}"
    return found[0]


def all_of(kind: type[T], commands: Iterable[Command]) -> list[T]:
    return [command for command in commands if isinstance(command, kind)]


def items_of(command: Any, lane: int = 0) -> tuple[int, ...]:
    """Items of a call's first input, on the lane in this place of its gang."""
    return tuple(sorted(item for part in command.inputs[lane][0] for item in part.items))


def made(call: RunCall, *items: int) -> ItemsProduced:
    """The first lane of a call has made items."""
    return ItemsProduced(call.call, call.lanes[0], items)


def finish(
    engine: Engine, call: Any, leaving: Iterable[int] = (), expands: int = 1
) -> list[Command]:
    """All lanes of a call produce everything and finish; the commands that follow."""
    commands: list[Command] = []
    for place, lane in enumerate(call.lanes):
        if isinstance(call, RunCall):
            items = [i * expands + k for i in items_of(call, place) for k in range(expands)]
            gone = tuple(item for item in items if item in leaving)
            commands += engine.handle(ItemsProduced(call.call, lane, tuple(items), 0, gone))
        commands += engine.handle(CallFinished(call.call, lane))
    return commands


CHAIN = graph_of(lambda a, b, x: b.score(a.score(x)), "a", "b")
APART = plan_of({"a": [0], "b": [1]})
STREAM = graph_of(lambda a, x: a.sample(x), "a")


def streaming(**stages: Any) -> Plan:
    return plan_of({"a": [0, 1]}, stages={"a.sample": StagePlan(**stages)})
