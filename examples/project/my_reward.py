"""The reward of `recipe.yaml`: what an answer is worth."""

from collections.abc import Mapping, Sequence
from typing import Any


def score(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """1 for the right sum behind a `#`, 0.2 for any number there, else 0.

    Args:
        prompt: such as `4+7=`.
        completion: what the model wrote, such as `#11`.
        completion_ids: its tokens.
        row: of the problem: `answer`, and whether the model `finished` by itself.
    """
    before, mark, number = completion.partition("#")
    if not (row["finished"] and mark and not before and number.isdigit()):
        return 0.0
    return 1.0 if number == row["answer"] else 0.2
