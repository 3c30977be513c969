"""What PPO learns of rollouts, against a slow computation: one turn at a time, torch's own
distributions, nothing computed beforehand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal

from m2flow.errors import UserError
from m2flow.flow import Batch, Place, Ragged
from m2flow.models.policies.actor_critic import mlp_actor_critic
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied import objective
from m2flow.workloads.embodied.learning import PolicyUpdate, _normalise
from m2flow.workloads.embodied.objective import wanted
from m2flow.workloads.embodied.turns import turns_of
from m2flow.workloads.embodied.workers.actor import Actor
from m2flow.workloads.embodied.workers.stages import critic_advantage

CHUNK, SCALE = 3, 2.5
LENGTHS = [4, 1, 3]
RECIPE: dict[str, Any] = {
    "workload": "embodied",
    "rollouts_per_step": len(LENGTHS),
    "environment": {"name": "table:red"},
    "policy": {"chunk": CHUNK},
    "rollout": {"horizon": 12},
    "update": {"epochs": 1, "minibatches": 1, "turns_per_microbatch": 2},
    "optimizer": {"max_grad_norm": None},
}


def policy(actions: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        bounds: dict[str, Any] = {"count": 4} if actions == "categorical" else {
            "low": [-1.0] * 2, "high": [1.0] * 2,
        }  # fmt: skip
        made = mlp_actor_critic(4, actions=actions, chunk=CHUNK, hidden=(8,), **bounds)
        for head in (*made.head.children(), made.value):
            torch.nn.init.normal_(head.weight, std=0.3)
    made.returns.square.fill_(SCALE**2)
    made.returns.count.fill_(1.0)
    return made


def rollouts(actions: str, *, whole: bool, by_action: bool = False) -> Batch:
    """Turns that are carried out to the end, or broken off here and there."""
    random, count = torch.Generator().manual_seed(0), sum(LENGTHS)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    steps = torch.full((count,), CHUNK)
    if not whole:
        steps[[0, 3, 4]] = torch.tensor([1, 2, 1])
    state = noise(count, 4)
    tokens = noise(count, CHUNK, 2)
    if actions == "categorical":
        tokens = torch.randint(4, (count, CHUNK, 1), generator=random)
    with torch.no_grad():
        near = policy(actions).evaluate({"state": state}, tokens)
    columns = {
        "steps": steps,
        "observation.state": state,
        "tokens": tokens,
        "logprobs": near.logprobs + 0.2 * noise(*near.logprobs.shape),
        "values": near.values + noise(count),
        "return": (SCALE * noise(count)).double(),
        "advantage": noise(count, *(CHUNK,) * by_action).double(),
    }
    return Batch({f"turn.{name}": Ragged(column, LENGTHS) for name, column in columns.items()})


def slow_loss(model: Any, batch: Batch, level: str, actions: str) -> torch.Tensor:
    """Policy and entropy by what the level counts, the value by turns."""
    parts, values = [], []
    for turn in range(sum(LENGTHS)):
        state = batch["turn.observation.state"].values[turn : turn + 1]
        features = model.actor({"state": state})
        taken = int(batch["turn.steps"].values[turn])
        drawn, before = (batch[f"turn.{name}"].values[turn] for name in ("tokens", "logprobs"))
        new, entropy = [], []
        for step in range(taken):
            if actions == "categorical":
                logits = model.head.logits(features).view(CHUNK, 4)[step]
                chance: Any = Categorical(logits=logits)
                new.append(chance.log_prob(drawn[step, 0])[None])
                entropy.append(chance.entropy()[None])
            else:
                mean = model.head.mean(features).view(CHUNK, 2)[step]
                chance = Normal(mean, model.head.log_std[step].exp())
                new.append(chance.log_prob(drawn[step]))
                entropy.append(chance.entropy())
        columns = [torch.stack(new), before[:taken], torch.stack(entropy)]
        if level != "token":
            columns = [column.sum(-1) for column in columns]
        if level == "chunk":
            columns = [column.sum() for column in columns]
        ratio = (columns[0] - columns[1]).exp().flatten()
        advantage = batch["turn.advantage"].values[turn].float()
        if advantage.dim():  # of each action, and so of all of its coordinates
            advantage = advantage[:taken].repeat_interleave(ratio.numel() // taken)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        parts.append(loss - 0.03 * columns[2].flatten())
        value = model.value(model.critic({"state": state})).view(())
        old, wanted = (float(batch[f"turn.{x}"].values[turn]) / SCALE for x in ("values", "return"))
        kept = old + (value - old).clamp(-0.1, 0.1)
        values.append(torch.maximum((value - wanted) ** 2, (kept - wanted) ** 2) / 2)
    return torch.cat(parts).mean() + 0.7 * torch.stack(values).mean()


LEVELS = [("token", "chunk"), ("action", "chunk"), ("chunk", "chunk"),
          ("token", "action"), ("action", "action")]  # fmt: skip
"""Of ratios and of advantages."""


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("level", "credit"), LEVELS)
@pytest.mark.parametrize("actions", ["gaussian", "categorical"])
def test_the_gradient_is_that_of_a_slow_computation(
    actions: str, level: str, credit: str, whole: bool
) -> None:
    algorithm = {
        "level": level, "entropy_coefficient": 0.03, "value_clip": 0.1, "value_coefficient": 0.7,
        "normalize_advantage": False, "advantage_level": credit,
    }  # fmt: skip
    recipe: Any = read_recipe({**RECIPE, "algorithm": algorithm})
    batch = rollouts(actions, whole=whole, by_action=credit == "action")
    model, slow = policy(actions), policy(actions)
    loss = slow_loss(slow, batch, level, actions)
    loss.backward()
    update = PolicyUpdate(model, recipe)
    found: dict[str, torch.Tensor] = {}
    taken = update.optimizer.step

    def step(sums: torch.Tensor, denominator: int, all_reduce: Any) -> Any:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad / sums[denominator]
        return taken(sums, denominator, all_reduce)

    update.optimizer.step = step  # type: ignore[method-assign]
    figures = update.run(batch, None)
    for name, parameter in slow.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    returns, values = (batch[f"turn.{x}"].values.double().numpy() for x in ("return", "values"))
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert figures["explained_variance"] == pytest.approx(explained, rel=1e-6)


@pytest.mark.parametrize(("level", "credit"), LEVELS)
@pytest.mark.parametrize(("entropy", "value_clip"), [(0.0, None), (0.03, 0.1)])
def test_numpy_says_the_same_loss_of_few_figures(
    level: str,
    credit: str,
    entropy: float,
    value_clip: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm = {"level": level, "entropy_coefficient": entropy, "value_clip": value_clip}
    recipe: Any = read_recipe({**RECIPE, "algorithm": algorithm})
    model = policy("gaussian")
    turns = turns_of(rollouts("gaussian", whole=True, by_action=credit == "action"))
    some = turns.examples(level, SCALE, by_episode=False)  # type: ignore[arg-type]
    some.advantage[2] = 1e4  # not every ratio stays within its bounds, nor every log-ratio
    some.old[4] = -100.0
    judged, _ = model.judge(some.observations, some.tokens_TKD)
    few = wanted(judged, some, recipe.algorithm, SCALE, 1.5)
    monkeypatch.setattr(objective, "FEW", 0)
    torchs = wanted(judged, some, recipe.algorithm, SCALE, 1.5)
    assert float(few.sums[objective.SUMS.index("clipped")]) > 0
    torch.testing.assert_close(few.sums, torchs.sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(few.logprobs_TKD, torchs.logprobs_TKD)
    torch.testing.assert_close(few.values_T, torchs.values_T)
    if entropy:
        torch.testing.assert_close(few.entropy_TKD, torchs.entropy_TKD)
    else:
        assert few.entropy_TKD is torchs.entropy_TKD is None


@pytest.mark.parametrize("few", [0, 10**6])
def test_no_turn_loses_its_critic_s_gradient_by_rounding(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old values and moves round to other values than those that the critic has said."""
    monkeypatch.setattr(objective, "FEW", few)
    recipe: Any = read_recipe({**RECIPE, "algorithm": {"level": "token", "value_clip": 0.2}})
    some = turns_of(rollouts("gaussian", whole=True)).examples("token", 1.0, by_episode=False)
    judged, _ = policy("gaussian").judge(some.observations, some.tokens_TKD)
    assert some.values_T is not None
    assert some.returns_T is not None
    draw = torch.Generator().manual_seed(0)
    for _ in range(100):
        worth_T, move_T, returns_T = torch.rand(3, len(some), generator=draw) - 0.5
        some.values_T.copy_(0.2 * worth_T + 0.39 * move_T)
        some.returns_T.copy_(returns_T)
        found = wanted(replace(judged, values=0.2 * worth_T), some, recipe.algorithm, 1.0, 1.5)
        assert found.values_T is not None
        assert bool(found.values_T.all())


