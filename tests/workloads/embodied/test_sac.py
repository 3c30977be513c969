"""SAC: what is replayed, what a step of training does, on every plan, and after a stop."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import m2flow
from m2flow.algorithms.sampling import derive_seed
from m2flow.environments.spec import ActionSpec
from m2flow.errors import UserError
from m2flow.flow import Place
from m2flow.training.optimizer import SumOptimizer
from m2flow.training.skipping import too_many
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment, spec_of
from m2flow.workloads.embodied.replay import Replay, Transitions, transitions_of
from m2flow.workloads.embodied.soft_update import STATE, SoftUpdate
from m2flow.workloads.embodied.workers.source import PolicySource

HERE = Path(__file__).parent

SMALL: dict[str, Any] = {
    "workload": "embodied",
    "name": "pointing",
    "mode": "eager",
    "steps": 4,
    "rollouts_per_step": 4,
    "environment": {"name": "pointing:Pointing", "options": {"falls": True}},
    "policy": {"hidden": [32, 32], "distribution": "squashed"},
    "rollout": {"horizon": 12},
    "algorithm": {"name": "sac", "gamma": 0.9, "polyak": 0.05},
    "replay": {"capacity": 150, "begin": 60, "batch_size": 32, "updates": 8},
    "optimizer": {"learning_rate": 0.003},
    "evaluation": {"every": 4, "episodes": 4, "films": 0},
    "checkpoint": {"every": 2},
}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """The environment's module, here and on lanes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield


def recipe(**changes: Any) -> Any:
    return read_recipe({**SMALL, **changes})


def test_actions_without_bounds_are_refused() -> None:
    said = r"policy.distribution: .* does not bound its actions"
    environment = {"name": "pointing:Pointing", "options": {"bounded": False}}
    with pytest.raises(UserError, match=said):
        EmbodiedExperiment(recipe(environment=environment))
    # Of bounds whose distance float32 has not every action was the upper one.
    wide = ActionSpec(1, (-3e38,), (3e38,))
    spec = replace(spec_of(recipe()), action=wide)
    with pytest.raises(UserError, match=said):
        PolicySource(recipe().policy, spec).make()


def kept_rollouts(some: Any, steps: int = 1) -> list[Any]:
    """What the learner is given in some steps."""
    experiment = EmbodiedExperiment(some)
    flow = experiment.flow()
    found: list[Any] = []
    run_update = SoftUpdate.run

    def keep(update: SoftUpdate, rollouts: Any, all_reduce: Any) -> dict[str, float]:
        found.append(rollouts)
        return run_update(update, rollouts, all_reduce)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoftUpdate, "run", keep)
        with m2flow.launch(flow, items_per_step=some.items_per_step, mode="eager") as run:
            list(run.steps(experiment.batch(step) for step in range(steps)))
    return found


def trained(some: Any, mode: str, steps: int, lanes: Any = "cpu:1") -> dict[str, torch.Tensor]:
    """Weights after so many steps."""
    experiment = EmbodiedExperiment(some)
    with m2flow.launch(
        experiment.flow(), items_per_step=some.items_per_step, mode=mode, lanes=lanes
    ) as run:
        list(run.steps(experiment.batch(step) for step in range(steps)))
        found: dict[str, torch.Tensor] = run.worker_call("learner", "weights")
        return found


def test_transitions_against_one_at_a_time() -> None:
    """Terminated, cut off by the limit or by the rollout's end: each has its own successor."""
    (rollouts,) = kept_rollouts(recipe(rollouts_per_step=16))
    found = transitions_of(rollouts, 0.9)
    row, kinds = 0, set()
    for number in range(len(rollouts)):
        states = rollouts["turn.observation.state"][number]
        cuts = iter(rollouts["cut.observation.state"][number])
        for turn, state in enumerate(states):
            ends, cut = (bool(rollouts[f"turn.{name}"][number][turn]) for name in ("ends", "cut"))
            kinds.add((ends, cut))
            action = 2 * rollouts["turn.tokens"][number][turn].flatten().tanh()
            after = state[0] + 0.1 * action[0]
            terminated = bool(after.abs() > 1)
            assert terminated == (ends and not cut)
            torch.testing.assert_close(found.reward_T[row], -after.abs())
            assert float(found.discount_T[row]) == pytest.approx(0.0 if terminated else 0.9)
            assert torch.equal(found.state_TS[row], state)
            if cut:
                assert torch.equal(found.next_TS[row], next(cuts))
            if not terminated:
                torch.testing.assert_close(found.next_TS[row][0], after)
                torch.testing.assert_close(found.next_TS[row][1], state[1] + 0.1)
            row += 1
    assert row == len(found.rows_TW)
    assert kinds == {(False, False), (True, False), (True, True), (False, True)}


