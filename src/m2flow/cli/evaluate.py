"""`m2flow eval`: figures of a model on problems with known answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from m2flow.errors import UserError
from m2flow.workloads.common import Examination, known_workloads, workload_named


def evaluate(asked: Examination, workload: str | None, *, as_json: bool) -> None:
    """Draw answers, score them, print the figures.

    Args:
        asked: model, data and how answers are drawn.
        workload: whose way of examining; None if only one is installed.
        as_json: print one JSON object instead of lines.

    Raises:
        UserError: the model or the data are missing or wrong.
    """
    _check(asked)
    names = sorted(known_workloads())
    if workload is None and len(names) > 1:
        raise UserError("is missing", key="--workload", expected=f"one of {', '.join(names)}")
    figures = workload_named(workload or names[0]).examine(asked)
    print(json.dumps(figures) if as_json else _in_lines(figures))


def _check(asked: Examination) -> None:
    counts = {
        "--samples": asked.samples,
        "--max-new-tokens": asked.max_new_tokens,
        "--limit": asked.limit,
    }
    for key, value in counts.items():
        if value is not None and value < 1:
            raise UserError("is too small", key=key, value=value, expected="at least 1")
    temperature = asked.temperature
    if temperature is not None and not 0 <= temperature < math.inf:
        raise UserError(
            "is no temperature", key="--temperature", value=temperature, expected="0 or more"
        )
    if not 0 <= asked.seed < 2**63:
        raise UserError("is no seed", key="--seed", value=asked.seed, expected="0 to 2**63 - 1")


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