class LinearWorth:
    """A critic that can be computed by hand."""

    weight = torch.tensor([0.5, -1.0, 2.0])

    def __init__(self) -> None:
        self.rows: list[int] = []

    def values(self, observations: Any) -> torch.Tensor:
        self.rows.append(len(observations["state"]))
        assert len(observations["instruction"]) == self.rows[-1]
        return observations["state"] @ self.weight


@pytest.mark.parametrize("said", [True, False])
def test_a_rollout_that_is_cut_off_goes_on_by_what_the_critic_expects(said: bool) -> None:
    """At a time limit and at the horizon, not where an episode ended by its own rules.

    All observations went through the critic at once, which pictures and a large model do not fit.
    """
    gamma, lam, lengths = 0.9, 0.8, [4, 3, 2]
    random = torch.Generator().manual_seed(1)
    count = sum(lengths)
    state = torch.randn(count, 3, generator=random)
    reward = torch.randn(count, 2, generator=random)
    steps = torch.tensor([2, 1, 2, 2, 2, 2, 2, 1, 2])
    reward[steps == 1, 1] = 0.0
    # The first is cut at a time limit, and at the horizon; the second ends; the third is cut.
    ends = torch.tensor([0, 1, 0, 0, 0, 1, 0, 1, 0]).bool()
    cut = torch.tensor([0, 1, 0, 1, 0, 0, 1, 0, 1]).bool()
    beyond = torch.randn(int(cut.sum()), 3, generator=random)
    worth, expected = LinearWorth(), torch.empty(count, dtype=torch.float64)
    follows, cuts = 0.0, iter(reversed(beyond @ worth.weight))
    lasts = {sum(lengths[: n + 1]) - 1 for n in range(len(lengths))}
    for turn in reversed(range(count)):
        value = float(state[turn] @ worth.weight)
        discount = gamma ** int(steps[turn])
        after, carried = follows_value(turn, state, worth), lam * discount * follows
        if ends[turn] or turn in lasts:
            after, carried = float(next(cuts)) if cut[turn] else 0.0, 0.0
        earned = float(reward[turn, 0] + gamma * reward[turn, 1])
        follows = earned + discount * after - value + carried
        expected[turn] = follows
    columns = {"reward": reward, "steps": steps, "ends": ends, "cut": cut}
    columns["observation.state"] = state
    words: dict[str, Any] = {"turn.observation.instruction": [["go"] * n for n in lengths]}
    if said:
        columns["values"] = state @ worth.weight
    batch = Batch({f"turn.{name}": Ragged(column, lengths) for name, column in columns.items()})
    of_cuts = [int(part.sum()) for part in cut.split(lengths)]
    words["cut.observation.instruction"] = [["go"] * n for n in of_cuts]
    batch = batch.with_columns(**words, **{"cut.observation.state": Ragged(beyond, of_cuts)})
    actor: Any = Actor(None, turns_per_microbatch=3)  # type: ignore[arg-type]
    actor.place, actor.policy = Place(), worth
    found = critic_advantage(actor.look_beyond(batch), gamma=gamma, lam=lam)
    assert worth.rows == ([3, 1] if said else [3, 1, 3, 3, 3])
    torch.testing.assert_close(found["turn.advantage"].values, expected, rtol=0, atol=1e-6)
    returns = expected + (state @ worth.weight).double()
    torch.testing.assert_close(found["turn.return"].values, returns, rtol=0, atol=1e-6)


