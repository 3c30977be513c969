"""Groups that teach nothing, and the starts that are tried in their place.

A group whose episodes all fail, or all succeed, has no gradient. Each start of a step therefore
brings spare ones along (`spares`), of which the next takes the place of a start whose group says
nothing, and its episodes are run (SimpleVLA-RL's dynamic sampling, arXiv 2509.09674; DAPO's, arXiv
2503.14476, section 3.2). All other rollouts go around the loop with them: they rest, which takes
one turn in which no simulator moves. What the episodes that were given up came to is kept in
`tried`, for the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.flow import Batch, Ragged, stage
from m2flow.workloads.embodied.workers.columns import OBSERVATION, TURN

SPARES, RESTS, TRIED = "spares", "rests", "tried"
"""Columns: (seed, initial state) of the further starts of each; whether a rollout stays as it is;
what was given up of it: episodes, how many failed, environment steps."""

NUMBERS = 1 << 48
"""More than there are rollouts: those of each further draw have numbers of their own, since after
the loss of a lane several draws of a step can be run again beside each other."""

COMPARED = {"success": "success_once", "return": "return"}
"""What `algorithm.reward` names, to the figure of an episode."""


def teaches(
    episodes: Sequence[Mapping[str, float] | None],
    reward: str,
    success_bounds: tuple[float, float] | None,
) -> bool:
    """Whether something can be learned from a group.

    Args:
        episodes: of the group; None for one that was given up.
        reward: a name in `COMPARED`.
        success_bounds: within which the share of successes must be; None: rewards must differ.
    """
    found = [one for one in episodes if one is not None]
    if len(found) < 2:
        return False
    if success_bounds is not None:
        share = sum(one["success_once"] for one in found) / len(found)
        return success_bounds[0] <= share <= success_bounds[1]
    return len({one[COMPARED[reward]] for one in found}) > 1


@stage
def first_drawn(rollouts: Batch) -> Batch:
    """The rollouts, none of which has been drawn again."""
    return rollouts.with_columns(**{TRIED: [()] * len(rollouts)})


@stage(unit="group")
def begin_others(
    rollouts: Batch,
    begun: Batch,
    *,
    group_size: int,
    draw: int,
    reward: str,
    success_bounds: tuple[float, float] | None,
) -> Batch:
    """The starts of whole groups, the next spare in place of each whose group teaches nothing.

    Args:
        rollouts: what came of them.
        begun: as they began first.
        group_size, reward, success_bounds: see `group_advantage`.
        draw: how many starts were given up before this one.
    """
    import torch

    from m2flow.algorithms.sampling import derive_seed

    episodes = [some[0] if some else None for some in rollouts["episodes"]]
    seeds, states = begun["seed"].tolist(), begun["initial_state"].tolist()
    rests: list[bool] = []
    for first in range(0, len(rollouts), group_size):
        group = range(first, first + group_size)
        rest = teaches([episodes[row] for row in group], reward, success_bounds)
        rests += [rest] * group_size
        seed, state = begun[SPARES][first][draw]
        for member, row in enumerate(() if rest else group):
            seeds[row] = derive_seed(seed, 3, member)
            states[row] = seed % (1 << 31) if state < 0 else state
    return begun.with_columns(
        rollout=begun["rollout"] + (draw + 1) * NUMBERS,
        seed=torch.tensor(seeds),
        initial_state=torch.tensor(states),
        **{RESTS: torch.tensor(rests)},
        **_first_seen(rollouts),
    )


@stage
def put_in(rollouts: Batch, begun: Batch, others: Batch) -> Batch:
    """The rollouts, with the others in place of those that were drawn again.

    Args:
        rollouts: as they were.
        begun: what `begin_others` gave of them.
        others: what came of that.
    """
    rests = begun[RESTS].tolist()
    facts = zip(
        rollouts[TRIED], rests, rollouts["episodes"], rollouts["failed"].tolist(),
        rollouts[f"{TURN}steps"].rows(), strict=True,
    )  # fmt: skip
    tried = [
        some if rest else (*some, (episodes, failed, int(steps.sum())))
        for some, rest, episodes, failed, steps in facts
    ]
    old = rollouts.without(TRIED).select([row for row, rest in enumerate(rests) if rest])
    new = others.select([row for row, rest in enumerate(rests) if not rest])
    joined = old if not len(new) else new if not len(old) else Batch.concat([old, new])
    return joined.take(rollouts.ids).with_columns(**{TRIED: tried})


def _first_seen(rollouts: Batch) -> dict[str, Any]:
    """What each rollout saw first, zeros where nothing is left of it: what who rests is shown."""
    import torch

    found: dict[str, Any] = {}
    for name, column in rollouts.columns.items():
        if not name.startswith(f"{TURN}{OBSERVATION}"):
            continue
        seen = name.removeprefix(TURN)
        if isinstance(column, Ragged):
            nothing = torch.zeros(column.values.shape[1:], dtype=column.values.dtype)
            found[seen] = torch.stack([row[0] if len(row) else nothing for row in column.rows()])
        else:
            found[seen] = [sentences[0] if sentences else "" for sentences in column]
    return found
