"""Behaviour cloning: demonstrations of a scripted expert, and a policy that does as they do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import m2flow
from m2flow.algorithms.sampling import derive_seed
from m2flow.environments.demonstrations import (
    played,
    read_demonstrations,
    record_demonstrations,
)
from m2flow.environments.environment import Array, Transition
from m2flow.environments.registry import make_environment
from m2flow.environments.spec import ObservationSpec
from m2flow.environments.table import TableEnvironment
from m2flow.errors import UserError
from m2flow.models.policies.flow_matching import FlowOptions, tiny_pi0
from m2flow.models.policies.protocol import Policy
from m2flow.training.optimizer import NotFinite
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied import experiment as experiments
from m2flow.workloads.embodied.cloning import clone, demonstrations, device_with_room
from m2flow.workloads.embodied.experiment import EmbodiedExperiment, spec_of
from m2flow.workloads.embodied.workload import WORKLOAD

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
    own = recipe(warmup={"episodes": 3})
    observations, actions = demonstrations(own, spec_of(own), 2)
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
    seen, _ = demonstrations(own, spec_of(own), 1)
    assert seen["state"].dtype == torch.float32
    assert seen["image"].dtype == torch.uint8
    clone(EmbodiedExperiment(own).flow().learner.source.make(), own, spec_of(own))


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


def test_pi0_is_cloned_by_matching_the_flow_of_all_that_it_decides_on() -> None:
    own = recipe(
        policy={"kind": "pi0", "cameras": ["image"], "chunk": 2},
        warmup={"steps": 200, "episodes": 6, "batch_size": 16, "learning_rate": 3e-3},
        model="tiny",
    )
    spec = spec_of(own)
    options = FlowOptions(action_size=2, chunk=2, low=(-1.0, -1.0), high=(1.0, 1.0))
    policy = tiny_pi0(["reach the red ball"], options, state_size=10, chunk=4)
    assert (policy.horizon, policy.chunk) == (4, 2)
    seen, shown = demonstrations(own, spec, policy.horizon)

    def error() -> float:
        with torch.no_grad():
            given = policy.act(seen, seeds=range(len(shown)), greedy=True).actions
        return float((given - shown[:, :2]).square().mean())

    before = error()
    clone(policy, own, spec)
    assert error() < before / 4


def test_a_warm_up_of_what_is_no_number_ends_and_changes_nothing() -> None:
    own = recipe(warmup={"steps": 2, "episodes": 2})
    policy = EmbodiedExperiment(own).flow().learner.source.make()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(float("inf"))
    before = {name: tensor.clone() for name, tensor in policy.named_parameters()}
    with pytest.raises(NotFinite, match="no step was taken: step 1 of the warm-up"):
        clone(policy, own, spec_of(own))
    for name, tensor in policy.named_parameters():
        assert torch.equal(tensor, before[name])


class Plane(Policy):
    """Actions that are linear in the state, by weights of any dtype; `idle` changes nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((10, 2), 0.5, dtype=dtype))
        self.idle = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        self.rows: list[int] = []

    def act(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def evaluate(self, *_: Any) -> Any:
        raise NotImplementedError

    def cloning_loss(
        self, observations: Any, actions_BHA: torch.Tensor, seed: int, rows: slice = slice(None)
    ) -> torch.Tensor:
        state, shown = observations["state"][rows], actions_BHA[rows, 0]
        self.rows.append(len(state))
        away = state @ self.weight.float() - shown
        return away.square().mean() + 0.0 * self.idle.float().sum()


def test_a_bfloat16_policy_is_cloned_by_float32_master_weights() -> None:
    """At 0.5 numbers of bfloat16 are 0.004 apart: steps of 0.0001 were all rounded away."""
    own = recipe(warmup={"steps": 100, "episodes": 3, "learning_rate": 1e-4})
    half, single = Plane(torch.bfloat16), Plane(torch.float32)
    for policy in (half, single):
        clone(policy, own, spec_of(own))
    assert float((half.weight.float() - 0.5).abs().max()) > 0.007
    torch.testing.assert_close(half.weight.float(), single.weight, rtol=0, atol=0.004)
    assert all(parameter.grad is None for parameter in half.parameters())


def test_a_warm_up_has_no_weight_decay() -> None:
    """What no gradient moves stays; AdamW's own decay of 0.01 shrank it, which nobody had asked."""
    own = recipe(warmup={"steps": 20, "episodes": 3, "learning_rate": 0.01})
    policy = Plane(torch.float32)
    clone(policy, own, spec_of(own))
    assert torch.equal(policy.idle, torch.ones(4))


def test_a_batch_of_the_warm_up_is_computed_in_micro_batches() -> None:
    """It was computed at once, which a model of billions of parameters does not fit."""
    warmup = {"steps": 2, "episodes": 3, "batch_size": 8}
    own = recipe(warmup=warmup, update={"turns_per_microbatch": 3})
    policy = Plane(torch.float32)
    clone(policy, own, spec_of(own))
    assert policy.rows == [3, 3, 2] * 2


@pytest.mark.parametrize("kind", ["mlp", "cnn", "pi0"])
def test_micro_batches_do_not_change_what_is_cloned(kind: str) -> None:
    """The noise that pi0 learns from is that of the row in its batch, too."""
    losses: list[list[float]] = []
    weights: list[dict[str, torch.Tensor]] = []

    class Told:
        def phase(self, *_: Any) -> None:
            losses.append([])

        def update(self, _: int, metrics: Any = None) -> None:
            losses[-1].append(metrics["loss"])

        def note(self, _: str) -> None: ...

    for size in (8, 3):
        own = recipe(
            policy={"kind": kind, "chunk": 2, **({"hidden": [16]} if kind == "mlp" else {})},
            warmup={"steps": 3, "episodes": 2, "batch_size": 8, "learning_rate": 1e-4},
            update={"turns_per_microbatch": size},
        )
        policy = EmbodiedExperiment(own).flow().learner.source.make()
        clone(policy, own, spec_of(own), Told())
        weights.append({name: x.detach() for name, x in policy.named_parameters()})
    whole, pieces = losses
    assert whole == pytest.approx(pieces, rel=1e-4)
    assert len(set(whole)) == 3
    for name, found in weights[0].items():  # Adam may take a step the other way where there is none
        away = (found - weights[1][name]).abs()
        assert float(away.mean()) < 2e-6, name


def test_a_warm_up_runs_on_an_accelerator_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran on the host's cores, whatever else the machine had."""
    policy = Plane(torch.bfloat16)  # 24 parameters with masters, gradients and moments: 18 bytes
    free = {0: 400, 1: 481}
    monkeypatch.setattr("m2flow.workloads.embodied.cloning.free_gpu_memory", tuple)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_with_room(policy, recipe()) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free[number], 1 << 40))
    assert device_with_room(policy, recipe()) == "cuda:1"
    assert device_with_room(policy, recipe(lanes="gpu:2")) == "cuda:1"
    assert device_with_room(policy, recipe(lanes="cpu:2")) == "cpu"
    assert device_with_room(policy, recipe(lane_memory="400B")) == "cpu"
    policy.weight.requires_grad_(False)
    assert device_with_room(policy, recipe()) == "cuda:0"
    policy.float()
    policy.weight.requires_grad_(True)
    assert device_with_room(policy, recipe()) == "cuda:1", "16 bytes of a float32 parameter"

    placed: list[str] = []

    class Seen(Exception): ...

    def seen(policy: Policy, *_: Any) -> None:
        placed.append(next(policy.parameters()).device.type)
        raise Seen

    monkeypatch.setattr(experiments, "device_with_room", lambda *_: "meta")
    monkeypatch.setattr(experiments, "clone", seen)
    with pytest.raises(Seen):
        EmbodiedExperiment(recipe()).prepare(tmp_path)
    assert placed == ["meta"]