def follows_value(turn: int, state: torch.Tensor, worth: LinearWorth) -> float:
    """What the observation of the next turn is worth."""
    return float(state[turn + 1] @ worth.weight) if turn + 1 < len(state) else 0.0


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared body"])
def test_at_first_the_critic_alone_learns(shared: bool) -> None:
    """What an action's probability depends on stands still, whatever it shares with the critic."""
    algorithm = {"name": "ppo", "value_warmup_steps": 2, "entropy_coefficient": 0.1}
    recipe: Any = read_recipe({**RECIPE, "algorithm": algorithm})
    model = policy("gaussian")
    if shared:
        model.critic = None
    critic = {id(parameter) for parameter in model.critic_parameters()}
    update = PolicyUpdate(model, recipe)
    seen = {"state": torch.randn(5, 4, generator=torch.Generator().manual_seed(1))}
    tokens = torch.zeros(5, CHUNK, 2)
    first = model.evaluate(seen, tokens).logprobs

    def changed() -> set[bool]:
        """Of the parameters that a step has changed whether they are the critic's."""
        before = [parameter.detach().clone() for parameter in model.parameters()]
        figures = update.run(rollouts("gaussian", whole=True), None)
        assert figures["grad_norm"] > 0
        pairs = zip(before, model.parameters(), strict=True)
        return {id(now) in critic for old, now in pairs if not old.equal(now)}

    assert [changed() for _ in range(2)] == [{True}] * 2
    assert model.evaluate(seen, tokens).logprobs.equal(first), (
        "nor do its running statistics change"
    )
    assert changed() == {True, False}


