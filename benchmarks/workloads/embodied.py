"""Workloads of environments that a policy takes turns with.

  * `fast`: CartPole: simulation is cheap beside the policy, and a trip between lanes is dear.
  * `slow`: each environment computes for some milliseconds a step: simulation is nearly all.
  * `balanced`: a wide policy, and environments that compute for about as long as it does.
  * `one_sided`: the same policy, and environments that compute ten times as long.

The last two are for the question of groups: where policy and environments stand on lanes of their
own, one lane works while the other waits, unless two groups of environments take turns. So are
`balanced_on_one_lane` and `one_sided_on_one_lane`, the same with the environments in a process of
the policy's lane.
"""

from __future__ import annotations

from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from workloads.common import LEARNING_RATE, Workload


def _workload(name: str, **keys: object) -> Workload:
    recipe = EmbodiedRecipe.model_validate(
        {
            "optimizer": {"learning_rate": LEARNING_RATE},
            "update": {"epochs": 1, "minibatches": 1},
            "evaluation": {"episodes": 0, "films": 0},
            **keys,
        }
    )
    experiment = EmbodiedExperiment(recipe)
    return Workload(name, experiment.flow, experiment.batch, recipe.items_per_step)


def _labour(rounds: int) -> dict[str, object]:
    return {"name": "labour:Labour", "options": {"rounds": rounds}}


def fast() -> Workload:
    """32 rollouts of 64 steps."""
    return _workload(
        "fast",
        environment={"name": "gymnasium:CartPole-v1"},
        rollouts_per_step=32,
        rollout={"horizon": 64},
        update={"epochs": 4, "minibatches": 4},
    )


def slow() -> Workload:
    """16 rollouts of 16 steps, some milliseconds each."""
    return _workload("slow", environment=_labour(12), rollouts_per_step=16, rollout={"horizon": 16})


def balanced() -> Workload:
    """32 rollouts of 32 steps; the policy takes as long as the environments."""
    return _grouped("balanced", 1)


def one_sided() -> Workload:
    """32 rollouts of 32 steps; the environments take ten times as long as the policy."""
    return _grouped("one_sided", 12)


def balanced_on_one_lane() -> Workload:
    """`balanced` with the environments in a process."""
    return _grouped("balanced_on_one_lane", 1, processes=1)


def one_sided_on_one_lane() -> Workload:
    """`one_sided` with the environments in a process."""
    return _grouped("one_sided_on_one_lane", 12, processes=1)


def _grouped(name: str, rounds: int, **environment: object) -> Workload:
    return _workload(
        name,
        environment=_labour(rounds) | environment,
        policy={"hidden": (1024, 1024)},
        rollouts_per_step=32,
        rollout={"horizon": 32},
    )


WORKLOADS = (fast, slow)
GROUPED = (balanced, one_sided)
GROUPED_ON_ONE_LANE = (balanced_on_one_lane, one_sided_on_one_lane)
