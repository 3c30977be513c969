"""Recipes on top of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow.errors import UserError
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.reasoning.config import ReasoningRecipe


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_sections_are_merged_and_values_replaced(tmp_path: Path) -> None:
    write(
        tmp_path,
        lowest="workload: reasoning\nsteps: 10\n"
        "optimizer: {betas: [0.9, 0.95], weight_decay: 0.1}\n",
        middle="base: lowest.yaml\nsteps: 20\noptimizer: {betas: [0.8, 0.9]}\n",
        top="base: middle.yaml\nname: top\ngeneration: {max_new_tokens: 7}\n",
    )
    recipe = read_recipe(tmp_path / "top.yaml", ["optimizer.weight_decay=0.2"])
    assert isinstance(recipe, ReasoningRecipe)
    assert (recipe.name, recipe.steps, recipe.generation.max_new_tokens) == ("top", 20, 7)
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.optimizer.weight_decay == 0.2
    assert read_recipe(recipe) == recipe, "what a run keeps stands on nothing"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"top": "base: other.yaml\n", "othr": ""}, r"other\.yaml: there is no such recipe.*othr"),
        ({"top": "base: [1]\n"}, r"top\.yaml: base: is no file"),
        ({"top": "base: top.yaml\n"}, "leads back to itself"),
        ({"top": "base: low.yaml\n", "low": "base: top.yaml\n"}, "leads back to itself"),
        ({"top": "base: low.yaml\n", "low": "- 1\n"}, r"low\.yaml: must be a table of keys"),
        (
            {"top": "base: low.yaml\n", "low": "workload: reasoning\nstep: 1\n"},
            "unknown key.*steps",
        ),
    ],
)
def test_what_is_wrong_is_said_of_the_file(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        read_recipe(write(tmp_path, **files) / "top.yaml")
