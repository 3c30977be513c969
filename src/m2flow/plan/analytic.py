"""Profiles of hardware that is not here: each stage's work in words, made seconds by roofline.

The caller says what each stage of the graph does (`Generate`, `Forward`, `Train`, `Act`,
`Simulate`; any other is a `Fixed` price), and on which model. What comes out is the same `Profile`
that measuring gives, one layout for each number of lanes that a replica may have and that holds
it. Nothing here chooses between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from m2flow.errors import UserError, suggestion
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.analytic_work import (
    Act,
    Fixed,
    Forward,
    Generate,
    Simulate,
    Train,
    TrainPolicy,
    Work,
)
from m2flow.plan.clusters import Cluster
from m2flow.plan.footprint import (
    ACTIVATION_BYTES,
    check_generation_fits,
    check_training_fits,
    running_limit,
    training_footprint,
    training_layouts,
)
from m2flow.plan.generating import by_whole_groups, generate, requests
from m2flow.plan.hardware import NETWORK_FRACTION, NVLINK_FRACTION, Device
from m2flow.plan.models import WEIGHT_BYTES
from m2flow.plan.profile import (
    LinkCost,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    StageLayout,
    StageProfile,
    WorkerLayout,
)
from m2flow.plan.roofline import (
    Layout,
    Rates,
    action_seconds,
    action_training_seconds,
    all_reduce_seconds,
    decode_step_seconds,
    host_copy_seconds,
    log_probability_seconds,
    prefill_seconds,
    publish_seconds,
    training_seconds,
)
from m2flow.plan.units import Bytes, BytesPerSecond, Seconds

MOST_PLAYED = 2048
"""Answers of one replica that are played; beyond them time goes on in proportion."""

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Of the prompts of a replica, at which it is told how far its seconds are."""

ADAM_BYTES = 16
"""Of a trained parameter: weight, gradient, single-precision weight and two moments."""

LATENCY = {"node": 100e-6, "cluster": 300e-6}
"""Seconds of a message between two processes. Assumptions, of the order of a socket's."""


def analytic_profile(
    graph: FlowGraph,
    cluster: Cluster,
    work: Mapping[str, Work],
    items: int,
    rates: Rates | None = None,
) -> Profile:
    """The profile of a flow on a cluster, by roofline.

    Args:
        graph: the flow.
        cluster: need not exist.
        work: by stage name, what the stage does; one left out is `Fixed`.
        items: of the step's input, the most that a stage's curve is asked for.
        rates: attained shares of the peaks.

    Raises:
        UserError: `work` names a stage that the graph does not have; a model fits on no number of
            lanes of any kind (says the smallest number that would do).
    """
    for name in work:
        if name not in {node.name for node in graph.nodes}:
            raise UserError(
                "the flow has no such stage",
                key=name,
                hint=suggestion(name, [node.name for node in graph.nodes]),
            )
    trained = {
        node.worker: what for node in graph.nodes if isinstance(what := work.get(node.name), Train)
    }
    made = _Maker(graph, cluster, rates or Rates(), items, trained)
    stages = {node.name: made.stage(node, work.get(node.name, Fixed())) for node in graph.nodes}
    workers = {
        worker: made.worker(
            [work.get(node.name, Fixed()) for node in graph.nodes if node.worker == worker]
        )
        for worker in graph.workers
    }
    return Profile(
        stages=stages,
        workers={worker: layouts for worker, layouts in workers.items() if layouts},
        publish=made.publishing(work),
        links=made.links(),
        key={
            "model": {name: model_name(what) for name, what in sorted(work.items())},
            "shapes": {"items": items},
            "hardware": {"cluster": str(cluster)},
        },
        source="analytic",
    )


def _counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({*(2**n for n in range(most.bit_length())), most})


def _curve(seconds: Callable[[int], float], counts: Sequence[int]) -> Piecewise:
    """The points, none below an earlier one."""
    points: list[tuple[float, float]] = []
    for count in counts:
        value = seconds(count)
        points.append((float(count), max(value, points[-1][1]) if points else value))
    return Piecewise(tuple(points))


