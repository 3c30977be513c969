"""Groups that teach nothing are drawn again: the batch is filled, by every plan alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import m2flow
from m2flow.errors import UserError
from m2flow.flow import Batch, Ragged
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers.further_draws import (
    begin_others,
    first_drawn,
    put_in,
    teaches,
)

HERE = Path(__file__).parent
GROUP, GROUPS = 4, 8

RECIPE: dict[str, Any] = {
    "workload": "embodied",
    "name": "counting",
    "rollouts_per_step": GROUP * GROUPS,
    "environment": {"name": "counting:Counting"},
    "policy": {"hidden": [16]},
    "rollout": {"horizon": 8, "automatic_reset": False},
    "algorithm": {
        "name": "grpo", "group_size": GROUP, "success_bounds": [0.2, 0.8], "further_draws": 4,
    },
    "update": {"epochs": 2, "minibatches": 2},
    "optimizer": {"learning_rate": 0.01},
    "evaluation": {"episodes": 4},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield


def trained(
    mode: str, lanes: Any = "cpu:1", options: Any = None, **algorithm: Any
) -> tuple[Any, list[Any], Any]:
    """The experiment, what two steps gave, and the weights after them."""
    changes = {f"algorithm.{key}": value for key, value in algorithm.items()}
    some = read_recipe(RECIPE, changes | {"environment.options": options or {}})
    experiment = EmbodiedExperiment(some)
    count = some.items_per_step
    with m2flow.launch(experiment.flow(), items_per_step=count, mode=mode, lanes=lanes) as run:
        results = list(run.steps(experiment.batch(step) for step in range(2)))
        return experiment, results, run.worker_call("learner", "weights")


def saved(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "policy.safetensors")


def assert_same_results(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for name in ("episodes", "tried"):
            assert one.output[name] == other.output[name], name


def assert_same_weights(found: Any, wanted: Any, near: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=near, rtol=near)


def test_the_batch_is_full_and_the_same_under_every_plan() -> None:
    pytest.importorskip("ray")
    from m2flow.engine.plan import LaneSpec
    from m2flow.runtime.driver.pool import LanePool

    experiment, wanted, weights = trained("eager")
    figures = [experiment.metrics(one) for one in wanted]
    assert [one["groups/dropped"] for one in figures] == [0.0, 0.0], "the batch is full"
    assert figures[0]["groups/drawn_again"] > 0, "or the seed shows nothing"
    with LanePool([LaneSpec(0), LaneSpec(1)]) as pool:
        for mode in ("collocated", "disaggregated", "hybrid"):
            _, found, others = trained(mode, pool)
            assert_same_results(found, wanted)
            assert_same_weights(others, weights)


def test_a_lane_that_dies_in_a_further_draw_changes_nothing(tmp_path: Path) -> None:
    """What it held of earlier draws is run again beside the draw in which it died."""
    pytest.importorskip("ray")
    experiment, wanted, weights = trained("eager")
    again = experiment.metrics(wanted[0])["groups/drawn_again"] * GROUP
    dead = tmp_path / "dead"
    options = {"dies_at": int(GROUPS * GROUP + again), "dead": str(dead)}
    _, found, others = trained("disaggregated", "cpu:2", options)
    assert dead.exists(), "nobody died, and the test shows nothing"
    assert_same_results(found, wanted)
    assert_same_weights(others, weights)


def test_a_run_that_goes_on_draws_the_same(tmp_path: Path) -> None:
    recipe = {**RECIPE, "mode": "eager", "steps": 4, "checkpoint": {"every": 2}}
    whole = train(recipe, run_dir=tmp_path / "whole")
    train(recipe, {"steps": 2}, run_dir=tmp_path / "parts")
    parts = train(recipe, run_dir=tmp_path / "parts", resume=True)
    assert_same_weights(saved(parts), saved(whole), near=0.0)


@pytest.mark.slow
def test_a_plan_that_is_chosen_draws_the_same(tmp_path: Path) -> None:
    recipe = {**RECIPE, "steps": 4, "checkpoint": {"every": 4}}
    here = train({**recipe, "mode": "eager"}, run_dir=tmp_path / "here")
    there = train({**recipe, "mode": "auto", "lanes": "cpu:2"}, run_dir=tmp_path / "there")
    assert_same_weights(saved(there), saved(here))


def test_what_was_given_up_is_counted() -> None:
    experiment, results, _ = trained("eager")
    for result in results:
        figures = experiment.metrics(result)
        groups = GROUPS + figures["groups/drawn_again"]
        assert figures["episodes/finished"] == groups * GROUP
        assert figures["environment_steps"] == groups * GROUP * 8
        tried = result.output["tried"]
        assert all(len(set(tried[at : at + GROUP])) == 1 for at in range(0, len(tried), GROUP)), (
            "groups are drawn again whole"
        )


def test_there_is_a_limit() -> None:
    once, (first, _), _ = trained("eager", further_draws=0)
    dropped = once.metrics(first)["groups/dropped"]
    experiment, (found, _), _ = trained("eager", further_draws=1)
    figures = experiment.metrics(found)
    assert figures["groups/drawn_again"] == dropped > figures["groups/dropped"] > 0
    kept = [row for row, tried in enumerate(found.output["tried"]) if not tried]
    for row in kept:
        assert found.output["episodes"][row] == first.output["episodes"][row], "they rested"


def test_without_bounds_rewards_that_are_all_the_same_are_drawn_again() -> None:
    experiment, (found, _), _ = trained("eager", success_bounds=None, further_draws=4)
    assert experiment.metrics(found)["groups/drawn_again"] > 0


@pytest.mark.parametrize(
    ("successes", "bounds", "said"),
    [
        ([1, 0], None, True),
        ([1, 1], None, False),
        ([1, None], None, False),
        ([1, 1, 1, 0], (0.1, 0.9), True),
        ([1, 1, 1, 0], (0.1, 0.7), False),
        ([None, 0, 1, None], (0.5, 0.5), True),
        ([None, None], (0.0, 1.0), False),
    ],
)
def test_what_teaches(successes: list[int | None], bounds: Any, said: bool) -> None:
    episodes = [
        None if one is None else {"success_once": float(one), "return": 0.0} for one in successes
    ]
    assert teaches(episodes, "success", bounds) is said
    if bounds is None:
        assert not teaches(episodes, "return", bounds), "returns are all the same"


def rollouts(successes: list[int], turns: list[int], mark: float) -> Batch:
    count = sum(turns)
    return Batch(
        {
            "episodes": [[{"success_once": float(one), "return": 0.0}] for one in successes],
            "failed": torch.zeros(len(turns), dtype=torch.int64),
            "turn.steps": Ragged(torch.ones(count, dtype=torch.int64), turns),
            "turn.observation.state": Ragged(torch.full((count, 2), mark), turns),
            "turn.observation.instruction": [["go"] * some for some in turns],
        }
    )


def test_rows_of_groups_that_teach_nothing_are_replaced() -> None:
    begun = Batch(
        {
            "rollout": torch.arange(4),
            "seed": torch.arange(4),
            "initial_state": torch.tensor([5, 5, 6, 6]),
            "spares": [((11, 8), (12, -1))] * 2 + [((13, 9), (14, -1))] * 2,
        }
    )
    first = first_drawn(rollouts([1, 0, 1, 1], [1, 2, 0, 3], 1.0))
    judging: dict[str, Any] = {"group_size": 2, "reward": "success", "success_bounds": None}
    others = begin_others(first, begun, draw=0, **judging)
    assert others["rests"].tolist() == [True, True, False, False]
    assert others["initial_state"].tolist() == [5, 5, 9, 9]
    assert others["seed"].tolist()[:2] == [0, 1]
    assert len(set(others["seed"].tolist())) == 4
    assert others["observation.state"].tolist() == [[1.0, 1.0]] * 2 + [[0.0, 0.0], [1.0, 1.0]]
    assert others["observation.instruction"] == ["go", "go", "", "go"]
    again = put_in(first, others, rollouts([0, 0, 0, 0], [1, 1, 2, 2], 2.0))
    assert again["turn.steps"].lengths == (1, 2, 2, 2)
    assert again["turn.observation.state"].values[:, 0].tolist() == [1.0] * 3 + [2.0] * 4
    assert [len(some) for some in again["tried"]] == [0, 0, 1, 1]
    assert [some[0][2] for some in again["tried"][2:]] == [0, 3], "steps of what was given up"
    last = begin_others(again, begun, draw=1, **judging)
    numbers = [*begun["rollout"].tolist(), *others["rollout"].tolist(), *last["rollout"].tolist()]
    assert len(set(numbers)) == 12, "draws can be run beside each other"
    assert last["initial_state"].tolist() == [5, 5, 14, 14], "a seed stands for its state"


def test_only_groups_are_drawn_again() -> None:
    with pytest.raises(UserError, match=r"further_draws.*ppo"):
        read_recipe({**RECIPE, "algorithm": {"name": "ppo", "further_draws": 1}})