def test_the_buffer_keeps_the_newest_and_draws_by_seed_alone() -> None:
    replay = Replay(10, 1)
    for first in (0, 7, 14):
        replay.add(torch.arange(first, first + 7.0)[:, None])
    assert len(replay) == 10
    assert replay.total == 21
    places = torch.arange(400)
    drawn = replay.sample(5, places)
    assert set(drawn[:, 0].tolist()) == set(range(11, 21))
    assert torch.equal(replay.sample(5, places[100:200]), drawn[100:200])
    again = Replay(10, 1)
    again.restore(
        **{name if name != "rows" else "rows_TW": x for name, x in replay.state().items()}
    )
    for one in (replay, again):
        one.add(torch.tensor([[50.0], [51.0]]))
    assert torch.equal(again.sample(6, places), replay.sample(6, places))
    whole = Replay(3, 1)
    whole.add(torch.arange(8.0)[:, None])
    assert set(whole.sample(0, places)[:, 0].tolist()) == {5.0, 6.0, 7.0}


def test_a_step_makes_progress_with_each_update() -> None:
    """All updates of a step stood under the deadline of one call."""
    some, heard = recipe(replay={"begin": 1, "batch_size": 6, "updates": 3}), []
    experiment = EmbodiedExperiment(some)
    place = Place(goes_on=lambda: heard.append(update.updates))
    update = SoftUpdate(experiment.flow().learner.source.make(), some, experiment.spec, place)
    update.run(kept_rollouts(some)[0], None)
    assert heard == [0, 1, 2]


def test_an_update_against_a_slow_one() -> None:
    """Row by row: targets of both critics, the policy's loss, and its temperature's."""
    some = recipe(replay={"begin": 1, "batch_size": 6, "updates": 1})
    experiment = EmbodiedExperiment(some)
    source = experiment.flow().learner.source
    policy = source.make()
    update = SoftUpdate(policy, some, experiment.spec, Place())
    (rollouts,) = kept_rollouts(some)
    rows = Transitions(transitions_of(rollouts, 0.9).rows_TW, 2)
    before = copy.deepcopy((policy, update.critics, update.targets))
    captured: dict[str, Any] = {}
    for name in ("critic", "actor"):
        optimizer = getattr(update, f"{name}_optimizer")

        def step(
            sums: Any, denominator: int, reduce: Any, name: str = name, to: Any = optimizer
        ) -> Any:
            captured[name] = [p.grad / float(sums[denominator]) for p in to._pieces]
            captured[f"{name} after"] = copy.deepcopy(update.critics)
            return type(to).step(to, sums, denominator, reduce)

        optimizer.step = step
    figures = update.run(rollouts, None)

    old_policy, critics, targets = before
    for norm in (old_policy.actor.norm, critics.norm, targets.norm):
        norm.take_in(norm.moments(rows.state_TS))
    temperature = torch.tensor(1.0)

    def drawn(state: Any, part: int, place: int) -> tuple[Any, Any]:
        seed = (derive_seed(some.seed, part, 0) >> 1) + place
        with torch.no_grad():
            token = old_policy.act({"state": state[None]}, seeds=[seed]).tokens.flatten()
        features = old_policy.actor({"state": state[None]})
        head = old_policy.head
        mean, deviation = head.mean(features)[0], head.log_std(features)[0].exp()
        noise = ((token - mean) / deviation).detach()
        token = mean + deviation * noise  # the same, with gradient
        chance = torch.distributions.Normal(mean, deviation).log_prob(token)
        return token.tanh(), (chance - torch.log(1 - token.tanh() ** 2)).sum()

    count = len(rows.rows_TW)
    picks = [int(count * one) for one in _uniforms(derive_seed(some.seed, 8, 0), 6)]
    critic_loss = actor_loss = temperature_loss = torch.tensor(0.0)
    log_temperature = torch.zeros((), requires_grad=True)
    after = captured["actor after"]
    for place, pick in enumerate(picks):
        state, next_state = rows.state_TS[pick], rows.next_TS[pick]
        action, logprob = drawn(next_state, 9, place)
        q = min(targets(next_state[None], action[None])[:, 0]) - temperature * logprob
        target = (rows.reward_T[pick] + rows.discount_T[pick] * q).detach()
        said = critics(state[None], rows.token_TA[pick].tanh()[None])[:, 0]
        critic_loss = critic_loss + ((said[0] - target) ** 2 + (said[1] - target) ** 2) / 2 / 6
        action, logprob = drawn(state, 10, place)
        low = min(after(state[None], action[None])[:, 0])
        actor_loss = actor_loss + (temperature * logprob - low) / 6
        temperature_loss = temperature_loss - log_temperature * (logprob.detach() - 1.0) / 6
    critic_loss.backward()
    (actor_loss + temperature_loss).backward()
    for parameter, gradient in zip(critics.parameters(), captured["critic"], strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)
    wanted = [p.grad for p in old_policy.parameters()] + [log_temperature.grad]
    for gradient, slow in zip(captured["actor"], wanted, strict=True):
        slow = torch.zeros_like(gradient) if slow is None else slow
        torch.testing.assert_close(gradient, slow, rtol=1e-3, atol=1e-5)
    assert figures["value_loss"] == pytest.approx(float(critic_loss.detach()), rel=1e-4)
    assert figures["loss"] == pytest.approx(float(actor_loss.detach()), rel=1e-4)
    for target, old, new in zip(
        update.targets.parameters(), targets.parameters(), update.critics.parameters(), strict=True
    ):
        torch.testing.assert_close(target, 0.95 * old + 0.05 * new)