def test_accelerators_that_are_looked_at_for_a_warm_up_get_no_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That which torch makes to ask takes hundreds of MB of each, for as long as the run lasts."""
    driver = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    def asked(number: int) -> tuple[int, int]:
        raise AssertionError(f"a context on accelerator {number}")

    policy = Plane(torch.bfloat16)

    def told(*free: str) -> str:
        rows = "".join(f"{n}, GPU-{n}, {mib}\n" for n, mib in enumerate(free))
        driver.write_text(f"#!/bin/sh\nprintf '{rows}'\n")
        driver.chmod(0o755)
        return device_with_room(policy, recipe())

    with monkeypatch.context() as refusing:
        refusing.setattr(torch.cuda, "mem_get_info", asked)
        assert told("0", "0", "1") == "cuda:2"
        assert told("0", "0", "0") == "cpu", "it is what is free now"
        refusing.setenv("CUDA_VISIBLE_DEVICES", "2,0,1")
        assert told("0", "0", "1") == "cuda:0"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (1000 * (number == 1), 1 << 40))
    assert told("0", "1", "[N/A]") == "cuda:1", "torch is asked what the driver does not tell"
    assert told("1", "0") == "cuda:1"


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


# --- from a file --------------------------------------------------------------------------------


def recorded(folder: Path, some: Any) -> str:
    """The file of what a recipe's expert shows."""
    path = folder / "shown.npz"
    environment = make_environment(some.environment.name, **some.environment.arguments)
    seeds = [derive_seed(some.seed, 6, number) for number in range(some.warmup.episodes)]
    record_demonstrations(path, environment, lambda one: one.expert(), seeds)
    return str(path)


