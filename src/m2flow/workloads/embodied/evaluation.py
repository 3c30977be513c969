"""How well a trained policy does: greedy episodes with seeds of their own, on lanes.

Where initial states are numbered (LIBERO) episodes are spread evenly over them, and so over the
tasks: 500 episodes of a suite are all 50 states of all ten tasks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from m2flow.algorithms.confidence import of_shares
from m2flow.errors import RunFailed, UserError
from m2flow.plan import parse_lanes
from m2flow.workloads.common.examining import (
    deadline_of,
    examined,
    recipe_examined,
    refuse_unheeded,
    wave_size,
)
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.embodied.config import (
    VISION_LANGUAGE_ACTION,
    EmbodiedRecipe,
    EmbodiedWarmupSection,
)
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers.source import WEIGHTS

EPISODES = 100

SIMULATORS_A_LANE = 32
"""Episodes on a lane at a time, where simulators are heavy ones, in processes of their own."""


def examine(asked: Examination) -> dict[str, Any]:
    """Success, with a confidence interval, that of each task, and return of a checkpoint's policy.

    Of episodes that came to an end; `failed` counts those that were given up.
    The environment is that of the run; of a published model, and of a checkpoint that lies
    elsewhere, it is that of the recipe which `asked.data` names. Seeds follow from `asked.seed`,
    and not from the run's.

    Raises:
        UserError: the checkpoint is of no embodied run, and there is no recipe; or the model holds
            no policy, or another one than the recipe's.
    """
    if asked.samples > 1:
        raise UserError(
            "each start has one episode",
            key="--samples",
            value=asked.samples,
            expected="1",
            hint="--limit says how many episodes",
        )
    refuse_unheeded(asked, "seed")
    recipe, checkpoint = _recipe_and_checkpoint(asked)
    count, lanes = asked.limit or EPISODES, asked.lanes or parse_lanes("auto")
    evaluation = recipe.evaluation.model_copy(update={"episodes": count, "films": 0})
    nothing = EmbodiedWarmupSection()  # its demonstrations may be elsewhere
    most = SIMULATORS_A_LANE * len(lanes) if recipe.environment.has_processes else count
    changes = {
        "evaluation": evaluation,
        "seed": asked.seed,
        "warmup": nothing,
        "rollouts_per_step": wave_size(count, most),
    }
    recipe = recipe.model_copy(update=changes)
    experiment = EmbodiedExperiment(recipe)
    starts = experiment.held_out()
    assert starts is not None
    flow = experiment.flow(checkpoint)
    deadline, at_once = deadline_of(asked, recipe), recipe.evaluated_at_once
    result = examined(flow, starts, lanes, asked.layout, "actor", deadline, at_once)
    figures = experiment.evaluation(result)
    if not figures:
        raise RunFailed(f"all {count} episodes of {recipe.environment.name} failed")
    tasks = experiment.success_by_task(starts, result)
    low, high = of_shares(experiment.success_by_start(starts, result))
    return {
        "about": f"{int(figures['eval/episodes'])} episodes of {recipe.environment.name}",
        "model": str(asked.model),
        "success": figures["eval/success"],
        "success_low": low,
        "success_high": high,
        **{f"success/{task}": share for task, share in tasks.items() if len(tasks) > 1},
        "failed": figures["eval/failed"],
        "success_at_end": figures["eval/success_at_end"],
        "return": figures["eval/return"],
        "length": figures["eval/length"],
        "seconds": result.seconds,
    }


def _recipe_and_checkpoint(asked: Examination) -> tuple[EmbodiedRecipe, Path | None]:
    """The recipe, and the checkpoint whose policy acts; None where a published model does.

    Raises:
        UserError: there is no recipe, or no policy in the folder.
    """
    recipe = recipe_examined(asked, EmbodiedRecipe, {})
    if (asked.model / WEIGHTS).is_file():
        return recipe, asked.model.resolve()
    if asked.data is not None and recipe.policy.kind in VISION_LANGUAGE_ACTION:
        return recipe_examined(asked, EmbodiedRecipe, {"model": str(asked.model)}), None
    instead = "a copy of it" if asked.data else "a published model's folder and --data RECIPE"
    raise UserError(
        f"holds no {WEIGHTS}",
        key="MODEL",
        value=str(asked.model),
        expected=f"RUN/checkpoints/latest, or {instead}",
    )
