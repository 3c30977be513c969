"""The reasoning workload, as the run and the command line know it; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.flow import Flow
from m2flow.flow.graph import FlowGraph
from m2flow.generation.supported import check_installed
from m2flow.plan.profile.work import Pricer
from m2flow.workloads.common.profile_key import digest
from m2flow.workloads.common.recipe import Recipe
from m2flow.workloads.common.workload import Assumed, Examination
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.files import lacking, names_files, without_warmup
from m2flow.workloads.reasoning.flow import PolicyGradient, recipe_flow
from m2flow.workloads.reasoning.named import check_task, rewards_of, task_of
from m2flow.workloads.reasoning.supported import check_model, known_shape
from m2flow.workloads.reasoning.work import prices
from m2flow.workloads.reasoning.workers import ModelSource
from m2flow.workloads.reasoning.workers.source import Divided

if TYPE_CHECKING:
    from m2flow.workloads.reasoning.experiment import ReasoningExperiment

SHAPES = (
    "prompts_per_step", "samples_per_prompt", "minibatches", "data", "reward", "generation",
    "training",
)  # fmt: skip
"""Keys of a recipe that say what a step has to do."""


def shaped(flow: PolicyGradient, recipe: ReasoningRecipe, model: str | None) -> Flow:
    """Have a flow's workers declare layouts for a model that is planned in the recipe's place.

    Args:
        flow: of the recipe.
        recipe: whose model it is otherwise.
        model: a folder, a `config.json` or a known name; None for the recipe's own.
    """
    if model is not None:
        shape = known_shape(recipe, model)
        flow.generator.key_value_heads = None if shape is None else shape.kv_heads
        for worker in flow.workers.values():
            if isinstance(worker, Divided):
                worker.planned_model = model
    return flow


class Reasoning:
    """The workload; see `m2flow.workloads.common.Workload`."""

    recipe: type[Recipe] = ReasoningRecipe
    reads_problems = True
    modules: Sequence[str] = (
        "m2flow.models.causal_lm",
        "m2flow.models.first_load",
        "m2flow.generation.native",
        "m2flow.training.policy",
        "m2flow.workloads.reasoning.learning",
        "m2flow.workloads.reasoning.workers",
    )

    def flow(self, recipe: ReasoningRecipe, model: str | None = None) -> Flow:
        check_model(recipe, model)
        return shaped(recipe_flow(recipe, ModelSource(recipe.model.path or "")), recipe, model)

    def check_here(self, recipe: ReasoningRecipe) -> None:
        check_installed(recipe.generation.engine)
        if key := recipe.training.of_torchao:
            from m2flow.training.torchao_adamw import check_installed as check_torchao

            check_torchao(key)
        if recipe.training.fused_kernels:
            from m2flow.training.fused import check_installed as check_liger

            check_liger()

    def lacking(self, recipe: ReasoningRecipe) -> Sequence[str]:
        found = lacking(recipe)
        if not found:
            self._check(recipe)
        return found

    def _check(self, recipe: ReasoningRecipe) -> None:
        """Refuse what a run would: without torch where the recipe names no model and no file."""
        if names_files(recipe):
            self.experiment(without_warmup(recipe))
        else:
            check_task(recipe, task_of(recipe))
            rewards_of(recipe)

    def prices(self, recipe: ReasoningRecipe, graph: FlowGraph, assumed: Assumed) -> Pricer:
        return prices(recipe, graph, assumed.model, assumed.prompt_tokens, assumed.answer_tokens)

    def profile_key(self, recipe: ReasoningRecipe) -> Mapping[str, Mapping[str, object]]:
        algorithm, model = recipe.algorithm, recipe.model
        shapes: dict[str, object] = {
            "algorithm": algorithm.name,
            "scale": algorithm.scale,
            "epochs": algorithm.epochs,
            "reference": algorithm.kl_coefficient > 0,
        }
        for name, value in recipe.model_dump(mode="json", include=set(SHAPES)).items():
            inner = value.items() if isinstance(value, dict) else ()
            shapes |= {f"{name}.{key}": setting for key, setting in inner} or {name: value}
        for key, value, off in (
            ("further_draws", recipe.further_draws, 0),
            ("overlong_buffer", algorithm.overlong_buffer > 0, False),
            ("kl_in_reward", algorithm.kl_in_reward > 0, False),
            ("entropy_in_loss", algorithm.entropy_coefficient > 0, False),
            ("truncated", algorithm.truncated, "terminal"),
            ("equal_groups", algorithm.equal_groups, "keep"),
        ):
            if value != off:
                shapes[key] = value
        for name, section in (("reward_model", recipe.reward_model), ("judge", recipe.judge)):
            if section.path is not None:  # as a path: what judges has no part in the model's facts
                shapes[name] = section.model_dump(mode="json")
        facts: dict[str, object] = {"dtype": model.dtype}
        if model.lora_rank:
            facts["lora_rank"] = model.lora_rank
            facts |= {} if model.lora_publish == "merged" else {"lora_publish": "adapter"}
        if model.path is not None:
            config = Path(model.path) / "config.json"
            facts["config"] = digest(config.read_text()) if config.is_file() else model.path
        if model.path is None or recipe.warmup.steps:
            facts["made"] = self.model_name(recipe)
        return {"model": facts, "shapes": shapes}

    def model_name(self, recipe: ReasoningRecipe) -> str:
        parts = (recipe.model, recipe.data, recipe.warmup)
        return digest([recipe.seed, *(part.model_dump() for part in parts)])

    def experiment(self, recipe: ReasoningRecipe) -> ReasoningExperiment:
        from m2flow.workloads.reasoning.experiment import ReasoningExperiment

        return ReasoningExperiment(recipe)

    def examine(self, examination: Examination) -> dict[str, Any]:
        from m2flow.workloads.reasoning.evaluation import examine

        return examine(examination)


WORKLOAD = Reasoning()
