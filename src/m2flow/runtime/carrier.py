"""`RayCarrier`: carries out the engine's commands on lanes that are Ray actors.

It keeps two things: which lane holds which payload, and which answers are outstanding. Payloads go
from lane to lane; only the source items and the items that a step returns pass through here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from m2flow.engine.messages import (
    Command,
    ExportWeights,
    FeedCall,
    Inputs,
    InstallWeights,
    ItemsProduced,
    LaneLost,
    MoveState,
    ReleaseItems,
    RunCall,
    RunFinish,
)
from m2flow.engine.plan import LaneSpec, Plan, StagePlan
from m2flow.engine.runner import Report
from m2flow.errors import RunFailed, UserError
from m2flow.flow.batch import Batch
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode
from m2flow.flow.worker import Worker
from m2flow.runtime.lane import Fetch, LaneProcess, Meeting
from m2flow.runtime.serialization import register_tensors

START_SECONDS = 120.0
"""Longest that lanes may take to start, or workers to load."""

CLOSE_SECONDS = 3.0
"""Longest that lanes may take to close before they are ended."""

ROOM_SECONDS = 3.0
"""Longest that the cluster may take to know that the lanes of an earlier run have ended."""


@dataclass(slots=True)
class _Outstanding:
    lane: int
    flow: str
    step: int
    node: int | None
    streaming: bool


class RayCarrier:
    """Lanes on a Ray cluster that has been connected to.

    Args:
        graphs: the flow's traced methods by name.
        plan: gives the lanes and the placement of workers.
        workers: the flow's workers; each lane gets copies of those placed on it.
        plans: the plan of each of the graphs.
        version: number of the weights that the run begins with.
        load_seconds: longest that loading the workers may take.
    """

    def __init__(
        self,
        graphs: Mapping[str, FlowGraph],
        plan: Plan,
        workers: Mapping[str, Worker],
        plans: Mapping[str, Plan],
        version: int = 0,
        load_seconds: float = START_SECONDS,
    ) -> None:
        register_tensors()
        _check_room(plan)
        self.graphs, self.plan, self._plans = graphs, plan, plans
        self._lanes = {lane.id: _start(lane) for lane in plan.lanes}
        self._outstanding: dict[Any, _Outstanding] = {}
        self._sources: dict[tuple[str, int], Batch] = {}
        self._holders: dict[tuple[str, int, int], dict[int, int]] = {}
        self._copied_to: dict[tuple[str, int, int], set[int]] = {}
        self._to_release: dict[tuple[str, int, int], list[tuple[int, Sequence[int]]]] = {}
        self._exports: dict[tuple[str, int], Any] = {}
        try:
            self._load(workers, version, load_seconds)
        except BaseException:
            self._end_lanes()
            raise

    def _load(self, workers: Mapping[str, Worker], version: int, seconds: float) -> None:
        order = list(self._lanes)
        addresses = self._get([lane.ready.remote() for lane in self._lanes.values()], seconds)
        placements = {
            name: spot.lanes for name, spot in self.plan.placements.items() if name in workers
        }
        positions = {
            tuple(sorted(order.index(lane) for lane in lanes))
            for lanes in placements.values()
            if len(lanes) > 1
        }
        meetings: list[Meeting | None] = [None] * len(order)
        if positions:
            port = self._get([self._lanes[order[0]].free_port.remote()], seconds)[0]
            meetings = [
                Meeting(
                    index,
                    len(order),
                    f"{addresses[0]}:{port}",
                    tuple(sorted(positions)),
                    same_node=len(set(addresses)) == 1,
                    timeout_seconds=self.plan.deadline_seconds,
                )
                for index in range(len(order))
            ]
        loads = []
        for index, (number, lane) in enumerate(self._lanes.items()):
            placed = {
                name: (
                    workers[name],
                    tuple(sorted(order.index(x) for x in lanes)),
                    lanes.index(number),
                )
                for name, lanes in placements.items()
                if number in lanes
            }
            sent = cloudpickle.dumps(placed)
            loads.append(lane.load.remote(self.graphs, sent, meetings[index], version))
        self.process_ids = dict(zip(order, self._get(loads, seconds), strict=True))

    def _get(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Answers of lanes, with a deadline; a worker's own error comes through as it is."""
        try:
            return list(ray.get(list(references), timeout=seconds))
        except ray.exceptions.GetTimeoutError:
            raise RunFailed(f"lanes have not answered within {seconds:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    # --- carrier ----------------------------------------------------------------------------------

    def submit(self, flow: str, step: int, batch: Batch) -> None:
        self._sources[flow, step] = batch

    def carry_out(self, flow: str, command: Command) -> None:
        match command:
            case RunCall(node=index, lanes=lanes, step=step):
                node = self.graphs[flow].nodes[index]
                for lane, inputs in zip(lanes, command.inputs, strict=True):
                    fetches = self._fetches(flow, step, lane, inputs)
                    released = self._to_release.pop((flow, step, lane), [])
                    in_pieces = node.streaming and self._wanted_early(flow, node, lane)
                    process = self._lanes[lane]
                    run = process.stream if in_pieces else process.call
                    answer = run.remote(flow, command, fetches, released)
                    self._expect(answer, lane, flow, step, index, in_pieces)
            case FeedCall(lane=lane, step=step):
                fetches = self._fetches(flow, step, lane, command.inputs)
                self._lanes[lane].feed.remote(flow, command, fetches)
            case RunFinish(lanes=lanes, step=step):
                for lane in lanes:
                    self._expect(self._lanes[lane].finish.remote(flow, command), lane, flow, step)
            case ExportWeights(source=source, version=version, lanes=(lane,)):
                export = self._lanes[lane].export_weights.options(num_returns=2)
                answer, weights = export.remote(flow, command)
                self._exports = {(source, version): weights}
                self._expect(answer, lane, flow)
            case InstallWeights(source=source, version=version, lanes=(lane,), local=local):
                weights = None if local else self._exports[source, version]
                install = self._lanes[lane].install_weights
                self._expect(install.remote(flow, command, weights), lane, flow)
            case MoveState(lane=lane):
                self._expect(self._lanes[lane].move.remote(command), lane, flow)
            case ReleaseItems(step=step, producer=producer, items=items):
                self._release(flow, step, producer, items)
            case _:
                raise AssertionError(f"no lane carries out {command}")

    def _expect(
        self,
        answer: Any,
        lane: int,
        flow: str,
        step: int = 0,
        node: int | None = None,
        streaming: bool = False,
    ) -> None:
        self._outstanding[answer] = _Outstanding(lane, flow, step, node, streaming)

    def _fetches(self, flow: str, step: int, lane: int, inputs: Inputs) -> list[Fetch]:
        """What a call reads that is not on its lane."""
        fetches = []
        for parts in inputs:
            for part in parts:
                if part.producer == SOURCE:
                    batch = self._sources[flow, step].take(part.items)
                    fetches.append(Fetch(step, SOURCE, part.items, batch=batch))
                    continue
                elsewhere: dict[int, list[int]] = {}
                holders = self._holders[flow, step, part.producer]
                for item in part.items:
                    if holders[item] != lane:
                        elsewhere.setdefault(holders[item], []).append(item)
                if elsewhere:
                    self._copied_to.setdefault((flow, step, part.producer), set()).add(lane)
                for holder, items in elsewhere.items():
                    process = self._lanes[holder]
                    fetches.append(Fetch(step, part.producer, tuple(items), lane=process))
        return fetches

    def _release(self, flow: str, step: int, producer: int, items: Sequence[int]) -> None:
        if producer == SOURCE:
            return
        key = (flow, step, producer)
        lanes = {self._holders[key].pop(item) for item in items if item in self._holders[key]}
        lanes |= self._copied_to.get(key, set())
        if self.graphs[flow].nodes[producer].loop is not None:
            for lane in lanes:
                self._lanes[lane].release_in_turn.remote(flow, step, producer, items)
            return
        for lane in lanes:
            self._to_release.setdefault((flow, step, lane), []).append((producer, items))

    def _wanted_early(self, flow: str, node: StageNode, lane: int) -> bool:
        """Whether anybody can use a call's first items before its last: another lane, or the
        engine, which feeds the call by what it has finished."""
        stage = self._plans[flow].stages.get(node.name, StagePlan())
        readers = [other for other in self.graphs[flow].nodes if node.index in other.inputs]
        lanes = {x for other in readers for x in self.plan.placements[other.worker].lanes}
        return stage.max_running is not None or not lanes <= {lane}

    def wait(self, seconds: float) -> list[Report]:
        """Reports of the lanes that have answered; waits for the first one, but no longer."""
        waiting = list(self._outstanding)
        if not waiting:
            return []
        if len(waiting) == 1 and not self._outstanding[waiting[0]].streaming:
            return self._read(waiting[0], seconds)  # one trip to Ray instead of two
        ready, _ = ray.wait(waiting, num_returns=1, timeout=seconds)
        if ready and len(waiting) > 1:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        reports: list[Report] = []
        for answer in ready:
            reports += self._read(answer)
        return reports

    def _read(self, answer: Any, seconds: float | None = None) -> list[Report]:
        expected = self._outstanding[answer]
        try:
            if not expected.streaming:
                reports = ray.get(answer, timeout=seconds)
                del self._outstanding[answer]
            else:
                reports = []
                try:
                    reports = [ray.get(next(answer))]
                except StopIteration:
                    del self._outstanding[answer]
        except ray.exceptions.GetTimeoutError:
            return []
        except (ActorDiedError, ActorUnavailableError) as error:
            self._outstanding.pop(answer, None)
            return [Report(LaneLost(expected.lane, str(error).splitlines()[0]))]
        except RayError as error:
            raise RunFailed(f"lane {expected.lane} did not answer") from error
        for report in reports:
            if isinstance(report.event, ItemsProduced):
                assert expected.node is not None
                key = (expected.flow, expected.step, expected.node)
                holders = self._holders.setdefault(key, {})
                holders.update(dict.fromkeys(report.event.items, expected.lane))
        return list(reports)

    def collect(self, flow: str, step: int) -> Batch:
        """The items that the step returned; then every lane lets the step's payloads go."""
        asked = []
        for producer in self.graphs[flow].output_nodes:
            by_lane: dict[int, list[int]] = {}
            for item, lane in self._holders.get((flow, step, producer), {}).items():
                by_lane.setdefault(lane, []).append(item)
            asked += [
                self._lanes[lane].export_items.remote(flow, step, producer, items)
                for lane, items in by_lane.items()
            ]
        joined = Batch.concat(self._get(asked, self.plan.deadline_seconds))
        for process in self._lanes.values():
            process.drop_step.remote(flow, step)
        self._sources.pop((flow, step))
        for table in (self._holders, self._copied_to, self._to_release):
            for key in [key for key in table if key[:2] == (flow, step)]:
                del table[key]
        return joined.select(sorted(range(len(joined)), key=joined.ids.__getitem__))

    # --- beside the steps -------------------------------------------------------------------------

    def worker_call(self, worker: str, method: str, *args: Any) -> Any:
        """Call a method of a worker on its first lane; the answer."""
        lane = self.plan.placements[worker].lanes[0]
        call = self._lanes[lane].worker_call.remote(worker, method, *args)
        return self._get([call], self.plan.deadline_seconds)[0]

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """Call a method of a worker on all of its lanes; the answers in order of rank."""
        lanes = self.plan.placements[worker].lanes
        calls = [self._lanes[lane].worker_call.remote(worker, method, *args) for lane in lanes]
        return self._get(calls, self.plan.deadline_seconds)

    def close(self) -> None:
        """End the lanes."""
        closing = [process.shut_down.remote() for process in self._lanes.values()]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        self._end_lanes()

    def _end_lanes(self) -> None:
        for process in self._lanes.values():
            ray.kill(process)
        self._lanes = {}


def _resources(lane: LaneSpec) -> dict[str, int]:
    return {"num_cpus": len(lane.cores)} if lane.gpu is None else {"num_gpus": 1}


def _check_room(plan: Plan) -> None:
    """Refuse lanes that the cluster has no room for: Ray would wait for it without a word.

    What the lanes of a run that has just ended held comes back a moment later.
    """
    needed = {
        name: sum(_resources(lane).get(key, 0) for lane in plan.lanes)
        for key, name in (("num_cpus", "CPU"), ("num_gpus", "GPU"))
    }
    deadline = time.monotonic() + ROOM_SECONDS
    while True:
        free = ray.available_resources()
        lacking = [name for name, count in needed.items() if count > free.get(name, 0)]
        if not lacking:
            return
        if time.monotonic() > deadline:
            name = lacking[0]
            raise UserError(
                f"the lanes need {needed[name]} {name}s, the Ray cluster has "
                f"{free.get(name, 0):g} free",
                key="lanes",
                hint="use fewer lanes, or end what else runs on the cluster",
            )
        time.sleep(0.05)


def _start(lane: LaneSpec) -> Any:
    """Start a lane's process."""
    resources = _resources(lane)
    actor = ray.remote(concurrency_groups={"items": 2, "control": 1}, **resources)(LaneProcess)
    return actor.remote(lane)
