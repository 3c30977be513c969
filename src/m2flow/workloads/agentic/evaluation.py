"""How well a policy does with its tools: greedy trajectories on held-out problems, on lanes."""

from __future__ import annotations

from typing import Any

from m2flow.algorithms.confidence import wilson
from m2flow.errors import RunFailed, UserError
from m2flow.plan import parse_lanes
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.agentic.experiment import AgenticExperiment, turn_figures
from m2flow.workloads.common.examining import (
    deadline_of,
    examined,
    recipe_examined,
    refuse_unheeded,
)
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.reasoning.evaluation import model_folder
from m2flow.workloads.reasoning.workers import ModelSource


def examine(asked: Examination) -> dict[str, Any]:
    """Accuracy with its interval, turns and calls of a checkpoint's policy.

    Problems and tools are those of the run; of a model that no run has trained they are those of
    the recipe which `asked.data` names.

    Raises:
        UserError: the checkpoint is of no agentic run, and there is no recipe.
    """
    refuse_unheeded(asked)
    model = model_folder(asked.model)
    recipe = recipe_examined(asked, AgenticRecipe, {"model.path": str(model), "warmup.steps": 0})
    count = asked.limit or recipe.evaluation.problems
    # The checkpoint alone: what the run began with need not be there any more.
    parts = {
        "model": recipe.model.model_copy(update={"path": str(model)}),
        "warmup": recipe.warmup.model_copy(update={"steps": 0}),
        "evaluation": recipe.evaluation.model_copy(update={"problems": count}),
    }
    recipe = recipe.model_copy(update=parts)
    experiment = AgenticExperiment(recipe, ModelSource.at(str(model), recipe.model.dtype))
    problems, lanes = experiment.held_out(), asked.lanes or parse_lanes("auto")
    if problems is None:
        raise UserError("there are no held-out problems", key="--limit", value=count)
    deadline = deadline_of(asked, recipe)
    result = examined(experiment.flow(), problems, lanes, asked.layout, "generator", deadline)
    figures = experiment.evaluation(result)
    if not figures:
        raise RunFailed(f"no problem could be judged: {result.output['failure'][0]}")
    tools = f", with {', '.join(experiment.tools)}" if experiment.tools else ""
    low, high = wilson(figures["eval/accuracy"], int(figures["eval/problems"]))
    return {
        "about": f"{len(problems)} held-out problems{tools}",
        "failed_share": figures.get("eval/failed_share", 0.0),
        "model": str(asked.model),
        "accuracy": figures["eval/accuracy"],
        "accuracy_low": low,
        "accuracy_high": high,
        "mean_tokens": figures["eval/length"],
        **turn_figures(result.output),
        "seconds": result.seconds,
    }
