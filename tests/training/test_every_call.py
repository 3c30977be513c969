"""A learner's save, killed at any system call of any of its lanes: a whole checkpoint is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from m2flow.flow import Place
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.training.checkpoint import resume_point
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers.learner import EmbodiedLearner
from m2flow.workloads.reasoning.workers import Learner
from tests.training.lane_processes import LaneProcesses
from tests.training.system_calls import Tree, moments_of, plant
from tests.training.test_sharded import place_on
from tests.training.test_trainer_state import batch_of, learner_of

RECIPES = Path(__file__).parents[2] / "recipes"
REPLICAS = {"one": ((0,),), "fsdp2": ((0, 1),), "embodied": ((0,),)}
CALLS = {"one": 300, "fsdp2": 300, "embodied": 100}
"""At least so many system calls are seen, and a tenth of them leave another state."""

SWITCH_SECONDS = 1.0

LEARNERS: list[Any] = []
"""This lane's, from one call to the next."""


def begin_on(groups: LaneGroups, layout: str, folder: Path, root: Path) -> int:
    """Make a learner that has saved two steps; this lane's process.

    A thread that waits for the interpreter wakes each 5 ms to ask for it, which is several calls.
    While all are stopped at each call they would ask faster than anybody gets on.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    place: Any = Place(spill=root)
    if layout == "fsdp2":
        place = place_on(groups, REPLICAS[layout], root, layout)
    LEARNERS.append(
        embodied_learner(place)
        if layout == "embodied"
        else learner_of("dense", folder, place, None)
    )
    for step in (1, 2):
        save_on(groups, root / "checkpoints", step)
    return os.getpid()


def embodied_learner(place: Place) -> EmbodiedLearner:
    """A learner of another workload, which writes files of its own."""
    recipe = read_recipe(RECIPES / "sac-mlp-pendulum.yaml")
    learner: EmbodiedLearner = EmbodiedExperiment(recipe).flow().learner
    learner.load(place)
    return learner


def save_on(_groups: LaneGroups, root: Path, step: int) -> None:
    """Train a step and save it; of two checkpoints one is deleted."""
    (learner,) = LEARNERS
    if isinstance(learner, Learner):
        learner.train(learner.logprobs(batch_of(step, learner.place)))
        learner.train_finish()
    else:
        for parameter in learner.policy.parameters():
            parameter.data += 1
    learner.save_checkpoint(str(root), step, 2)


def part_of(tree: Tree, step: str) -> Tree:
    """What lies in the folder of a step."""
    return {name: content for name, content in tree.items() if name.startswith(f"{step}/")}


@pytest.mark.parametrize("layout", REPLICAS)
def test_a_save_that_is_killed_at_any_system_call_leaves_a_whole_checkpoint(
    layout: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The newest one, to the last byte; and the newer one once it has been found."""
    root = tmp_path / "checkpoints"
    with LaneProcesses(len(REPLICAS[layout][0])) as lanes:
        processes = lanes(begin_on, layout, folders["dense"], tmp_path)
        trees, calls = moments_of(root, processes, lambda: lanes(save_on, root, 3))
    before, after = trees[0], trees[-1]
    whole = {step: part_of(tree, step) for tree, step in ((before, "step_000002"),
                                                          (after, "step_000003"))}  # fmt: skip
    assert all(whole.values())
    found_steps = []
    for number, tree in enumerate(trees):
        killed = tmp_path / str(number)
        plant(tree, killed)
        found = resume_point(killed)
        assert found is not None
        assert part_of(tree, found.name) == whole[found.name], (number, found)
        found_steps.append(found.name)
    assert found_steps == sorted(found_steps), "nothing is taken back"
    assert found_steps[0] == "step_000002"
    assert found_steps[-1] == "step_000003"
    print(f"{layout}: {calls} calls, {len(trees)} states")
    assert calls > CALLS[layout], "every call was seen"
    assert len(trees) > CALLS[layout] / 10, "and every state between them"
