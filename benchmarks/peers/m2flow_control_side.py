"""The m2flow side of a comparison on control: the PPO flow of the recipes, a step at a time."""

from __future__ import annotations

import time

from peers.control import ControlSettings
from peers.wire import StepRecord, Wire

from m2flow.runtime.driver.launch import launch
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment


def recipe_of(settings: ControlSettings) -> EmbodiedRecipe:
    """The settings as a recipe; `extra` has its mode, its lanes and processes of simulators."""
    return EmbodiedRecipe.model_validate(
        {
            "seed": settings.seed,
            "mode": settings.extra["mode"],
            "lanes": f"cpu:{settings.extra['lanes']}",
            "rollouts_per_step": settings.environments,
            "environment": {
                "name": settings.environment,
                "options": settings.options,
                "processes": settings.extra.get("processes"),
            },
            "policy": {"hidden": settings.hidden, "normalize_state": False},
            "rollout": {"horizon": settings.horizon},
            "algorithm": {"name": "ppo", "gamma": settings.gamma, "lam": settings.lam},
            "update": {"epochs": settings.epochs, "minibatches": settings.minibatches},
            "optimizer": {"learning_rate": settings.learning_rate, "max_grad_norm": 0.5},
            "evaluation": {"episodes": 0, "films": 0},
        }
    )


def main() -> None:
    """Serve steps until the other end closes."""
    wire = Wire()
    settings = wire.settings(ControlSettings)
    recipe = recipe_of(settings)
    experiment = EmbodiedExperiment(recipe)
    done: list[StepRecord] = []
    step = 0
    with launch(
        experiment.flow(),
        items_per_step=recipe.items_per_step,
        mode=recipe.mode,
        lanes=recipe.lanes,
        num_threads=1,
    ) as run:
        while asked := wire.next_request(done):
            done = []
            for _ in range(asked):
                began = time.perf_counter()
                output = run.step(experiment.batch(step)).output
                seconds = time.perf_counter() - began
                step += 1
                assert sum(output["steps_taken"]) == settings.steps
                ended = [one for some in output["episodes"] for one in some]
                returns = [one["return"] for one in ended]
                done.append(StepRecord(seconds, returns, [int(one["length"]) for one in ended]))


if __name__ == "__main__":
    main()