@pytest.mark.parametrize(
    "schedule", [{}, {"warmup_steps": 5}, {"schedule": "linear"}], ids=["constant", "rise", "fall"]
)
def test_after_the_critic_has_warmed_up_the_policy_begins_as_a_fresh_one(
    schedule: dict[str, Any],
) -> None:
    """By the count of all steps its first ones were several times the learning rate, decay
    had shrunk it before, and the learning rate had risen or fallen without it."""
    settings = {**RECIPE["optimizer"], "weight_decay": 0.5, "learning_rate": 0.01, **schedule}
    fresh: Any = read_recipe({**RECIPE, "optimizer": settings, "steps": 4})
    warm_up = {"name": "ppo", "value_warmup_steps": 20}
    late: Any = read_recipe({**RECIPE, "optimizer": settings, "algorithm": warm_up, "steps": 24})
    ours, theirs = policy("gaussian"), policy("gaussian")
    update, other = PolicyUpdate(ours, late), PolicyUpdate(theirs, fresh)
    update.optimizer.num_steps = update._critic_steps
    for _ in range(2):
        now, then = (some.run(rollouts("gaussian", whole=True), None) for some in (update, other))
        assert now["learning_rate"] == then["learning_rate"]
        critic = {id(parameter) for parameter in ours.critic_parameters()}
        for mine, one in zip(ours.parameters(), theirs.parameters(), strict=True):
            if id(mine) not in critic:
                torch.testing.assert_close(mine, one)
            with torch.no_grad():  # the critics have schedules of their own
                one.copy_(mine)


