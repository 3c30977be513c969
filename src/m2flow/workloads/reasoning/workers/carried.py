"""Answers that do not end in their step, and go on in a later one.

A step draws at most `tokens_per_step` tokens of each answer. A group that has an answer without an
end is not trained on: it is handed back, and asked again in a later step, in which each answer goes
on where it was, on the weights of then; what has ended waits for the others. Where an answer is cut
depends on its tokens alone, so every plan cuts it at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from m2flow.errors import UserError
from m2flow.flow import Batch

if TYPE_CHECKING:
    from torch import Tensor

BEGUN = "begun"
"""Column: of a prompt what is there of its answers, `()` where nothing is; of a sample that is
carried over its `BegunAnswer`, and None of others."""

OPEN = "open"
"""Finish reason of an answer that goes on in a later step."""

REASONS = (OPEN, "stop", "length")
"""By their numbers in a file."""

TURNS, LENGTHS, ENDS = "turns", "lengths", "ends"
TOKENS, LOGPROBS, VERSIONS = "token_ids", "logprobs", "versions"


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    """What is there of an answer.

    Attributes:
        token_ids, logprobs, versions: of each token.
        finish_reason: why it has ended, or `OPEN`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str


def carried_groups(samples: Batch, group_size: int) -> list[bool]:
    """Of each sample whether its group has an answer without an end."""
    is_open = [reason == OPEN for reason in samples["finish_reason"]]
    found: list[bool] = []
    for first in range(0, len(samples), group_size):
        found += [any(is_open[first : first + group_size])] * group_size
    return found


def begun_answers(samples: Batch) -> list[BegunAnswer | None]:
    """Of samples that are carried over (column `carried`) what goes on; None of the others."""
    columns = ("completion_ids", "behaviour_logprobs", "token_versions")
    rows = zip(
        samples["carried"],
        *(samples[name].rows() for name in columns),
        samples["finish_reason"],
        strict=True,
    )
    return [
        BegunAnswer(ids.tolist(), logprobs.tolist(), versions.tolist(), reason) if carried else None
        for carried, ids, logprobs, versions, reason in rows
    ]


def ended_groups(output: Batch) -> Batch:
    """The samples of a step whose groups have ended."""
    if BEGUN not in output:
        return output
    return output.select([row for row, begun in enumerate(output[BEGUN]) if begun is None])


def write(file: Path, answers: Mapping[int, Sequence[BegunAnswer]]) -> None:
    """Write the answers of groups, each under its turn, as safetensors."""
    import torch
    from safetensors.torch import save_file

    every = [answer for group in answers.values() for answer in group]

    def of_tokens(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([x for answer in every for x in getattr(answer, name)], dtype=dtype)

    save_file(
        {
            TURNS: torch.tensor([turn for turn, group in answers.items() for _ in group]),
            LENGTHS: torch.tensor([len(answer.token_ids) for answer in every]),
            ENDS: torch.tensor([REASONS.index(answer.finish_reason) for answer in every]),
            TOKENS: of_tokens(TOKENS, torch.int64),
            LOGPROBS: of_tokens(LOGPROBS, torch.float64),
            VERSIONS: of_tokens(VERSIONS, torch.int64),
        },
        file,
    )


def read(file: Path) -> dict[int, tuple[BegunAnswer, ...]]:
    """What `write` has written.

    Raises:
        UserError: the file is not there, or not whole.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = {name: tensor.tolist() for name, tensor in load_file(file).items()}
        ends: list[int] = list(accumulate(found[LENGTHS], initial=0))
        answers: dict[int, tuple[BegunAnswer, ...]] = {}
        for number, turn in enumerate(found[TURNS]):
            mine = slice(ends[number], ends[number + 1])
            ids, logprobs, versions = (found[name][mine] for name in (TOKENS, LOGPROBS, VERSIONS))
            answer = BegunAnswer(ids, logprobs, versions, REASONS[found[ENDS][number]])
            answers[turn] = (*answers.get(turn, ()), answer)
        return answers
    except (OSError, SafetensorError, LookupError) as error:
        raise UserError(
            f"does not hold the answers that go on ({type(error).__name__}: {error})",
            key=str(file),
            hint="go on from another checkpoint",
        ) from error
