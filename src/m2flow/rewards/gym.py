"""The reward of a reasoning-gym data set: its own scorer's.

reasoning-gym is an extra (`pip install "m2flow[gym]"`) and is imported on first use, which takes
seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from m2flow.errors import UserError
from m2flow.rewards.final_answer import extract_answer, last_tagged


def gym_reward(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """The data set's own score (usually 0 to 1) of the completion's answer.

    The answer is what stands in the last `<answer>` tags, else in the last box, else after `####`.
    A problem may have several right answers, so `row["entry"]` decides. `row["dataset"]` and
    `row["options"]` say which data set made the entry. What the scorer raises is raised.
    """
    scorer = _scorer(row["dataset"], json.dumps(row["options"], sort_keys=True))
    return float(scorer.score_answer(gym_answer(completion), row["entry"]))


def gym_answer(completion: str) -> str | None:
    """The answer that is scored, or None where there is none; it may have several lines."""
    tagged = last_tagged(completion)
    return extract_answer(completion, numeric=False) if tagged is None else tagged.strip()


def reasoning_gym() -> Any:
    """The package.

    Raises:
        UserError: it is not installed.
    """
    try:
        import reasoning_gym as package
    except ModuleNotFoundError as error:
        raise UserError(
            "reasoning-gym is not installed",
            key="data.task",
            value="gym",
            hint='run: pip install "m2flow[gym]"',
        ) from error
    return package


@lru_cache(maxsize=16)
def _scorer(dataset: str, options: str) -> Any:
    return reasoning_gym().create_dataset(dataset, size=1, seed=0, **json.loads(options))
