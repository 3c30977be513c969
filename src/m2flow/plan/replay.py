"""`replay`: a recorded run under another plan, item by item.

Every item costs what it cost in the record: a call the sum of its items and the least price of a
call, a streamed item the growth that it had. What the record cannot say of single items (switches,
links, the way of a command to its lane) comes from a profile that is fitted to it. Played under its
own plan a run takes the time that it took; what a plan would change of the stages' own speed, such
as lanes that share a memory bus, it does not know.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from m2flow.engine.messages import ExportWeights, InstallWeights, LaneCommand, RunFinish
from m2flow.engine.plan import Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.measured import Observed, fit
from m2flow.plan.prediction import Prediction
from m2flow.plan.profile import Profile
from m2flow.plan.replay_record import Record, taken_apart
from m2flow.plan.replay_spans import command_key
from m2flow.plan.simulate_account import predicted
from m2flow.plan.simulate_timing import ProfileTiming
from m2flow.simulation.driver import Simulation
from m2flow.simulation.timing import Admitted, Transfer


class RecordedTiming(ProfileTiming):
    """What a record says of time; what it does not say, a profile does.

    Args:
        graph, plan: what is played.
        profile: fitted to the record.
        record: the run, taken apart.
        numbers: for each step played the recorded step that it stands for.
    """

    def __init__(
        self,
        graph: FlowGraph,
        plan: Plan,
        profile: Profile,
        record: Record,
        numbers: Sequence[int],
    ) -> None:
        super().__init__(graph, plan, profile)
        self._record, self._numbers = record, numbers
        self._turns: dict[tuple[int, int, int], int] = {}

    def dispatch(self, command: LaneCommand) -> float:
        key = command_key(command, self._numbers.__getitem__)
        return self._record.dispatches.get(key or (), self._record.dispatch)

    def call(
        self, node: StageNode, step: int, lanes: Sequence[int], shares: Sequence[Sequence[int]]
    ) -> float:
        spent, number = self._record.least.get(node.index, 0.0), self._numbers[step]
        for item in (item for share in shares for item in share):
            key = (node.index, step, item)
            turns = self._record.seconds.get((node.index, number, item))
            if not turns:  # the record has lost it
                return super().call(node, step, lanes, shares)
            turn = self._turns[key] = self._turns.get(key, -1) + 1
            spent += turns[min(turn, len(turns) - 1)]
        return max(0.0, spent)

    def admit(self, node: StageNode, step: int, lane: int, items: Sequence[int]) -> Admitted:
        number, known = self._numbers[step], self._record.needs
        outputs = [item * node.expands + k for item in items for k in range(node.expands)]
        usual = statistics.fmean(known.values()) if known else 0.0
        return Admitted(0.0, [known.get((node.index, number, out), usual) for out in outputs])

    def resume(
        self,
        node: StageNode,
        step: int,
        lane: int,
        outputs: Sequence[int],
        grown: Sequence[float],
    ) -> float:
        return 0.0  # it is in the growth that items had

    def round(self, node: StageNode, lane: int, running: int) -> float:
        return pace(self.profile, node, running)

    def hands_on(self, node: StageNode, finished: int, running: int) -> bool:
        return True  # items end together where they were handed on together

    def finish(self, node: StageNode, command: RunFinish) -> float:
        key = (node.index, self._numbers[command.step], command.minibatch)
        known = self._record.finishes.get(key)
        return super().finish(node, command) if known is None else known

    def publish(self, command: ExportWeights | InstallWeights, lane: int) -> float:
        version = self._numbers[command.version - 1] + 1
        if isinstance(command, ExportWeights):
            exports = self._record.exports
            return exports.get((command.source, version), _mean(list(exports.values())))
        known = self._record.installs
        own = known.get((command.source, command.target, version, lane))
        if own is not None and own[1] == command.local:
            return own[0]
        some = [
            (seconds, local, at)
            for (source, target, at, _), (seconds, local) in known.items()
            if (source, target) == (command.source, command.target)
        ]
        alike = [(seconds, at) for seconds, local, at in some if local == command.local]
        alike = alike or [(seconds, at) for seconds, _, at in some]
        of_step = [seconds for seconds, at in alike if at == version]
        return _mean(of_step or [seconds for seconds, _ in alike])

    def transfer(self, transfer: Transfer) -> float:
        known, step = self._record.transfers, self._numbers[transfer.step]
        each = [known.get((transfer.node.index, step, item)) for item in transfer.items]
        seconds = [one for one in each if one is not None]
        return sum(seconds) if len(seconds) == len(each) else super().transfer(transfer)

    def leaves(self, node: StageNode, step: int, item: int) -> bool:
        assert node.loop is not None
        wanted = self._record.visits.get((node.loop, self._numbers[step], item), 1)
        key = (node.loop, step, item)
        made = self._visits[key] = self._visits.get(key, 0) + 1
        return made >= wanted


def replay(graph: FlowGraph, recorded: Observed, plan: Plan) -> Prediction:
    """What a recorded run would have taken under a plan.

    Args:
        graph: of the steps.
        recorded: whole steps of a run, one after the other.
        plan: any plan on as many lanes of a replica as the workers had.

    Raises:
        UserError: the record holds no whole steps, or not the items of its calls, or the plan has
            replicas of other sizes than were recorded.
    """
    return replay_steps(graph, recorded, plan)[0]


def replay_steps(
    graph: FlowGraph, recorded: Observed, plan: Plan
) -> tuple[Prediction, tuple[float, ...]]:
    """The same, with the seconds of each step."""
    if not recorded.steps:
        raise UserError("the timeline holds no whole step", key="timeline.json")
    profile = fit(graph, [recorded])
    record = taken_apart(graph, recorded, lambda node, running: pace(profile, node, running))
    warm = 1 if any(lane.memory_bytes is not None for lane in plan.lanes) else 0
    warm = max(warm, plan.max_staleness)
    numbers = record.numbers
    padded = [numbers[0]] * warm + numbers + [numbers[-1]] * plan.max_staleness
    timing = RecordedTiming(graph, plan, profile, record, padded)
    simulation = Simulation(graph, plan, timing, length=timing.said_length)
    run = simulation.run(recorded.num_items, len(padded))
    counted = range(warm, warm + len(numbers))
    ends = run.step_ends
    marks = [ends[step - 1] if step else run.step_starts[0] for step in counted]
    seconds = [
        ends[step] - mark + _beside(record, n, plan)
        for n, (step, mark) in enumerate(zip(counted, marks, strict=True))
    ]
    return predicted(plan, run, counted, {}, seconds), tuple(seconds)


def _beside(record: Record, number: int, plan: Plan) -> float:
    """Seconds of a step that belong to no lane: until the first call, and after the last one."""
    if plan.max_staleness:  # they go on beside other steps
        return 0.0
    return max(0.0, record.before[number] - record.dispatch) + record.after[number]


def pace(profile: Profile, node: StageNode, running: int) -> float:
    """Seconds of a unit of growth of a streaming stage.

    Where nothing is known of lengths, items are taken to be worked on in turn: the more are at
    work, the slower each grows.
    """
    layout = profile.stage(node.name).costs[0]
    return max(1e-12, layout.round.at(running)) if layout.round else float(running)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
