"""The embodied workload, as the run and the command line know it; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from m2flow.errors import UserError, is_there
from m2flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.plan.profile.work import Pricer
from m2flow.workloads.common.profile_key import digest
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.workload import Assumed, Examination
from m2flow.workloads.embodied.config import (
    STATES,
    TINY,
    VISION_LANGUAGE_ACTION,
    EmbodiedRecipe,
)
from m2flow.workloads.embodied.flow import recipe_flow
from m2flow.workloads.embodied.work import prices

if TYPE_CHECKING:
    from m2flow.workloads.embodied.experiment import EmbodiedExperiment

SHAPES = (
    "model", "rollouts_per_step", "environment", "policy", "rollout", "update", "replay",
)  # fmt: skip
"""Keys of a recipe that say what a step has to do."""


class Embodied:
    """The workload; see `m2flow.workloads.common.Workload`."""

    recipe: type[Recipe] = EmbodiedRecipe
    reads_problems = False
    modules: Sequence[str] = (
        "m2flow.environments",
        "m2flow.models.policies.actor_critic",
        "m2flow.workloads.embodied.learning",
        "m2flow.workloads.embodied.workers",
    )

    def flow(self, recipe: EmbodiedRecipe, model: str | None = None) -> Flow:
        if model is not None and recipe.policy.kind not in VISION_LANGUAGE_ACTION:
            raise UserError("is for policies that are published", key="--model", value=model)
        return recipe_flow(recipe)

    def check_here(self, recipe: EmbodiedRecipe) -> None:
        """Environments say themselves what they lack, when they are made."""
        recipe.require_model()
        if recipe.policy.head == "l1":
            raise UserError(
                "the regression head gives one action and no distribution: it cannot be trained",
                key="policy.head",
                value="l1",
                expected="discrete",
                hint="l1 is for m2flow eval",
            )

    def lacking(self, recipe: EmbodiedRecipe) -> Sequence[str]:
        """Files and the simulator's package; where it is here, its name and options must fit."""
        from m2flow.environments import rendering
        from m2flow.environments.registry import maker, not_installed, variables_of

        model = None if recipe.model in (TINY, STATES) else recipe.model
        paths = {"model": model, "warmup.data": recipe.warmup.data}
        found = [
            f"{key}: there is no {path}"
            for key, path in paths.items()
            if path is not None and not is_there(path)
        ]
        section = recipe.environment
        if section.python is not None:  # it knows what there is
            return found
        if (missing := not_installed(section.name)) is not None:
            return [*found, str(missing)]
        simulated = section.name, section.arguments
        rendering.use_here(variables_of(*simulated), required=False)
        maker(*simulated)
        return found

    def prices(self, recipe: EmbodiedRecipe, graph: FlowGraph, assumed: Assumed) -> Pricer:
        return prices(recipe, graph, assumed)

    def profile_key(self, recipe: EmbodiedRecipe) -> Mapping[str, Mapping[str, object]]:
        found = recipe.model_dump(mode="json", include=set(SHAPES))
        shapes: dict[str, object] = {"algorithm": recipe.algorithm.name, "group": recipe.group_size}
        if recipe.algorithm.further_draws:
            shapes["further_draws"] = recipe.algorithm.further_draws
        for name, value in found.items():
            inner = value.items() if isinstance(value, dict) else ()
            shapes |= {f"{name}.{key}": setting for key, setting in inner} or {name: value}
        model = digest([found["model"], found["policy"]])
        return {"model": {"policy": model}, "shapes": shapes}

    def model_name(self, recipe: EmbodiedRecipe) -> str:
        parts = (recipe.policy, recipe.environment, recipe.warmup)
        critic = recipe.algorithm.has_critic
        return digest([recipe.seed, recipe.model, critic, *(part.model_dump() for part in parts)])

    def experiment(self, recipe: EmbodiedRecipe) -> EmbodiedExperiment:
        from m2flow.workloads.embodied.experiment import EmbodiedExperiment

        return EmbodiedExperiment(recipe)

    def examine(self, examination: Examination) -> dict[str, Any]:
        from m2flow.workloads.embodied.evaluation import examine

        return examine(examination)


WORKLOAD = Embodied()
