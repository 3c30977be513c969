"""The recipes that come with m2flow are valid; nothing of what they name has to be installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow.workloads.common.reading import read_recipe

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(path: Path) -> None:
    """Those of published checkpoints leave to the user which folder it lies in."""
    published = path.stem.startswith(("openvla", "pi0"))
    assert read_recipe(path, {"model": "tiny"} if published else {}).steps > 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short(path: Path) -> None:
    """What recipes have in common stands in defaults and in a base."""
    assert len(path.read_text().splitlines()) < 40