def test_the_critic_s_learning_rate_does_not_wait_for_the_policy() -> None:
    schedule = {"warmup_steps": 5, "schedule": "linear"}
    settings = {**RECIPE["optimizer"], **schedule}
    fresh: Any = read_recipe({**RECIPE, "optimizer": settings, "steps": 12})
    warm_up = {"name": "ppo", "value_warmup_steps": 4}
    late: Any = read_recipe({**RECIPE, "optimizer": settings, "algorithm": warm_up, "steps": 12})
    ours, theirs = policy("gaussian"), policy("gaussian")
    figures = PolicyUpdate(ours, late).run(rollouts("gaussian", whole=True), None)
    PolicyUpdate(theirs, fresh).run(rollouts("gaussian", whole=True), None)
    assert figures["learning_rate"] == 0.0, "the policy's"
    for mine, one in zip(ours.critic_parameters(), theirs.critic_parameters(), strict=True):
        torch.testing.assert_close(mine, one)


def test_a_schedule_that_is_over_before_the_policy_begins_is_refused() -> None:
    warm_up = {"name": "ppo", "value_warmup_steps": 10}
    settings = {"schedule": "linear", "warmup_steps": 4}
    with pytest.raises(UserError, match=r"steps - algorithm.value_warmup_steps\).* = 4"):
        read_recipe({**RECIPE, "optimizer": settings, "algorithm": warm_up, "steps": 14})
    read_recipe({**RECIPE, "optimizer": settings, "algorithm": warm_up, "steps": 15})


def test_mini_batches_without_a_turn_have_no_ratio() -> None:
    """Figures of nothing are left out of the means: they would read 0."""
    recipe: Any = read_recipe({**RECIPE, "update": {"epochs": 1, "minibatches": 64}})
    update = PolicyUpdate(policy("gaussian"), recipe)
    norms, step = [], update.optimizer.step

    def noted(*arguments: Any) -> Any:
        taken = step(*arguments)
        norms.append(taken.grad_norm)
        return taken

    update.optimizer.step = noted  # type: ignore[method-assign]
    figures = update.run(rollouts("gaussian", whole=True), None)
    assert figures["ratio"] > 0.5
    assert figures["entropy"] > 0.5
    taken = [norm for norm in norms if norm]
    assert 0 < len(taken) == update.optimizer.num_steps < len(norms) == 64
    assert figures["grad_norm"] == pytest.approx(sum(taken) / len(taken))


@pytest.mark.parametrize("credit", ["chunk", "action"])
def test_advantages_are_brought_to_mean_0_and_deviation_1(credit: str) -> None:
    """Those of actions by their place in the chunk, of which some were not carried out."""
    turns = turns_of(rollouts("gaussian", whole=False, by_action=credit == "action"))
    rows, places = turns.advantage.view(len(turns), -1).tolist(), range(CHUNK)
    taken = turns.steps_T.tolist()
    if credit == "chunk":
        places = range(1)
    columns = [[row[k] for row, n in zip(rows, taken, strict=True) if k < n] for k in places]
    apart = [np.array(column) - np.mean(column) for column in columns]
    deviation = np.concatenate(apart).std()
    _normalise(turns, len(places), None)
    found = turns.advantage.view(len(turns), -1)
    for k, column in zip(places, apart, strict=True):
        mine = found[turns.steps_T > k, k].numpy()
        np.testing.assert_allclose(mine, column / deviation, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"algorithm": {"advantage_level": "action", "level": "chunk"}}, "one probability ratio"),
        ({"policy": {"kind": "pi0"}, "algorithm": {"advantage_level": "action"}}, "pi0 denoises"),
        ({"policy": {"kind": "openvla-oft"}}, "expected 8 for the checkpoints of LIBERO"),
        ({"algorithm": {"name": "grpo", "advantage_level": "action"}}, "grpo has no use for it"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        read_recipe({**RECIPE, **changes})