def _uniforms(seed: int, count: int) -> list[float]:
    """SplitMix64, as `m2flow.algorithms.sampling` says it, in plain integers."""
    found, mask = [], (1 << 64) - 1
    for position in range(count):
        state = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        found.append(((state ^ (state >> 31)) >> 11) * 2.0**-53)
    return found


def test_it_learns() -> None:
    some = recipe(steps=12, replay={"begin": 100, "batch_size": 64, "updates": 40})
    experiment = EmbodiedExperiment(some)
    with m2flow.launch(experiment.flow(), items_per_step=4, mode="eager") as run:
        results = list(run.steps(experiment.batch(step) for step in range(12)))
    returns = [experiment.metrics(one)["episodes/return"] for one in results]
    assert sum(returns[:2]) / 2 < -3.5
    assert sum(returns[-3:]) / 3 > -2.0
    early = experiment.metrics(results[0])
    assert early["train/updates"] == 0, "before there is enough to draw"
    losses = {"loss/policy", "loss/value", "train/q", "train/entropy", "train/learning_rate"}
    assert not losses & early.keys(), "no update was made, and zeros would be drawn as one"
    assert losses <= experiment.metrics(results[-1]).keys()
    assert experiment.metrics(results[-1])["train/updates"] == 40


def test_every_plan_computes_the_same() -> None:
    pytest.importorskip("ray")
    from m2flow.engine.plan import LaneSpec
    from m2flow.runtime.driver.pool import LanePool

    some = recipe(replay={**SMALL["replay"], "begin": 30})
    wanted = trained(some, "eager", 3)
    with LanePool([LaneSpec(0), LaneSpec(1)]) as lanes:
        for mode in ("collocated", "disaggregated", "hybrid", "auto"):
            found = trained(some, mode, 3, lanes)
            for name, tensor in wanted.items():
                torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4)


def test_four_steps_are_two_a_stop_and_two_more(tmp_path: Path) -> None:
    whole = train(SMALL, run_dir=tmp_path / "whole")
    train(SMALL, {"steps": 2}, run_dir=tmp_path / "parts")
    parts = train(SMALL, run_dir=tmp_path / "parts", resume=True)
    for file in ("policy.safetensors", f"trainer/{STATE}"):
        ours, theirs = (load_file(run / "checkpoints" / "latest" / file) for run in (whole, parts))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    assert int(ours["replay.total"]) == 192 > len(ours["replay.rows"]) == 150


@pytest.mark.parametrize("change", ["absent", "wider"])
def test_the_state_of_another_policy_is_refused(change: str, tmp_path: Path) -> None:
    update = fresh_update(recipe())
    update.write(tmp_path / "trainer")
    state = load_file(tmp_path / "trainer" / STATE)
    name = min(key for key in state if key.startswith("critics."))
    changed = state.pop(name)
    if change == "wider":
        state[name] = changed.repeat(*[2] * changed.ndim)
    save_file(state, tmp_path / "trainer" / STATE)
    with pytest.raises(UserError, match="state of another policy") as caught:
        update.read(tmp_path / "trainer")
    assert "\n" not in str(caught.value)
    assert "start a new run" in str(caught.value)


