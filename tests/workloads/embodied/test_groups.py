"""What GRPO learns of groups, against a slow computation: one action at a time, plain formulas."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributions import Normal

from m2flow.flow import Batch, Ragged
from m2flow.models.policies.actor_critic import mlp_actor_critic
from m2flow.models.policies.flow_matching import FlowOptions, tiny_pi0
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied import objective
from m2flow.workloads.embodied.config import EmbodiedAlgorithmSection, EmbodiedRecipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.learning import PolicyUpdate
from m2flow.workloads.embodied.turns import TrainingTurns
from m2flow.workloads.embodied.workers.stages import group_advantage, outcome

GROUP, CHUNK, ACTION = 4, 2, 3
SUCCESSES: list[list[bool | None]] = [
    [True, False, False, True],
    [True, True, True, True],
    [False, False, False, False],
    [None, True, None, False],  # two episodes were given up
    [None, None, None, True],
    [True, True, True, False],
]
TURNS = [[3, 1, 2, 4], [2, 2, 1, 1], [3, 3, 3, 3], [0, 2, 0, 5], [0, 0, 0, 1], [1, 2, 2, 6]]
"""Of each episode; the last turn of each takes one step of its chunk only."""


def policy() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = mlp_actor_critic(
            4, actions="gaussian", low=[-1] * ACTION, high=[1] * ACTION, chunk=CHUNK, hidden=(8,)
        )
        torch.nn.init.normal_(made.head.mean.weight, std=0.3)
    return made


def rollouts() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = [turns for group in TURNS for turns in group]
    count = sum(lengths)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    steps = torch.cat([torch.tensor([CHUNK] * (n - 1) + [1])[:n] for n in lengths])
    state, tokens = noise(count, 4), noise(count, CHUNK, ACTION)
    with torch.no_grad():
        near = policy().evaluate({"state": state}, tokens).logprobs
    return Batch(
        {
            "episodes": [
                [] if success is None else [{"success_once": float(success), "return": 0.0}]
                for group in SUCCESSES
                for success in group
            ],
            "failed": [0] * len(lengths),
            "seed": torch.arange(len(lengths)),
            "film": [b""] * len(lengths),
            "turn.steps": Ragged(steps, lengths),
            "turn.observation.state": Ragged(state, lengths),
            "turn.tokens": Ragged(tokens, lengths),
            "turn.logprobs": Ragged(near + 0.2 * noise(count, CHUNK, ACTION), lengths),
        }
    )


def slow_gradients(
    bounds: tuple[float, float] | None, *, by_episode: bool
) -> tuple[dict[str, torch.Tensor], int]:
    """Of the mean loss, and how many groups were dropped; by plain loops."""
    model, batch = policy(), rollouts()
    total, weight, dropped = torch.zeros(()), 0.0, 0
    for number, successes in enumerate(SUCCESSES):
        known = [float(one) for one in successes if one is not None]
        share = sum(known) / len(known)
        if bounds is not None and (len(known) < 2 or not bounds[0] <= share <= bounds[1]):
            dropped += 1
            continue
        for place, success in enumerate(successes):
            row = number * GROUP + place
            steps = batch["turn.steps"][row].tolist()
            if success is None:
                continue
            advantage = 0.0
            if len(known) > 1 and 0 < share < 1:
                advantage = (float(success) - share) / (statistics.pstdev(known) + 1e-6)
            for turn, taken in enumerate(steps):
                state = batch["turn.observation.state"][row][turn : turn + 1]
                mean = model.head.mean(model.actor({"state": state})).view(CHUNK, ACTION)
                for step in range(taken):
                    token = batch["turn.tokens"][row][turn][step]
                    chance = Normal(mean[step], model.head.log_std[step].exp())
                    before = batch["turn.logprobs"][row][turn][step].sum()
                    ratio = (chance.log_prob(token).sum() - before).exp()
                    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
                    share_of_one = 1 / sum(steps) if by_episode else 1.0
                    total = total + share_of_one * loss
                    weight += share_of_one
    (total / weight).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }, dropped


@pytest.mark.parametrize("by_episode", [False, True])
@pytest.mark.parametrize("bounds", [None, (0.1, 0.9), (0.0, 0.5), (0.5, 0.5)])
def test_the_gradient_is_that_of_a_slow_computation(
    bounds: tuple[float, float] | None, by_episode: bool
) -> None:
    mode = "sequence-mean-token-mean" if by_episode else "token-mean"
    algorithm = {
        "name": "grpo", "group_size": GROUP, "clip_high": 0.3, "aggregation": mode,
        "success_bounds": bounds,
    }  # fmt: skip
    recipe: Any = read_recipe(
        {
            "workload": "embodied", "name": "groups", "rollouts_per_step": 24,
            "environment": {"name": "table:red"}, "policy": {"chunk": CHUNK},
            "rollout": {"horizon": 12, "automatic_reset": False}, "algorithm": algorithm,
            "update": {"epochs": 1, "minibatches": 1, "turns_per_microbatch": 5},
        }
    )  # fmt: skip
    judged = group_advantage(
        rollouts(), group_size=GROUP, normalize_std=True, reward="success", success_bounds=bounds
    )
    wanted, dropped = slow_gradients(bounds, by_episode=by_episode)
    assert sum(outcome(judged)["dropped"]) == GROUP * dropped
    assert dropped == {None: 0, (0.1, 0.9): 3, (0.0, 0.5): 3, (0.5, 0.5): 4}[bounds]
    kept = judged.select([n for n in range(len(judged)) if not judged["dropped"][n]])
    model = policy()
    update = PolicyUpdate(model, recipe)
    found: dict[str, torch.Tensor] = {}
    taken = update.optimizer.step

    def step(sums: torch.Tensor, denominator: int, all_reduce: Any) -> Any:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad / sums[denominator]
        return taken(sums, denominator, all_reduce)

    update.optimizer.step = step  # type: ignore[method-assign]
    update.run(kept, None)
    for name, gradient in found.items():
        if name in wanted:
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
        else:
            assert not bool(gradient.any()), name


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean-token-mean"])
def test_pi0_counts_tokens_of_the_actions_that_were_carried_out_alone(mode: Any) -> None:
    """Those of the horizon behind the chunk were counted too, with a ratio of 1 and an entropy of
    0; and the share of an episode's token was that of coordinates that pi0 pads actions with.
    The chunk is of two actions in a horizon of four; of the second turn one was carried out.
    """
    policy = tiny_pi0(["lift it"], FlowOptions(ACTION, chunk=CHUNK), state_size=4, chunk=2 * CHUNK)
    random = torch.Generator().manual_seed(0)
    seen = {
        "image": torch.randint(0, 256, (3, 32, 32, 3), generator=random).byte(),
        "state": torch.randn(3, 4, generator=random),
        "instruction": ["lift it"] * 3,
    }
    drawn = policy.act(seen, seeds=range(3))
    old = drawn.logprobs + 0.2 * torch.randn(drawn.logprobs.shape, generator=random)
    steps, advantages, episodes = [CHUNK, 1, CHUNK], [0.5, 0.5, -1.0], [0, 0, 1]
    turns = TrainingTurns(
        seen, torch.tensor(episodes), torch.tensor([0, 1, 0]), drawn.tokens, old,
        torch.tensor(steps), torch.tensor(advantages).double(), None, None,
    )  # fmt: skip
    algorithm = EmbodiedAlgorithmSection(name="grpo", level="token", aggregation=mode)
    some = turns.examples("token", 1.0, by_episode=mode != "token-mean")
    with torch.no_grad():
        judged = policy.evaluate(seen, drawn.tokens)
    sums = objective.wanted(judged, some, algorithm, 1.0, 1.0).sums.tolist()
    found = dict(zip(objective.SUMS, sums, strict=True))

    losses: list[list[float]] = [[], []]
    entropy = 0.0
    for turn, (taken, advantage) in enumerate(zip(steps, advantages, strict=True)):
        for action in range(taken):
            for token in range((policy.steps + 1) * ACTION):
                place = turn, action, token
                ratio = float((judged.logprobs[place] - old[place]).exp())
                kept = min(max(ratio, 0.8), 1.2)
                losses[episodes[turn]].append(max(-ratio * advantage, -kept * advantage))
                entropy += float(judged.entropy[place])
    means = [statistics.fmean(some) for some in losses]
    total = statistics.fmean([one for some in losses for one in some])
    wanted_loss = total if mode == "token-mean" else statistics.fmean(means)
    assert found["counted"] == sum(steps) * (policy.steps + 1) * ACTION
    assert found["loss"] / found["denominator"] == pytest.approx(wanted_loss, rel=1e-4)
    assert found["entropy"] == pytest.approx(entropy, rel=1e-4)
    if mode != "token-mean":
        assert found["denominator"] == pytest.approx(2), "episodes"


def step_of(
    successes: list[list[bool | None]], step: int, bounds: tuple[float, float] | None = None
) -> Any:
    """What a step says whose groups have so come out; None where an episode was given up."""
    found = [success for group in successes for success in group]
    lengths = [int(success is not None) for success in found]
    judged = group_advantage(
        Batch(
            {
                "episodes": [
                    [] if one is None else [dict.fromkeys(FIGURES, float(one))]
                    for one in found
                ],
                "failed": [1 - length for length in lengths],
                "seed": torch.arange(len(found)),
                "film": [b""] * len(found),
                "turn.steps": Ragged(torch.ones(sum(lengths), dtype=torch.int64), lengths),
            }
        ),
        group_size=GROUP, normalize_std=True, reward="success", success_bounds=bounds,
    )  # fmt: skip
    return SimpleNamespace(output=outcome(judged), step=step)


FIGURES = ("success_once", "success", "return", "length")
ALIKE: list[list[bool | None]] = [[False] * GROUP, [None, True, None, None], [True] * GROUP]
TEACH: list[list[bool | None]] = [[False] * GROUP, [True, False, False, False]]


def test_steps_whose_groups_teach_nothing_are_said() -> None:
    """All episodes of each group were worth the same, no gradient was left, and nobody was told."""
    made: Any = {
        "workload": "embodied", "name": "alike", "rollouts_per_step": 8, "steps": 9,
        "environment": {"name": "table:red"}, "policy": {"hidden": [8]},
        "rollout": {"horizon": 12, "automatic_reset": False},
        "algorithm": {"name": "grpo", "group_size": GROUP},
    }  # fmt: skip

    def told(*steps: Any, **algorithm: Any) -> list[int]:
        """Which of some steps are told of."""
        changed = {**made, "algorithm": {**made["algorithm"], **algorithm}}
        experiment = EmbodiedExperiment(EmbodiedRecipe.model_validate(changed))
        said = [[a for a in experiment.alarms(step) if "no group" in a] for step in steps]
        return [number for number, alarms in enumerate(said) if alarms]

    assert told(step_of(ALIKE, 0), step_of(TEACH, 1)) == [0]
    assert told(step_of(TEACH, 0), *(step_of(ALIKE, n) for n in range(1, 5))) == [3, 4]
    often = [step_of(TEACH if n % 3 == 0 else ALIKE, n) for n in range(9)]
    assert told(*often) == [], "now and then it happens in a run that learns"
    bounds = (0.5, 0.9)
    assert told(step_of(TEACH, 0, bounds), success_bounds=bounds) == [0]
    assert told(step_of([[None] * GROUP], 0)) == [], "all were given up, which is said already"

    for successes, words in (
        ([[False] * GROUP], "in each group all episodes have the same success: take an easier"),
        ([[True] * GROUP], "in each group all episodes have the same success: take a harder"),
    ):
        experiment = EmbodiedExperiment(EmbodiedRecipe.model_validate(made))
        assert words in " ".join(experiment.alarms(step_of(successes, 0)))