def test_what_was_recorded_clones_the_policy_that_playing_it_does(tmp_path: Path) -> None:
    played = recipe(warmup={"steps": 5, "episodes": 3}, policy={"hidden": [8], "chunk": 3})
    data = recorded(tmp_path, played)
    read = recipe(warmup={"steps": 5, "data": data}, policy={"hidden": [8], "chunk": 3})
    ours, theirs = (demonstrations(one, spec_of(one), 3) for one in (played, read))
    assert torch.equal(ours[1], theirs[1])
    for name, part in ours[0].items():
        other = theirs[0][name]
        assert part == other if isinstance(part, list) else torch.equal(part, other), name
    for number, one in enumerate((played, read)):
        EmbodiedExperiment(one).prepare(tmp_path / str(number))
    files = [tmp_path / str(number) / "policy.safetensors" for number in (0, 1)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"action": None}, r"has no array 'action'.*it has episode, image, instruction, state$"),
        ({"action": np.float32(1)}, r"\(steps, "),
        ({"state": None}, r"has no array 'state'.*it has action, episode, image, instruction$"),
        ({"action": np.full((4, 2), 3.0)}, r"'action' .*got 3\.0\); expected -1\.0 to 1\.0"),
        ({"action": np.zeros((4, 3))}, r"'action' .*got \(4, 3\)\); expected \(steps, 2\)"),
        ({"image": np.zeros((4, 8, 8, 3), np.uint8)}, r"'image' .*expected \(steps, 32, 32, 3\)"),
        ({"image": np.zeros((4, 32, 32, 3))}, r"'image' .*got 'float64'\); expected uint8"),
        ({"state": np.full((4, 10), np.nan)}, r"'state' .*not finite"),
        ({"state": np.zeros((3, 10))}, r"'state' .*got \(3, 10\)"),
        ({"episode": np.array([0, 1, 0, 1])}, r"'episode' .*the rows of an episode together"),
        ({"instruction": np.zeros(4)}, r"'instruction' .*expected text"),
        ({"episode": np.array(["a", "a", "b", "b"])}, r"'episode' .*expected numbers"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_a_run(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    spec = spec_of(recipe())
    arrays: dict[str, Any] = {
        part.name: np.zeros((4, *part.shape), part.dtype) for part in spec.observations
    }
    arrays |= {"action": np.zeros((4, 2)), "episode": np.array([7, 7, 2, 2])}
    arrays |= {"instruction": np.array(["reach"] * 4)}
    path = tmp_path / "shown.npz"
    np.savez(path, **arrays)
    read_demonstrations(str(path), spec)
    np.savez(path, **{name: x for name, x in (arrays | changes).items() if x is not None})
    with pytest.raises(UserError, match=f"^warmup.data: .*{words}") as caught:
        EmbodiedExperiment(recipe(warmup={"steps": 1, "data": str(path)}))
    assert "\n" not in str(caught.value)


def test_demonstrations_come_from_one_place(tmp_path: Path) -> None:
    for warmup, words in (
        ({"data": "x.npz", "expert": "a:b"}, "warmup.expert: is for demonstrations that are"),
        ({"data": "x.npz", "episodes": 7}, "warmup.episodes: is for demonstrations that are"),
    ):
        with pytest.raises(UserError, match=words):
            recipe(warmup=warmup)
    with pytest.raises(UserError, match=r"warmup\.data: is no file of demonstrations"):
        EmbodiedExperiment(recipe(warmup={"steps": 1, "data": str(tmp_path / "nowhere.npz")}))
    with pytest.raises(UserError, match=r"warmup\.data: is no file of demonstrations"):
        EmbodiedExperiment(recipe(warmup={"steps": 1, "data": "no\0name.npz"}))


def test_a_policy_that_profiling_keeps_is_named_by_its_demonstrations() -> None:
    """Another warm-up took the policy that was cloned for the one before."""
    names = {WORKLOAD.model_name(recipe(warmup={"steps": steps})) for steps in (1, 1, 2)}
    assert len(names) == 2


def test_a_policy_that_profiling_keeps_is_named_by_whether_it_has_a_critic() -> None:
    """What PPO had left there has a value head, which GRPO's policy refused for good."""
    ppo, grpo = (
        recipe(
            warmup={"steps": 1},
            algorithm={"name": name},
            rollouts_per_step=8,
            rollout={"horizon": 6, "automatic_reset": False},
        )
        for name in ("ppo", "grpo")
    )
    assert WORKLOAD.model_name(ppo) != WORKLOAD.model_name(grpo)


def test_what_an_expert_says_is_an_action_within_the_bounds(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    environment = make_environment("gymnasium:Pendulum-v1")
    for said in (0.5, [0.5], np.array([0.5])):
        assert played(environment, lambda _, said=said: said, range(1))["action"].shape[1:] == (1,)
    wide = played(environment, lambda _: [9.0], range(1))["action"]
    assert np.abs(wide).max() == 2.0
    record_demonstrations(tmp_path / "wide.npz", environment, lambda _: [9.0], range(1))
    read_demonstrations(str(tmp_path / "wide.npz"), environment.spec)
    for said in ([0.1, 0.2], [float("nan")], "left", [[0.1]]):
        with pytest.raises(UserError, match=r"warmup\.expert: the expert gives no action"):
            played(environment, lambda _, said=said: said, range(1))


@pytest.mark.parametrize("said", [-1, 2, 0.5])
def test_a_choice_that_there_is_not_is_no_action(said: float) -> None:
    """It was brought within the bounds: an expert of a space that begins at 1 did another thing."""
    pytest.importorskip("gymnasium")
    environment = make_environment("gymnasium:CartPole-v1")
    with pytest.raises(UserError, match=r"warmup\.expert: the expert gives no .*from 0 to 1"):
        played(environment, lambda _: said, range(1))
    for taken in (0, 1.0, np.int64(1)):
        assert set(played(environment, lambda _, taken=taken: taken, range(1))["action"].flat) == {
            float(taken)
        }


class Remembering(TableEnvironment):
    """Shows what was done last, by a name that demonstrations have for what is done."""

    def __init__(self) -> None:
        super().__init__("red")
        last = ObservationSpec("action", (2,))
        self.spec = replace(self.spec, observations=(*self.spec.observations, last))
        self.last = np.zeros(2, np.float32)

    def step(self, action: Array) -> Transition:
        self.last = action
        return super().step(action)

    def observe(self) -> Mapping[str, Array]:
        return {**super().observe(), "action": self.last}


def test_an_observation_is_not_learned_as_an_action(tmp_path: Path) -> None:
    """What was seen and what was done came into one array, and every other row was cloned."""
    environment = Remembering()
    said = r"table:red gives an observation that demonstrations have no room for \(got 'action'\)"
    with pytest.raises(UserError, match=said):
        played(environment, lambda one: one.expert(), range(1))
    np.savez(tmp_path / "shown.npz", action=np.zeros((1, 2)))
    with pytest.raises(UserError, match=said):
        read_demonstrations(str(tmp_path / "shown.npz"), environment.spec)


def test_a_file_of_demonstrations_may_lie_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own = recipe(warmup={"episodes": 2})
    recorded(tmp_path, own)
    assert len(read_demonstrations("~/shown.npz", spec_of(own))["action"])


@pytest.mark.parametrize(("warmup", "said"), [({}, 1), ({"steps": 0}, 0), ({"steps": 1}, 0)])
def test_demonstrations_without_steps_are_said_to_be_without_effect(
    warmup: dict[str, Any], said: int, caplog: pytest.LogCaptureFixture
) -> None:
    recipe(warmup={"data": "shown.npz", **warmup})
    assert len(caplog.messages) == said