class _Maker:
    """What all stages of one profile have in common."""

    def __init__(
        self,
        graph: FlowGraph,
        cluster: Cluster,
        rates: Rates,
        items: int,
        trained: Mapping[str, Train],
    ) -> None:
        self.graph, self.cluster, self.rates, self.items = graph, cluster, rates, items
        self.trained = trained

    def stage(self, node: StageNode, work: Work) -> StageProfile:
        most = self.items * node.fanout
        layouts: list[StageLayout] = []
        unfit: UserError | None = None
        for kind, device in self.cluster.kinds.items():
            lanes = self.cluster.lanes_of(kind)
            try:
                layouts += [
                    replace(layout, kind=kind)
                    for layout in self._layouts(node, work, device, lanes, most)
                ]
            except UserError as error:
                unfit = unfit if unfit and device.kind == "cpu" else error
        if not layouts:
            raise unfit or UserError(
                "no lane of the cluster can run this stage",
                key=node.name,
                value=str(self.cluster),
                expected=f"{work.simulator.kind} lanes" if isinstance(work, Simulate) else None,
            )
        lengths = None
        if isinstance(work, Generate):
            lengths = Quantiles.of(work.answers.lengths.sample(200))
        return StageProfile(tuple(layouts), self._output_bytes(work), lengths)

    def _output_bytes(self, work: Work) -> Bytes:
        if isinstance(work, Generate | Forward | Train):
            return Bytes(int(16 * work.answers.tokens))  # ids, log-probabilities, masks
        if isinstance(work, Simulate | Act | TrainPolicy):
            return Bytes(3 * 224 * 224)  # an image
        return Bytes(64)

    def _layouts(
        self, node: StageNode, work: Work, device: Device, lanes: int, most: int
    ) -> list[StageLayout]:
        match work:
            case Generate():
                return self._generating(node, work, device, lanes, most)
            case Forward():
                return self._forward(node, work, device, lanes, most)
            case Train():
                return self._training(work, device, lanes, most)
            case Act():
                if work.policy.parameters * WEIGHT_BYTES > device.usable_bytes:
                    return []
                each = lambda n: action_seconds(work.policy, n, device, self.rates)  # noqa: E731
                return [StageLayout(1, _curve(each, _counts(most)))]
            case TrainPolicy():
                return self._policy_training(work, device, lanes, most)
            case Simulate():
                if work.simulator.kind != device.kind:
                    return []
                return [
                    StageLayout(
                        1,
                        _curve(work.simulator.seconds, _counts(most)),
                        working=Piecewise(((1.0, float(work.simulator.bytes_per_env)),)),
                    )
                ]
            case Fixed():
                price = lambda n: work.seconds_per_call + n * work.seconds_per_item  # noqa: E731
                return [StageLayout(1, _curve(price, _counts(most)))]

    def _generating(
        self, node: StageNode, work: Generate, device: Device, lanes: int, most: int
    ) -> list[StageLayout]:
        model, answers = work.model, work.answers
        found = []
        for layout in check_generation_fits(model, lanes, device, answers.longest):
            fitting = running_limit(model, device, layout, answers.tokens)
            found += [
                self._generating_on(layout, limit, node.expands, work, device, most)
                for limit in sorted({min(limit, fitting) for limit in work.max_running})
            ]
        return found

    def _generating_on(
        self, layout: Layout, limit: int, group: int, work: Generate, device: Device, most: int
    ) -> StageLayout:
        model, answers = work.model, work.answers

        def step(running: float, kv_tokens: float) -> float:
            return decode_step_seconds(model, running, kv_tokens, device, layout, self.rates)

        def play(prompts: int) -> tuple[float, ...]:
            lengths = answers.lengths.sample(prompts * group)
            start = prefill_seconds(
                model,
                prompts * answers.prompt_tokens,
                answers.prompt_tokens / 2,
                device,
                layout,
                self.rates,
            )
            wanted = requests(lengths, answers.prompt_tokens, group)
            whole = generate(wanted, 1, step, limit, start=start)
            # An item is a prompt: it is out when the last of its answers is.
            out = by_whole_groups(whole.finished)
            return tuple(out[math.ceil(share * len(out)) - 1].seconds for share in SHARES)

        counts = [count for count in _counts(most) if count * group <= MOST_PLAYED] or [1]
        played = [play(count) for count in counts]
        seconds = _curve(lambda count: played[counts.index(count)][-1], counts)
        ends = (0.0, *(min(1.0, at / played[-1][-1]) for at in played[-1]))
        cache = model.kv_bytes_per_token * answers.tokens / layout.lanes
        held = [(float(n), min(n * group, limit) * cache) for n in _counts(most)]
        return StageLayout(
            layout.lanes,
            seconds,
            max_running=limit,
            done=Piecewise(tuple(zip((0.0, *SHARES), (*ends[:-1], 1.0), strict=True))),
            working=Piecewise(tuple(held)),
        )

    def _training(self, work: Train, device: Device, lanes: int, most: int) -> list[StageLayout]:
        model, answers = work.model, work.answers
        found = []
        for count in _counts(lanes):
            layout = training_layout(work, count, device, self.rates)
            if layout is None:
                continue

            def seconds(n: int, count: int = count, layout: Layout = layout) -> float:
                return training_seconds(
                    model, n * answers.tokens, answers.context, count, device, layout, self.rates,
                    n, answers.deviation, updates=0, sharded=work.sharded,
                )  # fmt: skip

            def finish(n: int, count: int = count, layout: Layout = layout) -> float:
                return training_seconds(
                    model, 0, 0, count * n, device, layout, self.rates, updates=1,
                    sharded=work.sharded,
                )  # fmt: skip

            taken = training_footprint(model, count, layout, answers.longest, work.sharded)
            found.append(
                StageLayout(
                    count,
                    _curve(seconds, _counts(most)),
                    finish=_curve(finish, _counts(max(1, lanes // count))),
                    working=_flat(taken.working),
                )
            )
        if not found:
            check_training_fits(model, lanes, device, answers.longest, work.sharded)
        return found

    def _forward(
        self, node: StageNode, work: Forward, device: Device, lanes: int, most: int
    ) -> list[StageLayout]:
        model, answers = work.model, work.answers
        trainer = self.trained.get(node.worker)  # whose shards it passes through as they lie
        if trainer is None:
            check_generation_fits(model, lanes, device, answers.longest)
        found = []
        for count in _counts(lanes):
            if trainer is None:
                layout = forward_layout(work, count, device)
            else:
                layout = training_layout(trainer, count, device, self.rates)
            if layout is None:
                continue

            def seconds(n: int, count: int = count, layout: Layout = layout) -> float:
                return log_probability_seconds(
                    model, n * answers.tokens, answers.context, count, device, layout,
                    self.rates, n, answers.deviation,
                )  # fmt: skip

            taken = ACTIVATION_BYTES * answers.longest * model.hidden / layout.tensor
            curve = _curve(seconds, _counts(most))
            found.append(StageLayout(count, curve, working=_flat(taken)))
        if not found and trainer is not None:
            check_training_fits(model, lanes, device, answers.longest, trainer.sharded)
        return found

    def _policy_training(
        self, work: TrainPolicy, device: Device, lanes: int, most: int
    ) -> list[StageLayout]:
        found = []
        for count in _counts(lanes):
            if ADAM_BYTES * work.policy.parameters / count > device.usable_bytes:
                continue

            def seconds(n: int, count: int = count) -> float:
                return action_training_seconds(
                    work.policy, n * work.chunks, count, device, self.rates, updates=0
                )

            def finish(n: int, count: int = count) -> float:
                size = work.policy.parameters * WEIGHT_BYTES
                return 1.5 * all_reduce_seconds(size, count * n, device)

            found.append(
                StageLayout(
                    count,
                    _curve(seconds, _counts(most)),
                    finish=_curve(finish, _counts(max(1, lanes // count))),
                )
            )
        if not found:
            least = math.ceil(ADAM_BYTES * work.policy.parameters / device.usable_bytes)
            raise UserError(
                f"training {work.policy.name} fits on no {lanes} lanes of {device.name}",
                key="cluster",
                value=f"{lanes}x{device.name}",
                expected=f"at least {least} lanes",
            )
        return found

    def worker(self, works: Sequence[Work]) -> tuple[WorkerLayout, ...]:
        """State by lanes: a trainer's if any of its stages trains, else weights, else nothing."""
        if any(isinstance(work, Train) for work in works):
            works = [work for work in works if not isinstance(work, Forward)]
        found = []
        for kind, device in self.cluster.kinds.items():
            for count in _counts(self.cluster.lanes_of(kind)):
                size = max(_state_bytes(work, count, device, self.rates) for work in works)
                if size <= 0:
                    continue
                moved = Seconds(host_copy_seconds(size, device))
                found.append(WorkerLayout(count, Bytes(math.ceil(size)), moved, moved, kind))
        return tuple(found)

    def publishing(self, work: Mapping[str, Work]) -> tuple[PublishCost, ...]:
        generators = {
            node.worker: what
            for node in self.graph.nodes
            if isinstance(what := work.get(node.name), Generate)
        }
        device = next(iter(self.cluster.kinds.values()))
        found = []
        for edge in self.graph.weight_edges:
            what = generators.get(edge.target)
            for lanes in (1, 2, 4, 8) if what else ():
                assert what is not None
                for place in ("same", "node", "cluster"):
                    near = place != "cluster"
                    seconds = publish_seconds(what.model, device, device, Layout(lanes), near)
                    found.append(
                        PublishCost(edge.source, edge.target, place, Seconds(seconds), None, lanes)
                    )
        return tuple(found)

    def links(self) -> dict[str, LinkCost]:
        """The slowest device's, as a message may meet it."""
        devices = list(self.cluster.kinds.values())
        near = min(device.peer_bytes_per_second for device in devices) * NVLINK_FRACTION
        far = min(device.network_bytes_per_second for device in devices) * NETWORK_FRACTION
        rates = {"node": near, "cluster": far}
        return {
            place: LinkCost(Seconds(LATENCY[place]), BytesPerSecond(rate))
            for place, rate in rates.items()
        }


def _flat(num_bytes: float) -> Piecewise:
    """The same however many items there are."""
    return Piecewise(((1.0, num_bytes), (2.0, num_bytes)))


def model_name(work: Work) -> str:
    """Of what the stage works on; empty for a fixed price."""
    match work:
        case Generate() | Forward() | Train():
            return work.model.name
        case Act() | TrainPolicy():
            return work.policy.name
        case Simulate():
            return work.simulator.name
    return ""


def training_layout(work: Train, lanes: int, device: Device, rates: Rates) -> Layout | None:
    """The fastest layout of training on so many lanes, of those that fit; None if none does."""
    answers = work.answers
    fitting = training_layouts(work.model, lanes, device, answers.longest, work.sharded)

    def seconds(layout: Layout) -> float:
        return training_seconds(
            work.model, 64 * answers.tokens, answers.context, lanes, device, layout, rates,
            64, answers.deviation, sharded=work.sharded,
        )  # fmt: skip

    return min(fitting, key=seconds, default=None)


def forward_layout(work: Forward, lanes: int, device: Device) -> Layout | None:
    """The fewest lanes a copy that hold the longest answer and fill the lanes evenly."""
    sizes = (2**n for n in range(8) if 2**n <= min(lanes, device.lanes_per_node))
    for size in sizes:
        layout = Layout(size)
        even = lanes % size == 0 and work.model.heads % size == 0
        if even and running_limit(work.model, device, layout, work.answers.longest):
            return layout
    return None


def _state_bytes(work: Work, lanes: int, device: Device, rates: Rates) -> float:
    """What a worker keeps on each of so many lanes for this work; 0 where that cannot be."""
    match work:
        case Generate():
            return work.model.weight_bytes / lanes
        case Forward():
            copy = forward_layout(work, lanes, device)
            return work.model.weight_bytes / copy.lanes if copy else 0.0
        case Train():
            cut = training_layout(work, lanes, device, rates)
            if cut is None:
                return 0.0
            longest = work.answers.longest
            return training_footprint(work.model, lanes, cut, longest, work.sharded).state
        case Act():
            return float(work.policy.parameters * WEIGHT_BYTES)
        case TrainPolicy():
            return ADAM_BYTES * work.policy.parameters / lanes
    return 0.0
