"""The reward of a form: thoughts in tags, then an answer in tags, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_FORM = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")


def format_reward(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """1.0 for `<think>...</think><answer>...</answer>`, neither empty, each tag once; else 0.0.

    Where the prompt ends with `<think>`, as some chat templates have it, the completion begins
    after it.
    """
    if row.get("prompt_end", prompt).rstrip().endswith("<think>"):
        completion = "<think>" + completion
    if len(_TAG.findall(completion)) != 4:  # first: of many tags the form would try every pair
        return 0.0
    form = _FORM.fullmatch(completion)
    if form is None:
        return 0.0
    return float(all(part.strip() for part in form.groups()))
