"""What a recipe's profile depends on: model, shapes, hardware, versions.

A value belongs into the key if changing it changes how long a call takes or how much it holds.
Read without torch, but for the names of accelerators.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from m2flow.engine.plan import LaneSpec
from m2flow.observe.machine import processor_name
from m2flow.workloads.reasoning.config import ReasoningRecipe

PACKAGES = ("m2flow", "torch", "transformers")

SHAPES = (
    "prompts_per_step",
    "samples_per_prompt",
    "minibatches",
    "data",
    "generation",
    "training",
)
"""Parts of a recipe that say what a step has to do."""

NOT_SHAPES = {"training": {"gang"}, "generation": {"gang"}}
"""Keys of those parts that say how it is to be done: all of that is measured."""

Key = dict[str, dict[str, object]]


def profile_key(recipe: ReasoningRecipe, lanes: Sequence[LaneSpec]) -> Key:
    """The key of the recipe's profile on lanes of this machine."""
    algorithm = recipe.algorithm
    shapes: dict[str, object] = {
        "algorithm": algorithm.name,
        "whiten": algorithm.name == "ppo" and algorithm.whiten,
        "reference": algorithm.kl_coefficient > 0,
    }
    for name in SHAPES:
        value = getattr(recipe, name)
        if isinstance(value, int):
            shapes[name] = value
            continue
        for inner, setting in value.model_dump(mode="json").items():
            if inner not in NOT_SHAPES.get(name, ()):
                shapes[f"{name}.{inner}"] = setting
    return {
        "model": _model(recipe),
        "shapes": shapes,
        "hardware": _hardware(lanes),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
    }


def model_folder_name(recipe: ReasoningRecipe) -> str:
    """A name for the model that the recipe begins with, where it is made: the same for the same."""
    return _digest(
        [recipe.seed, *(part.model_dump() for part in (recipe.model, recipe.data, recipe.warmup))]
    )


def _model(recipe: ReasoningRecipe) -> dict[str, object]:
    model = recipe.model
    found: dict[str, object] = {"dtype": model.dtype}
    if model.path is not None:
        config = Path(model.path) / "config.json"
        found["config"] = _digest(config.read_text()) if config.is_file() else model.path
    if model.path is None or recipe.warmup.steps:
        found["made"] = model_folder_name(recipe)
    return found


def _hardware(lanes: Sequence[LaneSpec]) -> dict[str, object]:
    kinds = Counter(f"{lane.kind} of {len(lane.cores)} cores" for lane in lanes)
    found: dict[str, object] = {
        "cpu": processor_name(),
        "lanes": ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())),
        "machines": len({lane.node for lane in lanes}),
    }
    if any(lane.kind == "gpu" for lane in lanes):
        import torch

        names = {torch.cuda.get_device_name(lane.gpu) for lane in lanes if lane.gpu is not None}
        found["gpu"] = ", ".join(sorted(names))
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # m2flow itself, run from its sources
        from m2flow import __version__

        return __version__


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
