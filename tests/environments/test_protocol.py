"""Chunks, ends, seeds, automatic reset and saved episodes, against a plain loop."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.environments.protocol import MAX_FAILURES_IN_A_ROW
from m2flow.environments.serial import SerialEnvironments
from m2flow.environments.spec import ActionSpec
from m2flow.errors import RunFailed, UserError


def actions(num_envs, chunk, seed=0):
    return torch.rand(num_envs, chunk, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_a_chunk_is_its_steps_one_by_one(walk):
    chunked, single = SerialEnvironments(walk, 3), SerialEnvironments(walk, 3)
    first = chunked.reset(None, [5, 6, 7])
    assert torch.equal(first["state"], single.reset(None, [5, 6, 7])["state"])
    chunk = actions(3, 4)
    outcome = chunked.step(chunk)
    rewards = [single.step(chunk[:, k : k + 1]).reward for k in range(4)]
    assert torch.equal(outcome.reward, torch.cat(rewards, 1))
    assert outcome.steps.tolist() == [4, 4, 4]
    assert outcome.observation["image"].dtype == torch.uint8
    assert outcome.observation["image"].shape == (3, 8, 8, 3)
    assert len(outcome.observation["instruction"]) == 3


@given(
    limit=st.integers(1, 9), chunk=st.integers(1, 5), seed=st.integers(0, 99), goal=st.floats(0, 6)
)
def test_episodes_end_as_in_a_plain_loop(limit, chunk, seed, goal):
    from toy_environments import Walk

    vector = SerialEnvironments(partial(Walk, limit=limit, goal=goal), 2)
    vector.reset(None, [seed, seed + 1])
    plan = actions(2, 12, seed)
    oracles = []
    for env in range(2):
        oracle = Walk(limit=limit, goal=goal)
        oracle.reset(seed + env, None)
        oracles.append(oracle)
    open_ids, taken = [0, 1], 0
    while open_ids and taken + chunk <= 12:
        outcome = vector.step(plan[open_ids, taken : taken + chunk], open_ids)
        for row, env in enumerate(open_ids):
            for k in range(chunk):
                did = oracles[env].step(plan[env, taken + k].numpy())
                assert float(outcome.reward[row, k]) == pytest.approx(did.reward, rel=1e-6)
                cut = taken + k + 1 >= limit
                if did.terminated or cut:
                    assert bool(outcome.terminated[row]) == did.terminated
                    assert bool(outcome.truncated[row]) == (cut and not did.terminated)
                    assert int(outcome.steps[row]) == k + 1
                    assert not outcome.reward[row, k + 1 :].any()
                    break
            else:
                assert not bool(outcome.done[row])
        open_ids = [
            env for env, done in zip(open_ids, outcome.done.tolist(), strict=True) if not done
        ]
        taken += chunk


def test_some_environments_alone_go_as_all_together(walk):
    together, apart = SerialEnvironments(walk, 4), SerialEnvironments(walk, 4)
    together.reset(None, [1, 2, 3, 4])
    apart.reset([2, 0], [3, 1])
    apart.reset([1, 3], [2, 4])
    chunk = actions(4, 3)
    whole = together.step(chunk)
    left, right = apart.step(chunk[[3, 1]], [3, 1]), apart.step(chunk[[0, 2]], [0, 2])
    assert torch.equal(whole.observation["state"][[3, 1]], left.observation["state"])
    assert torch.equal(whole.observation["state"][[0, 2]], right.observation["state"])
    assert torch.equal(whole.reward[[0, 2]], right.reward)


def test_an_episode_that_is_over_takes_no_step(walk):
    vector = SerialEnvironments(partial(walk, limit=2), 1)
    vector.reset(None, [0])
    assert vector.step(actions(1, 3)).truncated.all()
    with pytest.raises(ValueError, match="reset it"):
        vector.step(actions(1, 1))


def test_episodes_of_one_initial_state_begin_alike(walk):
    vector = SerialEnvironments(walk, 3)
    state = vector.reset(None, [1, 2, 3], [7, 7, 8])["state"]
    assert torch.equal(state[0], state[1])
    assert not torch.equal(state[0], state[2])


@pytest.mark.parametrize("restores", ["replayed", "saved"])
def test_a_restored_episode_goes_on_as_it_would_have(walk, restores):
    make = partial(walk, restores=restores)
    vector, other = SerialEnvironments(make, 2), SerialEnvironments(make, 2)
    vector.reset([0], [1])
    vector.step(actions(1, 4), [0])
    other.restore(vector.state())
    chunk = actions(1, 5, 1)
    expected, found = vector.step(chunk, [0]), other.step(chunk, [0])
    assert torch.equal(expected.observation["state"], found.observation["state"])
    assert torch.equal(expected.reward, found.reward)
    assert other.step(actions(1, 1), [1]).failed.all(), "no episode was begun there"


def test_an_environment_that_cannot_draw_itself_goes_on(walk):
    class Undrawn(walk):
        def render(self):
            raise RuntimeError("no OpenGL here")

    vector = SerialEnvironments(Undrawn, 1)
    vector.reset(None, [0])
    with pytest.raises(UserError, match=r"cannot draw itself.*no OpenGL here"):
        vector.render([0])
    assert not vector.step(actions(1, 1)).failed.any()
    assert not sum(vector.failures.values())


def test_what_a_simulator_raises_costs_its_episode(toys, tmp_path):
    vector = SerialEnvironments(partial(toys.Faulty, str(tmp_path)), 2)
    vector.reset(None, [0, 1])
    for cause, name in (("error", "raise"), ("nan", "nan")):
        (tmp_path / name).touch()
        outcome = vector.step(actions(2, 2))
        assert outcome.failed.tolist() == [True, False]
        assert not outcome.observation["state"][0].any()
        assert not outcome.reward[0].any()
        assert vector.failures[cause] == 1
        assert vector.step(actions(2, 1)).failed.tolist() == [True, False]
        assert vector.failures[cause] == 1, "an episode is counted once"
        vector.reset([0], [5])


@pytest.mark.parametrize("wrong", ["leaves", "stretches", "huge"])
def test_what_else_costs_an_episode_alone(walk, wrong):
    class Wrong(walk):
        def step(self, action):
            if wrong == "leaves":
                raise SystemExit(0)
            did = super().step(action)
            return did._replace(reward=1e300) if wrong == "huge" else did

        def observe(self):
            seen = super().observe()
            return {**seen, "state": np.float32(0)} if wrong == "stretches" and self.taken else seen

        def reset(self, seed, initial_state):
            self.taken = False
            super().reset(seed, initial_state)

    made = iter([Wrong(), walk()])
    vector = SerialEnvironments(lambda: next(made), 2)
    vector.reset(None, [1, 2])
    vector._slots._environments[0].taken = True
    outcome = vector.step(actions(2, 1))
    assert outcome.failed.tolist() == [True, False]
    assert outcome.reward[0].tolist() == [0.0]
    assert sum(vector.failures.values()) == 1


@pytest.mark.parametrize(("times", "fails"), [(2, False), (3, True)])
def test_a_reset_is_tried_three_times(toys, tmp_path, times, fails):
    (tmp_path / "noreset").write_text(str(times))
    vector = SerialEnvironments(partial(toys.Faulty, str(tmp_path)), 1)
    vector.reset(None, [0])
    assert vector.failures["reset"] == fails
    assert bool(vector.step(actions(1, 1)).failed) == fails
    vector.reset(None, [0])
    assert not vector.step(actions(1, 1)).failed.any()


def test_failures_are_in_a_row_where_no_step_was_taken_between(toys, tmp_path):
    """A rollout that its horizon ends is none that has failed."""
    vector = SerialEnvironments(partial(toys.Faulty, str(tmp_path), limit=None), 1)
    for seed in range(2 * MAX_FAILURES_IN_A_ROW):
        vector.reset(None, [seed])
        assert not vector.step(actions(1, 1)).failed.any()
        vector.reset(None, [seed])
        (tmp_path / "raise").touch()
        assert vector.step(actions(1, 1)).failed.all()
    assert vector.failures["error"] == 2 * MAX_FAILURES_IN_A_ROW


def test_what_is_raised_while_an_episode_is_saved_carried_on_or_closed_costs_it_alone(walk):
    class Wrong(walk):
        broken = ""

        def state(self):
            if Wrong.broken == "state":
                raise OSError
            return super().state()

        def restore(self, state):
            if Wrong.broken == "restore":
                raise OSError
            super().restore(state)

        def reset(self, seed, initial_state):
            if Wrong.broken == "reset" and self.used:
                raise OSError
            self.used = True
            super().reset(seed, initial_state)

        used = False

        def close(self):
            if Wrong.broken == "reset":
                raise OSError

    vector = SerialEnvironments(partial(Wrong, restores="saved"), 1)
    for wrong in ("state", "restore"):
        Wrong.broken = ""
        vector.reset(None, [1])
        Wrong.broken = wrong
        vector.restore(vector.state())
        assert vector.step(actions(1, 1)).failed.all()
    Wrong.broken = "reset"
    vector.reset(None, [2])  # the third simulator is as good as new
    assert not vector.step(actions(1, 1)).failed.any()


def test_an_environment_that_never_works_stops_the_run(toys):
    vector = SerialEnvironments(toys.Broken, 1)
    for seed in range(MAX_FAILURES_IN_A_ROW - 1):
        vector.reset(None, [seed])
    with pytest.raises(RunFailed, match="no licence"):
        vector.reset(None, [9])
    assert vector.failures["reset"] == MAX_FAILURES_IN_A_ROW


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(2, 1, 3), r"do not fit.*\(2, 1, 3\)"),
        (torch.zeros(2, 2), "do not fit"),
        (torch.full((2, 1, 2), 1.5), "figure 0 of an action is out of bounds.*1.5.*-1.0 to 1.0"),
        (torch.full((2, 1, 2), float("nan")), "not finite"),
    ],
)
def test_actions_that_do_not_fit_are_refused(walk, action, message):
    vector = SerialEnvironments(walk, 2)
    vector.reset(None, [0, 1])
    with pytest.raises(UserError, match=message):
        vector.step(action)


def test_what_is_no_number_is_refused_where_actions_have_no_bounds():
    spec = ActionSpec(1, (-math.inf,), (math.inf,))
    spec.check(np.array([[[3e38]]], np.float32))
    for wrong in (math.inf, -math.inf, math.nan):
        with pytest.raises(UserError, match="an action is not finite"):
            spec.check(np.array([[[wrong]]], np.float32))


def test_a_large_bound_may_be_met_as_float32_has_it():
    """4500.7 is 2e-4 lower than the float32 nearest to it, to which a policy clamps."""
    spec = ActionSpec(2, (-4500.7, -1.0), (4500.7, 1.0))
    at_bounds = np.array([[[-4500.7, -1.0]], [[4500.7, 1.0]]], np.float32)
    assert float(at_bounds[1, 0, 0]) - 4500.7 > 1.5e-4
    spec.check(at_bounds)
    for outside in ([4500.71, 0.0], [-4500.71, 0.0], [0.0, 1.0002]):
        with pytest.raises(UserError, match="out of bounds"):
            spec.check(np.array([[outside]], np.float32))


def test_a_choice_is_a_whole_number():
    spec = ActionSpec.discrete(4)
    spec.check(np.array([[[0.0], [3.0]]]))
    for wrong in (4.0, -1.0, 0.5):
        with pytest.raises(UserError):
            spec.check(np.array([[[wrong]]]))


def test_a_policy_that_does_not_fit_is_refused_beforehand():
    spec = ActionSpec(2, (-1.0, -1.0), (1.0, 1.0))
    spec.require(2, (-1, -0.5), (1, 0.5))
    free = ActionSpec(2, (-np.inf, -4500.7), (np.inf, 4500.7))
    in_float32 = np.array([-np.inf, -4500.7], np.float32).tolist()
    free.require(2, in_float32, [-end for end in in_float32])
    with pytest.raises(UserError, match="low bounds"):
        free.require(2, (0.0, -4500.71))
    with pytest.raises(UserError, match="size"):
        spec.require(7)
    with pytest.raises(UserError, match="low bounds"):
        spec.require(2, (-2, -1), (1, 1))
    with pytest.raises(UserError, match="high bounds"):
        spec.require(2, (-1, -1), (1, 3))
    with pytest.raises(UserError, match="discrete"):
        spec.require(1, num_discrete=3)
    with pytest.raises(UserError, match="number of choices"):
        ActionSpec.discrete(4).require(1, num_discrete=3)