def test_a_learner_goes_on_elsewhere_from_a_copy_of_what_was_saved() -> None:
    some = recipe()
    learners = [EmbodiedExperiment(some).flow().learner for _ in range(2)]
    for learner in learners:
        learner.load(Place())
    first, second = learners
    rollouts, later = kept_rollouts(some, 2)
    first.update.run(rollouts, None)
    lent = {name: x.clone() for name, x in first.save().items()}
    second.restore(lent)
    for x in lent.values():
        x.zero_()
    for learner in learners:
        learner.update.run(later, None)
    ours, theirs = (learner.save() for learner in learners)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert torch.equal(x, theirs[name]), name


def spoil(optimizer: SumOptimizer, which: set[int]) -> list[int]:
    """Spoil the gradient of some steps of an optimizer; how many it was asked for, in a list."""
    asked = [0]

    def step(*given: Any) -> Any:
        if asked[0] in which:
            optimizer._flats[0][0] = float("nan")
        asked[0] += 1
        return SumOptimizer.step(optimizer, *given)

    optimizer.step = step  # type: ignore[method-assign]
    return asked


def fresh_update(some: Any) -> SoftUpdate:
    experiment = EmbodiedExperiment(some)
    return SoftUpdate(experiment.flow().learner.source.make(), some, experiment.spec, Place())


def test_what_is_left_out_of_an_update_is_what_it_says() -> None:
    """Without the critics' step nothing moves; without the policy's the critics' stands."""
    some = recipe(replay={"begin": 1, "batch_size": 6, "updates": 1})
    (rollouts,) = kept_rollouts(some)
    update = fresh_update(some)
    parts = (update.policy, update.critics, update.targets)
    spoil(update.critic_optimizer, {0})
    asked = spoil(update.actor_optimizer, {0})

    def moved() -> tuple[float, list[bool]]:
        before = [copy.deepcopy(list(part.parameters())) for part in parts]
        share = update.run(rollouts, None)["skipped_share"]
        pairs = zip(before, parts, strict=True)
        return share, [
            any(not torch.equal(a, b) for a, b in zip(old, part.parameters(), strict=True))
            for old, part in pairs
        ]

    assert moved() == (1.0, [False, False, False])
    assert asked == [0], "the policy's step is left out where the critics' is"
    assert moved() == (0.5, [False, True, True])
    assert moved() == (0.0, [True, True, True])


def test_the_update_after_one_that_was_left_out_is_of_another_batch() -> None:
    """One transition that is no number would else be drawn again and again."""
    some = recipe(replay={"begin": 1, "batch_size": 6, "updates": 2})
    (rollouts,) = kept_rollouts(some)
    update, drawn = fresh_update(some), list[int]()
    sample = update.replay.sample

    def noted(seed: int, places: torch.Tensor) -> torch.Tensor:
        drawn.append(seed)
        return sample(seed, places)

    update.replay.sample = noted  # type: ignore[method-assign]
    spoil(update.critic_optimizer, {0})
    update.run(rollouts, None)
    assert len(set(drawn)) == 2
    again = fresh_update(some)
    again.load_state_dict({name: x.clone() for name, x in update.state_items()})
    assert again.updates == update.updates == 2


def test_a_policy_whose_steps_are_left_out_in_a_row_ends_the_run() -> None:
    some = recipe(replay={"begin": 1, "batch_size": 6, "updates": 3}, max_skipped_updates=1)
    (rollouts,) = kept_rollouts(some)
    update = fresh_update(some)
    spoil(update.actor_optimizer, {0, 1, 2})
    figures = update.run(rollouts, None)
    assert figures["skipped_share"] == 0.5
    assert "value_loss" in figures
    assert not {"loss", "grad_norm", "temperature"} & figures.keys(), "of steps that were not taken"
    assert "2 times in a row (max_skipped_updates: 1)" in too_many([update.skips.take_note()])


@pytest.mark.parametrize(("begin", "said"), [(96, 0), (97, 1)])
def test_a_run_whose_buffer_never_has_enough_says_so(begin: int, said: int) -> None:
    """It learned nothing, and ended as a run does that has."""
    some = recipe(steps=2, replay={**SMALL["replay"], "begin": begin})
    experiment = EmbodiedExperiment(some)
    with m2flow.launch(experiment.flow(), items_per_step=4, mode="eager") as run:
        results = list(run.steps(experiment.batch(step) for step in range(2)))
    assert [len(experiment.alarms(one)) for one in results] == [said, said]
