"""What of a recipe may differ from that of the run which is to be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from m2flow.errors import UserError
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.common.resume import FREE_TABLES, MAY_CHANGE, _check_same
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.reasoning.config import ReasoningRecipe


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        ({"data": {"chat_options": {}}}, {"data": {"chat_options": {"a": 1}}}, "data.chat_options"),
        ({"data": {"chat_options": {"a": 1}}}, {"data": {"chat_options": {}}}, "data.chat_options"),
        ({"judge": {"chat_options": {}}}, {"judge": {"chat_options": {"a": 1}}}, "judge.chat_opti"),
        ({"data": {"dataset": {"a": 1}}}, {"data": {"dataset": {"a": 1, "b": 5}}}, "data.dataset"),
        ({"data": {"dataset": {"a": 1}}}, {"data": {"dataset": "a"}}, "data.dataset"),
        ({"data": {"curriculum": {"band": 1}}}, {"data": {"curriculum": None}}, "data.curriculum"),
        ({"data": {"curriculum": None}}, {"data": {"curriculum": {"band": 1}}}, "data.curriculum"),
        ({"states": {"steps": 1}}, {"states": {}}, "states"),
        ({"seed": 1}, {}, "seed"),
    ],
)
def test_what_changes_the_run_is_refused(
    before: dict[str, Any], now: dict[str, Any], key: str
) -> None:
    with pytest.raises(UserError, match="differs from the run") as refused:
        _check_same(before, now)
    assert str(refused.value.key).startswith(key)


def test_what_may_change_is_a_key_of_a_recipe() -> None:
    recipes = (ReasoningRecipe, AgenticRecipe, EmbodiedRecipe)
    known = {key for recipe in recipes for key in keys_of(recipe)}
    assert known >= MAY_CHANGE


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a recipe, and of its sections."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind, f"{prefix}{name}.")


@pytest.mark.parametrize(
    ("key", "now"),
    [
        ("training.gradient_checkpointing", True),
        ("training.optimizer_on_host", True),
        ("training.sharing", "none"),
        ("training.fused_kernels", False),
        ("generation.cache_gb", 8.0),
        ("generation.max_running", 64),
        ("generation.captured_decode", False),
        ("judge.cache_gb", 8.0),
        ("judge.max_running", 64),
    ],
)
def test_a_run_goes_on_with_settings_that_need_less(key: str, now: Any) -> None:
    """One that ran out of memory could not be resumed with them."""
    section, _, name = key.partition(".")
    of_judge = {"path": "judge"} if section == "judge" else {}
    before, after = (
        ReasoningRecipe.model_validate({section: of_judge | more}).model_dump(mode="json")
        for more in ({}, {name: now})
    )
    assert before != after
    _check_same(before, after)


def free_tables(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Keys of a recipe that hold tables whose keys the user chooses."""
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) in (tuple, list):
            continue  # is compared whole
        kinds = [field.annotation, *get_args(field.annotation)]
        if any(get_origin(kind) is dict for kind in kinds):
            yield prefix + name
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from free_tables(kind, f"{prefix}{name}.")


@pytest.mark.parametrize("recipe", [ReasoningRecipe, AgenticRecipe, EmbodiedRecipe])
def test_tables_whose_keys_the_user_chooses_are_compared_whole(recipe: type[BaseModel]) -> None:
    found = {key for key in free_tables(recipe) if key.partition(".")[0] not in MAY_CHANGE}
    assert found
    assert found <= FREE_TABLES


@pytest.mark.parametrize(
    ("recipe", "rest", "key", "now"),
    [
        (
            EmbodiedRecipe,
            {"environment": {"name": "table:reach"}, "policy": {"kind": "openvla"}},
            "update.gradient_checkpointing",
            True,
        ),
        (ReasoningRecipe, {}, "reward_model.tokens_per_microbatch", 4096),
    ],
)
def test_further_settings_that_need_less_memory(
    recipe: type[BaseModel], rest: dict[str, Any], key: str, now: Any
) -> None:
    section, _, name = key.partition(".")
    there = {"path": "model"} if section == "reward_model" else {}
    before, after = (
        recipe.model_validate({**rest, section: there | more}).model_dump(mode="json")
        for more in ({}, {name: now})
    )
    assert before != after
    _check_same(before, after)
