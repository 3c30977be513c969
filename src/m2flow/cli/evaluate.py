"""`m2flow eval`: accuracy and pass@k of a model on problems with known answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m2flow.errors import UserError
from m2flow.plan import parse_lanes
from m2flow.workloads.reasoning.data import DEFAULT_TEMPLATE


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k answers is right, estimated without bias.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def evaluate(
    model: Path,
    data: Path,
    *,
    samples: int = 1,
    temperature: float | None = None,
    max_new_tokens: int = 256,
    limit: int | None = None,
    seed: int = 0,
    template: str | None = None,
    lanes: str = "auto",
    on_bad_row: str = "fail",
    as_json: bool = False,
) -> dict[str, Any]:
    """Draw answers, score them, print the figures.

    Args:
        model: a checkpoint of a run (its `model/` is taken) or a Hugging Face folder.
        data: JSON lines with a question and an answer.
        samples: answers for each problem; pass@k is reported for k = samples and powers of two.
        temperature: of the sampling; None is 0 for one sample and 1 for several.
        max_new_tokens: longest answer.
        limit: only the first so many problems.
        seed: fixes what is drawn.
        template: the prompt, with `{question}` in it; None for the one that recipes have.
        lanes: where it runs.
        on_bad_row: "fail" or "skip".
        as_json: print one JSON object instead of lines.

    Raises:
        UserError: the model or the data are missing or wrong.
    """
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    template = DEFAULT_TEMPLATE if template is None else template
    _check(samples, temperature, max_new_tokens, limit, seed, template, on_bad_row)
    specs = parse_lanes(lanes)
    from m2flow.workloads.reasoning.evaluation import evaluate_file  # imports torch: seconds

    scores = evaluate_file(
        model,
        data,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        limit=limit,
        seed=seed,
        template=template,
        lanes=specs,
        on_bad_row="skip" if on_bad_row == "skip" else "fail",
    )
    figures: dict[str, Any] = {
        "model": str(model),
        "data": str(data),
        "problems": len(scores.rewards),
        "samples": samples,
        "temperature": temperature,
        **_accuracy(scores.rewards, samples),
        "mean_tokens": scores.mean_tokens,
        "truncated_share": scores.truncated_share,
        "seconds": scores.seconds,
    }
    print(json.dumps(figures) if as_json else _in_lines(figures))
    return figures


def _check(
    samples: int,
    temperature: float,
    max_new_tokens: int,
    limit: int | None,
    seed: int,
    template: str,
    on_bad_row: str,
) -> None:
    counts = {"--samples": samples, "--max-new-tokens": max_new_tokens, "--limit": limit}
    for key, value in counts.items():
        if value is not None and value < 1:
            raise UserError("is too small", key=key, value=value, expected="at least 1")
    if not 0 <= temperature < math.inf:
        raise UserError(
            "is no temperature", key="--temperature", value=temperature, expected="0 or more"
        )
    if not 0 <= seed < 2**63:
        raise UserError("is no seed", key="--seed", value=seed, expected="0 to 2**63 - 1")
    if on_bad_row not in ("fail", "skip"):
        raise UserError("is unknown", key="--on-bad-row", value=on_bad_row, expected="fail or skip")
    if "{question}" not in template:
        raise UserError(
            "has no place for the question",
            key="--template",
            value=template,
            expected="a text with {question} in it",
        )


def _accuracy(rewards: Sequence[Sequence[float]], samples: int) -> dict[str, float]:
    """The share of right answers, and pass@k for k = samples and powers of two."""
    correct = [sum(reward >= 1.0 for reward in answers) for answers in rewards]
    ks = sorted({1, samples} | {2**n for n in range(1, samples.bit_length()) if 2**n <= samples})
    return {
        "accuracy": sum(correct) / (len(correct) * samples),
        **{f"pass@{k}": sum(pass_at_k(samples, c, k) for c in correct) / len(correct) for k in ks},
    }


def _in_lines(figures: Mapping[str, Any]) -> str:
    lines = [
        f"{figures['problems']} problems of {figures['data']}, {figures['samples']} answer(s) each"
    ]
    for name, value in figures.items():
        if name == "accuracy" or name.startswith("pass@"):
            lines.append(f"  {name:<16} {value:.4f}")
        elif name in ("mean_tokens", "truncated_share", "seconds"):
            lines.append(f"  {name:<16} {value:.2f}")
    return "\n".join(lines)
