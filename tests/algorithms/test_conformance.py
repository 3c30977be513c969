"""Each algorithm from rewards to gradient, as its paper has it, against plain loops.

The oracle goes sequence by sequence and token by token with Python numbers and single tensors; it
shares no code with m2flow. What is compared is the loss of a step and the gradient of each token.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m2flow.flow import Batch, Ragged
from m2flow.workloads.reasoning.config import ALGORITHMS, ReasoningRecipe
from m2flow.workloads.reasoning.learning import loss_of
from m2flow.workloads.reasoning.workers import gae, group_advantage, reward_to_go, whiten
from m2flow.workloads.reasoning.workers.columns import kept_rows

GROUP, BUDGET = 3, 6

# --- the oracle -----------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def oracle_advantages(name: str, step: dict[str, Any]) -> list[list[float]]:
    """One for each token of each sequence."""
    rewards, lengths = step["rewards"], [len(row) for row in step["new"]]
    found: list[list[float]] = []
    for row, length in enumerate(lengths):
        group = rewards[row // GROUP * GROUP :][:GROUP]
        others = [reward for place, reward in enumerate(group) if place != row % GROUP]
        equal = len(set(group)) == 1
        match name:
            case "grpo" | "dapo" | "gspo" | "cispo":
                one = 0.0 if equal else (rewards[row] - mean(group)) / (deviation(group) + 1e-6)
            case "dr-grpo" | "reinforce++-baseline":
                one = 0.0 if equal else rewards[row] - mean(group)
            case "rloo":
                one = 0.0 if equal else rewards[row] - mean(others)
            case "reinforce++":
                one = rewards[row]
            case "ppo":
                values = [*step["values"][row], 0.0]
                backwards, after = [], 0.0
                for t in reversed(range(length)):
                    reward = rewards[row] if t == length - 1 else 0.0
                    after = reward + values[t + 1] - values[t] + 0.95 * after
                    backwards.append(after)
                found.append(backwards[::-1])
                continue
            case _:
                raise AssertionError(name)
        found.append([one] * length)
    if name in ("ppo", "reinforce++", "reinforce++-baseline"):
        flat = [value for row in found for value in row]
        spread, middle = deviation(flat), mean(flat)
        found = [[(value - middle) / (spread + 1e-8) for value in row] for row in found]
        if len(set(flat)) == 1:
            found = [[0.0] * len(row) for row in found]
    return found


def oracle(name: str, step: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """The loss, and its derivative by each token's log-probability."""
    advantages = oracle_advantages(name, step)
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}.get(
        name, (0.2,) * 2
    )
    total, gradient = 0.0, []
    rows = list(zip(step["new"], step["old"], advantages, strict=True))
    kept = [True] * len(rows)
    if name == "dapo":
        rewards = step["rewards"]
        groups = [rewards[row // GROUP * GROUP :][:GROUP] for row in range(len(rows))]
        kept = [len(set(group)) > 1 for group in groups]
    tokens = sum(len(new) for (new, _, _), keep in zip(rows, kept, strict=True) if keep)
    for (new, old, advantage), keep in zip(rows, kept, strict=True):
        match name:
            case "grpo" | "gspo":
                share = 1 / (len(rows) * len(new))
            case "dr-grpo" | "rloo":
                share = 1 / (len(rows) * BUDGET)
            case _:
                share = 1 / tokens if tokens else 0.0
        logs = [a - b for a, b in zip(new, old, strict=True)]
        slopes = []
        for t, log in enumerate(logs):
            ratio = math.exp(mean(logs) if name == "gspo" else log)
            bounded = min(max(ratio, 1 - low), 1 + high)
            if name == "cispo":
                total -= keep * share * bounded * advantage[t] * new[t]
                slopes.append(-keep * share * bounded * advantage[t])
                continue
            total -= keep * share * min(ratio * advantage[t], bounded * advantage[t])
            free = ratio * advantage[t] <= bounded * advantage[t]
            slopes.append(-keep * share * ratio * advantage[t] if free else 0.0)
        gradient.append(slopes)
    return total, gradient


# --- m2flow ---------------------------------------------------------------------------------------


def ours(name: str, step: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """The same by the stages and the loss of a recipe that says nothing but the name."""
    recipe = ReasoningRecipe.model_validate(
        {
            "algorithm": {"name": name},
            "generation": {"max_new_tokens": BUDGET},
            "samples_per_prompt": GROUP,
            "prompts_per_step": len(step["rewards"]) // GROUP,
            "minibatches": 1,
        }
    )
    algorithm, loss = recipe.algorithm, loss_of(recipe)
    lengths = [len(row) for row in step["new"]]

    def ragged(column: str) -> Ragged:
        return Ragged(
            torch.cat([torch.tensor(row, dtype=torch.float64) for row in step[column]]), lengths
        )

    samples = Batch(
        {
            "reward": step["rewards"],
            "completion_ids": Ragged(torch.zeros(sum(lengths), dtype=torch.int64), lengths),
            "behaviour_logprobs": ragged("old"),
            "finish_reason": ["stop"] * len(lengths),
        }
    )
    if name == "ppo":
        samples = gae(samples, Batch({"values": ragged("values")}), gamma=1.0, lam=0.95)
    elif name == "reinforce++":
        samples = reward_to_go(samples, gamma=1.0, kl=0.0)
    else:
        samples = group_advantage(
            samples,
            group_size=GROUP,
            leave_one_out=name == "rloo",
            normalize_std=algorithm.scale == "group",
            drop_equal=algorithm.equal_groups == "drop",
        )
    if algorithm.scale == "step":
        samples = whiten(samples)
    lengths_B = torch.tensor(lengths)
    if "advantages" in samples:
        advantages_T = samples["advantages"].values
    else:
        advantages_T = torch.repeat_interleave(samples["advantage"], lengths_B)
    new_T = ragged("new").values.requires_grad_()
    rows = kept_rows(samples, drop_truncated=False)
    kept_B = torch.ones(len(lengths), dtype=torch.bool)
    if rows is not None:
        kept_B = torch.zeros(len(lengths), dtype=torch.bool).index_fill(0, rows, True)
    kept_T = torch.repeat_interleave(kept_B, lengths_B)
    terms = loss.loss(
        new_T[kept_T], ragged("old").values[kept_T], advantages_T[kept_T], lengths_B[kept_B]
    )
    total = terms.loss / max(1, loss.denominator(lengths_B[kept_B]))
    (gradient_T,) = torch.autograd.grad(total, new_T, allow_unused=True)
    slopes: Tensor = torch.zeros_like(new_T) if gradient_T is None else gradient_T
    return float(total.detach()), [row.tolist() for row in slopes.split(lengths)]


LOGPROB = st.floats(-4, 0)
REWARD = st.sampled_from([0.0, 1.0]) | st.floats(-2, 2).map(lambda x: round(x, 3))


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    count = GROUP * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, BUDGET), min_size=count, max_size=count))
    columns = {
        name: [draw(st.lists(LOGPROB, min_size=n, max_size=n)) for n in lengths]
        for name in ("new", "old", "values")
    }
    return {"rewards": [draw(REWARD) for _ in lengths], **columns}


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=120)
@given(step=steps())
def test_against_plain_loops(name: str, step: dict[str, Any]) -> None:
    loss, gradient = ours(name, step)
    expected, slopes = oracle(name, step)
    assert loss == pytest.approx(expected, abs=1e-6)
    for found, wanted in zip(gradient, slopes, strict=True):
        assert found == pytest.approx(wanted, abs=1e-6)
