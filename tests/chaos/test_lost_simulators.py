"""Lanes of simulators that are killed in the middle of episodes: no others begin anew."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import m2flow
from m2flow.engine.messages import RunCall
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.plan import build_plan
from m2flow.runtime.driver.carrier import RayCarrier
from m2flow.runtime.driver.pool import LanePool
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment

pytest.importorskip("ray")

COUNTING = Path(__file__).parents[1] / "workloads/embodied"
LANES = tuple(LaneSpec(number) for number in range(4))
SIMULATORS, ACTOR, LEARNER = (0, 1), 2, 3
ROLLOUTS, STEPS = 8, 3

RECIPE: dict[str, Any] = {
    "workload": "embodied",
    "name": "counting",
    "rollouts_per_step": ROLLOUTS,
    "environment": {"name": "counting:Counting"},
    "policy": {"hidden": [16]},
    "rollout": {"horizon": 12},
    "update": {"epochs": 2, "minibatches": 2},
    "optimizer": {"learning_rate": 0.01},
    "evaluation": {"episodes": 6},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(COUNTING))
        patch.setenv("PYTHONPATH", f"{COUNTING}:{os.environ.get('PYTHONPATH', '')}")
        with LanePool(LANES) as lanes:
            yield lanes


def experiment() -> EmbodiedExperiment:
    recipe = read_recipe(RECIPE)
    assert isinstance(recipe, EmbodiedRecipe)
    return EmbodiedExperiment(recipe)


def together() -> Plan:
    """The policy acts beside the simulators, and the loop runs fused."""
    graph = experiment().flow().trace()
    return replace(build_plan("disaggregated", graph, LANES, ROLLOUTS), deadline_seconds=60.0)


def apart() -> Plan:
    """The policy acts on a lane of its own."""
    made = together()
    spots = made.placements | {
        "simulator": Placement(tuple((lane,) for lane in SIMULATORS)),
        "actor": Placement(((ACTOR,),)),
        "learner": Placement(((LEARNER,),)),
    }
    return replace(made, placements=spots)


class Killer:
    """Kills a lane when a stage is to run there in step 1 for the n-th time."""

    def __init__(self, stage: str, lane: int, count: int) -> None:
        self.stage, self.lane, self.left = stage, lane, count
        self.begun: dict[int, list[int]] = defaultdict(list)  # by rollout the lanes that began it

    def __call__(self, carrier: RayCarrier, flow: str, command: Any) -> None:
        if not isinstance(command, RunCall) or (flow, command.step) != ("step", 1):
            return
        name = carrier.graphs[flow].nodes[command.node].name
        if name == "simulator.begin":
            for part in command.inputs[0][0]:
                for item in part.items:
                    self.begun[item] += command.lanes
        if (name, command.lanes) == (self.stage, (self.lane,)):
            self.left -= 1
            if self.left == 0:
                os.kill(carrier.pool.addresses[self.lane].process_id, signal.SIGKILL)


def trained(**where: Any) -> tuple[Any, list[Any], dict[str, torch.Tensor]]:
    some = experiment()
    with m2flow.launch(some.flow(), items_per_step=ROLLOUTS, **where) as run:
        results = list(run.steps(some.batch(step) for step in range(STEPS)))
        return run, results, run.worker_call("learner", "weights")


@pytest.fixture(scope="module")
def undisturbed(pool: LanePool) -> Any:
    return trained(mode="eager", lanes="cpu:1")


@pytest.mark.parametrize(
    ("plan", "stage", "lane", "count"),
    [
        (apart, "simulator.step", 0, 3),
        (apart, "actor.act", ACTOR, 4),
        (together, "simulator.begin", 1, 3),
        (together, "actor.act", 0, 1),
    ],
    ids=["simulator", "actor", "begin", "fused"],
)
def test_only_its_episodes_begin_anew(
    plan: Callable[[], Plan],
    stage: str,
    lane: int,
    count: int,
    pool: LanePool,
    undisturbed: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killer, carry_out = Killer(stage, lane, count), RayCarrier.carry_out

    def watched(self: RayCarrier, flow: str, command: Any) -> None:
        killer(self, flow, command)
        carry_out(self, flow, command)

    monkeypatch.setattr(RayCarrier, "carry_out", watched)
    run, results, weights = trained(plan=plan(), lanes=pool)
    assert killer.left <= 0, "nobody was killed"
    assert [(loss.lane, loss.healed) for loss in run.losses] == [(lane, True)]
    _, wanted, expected = undisturbed
    assert [one.step for one in results] == list(range(STEPS))
    for ours, theirs in zip(results, wanted, strict=True):
        assert ours.output["episodes"] == theirs.output["episodes"]
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-4, rtol=1e-4)
    assert killer.begun.keys() == set(range(ROLLOUTS))
    again = [lanes[0] for lanes in killer.begun.values() if len(lanes) > 1]
    assert len(again) < ROLLOUTS
    if lane in plan().placements["simulator"].lanes:  # else those whose actions were on it
        assert set(again) <= {lane}, "rollouts of other lanes have begun anew"
