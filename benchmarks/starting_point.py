"""The model that benchmarks start from: the quick start's, warmed up once and kept."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from harness import CACHE, ROOT

from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.workers import ModelSource


def quickstart(*overrides: str) -> tuple[ReasoningRecipe, ReasoningExperiment, ModelSource]:
    """The quick start's recipe with overrides, and its model after the warm-up."""
    recipe = read_recipe(ROOT / "recipes" / "quickstart.yaml", overrides)
    experiment = ReasoningExperiment(recipe)
    matters = [recipe.seed, recipe.model.model_dump(), recipe.data.model_dump()]
    matters.append(recipe.warmup.model_dump())
    key = hashlib.sha256(json.dumps(matters, sort_keys=True).encode()).hexdigest()[:12]
    folder = CACHE / f"quickstart-{key}"
    if not (folder / "config.json").is_file():
        print(f"warming up the starting model (once; kept in {folder})", flush=True)
    return recipe, experiment, experiment.prepare(Path(folder))
