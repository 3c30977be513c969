"""Behaviour cloning: demonstrations of a scripted expert, and a policy that does as they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import m2flow
from m2flow.errors import UserError
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.cloning import clone, demonstrations
from m2flow.workloads.embodied.experiment import EmbodiedExperiment

CLONED: dict[str, Any] = {
    "workload": "embodied",
    "name": "cloned",
    "environment": {"name": "table:red", "options": {"privileged": True}},
    "policy": {"hidden": [64, 64], "chunk": 2},
    "rollout": {"horizon": 24, "automatic_reset": False},
    "warmup": {"steps": 300, "episodes": 40},
    "evaluation": {"episodes": 32, "films": 0},
}


def recipe(**changes: Any) -> Any:
    return read_recipe({**CLONED, **changes})


def test_demonstrations_are_chunks_of_what_was_done_next() -> None:
    observations, actions = demonstrations(recipe(warmup={"episodes": 3}))
    assert actions.shape[1:] == (2, 2)
    assert {len(part) for part in observations.values()} == {len(actions)}
    assert set(observations["instruction"]) == {"reach the red ball"}
    following = actions[1:, 0] == actions[:-1, 1]
    assert float(following.all(1).float().mean()) > 0.8, "but for the ends of episodes"


def test_what_an_expert_saw_has_the_dtypes_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an environment gives float64 the policy, which takes float32, raised."""
    environments = Path(__file__).parents[2] / "environments"
    monkeypatch.syspath_prepend(str(environments))
    own = recipe(
        environment={"name": "toy_environments:Walk"},
        warmup={"steps": 2, "episodes": 2, "expert": "toy_environments:go_right"},
        policy={"hidden": [8]},
    )
    seen, _ = demonstrations(own)
    assert seen["state"].dtype == torch.float32
    assert seen["image"].dtype == torch.uint8
    clone(EmbodiedExperiment(own).flow().learner.source.make(), own)


def test_a_cloned_policy_does_as_it_was_shown(tmp_path: Path) -> None:
    experiment = EmbodiedExperiment(recipe())
    assert experiment.makes_model
    experiment.prepare(tmp_path)
    held_out = experiment.held_out()
    assert held_out is not None
    with m2flow.launch(
        experiment.flow(), items_per_step=16, mode="eager", also={"evaluate": len(held_out)}
    ) as run:
        figures = experiment.evaluation(run.run_method("evaluate", held_out))
    assert figures["eval/success"] > 0.6
    again = EmbodiedExperiment(recipe())
    again.prepare(tmp_path)  # takes what lies there
    ours, theirs = (one.flow().learner.source.make() for one in (experiment, again))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": {"name": "gymnasium:CartPole-v1"}}, "has no expert of its own"),
        ({"warmup": {"steps": 1, "expert": "no_such:thing"}}, "warmup.expert: there is no module"),
    ],
)
def test_who_cannot_show_anything_is_refused(changes: dict[str, Any], words: str) -> None:
    if "environment" in changes:
        pytest.importorskip("gymnasium")
    with pytest.raises(UserError, match=words):
        EmbodiedExperiment(recipe(**changes))
