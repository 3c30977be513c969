"""The figures of a step's samples, and a sample for people to read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from m2flow.algorithms.advantages import equal_groups
from m2flow.flow import Batch
from m2flow.workloads.reasoning.workers.further_draws import NUMBER, TRIED, rates

SHOWN_OF_MODELS = ("reward_model_score", "judge_score", "judge")
"""What samples.jsonl has of models that judge."""


def sample_figures(output: Batch, group_size: int | None) -> dict[str, float]:
    """Figures of scored samples.

    Args:
        output: the samples; groups are consecutive.
        group_size: samples of a group; None where the algorithm compares none with each other.
    """
    failed = [bool(why) for why in output["failure"]]
    every = torch.tensor(output["reward"], dtype=torch.float64)
    judged_B = ~torch.tensor(failed)
    rewards = every[judged_B]
    if "shaped" in output:  # what advantages are made of
        every = output["shaped"]
    of_groups = {}
    if group_size is not None:
        equal = equal_groups(every, group_size, judged_B)[::group_size]
        of_groups["reward/zero_variance_share"] = float(equal.double().mean())
    truncated = sum(reason != "stop" for reason in output["finish_reason"])
    tokens = sum(output["num_tokens"])
    of_models = {
        f"reward/{name}": [score for score in output[f"{name}_score"] if score is not None]
        for name in ("reward_model", "judge")
        if f"{name}_score" in output
    }
    return {
        **{name: sum(scores) / len(scores) for name, scores in of_models.items() if scores},
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)) if len(rewards) else math.nan,
        "accuracy/mean": float((rewards >= 1.0).double().mean()),
        **of_groups,
        "reward/failed_share": sum(failed) / len(output),
        "samples": float(len(output)),
        "tokens/generated": float(tokens),
        "tokens/prompt": float(sum(output["num_prompt_tokens"])),
        "length/mean": tokens / len(output),
        "length/truncated_share": truncated / len(output),
    }


def sample_row(output: Batch, row: int) -> dict[str, Any]:
    """One rollout for samples.jsonl."""
    values: Mapping[str, Any] = output.row(row)
    return {
        "item": output.ids[row],
        "prompt": values["prompt"],
        "completion": values["text"],
        "reward": values["reward"],
        "answer": values["answer"],
        "finish_reason": values["finish_reason"],
        **({"version": values["version"][0]} if "version" in values else {}),
        **({"advantage": round(values["advantage"], 6)} if "advantage" in values else {}),
        **{name: values[name] for name in SHOWN_OF_MODELS if name in values},
        **({"failure": values["failure"]} if values["failure"] else {}),
    }


def rounds_of(output: Batch, group_size: int) -> list[list[tuple[int, float | None]]]:
    """Of each slot the problems that were asked, the last one trained on, each with the share of
    its answers that were right, where any could be judged."""
    firsts = range(0, len(output), group_size)
    last = rates(output, group_size)
    return [[*output[TRIED][row], (output[NUMBER][row], last[row])] for row in firsts]


def sampling_figures(output: Batch, group_size: int, compares: bool) -> dict[str, float]:
    """How many prompts it took, and how many slots still have a group that teaches nothing.

    Args:
        output: the samples of each slot, one slot after another.
        group_size: samples of a slot.
        compares: whether the algorithm compares the samples of a slot; else none teaches nothing.
    """
    found = rounds_of(output, group_size)
    figures = {"sampling/prompts": float(sum(map(len, found)))}
    if not compares:
        return figures
    worth = output["verified"] if "verified" in output else output["reward"]
    unfilled = 0
    for first in range(0, len(output), group_size):
        group = range(first, first + group_size)
        unfilled += len({worth[row] for row in group if not output["failure"][row]}) <= 1
    return figures | {"sampling/unfilled_share": unfilled / len(found)}
