"""What m2flow's own plan gains over the fixed modes in a row of the published tables.

The row's workload as a flow, its analytic profile, and m2flow's decision: plans of its own and the
fixed modes, all played through the engine on the same draws of lengths. The gain is the seconds of
the best fixed mode over those of the chosen plan. Fixed modes are those of `--mode`, and the
table's spatial and hybrid ones with several splits of the lanes.

A lane here is as many accelerators as a replica of the row's generator spans: so the fixed modes
generate as the row does, and m2flow's own plan may take several of them together. Of more than
`MOST_LANES` lanes a part is played with its part of the prompts, the rest being alike. Simulators
on cores have lanes of cores beside the accelerators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from embodied_prices import acting, simulating, training
from paper_model import Embodied, Reasoning

from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.flow import Flow, FlowGraph, Worker, loop, stage
from m2flow.flow.worker import Layout
from m2flow.models.work import (
    ADAM_BYTES,
    Rates,
    decoding,
    forward_pass,
    prefill,
    training_bytes,
    training_pass,
    update,
)
from m2flow.plan.builders import build_plan
from m2flow.plan.choose import choose
from m2flow.plan.chunks import pipelined, spread
from m2flow.plan.prediction import Prediction
from m2flow.plan.profile import Profile, Quantiles
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import lane_specs, parse_cluster
from m2flow.plan.profile.hardware import Device
from m2flow.plan.profile.work import FlowWork, LayoutWork, Rounds, StageWork, WorkerWork, rising
from m2flow.training.division import Division

RUNNING = 256
"""Requests that a generator decodes at once; memory has room for them in all rows."""

SPLITS = (3, 4, 5, 6)
"""Eighths of the lanes that generate in a fixed spatial plan."""

MOST_LANES = 32
"""Lanes on which a reasoning row is played."""

REPLICA_SIZES = 4
"""Sizes of a trainer's replicas that a fixed collocated plan is tried with, the largest ones."""

FIXED_MODES = ("collocated", "disaggregated", "hybrid", "spatial", "temporal")


class Generator(Worker):
    """Samples answers."""

    def __init__(self, group: int) -> None:
        self.group = group

    @stage(streaming=True, expands="group")
    def generate(self, prompts: Any) -> Any: ...

    @stage(streaming=True, expands="group", length="expected")
    def generate_known(self, prompts: Any) -> Any: ...


class Trainer(Worker):
    """A model that passes over answers and is trained on them: an actor, a critic, a policy."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    @stage
    def score(self, answers: Any) -> Any: ...

    @stage(accumulates=True, minibatches="updates")
    def train(self, answers: Any) -> Any: ...


class Policy(Worker):
    """Acts on published weights."""

    @stage
    def act(self, observations: Any) -> Any: ...


class World(Worker):
    """Environments."""

    @stage(sticky=True)
    def move(self, actions: Any) -> Any: ...


@stage(unit="group")
def advantage(answers: Any) -> Any: ...


class Grpo(Flow):
    """One trained model; an advantage needs its whole group."""

    generator: Generator
    actor: Trainer
    known: bool

    def step(self, prompts: Any) -> Any:
        generate = self.generator.generate_known if self.known else self.generator.generate
        return self.actor.train(self.actor.score(advantage(generate(prompts))))

    def sync(self) -> None:
        self.actor.publish(self.generator)


class Ppo(Flow):
    """Two trained models; each answer has its advantage from the critic's values."""

    generator: Generator
    actor: Trainer
    critic: Trainer
    known: bool

    def step(self, prompts: Any) -> Any:
        generate = self.generator.generate_known if self.known else self.generator.generate
        answers = generate(prompts)
        valued = self.critic.score(self.actor.score(answers))
        return self.critic.train(self.actor.train(valued))

    def sync(self) -> None:
        self.actor.publish(self.generator)


class Episodes(Flow):
    """Episodes of one length, then training on them."""

    world: World
    policy: Policy
    actor: Trainer
    turns: int

    def step(self, starts: Any) -> Any:
        turning = loop(self.policy.act, self.world.move, until="", max_turns=self.turns)
        return self.actor.train(turning(starts))

    def sync(self) -> None:
        self.actor.publish(self.policy)


@dataclass(frozen=True)
class Gain:
    """What the own plan is, and its gain.

    Attributes:
        seconds: of a step of the own plan, and of the best fixed one.
        gain: their ratio.
        plan: in words.
    """

    seconds: float
    fixed: float
    best_fixed: str
    gain: float
    plan: str


