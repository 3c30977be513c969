"""What rollouts keep: turns, the observation at each cut, and nothing that failed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from m2flow.environments.protocol import StepOutcome
from m2flow.workloads.embodied.workers.recording import Recordings

NUMBERS = [5, 3]


def begun(single: bool = False) -> Recordings:
    recordings = Recordings()
    recordings.begin(NUMBERS, [1, 2], [-1, -1], [single] * 2, [False] * 2)
    see(recordings, [0.0, 10.0])
    return recordings


def see(recordings: Recordings, states: Sequence[float], numbers: Sequence[int] = NUMBERS) -> None:
    found = {"state": torch.tensor(states)[:, None], "instruction": [f"go to {x}" for x in states]}
    recordings.see(recordings.rows_of(numbers), found)


def turn(
    recordings: Recordings,
    rewards: Sequence[float],
    *,
    success: bool = False,
    now: Sequence[float] = (0.0, 0.0),
    ends: Sequence[str] = ("", ""),
    numbers: Sequence[int] = NUMBERS,
) -> None:
    """A turn of rollouts, of which some end as `ends` says."""

    def those(word: str) -> torch.Tensor:
        return torch.tensor([end == word for end in ends])

    count = len(numbers)
    outcome = StepOutcome(
        observation={
            "state": torch.tensor(now)[:, None],
            "instruction": [f"go to {x}" for x in now],
        },
        reward=torch.tensor(rewards)[:, None],
        terminated=those("terminated"),
        truncated=those("truncated"),
        success=torch.full((count,), success),
        success_once=torch.full((count,), success),
        steps=torch.ones(count, dtype=torch.int64),
        failed=those("failed"),
    )
    acted = {"tokens": torch.tensor(rewards).view(-1, 1, 1)}
    over = recordings.add(recordings.rows_of(numbers), acted, outcome)
    assert over.tolist() == [bool(end) for end in ends]
    for number, end in zip(numbers, ends, strict=True):
        if end in ("terminated", "truncated"):
            recordings.end(number, terminated=end == "terminated")


def rows(recordings: Recordings, name: str, numbers: Sequence[int] = NUMBERS) -> list[list[float]]:
    """A column of rollouts that are over, of one figure a turn."""
    column = recordings.take(numbers, [True] * len(numbers))[name]
    return [row.flatten().tolist() for row in column.rows()]


def test_figures_of_16_bits_are_kept_as_they_are() -> None:
    recordings = begun()
    drawn = torch.tensor([1.0, -0.333251953125], dtype=torch.bfloat16).view(2, 1, 1)
    at = recordings.rows_of(NUMBERS)
    outcome = StepOutcome(
        {"state": torch.zeros(2, 1), "instruction": ["", ""]},
        torch.zeros(2, 1),
        *(torch.zeros(2, dtype=torch.bool) for _ in range(4)),
        torch.ones(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.bool),
    )
    recordings.add(at, {"tokens": drawn}, outcome)
    kept = recordings.take(NUMBERS, [True, True])["turn.tokens"].values
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, drawn)


def test_a_cut_keeps_the_observation_there() -> None:
    recordings = begun()
    turn(recordings, [1.0, 4.0], now=[1.0, 11.0])
    turn(recordings, [2.0, 5.0], success=True, now=[2.0, 12.0], ends=["truncated", ""])
    see(recordings, [5.0], [5])
    turn(recordings, [3.0, 6.0], now=[6.0, 13.0])
    for number in NUMBERS:
        recordings.stop(number)
    assert rows(recordings, "turn.ends") == [[False, True, False], [False] * 3]
    assert rows(recordings, "turn.cut") == [[False, True, True], [False, False, True]]
    states = [[0.0, 1.0, 5.0], [10.0, 11.0, 12.0]]
    assert rows(recordings, "turn.observation.state") == states
    assert rows(recordings, "cut.observation.state") == [[2.0, 6.0], [13.0]]
    told = recordings.take(NUMBERS, [True, False])
    assert told["turn.observation.instruction"] == [["go to 0.0", "go to 1.0", "go to 5.0"], []]
    assert told["cut.observation.instruction"] == [["go to 2.0", "go to 6.0"], []]
    assert told["turn.tokens"].lengths == (3, 0)
    (episode,) = recordings.told[5].episodes
    assert episode == {"return": 3.0, "length": 2.0, "success_once": 1.0, "success": 1.0}


def test_behind_an_end_of_its_own_there_is_nothing_to_be_worth() -> None:
    recordings = begun()
    turn(recordings, [1.0, 1.0], ends=["terminated", ""])
    assert recordings.waiting(recordings.rows_of(NUMBERS)).tolist() == [True, False]
    recordings.stop(5)
    assert rows(recordings, "turn.cut", [5]) == [[False]]
    assert rows(recordings, "cut.observation.state", [5]) == [[]]


def test_an_episode_that_fails_takes_only_its_own_turns() -> None:
    recordings = begun(single=False)
    turn(recordings, [1.0, 1.0], ends=["truncated", ""])
    see(recordings, [5.0], [5])
    turn(recordings, [7.0, 2.0])
    turn(recordings, [8.0, 3.0], ends=["failed", ""])
    see(recordings, [6.0], [5])
    turn(recordings, [2.0, 4.0])
    recordings.of["single"][:] = True
    assert recordings.over(recordings.rows_of(NUMBERS), 99, 99).tolist() == [True, False]
    for number in NUMBERS:
        recordings.stop(number)
    assert rows(recordings, "turn.reward") == [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]
    assert rows(recordings, "turn.observation.state")[0] == [0.0, 6.0]
    assert [one["return"] for one in recordings.told[5].episodes] == [1.0, 2.0]
    row = recordings.rows_of([5])
    assert (recordings.of["failed"][row], recordings.of["steps"][row]) == (1, 4)


def test_a_rollout_that_is_one_episode_may_go_on_for_longer() -> None:
    """An evaluation judges whole episodes, also where rollouts of the training are shorter."""
    recordings = begun(single=False)
    recordings.of["single"][recordings.rows_of([NUMBERS[1]])] = True
    rows_of = recordings.rows_of(NUMBERS)
    turn(recordings, [1.0, 1.0])
    assert recordings.over(rows_of, 1, 2).tolist() == [True, False]
    turn(recordings, [1.0, 1.0])
    assert recordings.over(rows_of, 1, 2).tolist() == [True, True]


def test_tables_grow_with_turns_and_rollouts() -> None:
    """Behind many turns another rollout begins, and another after the first one is gone."""
    recordings = begun()
    for number in range(40):
        turn(recordings, [float(number), -float(number)])
    recordings.begin([9], [3], [-1], [False], [False])
    see(recordings, [20.0], [9])
    turn(recordings, [1.0, 2.0, 3.0], now=[0.0] * 3, ends=[""] * 3, numbers=[9, 3, 5])
    recordings.forget([3])
    recordings.begin([4], [3], [-1], [False], [False])
    see(recordings, [30.0], [4])
    turn(recordings, [4.0, 5.0], numbers=[4, 5])
    wanted = [[*map(float, range(40)), 3.0, 5.0], [1.0], [4.0]]
    assert rows(recordings, "turn.reward", [5, 9, 4]) == wanted
    assert rows(recordings, "turn.observation.state", [9, 4]) == [[20.0], [30.0]]


def test_of_rollouts_that_failed_at_once_there_are_columns_of_nothing() -> None:
    recordings = begun(single=True)
    turn(recordings, [1.0, 1.0], ends=["failed", "failed"])
    assert rows(recordings, "turn.reward") == [[], []]
    assert recordings.take(NUMBERS, [True, True])["turn.tokens"].values.shape == (0, 1, 1)
