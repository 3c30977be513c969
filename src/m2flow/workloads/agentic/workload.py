"""The agentic workload, as the run and the command line know it; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from m2flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.plan.profile.work import Pricer
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.agentic.flow import recipe_flow
from m2flow.workloads.agentic.work import prices
from m2flow.workloads.common.profile_key import digest
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.workload import Assumed, Examination
from m2flow.workloads.reasoning.files import without_warmup
from m2flow.workloads.reasoning.supported import check_model
from m2flow.workloads.reasoning.workers import ModelSource
from m2flow.workloads.reasoning.workload import Reasoning, shaped

if TYPE_CHECKING:
    from m2flow.workloads.agentic.experiment import AgenticExperiment

SHAPES = ("tools", "turn_reward", "agent", "episode")
"""Keys of a recipe, beside those of reasoning, that say what a step has to do."""


class Agentic(Reasoning):
    """The workload; see `m2flow.workloads.common.Workload`."""

    recipe: type[Recipe] = AgenticRecipe
    reads_problems = False
    modules: Sequence[str] = (
        *Reasoning.modules,
        "m2flow.workloads.agentic.dialect",
        "m2flow.workloads.agentic.workers",
    )

    def flow(self, recipe: AgenticRecipe, model: str | None = None) -> Flow:  # type: ignore[override]
        check_model(recipe, model)
        return shaped(recipe_flow(recipe, ModelSource(recipe.model.path or "")), recipe, model)

    def _check(self, recipe: AgenticRecipe) -> None:  # type: ignore[override]
        self.experiment(without_warmup(recipe))

    def prices(  # type: ignore[override]
        self, recipe: AgenticRecipe, graph: FlowGraph, assumed: Assumed
    ) -> Pricer:
        return prices(recipe, graph, assumed)

    def profile_key(self, recipe: AgenticRecipe) -> Mapping[str, Mapping[str, object]]:  # type: ignore[override]
        found = super().profile_key(recipe)
        own = recipe.model_dump(mode="json", include=set(SHAPES))
        return {**found, "shapes": {**found["shapes"], **own}}

    def model_name(self, recipe: AgenticRecipe) -> str:  # type: ignore[override]
        return digest(
            [super().model_name(recipe), recipe.model_dump(mode="json", include=set(SHAPES))]
        )

    def experiment(self, recipe: AgenticRecipe) -> AgenticExperiment:  # type: ignore[override]
        from m2flow.workloads.agentic.experiment import AgenticExperiment

        return AgenticExperiment(recipe)

    def examine(self, examination: Examination) -> dict[str, Any]:
        from m2flow.workloads.agentic.evaluation import examine

        return examine(examination)


WORKLOAD = Agentic()
