"""The reward of the addition task: an exact sum behind the only `#`, and then the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def addition_reward(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """1.0 if `row["answer"]` follows the only `#` and the end token follows, else 0.0."""
    _, mark, final = completion.partition("#")
    return float(row["finished"] and mark == "#" and final == row["answer"])
