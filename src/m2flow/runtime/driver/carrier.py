"""`RayCarrier`: carries out the engine's commands on the lanes of a pool.

It keeps which lane holds which payload; its `Publisher` keeps where weights lie. Payloads go from
lane to lane; only the source items and the items that a step returns pass through here.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray import cloudpickle

from m2flow.engine.messages import (
    CallFailed,
    CallFinished,
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
from m2flow.engine.plan import Plan, StagePlan
from m2flow.errors import RunFailed
from m2flow.flow.batch import Batch
from m2flow.flow.graph import SOURCE, FlowGraph, StageNode
from m2flow.flow.worker import Worker
from m2flow.runtime.driver.pool import START_SECONDS, LaneGone, LanePool
from m2flow.runtime.driver.runner import Report
from m2flow.runtime.lane.exchange import ItemsKey
from m2flow.runtime.lane.host import joined_exits, share_of
from m2flow.runtime.lane.orders import (
    Answer,
    Ask,
    Do,
    DropStep,
    Fetch,
    FromLane,
    Load,
    Loaded,
    Meeting,
    Order,
    Placed,
    Release,
    Said,
)
from m2flow.runtime.transport.groups import lane_sets_of
from m2flow.runtime.transport.peering import PeerLost
from m2flow.runtime.weights.publisher import Publisher

PEER_SECONDS = 1.0
"""How long to wait for the end of a lane to be known, when another one misses it."""


@dataclass(frozen=True)
class Moved:
    """What becomes of the workers of a run that goes on under another plan.

    Attributes:
        kept: workers that stand where they stood, and stay as they are.
        states: where the states of others lie.
    """

    kept: frozenset[str]
    states: Mapping[str, Fetch]


class RayCarrier:
    """Carries out commands on lanes that are up.

    Args:
        pool: the lanes.
        graphs: the flow's traced methods by name.
        plan: gives the placement of all workers.
        workers: the flow's workers; each lane gets copies of those placed on it.
        plans: the plan of each of the graphs.
        version: number of the weights that the run begins with.
        load_seconds: longest that loading the workers may take.
        publish: the one way to send weights; by default it follows from where workers stand.
        moved: what is known of the run that this one goes on with on the same lanes, if any.

    Attributes:
        state_bytes: what each worker's state takes on a lane, as the workers say after loading.

    Raises:
        UserError: weights cannot be published that way.
        Exception: what a worker raised while it was loaded.
    """

    def __init__(
        self,
        pool: LanePool,
        graphs: Mapping[str, FlowGraph],
        plan: Plan,
        workers: Mapping[str, Worker],
        plans: Mapping[str, Plan],
        version: int = 0,
        load_seconds: float = START_SECONDS,
        publish: str | None = None,
        moved: Moved | None = None,
    ) -> None:
        self.pool, self.graphs, self.plan, self._plans = pool, graphs, plan, plans
        self._sources: dict[tuple[str, int], Batch] = {}
        self._holders: dict[tuple[str, int, int], dict[int, int]] = {}
        self._copied_to: dict[tuple[str, int, int], set[int]] = {}
        self._to_release: dict[tuple[str, int, int], list[tuple[int, Sequence[int]]]] = {}
        self._calls: dict[int, tuple[str, Command]] = {}
        self._held: dict[int, Do] = {}
        self._limited = {lane.id for lane in plan.lanes if lane.memory_bytes is not None}
        self._collective = {name for name, worker in workers.items() if worker.collective}
        order = [lane.id for lane in pool.lanes]
        self.publisher = Publisher(pool, plan, graphs, order, publish, pool.exchange.link)
        self.state_bytes = self._load(workers, version, load_seconds, moved)

    def _load(
        self, workers: Mapping[str, Worker], version: int, seconds: float, moved: Moved | None
    ) -> dict[str, int]:
        """Bring the workers up on their lanes; the most that each one's state takes on one."""
        order = [lane.id for lane in self.pool.lanes]
        placements = {name: spot for name, spot in self.plan.placements.items() if name in workers}
        positions = {
            name: [tuple(order.index(x) for x in gang) for gang in spot.replicas]
            for name, spot in placements.items()
        }
        lane_sets = {lanes for gangs in positions.values() for lanes in lane_sets_of(gangs)}
        broadcasts = tuple(self.publisher.groups().items())
        number = self.pool.new_number()
        sent = {name: cloudpickle.dumps(workers[name]) for name in placements}
        graphs = cloudpickle.dumps(dict(self.graphs))
        for lane in self.pool.lanes:
            placed = {
                name: Placed(
                    sent[name],
                    tuple(positions[name]),
                    tuple(order.index(x) for x in spot.lanes),
                    None if moved is None else moved.states.get(name),
                )
                for name, spot in placements.items()
                if lane.id in spot.lanes
            }
            load = Load(
                number,
                graphs,
                placed,
                version,
                next((x.memory_bytes for x in self.plan.lanes if x.id == lane.id), None),
                self.plan.deadline_seconds,
                self._meeting() if lane_sets or broadcasts else None,
                tuple(sorted(lane_sets)),
                broadcasts,
                None if moved is None else tuple(set(placed) & moved.kept),
            )
            self.pool.send(lane.id, load)
        return self._loaded(number, seconds)

    def _meeting(self) -> Meeting:
        first = self.pool.addresses[self.pool.lanes[0].id]
        nodes = {address.node for address in self.pool.addresses.values()}
        return Meeting(first.host, first.meeting_port, len(nodes) == 1, self.plan.deadline_seconds)

    def _loaded(self, number: int, seconds: float) -> dict[str, int]:
        missing = {lane.id for lane in self.pool.lanes}
        state_bytes: dict[str, int] = {}
        deadline = time.monotonic() + seconds
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RunFailed(f"lanes {sorted(missing)} have not loaded within {seconds:g} s")
            for lane, message in self.pool.receive(left):
                if not isinstance(message, Loaded) or message.number != number:
                    continue  # the last words of an earlier run
                if message.error is not None:
                    raise pickle.loads(message.error)
                missing.discard(lane)
                for name, size in message.state_bytes.items():
                    state_bytes[name] = max(size, state_bytes.get(name, 0))
        return state_bytes

    # --- carrier ----------------------------------------------------------------------------------

    def submit(self, flow: str, step: int, batch: Batch) -> None:
        self._sources[flow, step] = batch

    def carry_out(self, flow: str, command: Command) -> None:
        match command:
            case RunCall(node=index, lanes=lanes, step=step):
                self._calls[command.call] = (flow, command)
                node = self.graphs[flow].nodes[index]
                for lane in lanes:
                    inputs = share_of(command, lane, collective=node.worker in self._collective)
                    fetches = self._fetches(flow, step, lane, inputs)
                    released = self._to_release.pop((flow, step, lane), [])
                    in_pieces = command.fused or (
                        node.streaming and self._wanted_early(flow, node, lane)
                    )
                    self._hold(lane, Do(flow, command, fetches, released, in_pieces))
            case FeedCall(lanes=lanes, step=step):
                for lane in lanes:
                    fetches = self._fetches(flow, step, lane, command.inputs)
                    self._order(lane, Do(flow, command, fetches))
            case RunFinish(lanes=lanes):
                for lane in lanes:
                    self._hold(lane, Do(flow, command))
            case ExportWeights(source=source, version=version, lanes=lanes):
                for lane, sends in self.publisher.export(source, version, lanes).items():
                    self._order(lane, Do(flow, command, sends=sends))
            case InstallWeights(lanes=(lane,), local=local):
                exports = [] if local else self.publisher.install(command)
                self._order(lane, Do(flow, command, exports=exports))
            case MoveState(lane=lane, early=True) if lane in self._held:
                self._order(lane, replace(self._held.pop(lane), early=command))
            case MoveState(lane=lane):
                self._order(lane, Do(flow, command))
            case ReleaseItems(step=step, producer=producer, items=items):
                self._release(flow, step, producer, items)
            case _:
                raise AssertionError(f"no lane carries out {command}")

    def _hold(self, lane: int, order: Do) -> None:
        """Give a call to a lane; under a memory limit with the early move that may come next.

        A lane that works on a call takes up nothing else, so what is to go on beside it comes
        along with it.
        """
        if lane in self._limited:
            self._let_go(lane)
            self._held[lane] = order
        else:
            self._order(lane, order)

    def _order(self, lane: int, order: Order) -> None:
        self._let_go(lane)
        self.pool.send(lane, order)

    def _let_go(self, lane: int) -> None:
        held = self._held.pop(lane, None)
        if held is not None:
            self.pool.send(lane, held)

    def _fetches(self, flow: str, step: int, lane: int, inputs: Inputs) -> list[Fetch]:
        """What a call reads that is not on its lane."""
        fetches = []
        for parts in inputs:
            for part in parts:
                if not part.items:
                    continue
                if part.producer == SOURCE:
                    batch = self._sources[flow, step].take(part.items)
                    same_node = self.pool.is_here(lane)
                    packed = self.pool.exchange.wrap(batch, lane, same_node=same_node)
                    fetches.append(Fetch(step, SOURCE, part.items, packed=packed))
                    continue
                elsewhere: dict[int, list[int]] = {}
                holders = self._holders[flow, step, part.producer]
                for item in part.items:
                    if holders[item] != lane:
                        elsewhere.setdefault(holders[item], []).append(item)
                if elsewhere:
                    self._copied_to.setdefault((flow, step, part.producer), set()).add(lane)
                for holder, items in elsewhere.items():
                    fetches.append(Fetch(step, part.producer, tuple(items), lane=holder))
        return fetches

    def _release(self, flow: str, step: int, producer: int, items: Sequence[int]) -> None:
        if producer == SOURCE:
            return
        key = (flow, step, producer)
        lanes = {self._holders[key].pop(item) for item in items if item in self._holders[key]}
        lanes |= self._copied_to.get(key, set())
        if self.graphs[flow].nodes[producer].loop is not None:
            for lane in lanes:
                self._order(lane, Release(flow, step, producer, tuple(items)))
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
        for lane in list(self._held):
            self._let_go(lane)
        try:
            said = self.pool.receive(seconds)
            if any(self._missed_another(message) for _, message in said):
                said += self._look_for_the_lost()
        except LaneGone as error:
            self.pool.exchange.forget(error.lane)
            return [Report(LaneLost(error.lane, self._end_of(error)))]
        reports: list[Report] = []
        for lane, message in said:
            if isinstance(message, Said):
                self._note(lane, message)
                reports += message.reports
        return reports

    def _missed_another(self, message: FromLane) -> bool:
        """Whether a call failed as it does when another lane is gone."""
        if not isinstance(message, Said):
            return False
        for report in message.reports:
            if isinstance(report.event, CallFailed):
                _, command = self._calls.get(report.event.call, ("", None))
                if isinstance(report.event.error, PeerLost) or (
                    isinstance(command, RunCall | RunFinish) and len(command.lanes) > 1
                ):
                    return True
        return False

    def _look_for_the_lost(self) -> list[tuple[int, FromLane]]:
        """What else is said for a while; a lane that was lost itself is the first cause.

        Raises:
            LaneGone: there is one.
        """
        said: list[tuple[int, FromLane]] = []
        deadline = time.monotonic() + PEER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            said += self.pool.receive(left)
        return said

    def _end_of(self, error: LaneGone) -> str:
        spots = self.plan.placements.items()
        there = ", ".join(worker for worker, spot in spots if error.lane in spot.lanes)
        return f"{error.reason} (it held {there or 'nothing'})"

    def _note(self, lane: int, said: Said) -> None:
        """Remember where payloads and weights lie."""
        for report in said.reports:
            match report.event:
                case ItemsProduced(call=number, items=items):
                    flow, command = self._calls[number]
                    assert isinstance(command, RunCall)
                    key = (flow, command.step, command.node)
                    self._holders.setdefault(key, {}).update(dict.fromkeys(items, lane))
                case CallFinished(call=number):
                    self.publisher.finished(number)
        if said.exports:
            self.publisher.laid_out(said.exports)

    def collect(self, flow: str, step: int) -> Batch:
        """The items that the step returned; then every lane lets the step's payloads go."""
        pieces = []
        for producer in self.graphs[flow].output_nodes:
            by_lane: dict[int, list[int]] = {}
            for item, lane in self._holders.get((flow, step, producer), {}).items():
                by_lane.setdefault(lane, []).append(item)
            for lane, items in by_lane.items():
                key = ItemsKey(flow, step, producer, tuple(items))
                pieces.append(self._fetched(lane, key))
        graph = self.graphs[flow]
        joined = joined_exits(graph, graph.output_nodes, lambda: Batch.concat(pieces))
        for spec in self.pool.lanes:
            self._order(spec.id, DropStep(flow, step))
        self._sources.pop((flow, step))
        for table in (self._holders, self._copied_to, self._to_release):
            for done in [key for key in table if key[:2] == (flow, step)]:
                del table[done]
        for number, (name, command) in list(self._calls.items()):
            if name == flow and getattr(command, "step", None) == step:
                del self._calls[number]
        return joined.select(sorted(range(len(joined)), key=joined.ids.__getitem__))

    def _fetched(self, lane: int, key: ItemsKey) -> Batch:
        try:
            return self.pool.exchange.ask(lane, key, self.plan.deadline_seconds)
        except PeerLost:
            self._look_for_the_lost()
            raise

    # --- beside the steps -------------------------------------------------------------------------

    def worker_call(self, worker: str, method: str, *args: Any) -> Any:
        """Call a method of a worker on its first lane; the answer."""
        return self._ask(self.plan.placements[worker].lanes[:1], worker, method, args)[0]

    def worker_call_everywhere(self, worker: str, method: str, *args: Any) -> list[Any]:
        """Call a method of a worker on all of its lanes; the answers in order of rank."""
        return self._ask(self.plan.placements[worker].lanes, worker, method, args)

    def _ask(
        self, lanes: Sequence[int], worker: str, method: str, args: tuple[Any, ...]
    ) -> list[Any]:
        arguments = cloudpickle.dumps(args)
        answers = self.pool.ask_all(
            dict.fromkeys(lanes, lambda number: Ask(number, worker, method, arguments)),
            self.plan.deadline_seconds,
        )
        return [_value(answers[lane]) for lane in lanes]

    def close(self) -> None:
        """Nothing: the workers end with the pool, or make way for those of the next run."""


def _value(answer: Answer) -> Any:
    value = pickle.loads(answer.value)
    if answer.raised:
        raise value
    return value
