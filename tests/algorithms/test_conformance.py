"""Each algorithm from rewards to gradient, as its paper has it, against plain loops.

The oracle goes sequence by sequence and token by token with Python numbers; it shares no code with
m2flow. What is compared is the loss of a step and the gradient of each token, to 1e-6 of the
largest term (1e-5 in float32, whose own log-ratios of 20 are no better). Tokens that somebody else
wrote lie anywhere in an answer, at its beginning too, and what is recorded of them is NaN.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from m2flow.flow import Batch, Ragged
from m2flow.training.packing import pack
from m2flow.workloads.reasoning.algorithm_section import ALGORITHMS
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.learning import loss_of
from m2flow.workloads.reasoning.workers import gae, group_advantage, reward_to_go, whiten
from m2flow.workloads.reasoning.workers.columns import kept_rows, rollouts

GROUP, BUDGET = 3, 6
MOST = 20.0
"""Log-ratios are cut there, and have no gradient beyond."""

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}

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
        pairs = [zip(row, own, strict=True) for row, own in zip(found, step["drawn"], strict=True)]
        flat = [value for row in pairs for value, own in row if own]
        spread, middle = (deviation(flat), mean(flat)) if flat else (0.0, 0.0)
        found = [[(value - middle) / (spread + 1e-8) for value in row] for row in found]
        if len(set(flat)) <= 1:
            found = [[0.0] * len(row) for row in found]
    return found


def oracle(name: str, step: dict[str, Any]) -> tuple[float, list[list[float]], float]:
    """The loss, its derivative by each token's log-probability, and the size of its terms."""
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}.get(
        name, (0.2,) * 2
    )
    advantages, rewards = oracle_advantages(name, step), step["rewards"]
    groups = [rewards[row // GROUP * GROUP :][:GROUP] for row in range(len(rewards))]
    kept = [name != "dapo" or len(set(group)) > 1 for group in groups]
    rows = [
        [token[:3] for token in zip(*columns, strict=True) if token[3]]
        for columns in zip(step["new"], step["old"], advantages, step["drawn"], strict=True)
    ]
    counted = [row for row, keep in zip(rows, kept, strict=True) if keep and row]
    tokens = sum(len(row) for row in counted)
    total, size, gradient = 0.0, 0.0, []
    for row, keep, drawn in zip(rows, kept, step["drawn"], strict=True):
        slopes = []
        logs = [new - old for new, old, _ in row]
        for log, (new, _, advantage) in zip(logs, row, strict=True):
            match name:
                case "grpo" | "gspo":
                    share = 1 / (max(1, len(counted)) * len(row))
                case "dr-grpo" | "rloo":
                    share = 1 / (max(1, len(counted)) * BUDGET)
                case _:
                    share = 1 / max(1, tokens)
            share *= keep
            exponent = mean(logs) if name == "gspo" else log
            ratio = math.exp(min(max(exponent, -MOST), MOST))
            assume(all(abs(ratio - bound) > 1e-5 for bound in (1 - low, 1 + high) if bound > 0))
            assume(abs(abs(exponent) - MOST) > 1e-4)
            bounded = min(max(ratio, 1 - low), 1 + high)
            if name == "cispo":
                term, slope = -bounded * advantage * new, -bounded * advantage
            else:
                term = -min(ratio * advantage, bounded * advantage)
                free = ratio * advantage <= bounded * advantage and abs(exponent) < MOST
                slope = -ratio * advantage if free else 0.0
            total += share * term
            size = max(size, share * abs(term), share * abs(slope))
            slopes.append(share * slope)
        own = iter(slopes)
        gradient.append([next(own) if one else 0.0 for one in drawn])
    return total, gradient, size


# --- m2flow ---------------------------------------------------------------------------------------


def ours(
    name: str, step: dict[str, Any], dtype: torch.dtype
) -> tuple[float, list[list[float]], dict[str, Tensor]]:
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
    drawn_T = torch.tensor([one for row in step["drawn"] for one in row])

    def ragged(column: str, dtype: torch.dtype = dtype) -> Ragged:
        rows = [torch.tensor(row, dtype=dtype) for row in step[column]]
        return Ragged(torch.cat(rows), lengths)

    def unknown(column: str) -> Tensor:
        """What is recorded of tokens that the model did not draw is not to be looked at."""
        return torch.where(drawn_T, ragged(column).values, torch.nan)

    samples = Batch(
        {
            "reward": step["rewards"],
            "prompt_ids": Ragged(torch.ones(len(lengths), dtype=torch.int64), [1] * len(lengths)),
            "completion_ids": Ragged(torch.zeros(sum(lengths), dtype=torch.int64), lengths),
            "behaviour_logprobs": Ragged(unknown("old"), lengths),
            "loss_mask": Ragged(drawn_T, lengths),
            "finish_reason": ["stop"] * len(lengths),
        }
    )
    if name == "ppo":
        values = ragged("values", torch.float64)
        samples = gae(samples, Batch({"values": values}), gamma=1.0, lam=0.95)
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
    new_T = unknown("new").requires_grad_()
    kept_B = torch.ones(len(lengths), dtype=torch.bool)
    if (rows := kept_rows(samples, drop_truncated=False)) is not None:
        kept_B = torch.zeros(len(lengths), dtype=torch.bool).index_fill(0, rows, True)
        samples = samples.select(rows.tolist())
    kept_T = new_T[torch.repeat_interleave(kept_B, torch.tensor(lengths))]
    learned = rollouts(samples)
    total, sums = torch.zeros((), dtype=dtype), dict[str, Tensor]()
    for piece in pack(learned.pairs, 8, "none"):  # as the trainer does: some rows at a time
        at_T = piece.token_index_T
        terms = loss.loss(
            kept_T[at_T],
            learned.behaviour_logprobs_T[at_T],
            learned.advantages_T[at_T],
            piece.lengths_R,
        )
        total = total + terms.loss
        sums |= terms.sums
    total = total / max(1, loss.denominator(learned.pairs.learned_lengths_B))
    slopes_T: Tensor = torch.zeros_like(new_T)
    if total.requires_grad:
        (slopes_T,) = torch.autograd.grad(total, new_T)
    return float(total.detach()), [row.tolist() for row in slopes_T.split(lengths)], sums


LOGPROB = st.floats(-4, 0, width=32) | st.floats(-200, 0, width=32) | st.sampled_from([-50.0, -1e4])
VALUE = st.floats(-4, 0)
REWARD = st.sampled_from([0.0, 1.0]) | st.floats(-2, 2).map(lambda x: round(x, 3))


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    count = GROUP * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, BUDGET), min_size=count, max_size=count))
    kinds = {"new": LOGPROB, "old": LOGPROB, "values": VALUE}
    columns: dict[str, Any] = {
        name: [draw(st.lists(kind, min_size=n, max_size=n)) for n in lengths]
        for name, kind in kinds.items()
    }
    columns["drawn"] = [[True] * n for n in lengths]
    if draw(st.booleans()):
        columns["drawn"] = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    return {"rewards": [draw(REWARD) for _ in lengths], **columns}


def check(name: str, step: dict[str, Any], dtype: torch.dtype) -> None:
    expected, slopes, size = oracle(name, step)
    loss, gradient, sums = ours(name, step, dtype)
    assert all(bool(torch.isfinite(one)) for one in sums.values()), sums
    within = TOLERANCE[dtype] * max(1.0, size)
    assert loss == pytest.approx(expected, abs=within)
    for found, wanted in zip(gradient, slopes, strict=True):
        assert found == pytest.approx(wanted, abs=within)
    for found, drawn in zip(gradient, step["drawn"], strict=True):
        assert all(one or slope == 0 for slope, one in zip(found, drawn, strict=True))


DTYPES = st.sampled_from(list(TOLERANCE))


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=60)
@given(step=steps(), dtype=DTYPES)
def test_against_plain_loops(name: str, step: dict[str, Any], dtype: torch.dtype) -> None:
    check(name, step, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=1000)
@given(step=steps(), dtype=DTYPES)
def test_against_plain_loops_a_thousand_times(
    name: str, step: dict[str, Any], dtype: torch.dtype
) -> None:
    check(name, step, dtype)
