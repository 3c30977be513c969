"""Replay: a recorded run under its own plan takes the time that it took; then under others."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from m2flow.engine.facts import ids_of, ids_text
from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.engine.spans import Span
from m2flow.errors import UserError
from m2flow.flow import Batch, Flow, Stream, Worker, stage
from m2flow.flow.worker import Layout
from m2flow.plan import build_plan
from m2flow.plan.measured import Observed
from m2flow.plan.profile import Piecewise
from m2flow.plan.replay import replay, replay_steps
from m2flow.plan.search import search, to_plan
from m2flow.plan.simulate_timing import ProfileTiming
from m2flow.simulation.driver import Simulation
from tests.plan.search.random_cases import draw
from tests.plan.test_simulate import GRPO, LANES, LONG_TAIL, grpo_profile, lanes_of

WITHIN = 0.05
"""How far a replay may be from the median step of a real run."""


# --- a simulated run as the record ----------------------------------------------------------------


def recorded(simulation: Simulation, num_items: int, steps: int) -> Observed:
    """A run under a virtual clock, as it would be recorded."""
    run = simulation.run(num_items, steps)
    windows = tuple(
        (run.step_starts[n], run.step_ends[n] - run.step_starts[n]) for n in range(steps)
    )
    return Observed(simulation.plan, num_items, tuple(run.spans), windows, warm=True)


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_its_own_plan_takes_what_it_took(mode: str) -> None:
    plan = build_plan(mode, GRPO, LANES, 8)
    timing = ProfileTiming(GRPO, plan, grpo_profile(LONG_TAIL))
    one = recorded(Simulation(GRPO, plan, timing, detailed=True), 8, 4)
    prediction, seconds = replay_steps(GRPO, one, plan)
    assert seconds == pytest.approx([spent for _, spent in one.steps])
    assert prediction.seconds == pytest.approx(statistics.fmean(seconds))
    assert sum(prediction.terms.values()) == pytest.approx(2 * prediction.seconds)


def test_a_streaming_stage_on_a_gang_takes_what_it_took() -> None:
    profile = grpo_profile(LONG_TAIL)
    generate = profile.stages["gen.generate"]
    pair = tuple(replace(layout, lanes=2) for layout in generate.costs)
    stages = {**profile.stages, "gen.generate": replace(generate, costs=pair)}
    plan = build_plan("collocated", GRPO, LANES, 8, layouts={"gen": Layout("tp2", 2)})
    timing = ProfileTiming(GRPO, plan, replace(profile, stages=stages))
    one = recorded(Simulation(GRPO, plan, timing, detailed=True), 8, 4)
    _, seconds = replay_steps(GRPO, one, plan)
    assert seconds == pytest.approx([spent for _, spent in one.steps])


def test_another_plan_takes_what_a_simulation_of_it_does() -> None:
    """Where calls cost what their items do, items carry all that is to be known.

    A `finish` is taken to cost the same on any number of replicas: the record has seen one number.
    """
    profile = grpo_profile(LONG_TAIL)
    train = profile.stages["learner.train"]
    same = replace(train.costs[0], finish=Piecewise(((1, 1.0), (2, 1.0))))
    train = replace(train, costs=(same,))
    profile = replace(profile, stages={**profile.stages, "learner.train": train})
    plans = {mode: build_plan(mode, GRPO, LANES, 8) for mode in ("collocated", "disaggregated")}
    runs = {}
    for mode, plan in plans.items():
        timing = ProfileTiming(GRPO, plan, profile)
        runs[mode] = recorded(Simulation(GRPO, plan, timing, detailed=True), 8, 4)
    _, seconds = replay_steps(GRPO, runs["collocated"], plans["disaggregated"])
    wanted = [spent for _, spent in runs["disaggregated"].steps]
    # The pieces in which items come out are those of the record, so that it is not exact.
    assert seconds == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("seed", range(60))
def test_plans_of_random_flows_take_what_they_took(seed: int) -> None:
    """Chains, forks, diamonds and cycles, in turn, apart and in chunks."""
    problem = draw(seed)
    found = search(problem)[0]
    plan = to_plan(problem, found, lanes_of(problem))
    plan = replace(plan, lanes=tuple(replace(lane, memory_bytes=None) for lane in plan.lanes))
    timing = ProfileTiming(problem.graph, plan, replace(problem.profile, links={}))
    simulation = Simulation(problem.graph, plan, timing, detailed=True)
    one = recorded(simulation, int(problem.num_items), 2)
    called = {span.name for span in one.spans if span.kind == "call"}
    if called != {node.name for node in problem.graph.nodes}:
        return  # a loop that all items left before its last member
    _, seconds = replay_steps(problem.graph, one, plan)
    assert seconds == pytest.approx([spent for _, spent in one.steps], rel=0.01)


def test_a_timeline_without_items_is_refused() -> None:
    spans = (Span(0, "learner.train", "call", 0.0, 1.0, {"step": 0, "items": 4}),)
    spans += tuple(
        Span(0, name, "call", 0.0, 1.0, {"step": 0, "items": 4})
        for name in ("gen.generate", "score", "normalise")
    )
    plan = Plan("custom", LANES[:1], {w: Placement(((0,),)) for w in GRPO.workers})
    with pytest.raises(UserError, match="does not say which items"):
        replay(GRPO, Observed(plan, 4, spans, ((0.0, 1.0),), warm=True), plan)


@pytest.mark.parametrize("items", [(), (3,), (0, 1, 2), (5, 4, 7, 8, 9), (2, 2, 3)])
def test_items_are_written_as_ranges(items: tuple[int, ...]) -> None:
    assert ids_of(ids_text(items)) == items


# --- real lanes -----------------------------------------------------------------------------------


class Sampler(Worker):
    """Hands samples on one by one; some take much longer than others."""

    @stage(streaming=True, expands=4)
    def generate(self, prompts: Batch) -> Iterator[Batch]:
        samples = prompts.repeat(4)
        for row, item in enumerate(samples.ids):
            time.sleep(0.002 + 0.02 * (item % 7 == 0))
            yield samples.select([row])

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        time.sleep(0.005)


class Trainer(Worker):
    @stage
    def score(self, samples: Batch) -> Batch:
        time.sleep(0.004 * len(samples))
        return samples

    @stage(accumulates=True, minibatches=2)
    def train(self, samples: Batch) -> Batch:
        time.sleep(0.003 + 0.003 * len(samples))
        return samples

    @train.finish
    def update(self) -> dict[str, float]:
        time.sleep(0.01)
        return {}

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(1)}


class Sleeping(Flow):
    sampler: Sampler
    trainer: Trainer

    def step(self, prompts: Stream) -> Stream:
        return self.trainer.train(self.trainer.score(self.sampler.generate(prompts)))

    def sync(self) -> None:
        self.trainer.publish(self.sampler)


@pytest.fixture(scope="module")
def observed() -> dict[str, Observed]:
    """The sleeping flow on two lanes, under two plans."""
    ray = pytest.importorskip("ray")
    from m2flow.runtime.driver.launch import launch
    from m2flow.runtime.driver.pool import LanePool
    from tests.runtime.local_cluster import local_cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    found = {}
    with local_cluster(2), LanePool((LaneSpec(0), LaneSpec(1))) as pool:
        for mode in ("collocated", "disaggregated"):
            flow = Sleeping(sampler=Sampler(), trainer=Trainer())
            with launch(flow, items_per_step=8, mode=mode, lanes=pool) as run:
                batches = [Batch({"x": torch.arange(8)}) for _ in range(7)]
                results = list(run.steps(batches))[2:]
            found[mode] = Observed.of(run.plan, 8, results, warm=True)
    return found


SLEEPING = Sleeping(sampler=Sampler(), trainer=Trainer()).trace()


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_real_run_takes_what_it_took(observed: dict[str, Observed], mode: str) -> None:
    one = observed[mode]
    _, seconds = replay_steps(SLEEPING, one, one.plan)
    real = statistics.median(spent for _, spent in one.steps)
    assert statistics.median(seconds) == pytest.approx(real, rel=WITHIN)


@pytest.mark.parametrize(
    ("recorded_under", "mode"), [("collocated", "disaggregated"), ("disaggregated", "collocated")]
)
def test_another_plan_takes_what_its_real_run_took(
    observed: dict[str, Observed], recorded_under: str, mode: str
) -> None:
    """Sleeping lanes do not slow each other down, so that items take the same anywhere."""
    _, seconds = replay_steps(SLEEPING, observed[recorded_under], observed[mode].plan)
    real = statistics.median(spent for _, spent in observed[mode].steps)
    assert statistics.median(seconds) == pytest.approx(real, rel=3 * WITHIN)


def test_chunks_can_be_tried_out(observed: dict[str, Observed]) -> None:
    """All of the samples in one call: the verifier waits for the last of them."""
    one = observed["disaggregated"]
    whole = replace(one.plan, stages={**one.plan.stages, "trainer.score": StagePlan(chunk=32)})
    assert replay(SLEEPING, one, whole).seconds > 1.1 * replay(SLEEPING, one, one.plan).seconds