def reasoning_gain(work: Reasoning, lanes: int, rates: Rates, known: bool = False) -> Gain:
    """The gain in a row of GRPO or PPO.

    Args:
        known: whether lengths are known before they are generated, each of them exactly.
    """
    size = work.rollout
    part = max(1, lanes // size // MOST_LANES)
    lanes, prompts = lanes // part, work.number // work.group // part
    generator, actor = Generator(work.group), Trainer(work.updates)
    if work.trained == 2:
        flow: Flow = Ppo(
            generator=generator, actor=actor, critic=Trainer(work.updates), known=known
        )
    else:
        flow = Grpo(generator=generator, actor=actor, known=known)
    graph = flow.trace()
    cluster = parse_cluster(f"{lanes // 8}x8x{work.device.name}")
    prices = partial(priced, work, graph, rates)
    profile = bundled(analytic_profile(graph, cluster, prices, prompts), size)
    specs = lane_specs(parse_cluster(f"{lanes // 8}x{8 // size}x{work.device.name}"))
    beside = (
        *collocated_plans(graph, profile, specs, prompts),
        *spatial_plans(graph, profile, specs, prompts),
    )
    found = choose(graph, profile, specs, prompts, layouts=layouts_of(profile, 1), beside=beside)
    return _gain((one.plan, one.prediction) for one in (found.chosen, *found.others))


def priced(
    work: Reasoning, graph: FlowGraph, rates: Rates, _device: Device, count: int
) -> FlowWork:
    """What the row's stages ask: generation by divided layers, training in shards."""
    model, answers = work.model, work.answers
    prompt, longest = answers.prompt_tokens, answers.longest
    divided = [Layout(f"tp{n}", n, (("heads", model.kv_heads, n),)) for n in rising(8)]
    sharded = [Layout(f"fsdp{n}", n) for n in rising(count)]

    def generating(layout: Layout) -> LayoutWork:
        n = layout.lanes
        rounds = Rounds(
            admit=lambda prompts: prefill(model, prompts * prompt, prompt / 2, n, rates),
            round=lambda running, tokens: decoding(model, running, tokens, n, rates),
            start=prompt,
            longest=longest,
            unit_bytes=model.kv_bytes_on_lane(n),
            limits=(RUNNING,),
        )
        return LayoutWork(layout, rounds=rounds)

    def passing(layout: Layout) -> LayoutWork:
        return LayoutWork(
            layout,
            lambda items: forward_pass(
                model, answers, items, Division(fsdp=layout.lanes), longest, rates
            ),
            working_bytes=lambda _: training_bytes(
                model, Division(fsdp=layout.lanes), longest, True
            ),
        )

    def learning(layout: Layout) -> LayoutWork:
        return replace(
            passing(layout),
            call=lambda items: training_pass(
                model, answers, items, Division(fsdp=layout.lanes), longest, True, rates
            ),
            finish=lambda replicas: update(model, Division(fsdp=layout.lanes), replicas),
        )

    lengths = Quantiles.of(answers.lengths.stratified(516), 129)
    size = 16 * answers.tokens
    works = {
        "generate": StageWork(tuple(map(generating, divided)), size, lengths),
        "generate_known": StageWork(tuple(map(generating, divided)), size, lengths),
        "score": StageWork(tuple(map(passing, sharded)), size),
        "train": StageWork(tuple(map(learning, sharded)), size),
    }
    weights, trained = float(model.weight_bytes), float(ADAM_BYTES * model.parameters)
    state = WorkerWork([(one, trained / one.lanes) for one in sharded])
    generator = WorkerWork([(one, weights / one.lanes) for one in divided], weights)
    stages = {node.name: works[node.method] for node in graph.nodes if node.method}
    workers = {worker: state for worker in ("actor", "critic") if worker in graph.workers}
    return FlowWork(stages, {"generator": generator, **workers}, model.name)


def embodied_gain(work: Embodied, lanes: int) -> Gain:
    """The gain in a row of a loop with a simulator."""
    actor = Trainer(work.updates)
    flow = Episodes(world=World(), policy=Policy(), actor=actor, turns=work.steps)
    graph = flow.trace()
    cores = f"+{lanes // 8}x8xCPU" if work.simulator.kind == "cpu" else ""
    cluster = parse_cluster(f"{lanes // 8}x8x{work.device.name}{cores}")

    def prices(device: Device, count: int) -> FlowWork:
        acts, acting_state = acting(work.policy)
        moves = simulating(work.simulator, device.kind)
        learns, learning_state = training(work.policy, work.steps, count)
        return FlowWork(
            {"world.move": moves, "policy.act": acts, "actor.train": learns},
            {"policy": acting_state, "actor": learning_state},
        )

    profile = analytic_profile(graph, cluster, prices, work.envs)
    specs = lane_specs(cluster)
    beside = list(loop_plans(graph, specs, work.envs))
    found = choose(graph, profile, specs, work.envs, beside=beside)
    return _gain((one.plan, one.prediction) for one in (found.chosen, *found.others))


def bundled(profile: Profile, size: int) -> Profile:
    """The profile where each lane is `size` of the lanes that it was made for.

    Layouts on fewer lanes are left out, but for those of stages that have no other (functions).
    """

    def lanes_of(layouts: Any) -> Any:
        whole = [replace(one, lanes=one.lanes // size) for one in layouts if one.lanes % size == 0]
        return tuple(whole) or layouts

    return replace(
        profile,
        stages={
            name: replace(one, costs=lanes_of(one.costs)) for name, one in profile.stages.items()
        },
        workers={name: lanes_of(layouts) for name, layouts in profile.workers.items()},
        publish=tuple(
            replace(one, target_lanes=one.target_lanes // size)
            for one in profile.publish
            if one.target_lanes and one.target_lanes % size == 0
        ),
    )


def layouts_of(profile: Profile, nth: int) -> dict[str, Layout]:
    """The n-th largest replica of each worker that trains; a generator has a lane, as the row's."""
    found = {}
    for worker, layouts in profile.workers.items():
        known = sorted((one.lanes, one.layout) for one in layouts)
        lanes, name = known[0] if worker == "generator" else known[-min(nth, len(known))]
        found[worker] = Layout(name, lanes)
    return found


def collocated_plans(
    graph: FlowGraph, profile: Profile, lanes: tuple[LaneSpec, ...], items: int
) -> Iterator[Plan]:
    """The phases in turn on all lanes, with several sizes of the trainers' replicas."""
    for nth in range(1, REPLICA_SIZES + 1):
        yield build_plan("collocated", graph, lanes, items, layouts=layouts_of(profile, nth))


def spatial_plans(
    graph: FlowGraph, profile: Profile, lanes: tuple[LaneSpec, ...], items: int
) -> Iterator[Plan]:
    """Generation on the first lanes, training on the others, a pipeline between them."""
    for eighths in SPLITS:
        cut = eighths * len(lanes) // 8
        rest = [lane.id for lane in lanes[cut:]]
        placements = {}
        for worker in graph.workers:
            known = [Layout(one.layout, one.lanes) for one in profile.workers.get(worker, ())]
            known = known or [Layout()]
            if worker == "generator":
                gangs = tuple((lane.id,) for lane in lanes[:cut])
                name = min(known, key=lambda one: one.lanes).name
                placements[worker] = Placement(gangs, layout=name)
                continue
            fitting = [one for one in known if len(rest) % one.lanes == 0]
            if fitting:
                largest = max(fitting, key=lambda one: one.lanes)
                parts = range(0, len(rest), largest.lanes)
                gangs = tuple(tuple(rest[n : n + largest.lanes]) for n in parts)
                placements[worker] = Placement(gangs, layout=largest.name)
        if len(placements) == len(graph.workers):
            order = tuple(node.name for node in reversed(graph.nodes))
            yield Plan(
                "spatial", lanes, placements, pipelined(graph, placements, items), order=order
            )


def loop_plans(graph: FlowGraph, lanes: tuple[LaneSpec, ...], items: int) -> Iterator[Plan]:
    """Simulator and policy in turn, or side by side in two groups; training on all accelerators."""
    gpus = [lane.id for lane in lanes if lane.kind == "gpu"]
    cores = [lane.id for lane in lanes if lane.kind == "cpu"]
    together = [(cores, gpus, 1)] if cores else [(gpus, gpus, 1)]
    apart = [(gpus[:cut], gpus[cut:], 2) for cut in range(1, len(gpus))] if not cores else []
    for worlds, policies, groups in (*together, *apart):
        placements = {
            "world": Placement(tuple((lane,) for lane in worlds)),
            "policy": Placement(tuple((lane,) for lane in policies)),
            "actor": Placement((tuple(gpus),), layout=f"fsdp{len(gpus)}"),
        }
        stages = spread(graph, placements, items)
        for name in ("world.move", "policy.act"):
            share = -(-items // groups // len(placements[name.split(".")[0]].replicas))
            stages[name] = StagePlan(chunk=share)
        mode = "temporal" if groups == 1 else "hybrid"
        yield Plan(mode, lanes, placements, stages, fuse_loops=False)


def _gain(judged: Iterable[tuple[Plan, Prediction]]) -> Gain:
    """Of the first of some plans over the first that is of a fixed mode."""
    every = list(judged)
    (own, best), fixed = every[0], next(one for one in every if one[0].mode in FIXED_MODES)
    seconds, usual = float(best.seconds), float(fixed[1].seconds)
    return Gain(seconds, usual, fixed[0].mode, usual / seconds, in_words(own))


def in_words(plan: Plan) -> str:
    """Where the workers of a plan stand."""
    parts = []
    for worker, spot in plan.placements.items():
        if spot.lanes and len(plan.lanes) > 1:
            parts.append(f"{worker} {len(spot.replicas)}x{len(spot.replicas[0])}")
    return f"{plan.mode}: {', '.join(parts)} of {len(plan.lanes)} lanes"
