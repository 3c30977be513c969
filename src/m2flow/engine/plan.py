"""`Plan`: the micro flow, as the engine reads it. Plain data.

It says which lanes each worker has, how many units a call takes, how much may wait on an edge and
in which order a lane prefers its stages. `m2flow.plan` reads and writes it as JSON, checks it
against a graph and a machine, and builds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

LONGEST_DEADLINE = 1e6
"""Seconds of a deadline at most: timers of the system that count milliseconds in 32 bits hold it,
and twice as many."""


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """One process that owns one accelerator, or a fixed set of CPU cores.

    Attributes:
        id: the lane's number.
        kind: "cpu" or "gpu"; beside accelerators of another sort, the name of its own, as "h100".
        cores: CPU cores the lane is bound to; empty for no binding.
        gpu: index of the accelerator; None for a lane of CPU cores, or one that is only priced.
        memory_bytes: the most that states resident on the lane and the calls that run there may
            take; None for no limit.
        node: which machine of the cluster the lane is on; 0 is the one that launches the run.
        reserved_for: the one worker that may stand on the lane, in a process of its own; such a
            lane may share the cores of another one.
    """

    id: int
    kind: str = "cpu"
    cores: tuple[int, ...] = ()
    gpu: int | None = None
    memory_bytes: int | None = None
    node: int = 0
    reserved_for: str | None = None


@dataclass(frozen=True)
class Placement:
    """Where a worker stands.

    Attributes:
        replicas: each replica is the tuple of lanes (a gang) that take part in each of its calls.
        state_bytes: what its state takes on each lane while it is resident.
        working_bytes: what a call of a stage, or its `finish`, takes there beside the state, at
            most.
        layout: name of the layout of each replica, as the worker declares it
            (`m2flow.flow.worker.Layout`).
    """

    replicas: tuple[tuple[int, ...], ...]
    state_bytes: int = 0
    working_bytes: int = 0
    layout: str = "one"

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """Every lane that holds the worker, in order of rank."""
        return tuple(dict.fromkeys(lane for gang in self.replicas for lane in gang))

    def stands_as(self, other: Placement) -> bool:
        """Whether a worker that stands as `other` says need not be brought up anew."""
        return (self.replicas, self.layout) == (other.replicas, other.layout)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How a stage is cut into calls.

    Attributes:
        chunk: units a call takes; None for all that its window (mini-batch or step) has.
        max_running: for a streaming stage, the most input items a call may hold at once.
    """

    chunk: int | None = None
    max_running: int | None = None


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """What may wait, or be in the making, between two stages; None for no limit."""

    max_items: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """A complete micro flow for one graph.

    Attributes:
        mode: the name of the builder that made it, or "custom".
        lanes: the lanes used.
        placements: by worker (a pure function counts as a worker of its own).
        stages: by stage name; a stage left out runs one call for each window.
        edges: by `producer->consumer`; an edge left out has no limit.
        order: stage names, most preferred first, where a lane has a choice; topological if empty.
        max_staleness: how many steps the weights that generate may lag behind (0: on-policy).
        deadline_seconds: longest that a call may take before the run is stopped with an account
            of who waits for whom; of a plan that is run LONGEST_DEADLINE at most.
        fuse_loops: whether a loop whose members stand on the same single lanes goes around there,
            without a trip to the controller for each stage.
        predicted_seconds: what the planner expects of a step, or None.
    """

    mode: str
    lanes: tuple[LaneSpec, ...]
    placements: Mapping[str, Placement]
    stages: Mapping[str, StagePlan] = field(default_factory=dict)
    edges: Mapping[str, EdgePlan] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    max_staleness: int = 0
    deadline_seconds: float = 600.0
    predicted_seconds: float | None = None
    fuse_loops: bool = True

    def stands_as(self, other: Plan) -> bool:
        """Whether all workers stand as they do under another plan of the same flow."""
        there = other.placements
        return all(spot.stands_as(there[worker]) for worker, spot in self.placements.items())
