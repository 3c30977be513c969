"""Recipes on top of others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

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


TINY = "workload: reasoning\nmodel: {hidden_size: 64, intermediate_size: 384}\n"
BESIDE = "workload: reasoning\nmodel: {path: x, hidden_size: 64, intermediate_size: 384}\n"


@pytest.mark.parametrize(
    ("recipe", "said", "keys"),
    [
        (BESIDE, [], "model.hidden_size"),
        (BESIDE, ["model.num_hidden_layers=2"], "model.hidden_size, model.num_hidden_layers"),
        (TINY, ["model={path: x, initializer_range: 0.1}"], "model.initializer_range"),
        ("base: tiny.yaml\n", {"model.path": "x", "model.hidden_size": 32}, "model.hidden_size"),
        (BESIDE, ["model.path=null"], None),
        (TINY, [], None),
        (TINY, ["model.path=x"], "model.hidden_size"),
        ("base: beside.yaml\nname: top\n", [], None),
        ("base: tiny.yaml\nmodel: {path: x}\n", ["steps=3"], None),
        ("workload: agentic\nmodel: {path: x}\n", ["model.hidden_size=32"], "model.hidden_size"),
        ('workload: embodied\nenvironment: {name: "table:red"}\n', [], None),
    ],
)
def test_keys_that_a_model_in_a_folder_makes_idle_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recipe: str, said: Any, keys: str | None
) -> None:
    """What a person has written had no effect, and nobody said so."""
    folder = write(tmp_path, tiny=TINY, beside=BESIDE, mine=recipe)
    with caplog.at_level(logging.WARNING, "m2flow"):
        read_recipe(folder / "mine.yaml", said)
    told = [record.getMessage() for record in caplog.records]
    assert told == ([] if keys is None else [f"{keys}: without effect, since model.path is set"])


def test_what_a_run_has_kept_is_not_what_somebody_wrote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = read_recipe({"workload": "reasoning", "model": {"path": "x"}})
    with caplog.at_level(logging.WARNING, "m2flow"):
        read_recipe(recipe.model_dump(mode="json"), ["steps=3"])
        assert not caplog.records
        read_recipe({"workload": "reasoning", "model": {"path": "x", "hidden_size": 64}})
    assert "model.hidden_size" in caplog.text
