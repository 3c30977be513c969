"""Stages that need no worker: which rollouts begin alike, and how much better each one did."""

from __future__ import annotations

from typing import Any

from m2flow.flow import Batch, Ragged, stage
from m2flow.workloads.embodied.workers.columns import TURN, lengths_of
from m2flow.workloads.embodied.workers.further_draws import COMPARED, TRIED, teaches

OUTCOME = (
    "seed", "episodes", "failed", "steps_taken", "reward", "film", "dropped", "largest", TRIED,
)  # fmt: skip
"""Columns that a step hands back for metrics and samples."""


@stage(expands="group_size")
def begin_alike(starts: Batch, *, group_size: int) -> Batch:
    """As many rollouts of each start; they differ in what the policy draws.

    Those of a group begin in the state that the start's number names, or that its seed yields.
    """
    import torch

    from m2flow.algorithms.sampling import derive_seed

    rollouts = starts.repeat(group_size)
    if group_size == 1:
        return rollouts
    seeds = starts["seed"].tolist()
    given = zip(seeds, starts["initial_state"].tolist(), strict=True)
    states = [seed % (1 << 31) if state < 0 else state for seed, state in given]
    return rollouts.with_columns(
        seed=torch.tensor([derive_seed(seed, 3, n) for seed in seeds for n in range(group_size)]),
        initial_state=torch.tensor(states).repeat_interleave(group_size),
        rollout=(rollouts["rollout"].view(-1, group_size) * group_size)
        .add(torch.arange(group_size))
        .flatten(),
    )


@stage
def critic_advantage(rollouts: Batch, *, gamma: float, lam: float, level: str = "chunk") -> Batch:
    """Adds `turn.advantage` and `turn.return`: generalised advantage estimation of each turn.

    At the level "action" the advantage has a column for each action of a turn.
    """
    import torch

    from m2flow.algorithms.segments import (
        action_advantages,
        discounted_rewards,
        segment_advantages,
    )

    def turns(name: str) -> Any:
        return rollouts[f"{TURN}{name}"].values

    lengths = lengths_of(rollouts)
    found = segment_advantages(
        discounted_rewards(turns("reward"), gamma),
        turns("values"),
        turns("beyond"),
        turns("ends"),
        turns("steps"),
        torch.tensor(lengths, dtype=torch.int64),
        gamma=gamma,
        lam=lam,
    )
    advantage = found.advantages_T
    if level == "action":
        advantage = action_advantages(advantage, turns("reward"), gamma)
    return rollouts.with_columns(
        **{
            f"{TURN}advantage": Ragged(advantage, lengths),
            f"{TURN}return": Ragged(found.returns_T, lengths),
        }
    )


@stage(unit="group")
def group_advantage(
    rollouts: Batch,
    *,
    group_size: int,
    normalize_std: bool,
    reward: str,
    success_bounds: tuple[float, float] | None = None,
) -> Batch:
    """Adds `turn.advantage`: the episode's reward against the others of its group; and `dropped`.

    Every turn of an episode has the same. Episodes that were given up are not compared. With
    `success_bounds` a group is dropped whose share of successes is not within them, as SimpleVLA-RL
    does (arXiv 2509.09674), or of which fewer than two episodes are left.
    """
    import torch

    from m2flow.algorithms.advantages import group_advantages

    name = COMPARED[reward]
    episodes: list[Any] = [some[0] if some else None for some in rollouts["episodes"]]
    advantages, dropped = [0.0] * len(episodes), [False] * len(episodes)
    for first in range(0, len(episodes), group_size):
        group = range(first, first + group_size)
        rows = [n for n in group if episodes[n] is not None]
        if len(rows) > 1:
            compared = torch.tensor([episodes[n][name] for n in rows], dtype=torch.float64)
            better = group_advantages(compared, len(rows), normalize_std).tolist()
            for row, advantage in zip(rows, better, strict=True):
                advantages[row] = advantage
        if success_bounds is not None:
            kept = teaches([episodes[n] for n in group], reward, success_bounds)
            dropped[first : first + group_size] = [not kept] * group_size
    lengths = lengths_of(rollouts)
    spread = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    return rollouts.with_columns(
        **{f"{TURN}advantage": Ragged(spread, lengths)}, dropped=torch.tensor(dropped)
    )


@stage
def outcome(rollouts: Batch) -> Batch:
    """What is left of a rollout when it has been learned from.

    Episodes, failures and steps are those of the starts given up before it too, `tried` is how many
    of these there were.
    """
    taken = rollouts[f"{TURN}steps"]
    tried = rollouts[TRIED] if TRIED in rollouts else [()] * len(rollouts)
    rewards = [
        sum(one["return"] for one in some) / len(some) if some else 0.0
        for some in rollouts["episodes"]
    ]
    nothing = [False] * len(rewards)
    return rollouts.with_columns(
        seed=rollouts["seed"].tolist(),
        episodes=[
            [one for episodes, _, _ in some for one in episodes] + own
            for some, own in zip(tried, rollouts["episodes"], strict=True)
        ],
        failed=[
            int(own) + sum(failed for _, failed, _ in some)
            for some, own in zip(tried, rollouts["failed"], strict=True)
        ],
        steps_taken=[
            int(own.sum()) + sum(steps for _, _, steps in some)
            for some, own in zip(tried, taken.rows(), strict=True)
        ],
        tried=[len(some) for some in tried],
        reward=rewards,
        dropped=list(rollouts["dropped"]) if "dropped" in rollouts else nothing,
        largest=largest(rollouts),
    ).only(*OUTCOME)


def largest(rollouts: Batch) -> list[dict[str, float]]:
    """Of each rollout the largest magnitude in its turns' columns of floats; NaN where one is."""
    import torch

    lengths = torch.tensor(lengths_of(rollouts))
    found: dict[str, list[float]] = {}
    for name, column in rollouts.columns.items():
        if not (name.startswith(TURN) and isinstance(column, Ragged)):
            continue
        values = column.values.unsqueeze(-1).flatten(1)
        if values.is_floating_point():
            size_T = torch.linalg.vector_norm(values, torch.inf, dim=1).double()
            most_B = torch.segment_reduce(size_T, "max", lengths=lengths, initial=0.0)
            found[name.removeprefix(TURN)] = most_B.tolist()
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
