"""What trajectories and their turns are worth."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.flow import Batch, Place, Ragged
from m2flow.rewards.reward import WeightedReward
from m2flow.workloads.agentic.episodes import Turn
from m2flow.workloads.agentic.workers import TrajectoryVerifier, turn_advantage
from m2flow.workloads.reasoning.workers import ModelSource


def samples(seed: int, groups: int = 3, size: int = 4) -> Batch:
    """Scored trajectories with one to four turns, each turn behind what a tool answered."""
    draw = random.Random(seed)
    rewards, turn_rewards, ends, lengths, failures = [], [], [], [], []
    for _ in range(groups * size):
        count, end, mine = draw.randint(1, 4), 0, []
        for _ in range(count):
            end += draw.randint(1, 5)
            mine.append(end)
        ends.append(mine)
        lengths.append(end)
        rewards.append(float(draw.random() < 0.5))
        turn_rewards.append([draw.choice([0.0, 0.1, -0.2]) for _ in mine])
        failures.append("broken" if draw.random() < 0.15 else "")
    rows = [torch.tensor(row, dtype=torch.float64) for row in turn_rewards]
    shaped = [reward + float(row.sum()) for reward, row in zip(rewards, rows, strict=True)]
    return Batch(
        {
            "completion_ids": Ragged(torch.zeros(sum(lengths), dtype=torch.int64), lengths),
            "reward": rewards,
            "failure": failures,
            "shaped": torch.tensor(shaped, dtype=torch.float64),
            "turn_rewards": Ragged.from_rows(rows),
            "turn_ends": Ragged.from_rows([torch.tensor(row) for row in ends]),
        }
    )


def compared(values: list[float], judged: list[bool]) -> list[float]:
    """GRPO's advantages of one group, as they are printed."""
    some = [value for value, counts in zip(values, judged, strict=True) if counts]
    if not some or max(some) <= min(some):
        return [0.0] * len(values)
    mean = sum(some) / len(some)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in some) / len(some))
    return [(value - mean) / (deviation + 1e-6) if counts else 0.0
            for value, counts in zip(values, judged, strict=True)]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_advantages_of_turns_against_a_plain_loop(seed: int) -> None:
    given = samples(seed)
    found = turn_advantage(given, group_size=4, credit="turn")
    for first in range(0, len(given), 4):
        group = range(first, first + 4)
        judged = [not given["failure"][row] for row in group]
        for row in group:
            rewards, ends = given["turn_rewards"].rows(), given["turn_ends"][row].tolist()
            begin = 0
            for number, end in enumerate(ends):
                rest = [given["reward"][n] + float(rewards[n][number:].sum()) for n in group]
                wanted = compared(rest, judged)[row - first]
                mine = found["advantages"][row][begin:end].tolist()
                assert mine == pytest.approx([wanted] * (end - begin), abs=1e-9)
                begin = end


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"formula": "144/2"}}\n</tool_call>'


def test_a_call_that_nobody_has_answered_is_no_answer(chat_folder: Path) -> None:
    """`144/2` was right where 72 was asked for, of a trajectory that was cut off before the answer:
    by its turns, by its tokens, or within the call."""
    verifier = TrajectoryVerifier(ModelSource(str(chat_folder)), [WeightedReward("math")])
    verifier.load(Place())
    tokenizer = verifier.tokenizer
    ended = {CALL: "turns", CALL + " ": "length", CALL[:-20]: "length", "It is 72.": "length",
             "It is 144/2.": "stop"}  # fmt: skip
    rows = [torch.tensor(tokenizer(f"I ask.{text}")["input_ids"]) for text in ended]
    turns = [[Turn(0, 6, result_end=6), Turn(6, len(row), result_end=len(row))] for row in rows]
    count = len(rows)
    given = Batch(
        {
            "prompt": ["144/2?"] * count, "prompt_ids": Ragged.from_rows(rows),
            "completion_ids": Ragged.from_rows(rows), "turns": turns, "metadata": [{}] * count,
            "answer": ["72"] * count, "finish_reason": [*ended.values()],
            "tool_failure": [""] * count,
        }
    )  # fmt: skip
    scored = verifier.score(given)
    assert scored["failure"] == [""] * count
    assert scored["reward"] == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert scored["turns"][0][-1]["text"] == CALL, "turns are told as they are"


def test_without_rewards_of_turns_each_turn_has_the_trajectorys_advantage() -> None:
    given = samples(7)
    none = Ragged(torch.zeros_like(given["turn_rewards"].values), given["turn_rewards"].lengths)
    given = given.with_columns(
        turn_rewards=none, shaped=torch.tensor(given["reward"], dtype=torch.float64)
    )
    whole = turn_advantage(given, group_size=4)
    by_turns = turn_advantage(given, group_size=4, credit="turn")
    assert "advantages" not in whole
    for row, each in enumerate(by_turns["advantages"].rows()):
        assert each.tolist() == [float(whole["advantage"][row])] * len(each)


def test_a_group_is_dropped_only_where_no_turn_has_a_signal() -> None:
    """By turns something is learned where the first of two turns is worth what the second is."""
    given = samples(0, groups=1, size=2)
    rows = [torch.tensor(row, dtype=torch.float64) for row in ([1.0, 0.0], [0.0, 1.0])]
    given = given.with_columns(
        reward=[0.0, 0.0], failure=["", ""], turn_rewards=Ragged.from_rows(rows),
        shaped=torch.ones(2, dtype=torch.float64),
        turn_ends=Ragged.from_rows([torch.tensor([1, 2])] * 2),
        completion_ids=Ragged(torch.zeros(4, dtype=torch.int64), [2, 2]),
    )  # fmt: skip
    settings: dict[str, Any] = {"group_size": 2, "drop_equal": True}
    assert not turn_advantage(given, credit="turn", **settings)["dropped"].any()
    assert turn_advantage(given, **settings)["dropped"].all()
