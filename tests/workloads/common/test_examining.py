"""Who examines a model, where nobody names a workload."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from m2flow.engine.plan import Plan
from m2flow.errors import UserError
from m2flow.flow import Batch
from m2flow.plan import parse_lanes
from m2flow.plan.chunks import ITEMS_IN_TIME
from m2flow.workloads.common import read_recipe, registry, workload_named
from m2flow.workloads.common.examining import deadline_of, examined, examiner_of
from m2flow.workloads.common.workload import Examination
from tests.plan.small_graphs import Grpo, Model, Trainer

MODEL, PROBLEMS = Path("model"), Path("problems.jsonl")


@pytest.mark.parametrize(
    ("recipe", "name"), [("quickstart-embodied", "embodied"), ("quickstart", "reasoning")]
)
def test_a_recipe_and_a_run_say_whose_they_are(recipe: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"base: {recipe}\n")
    assert examiner_of(MODEL, tmp_path / "mine.yaml") is workload_named(name)
    keys = read_recipe(recipe).model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(keys))
    (tmp_path / "checkpoints").mkdir()
    assert examiner_of(tmp_path / "checkpoints" / "latest", None) is workload_named(name)


def test_problems_are_for_the_one_workload_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None is the default: a second one that reads problems is asked for by name."""
    (own,) = (entry for entry in registry.OWN if workload_named(entry.name).reads_problems)
    assert examiner_of(MODEL, PROBLEMS) is workload_named(own.name)
    second = EntryPoint("second", own.value, registry.GROUP)
    monkeypatch.setattr(registry, "OWN", (*registry.OWN, second))
    with pytest.raises(UserError, match=rf"^--workload: is missing; expected {own.name} or second"):
        examiner_of(MODEL, PROBLEMS)


def test_a_model_of_no_run_needs_something_to_be_asked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--data: is missing; expected a file of problems"):
        examiner_of(tmp_path, None)


@pytest.mark.parametrize(
    ("workload", "asked", "option"),
    [
        ("embodied", {"temperature": 0.5}, "--temperature"),
        ("embodied", {"engine": "vllm"}, "--engine"),
        ("agentic", {"seed": 3}, "--seed"),
        ("agentic", {"samples": 4}, "--samples"),
        ("agentic", {"skip_bad_rows": True}, "--on-bad-row"),
        ("agentic", {"chat_options": {"enable_thinking": False}}, "--chat-option"),
    ],
)
def test_what_would_change_nothing_is_refused(
    workload: str, asked: dict[str, Any], option: str, tmp_path: Path
) -> None:
    """A success rate at a temperature that nobody has drawn at is worse than none."""
    with pytest.raises(UserError, match=f"^{option}: changes nothing: .*what does: --data, "):
        workload_named(workload).examine(Examination(tmp_path, None, **asked))


def test_a_call_may_take_as_long_as_is_said() -> None:
    """Ten minutes were all that there was, whatever the run was trained with."""
    recipe = read_recipe("quickstart", {"deadline_seconds": 1800.0})
    assert deadline_of(Examination(MODEL, None), None) == 600.0
    assert deadline_of(Examination(MODEL, None), recipe) == 1800.0
    assert deadline_of(Examination(MODEL, None, deadline_seconds=7200.0), recipe) == 7200.0


@pytest.mark.parametrize("lanes", ["cpu:1", "2xcpu:1"])
def test_the_deadline_and_short_calls_are_in_the_plan(
    lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []

    def launched(*_: object, plan: Plan, **__: object) -> nullcontext[SimpleNamespace]:
        plans.append(plan)
        return nullcontext(SimpleNamespace(step=len))

    monkeypatch.setattr("m2flow.runtime.driver.launch.launch", launched)
    flow, batch = Grpo(gen=Model(), learner=Trainer()), Batch({"x": list(range(9740))})
    examined(flow, batch, parse_lanes(lanes), None, "gen", 1800.0)
    (plan,) = plans
    assert plan.deadline_seconds == 1800.0
    assert plan.stages["score"].chunk == ITEMS_IN_TIME
