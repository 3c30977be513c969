"""What a task is: problems by index and held-out problems. What an answer is worth, a reward says.

A problem is a function of (task settings, seed, index) alone, where the index counts the problems
of the whole run: a resumed run needs nothing but the index. Standard library only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Problem:
    """One question with its right answer.

    Args:
        prompt: the text that the model continues (before any chat template).
        answer: the right answer.
        metadata: further fields of the row that a reward is given: where it came from, what it is.
        before: turns of a conversation before the prompt, each with `role` and `content`; they need
            a chat template.
        line: of the file that it was read from, which messages name; 0 if it was read from none.
    """

    prompt: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    before: Sequence[Mapping[str, str]] = ()
    line: int = field(default=0, compare=False)


@runtime_checkable
class Task(Protocol):
    """A source of problems. Its calls are pure.

    Attributes:
        name: the name it is made by.
        characters: every character that its texts consist of, where a character tokenizer fits;
            None for ordinary language, which needs the model's own tokenizer.
        num_train: number of different training problems; None where they are generated.
    """

    name: str
    characters: str | None
    num_train: int | None

    def train(self, index: int) -> Problem:
        """Training problem number `index` (0-based) of the run."""
        ...

    def held_out(self, count: int) -> list[Problem]:
        """The first `count` problems that training never sees; fewer where there are fewer."""
        ...


@runtime_checkable
class DemonstratedTask(Task, Protocol):
    """A task that can also show how it is done, for supervised warm-up."""

    def demonstration(self, index: int) -> tuple[str, str]:
        """(prompt, completion) number `index`; the completion is followed by the end token."""
        ...


def generator(*key: object) -> random.Random:
    """A random generator that depends on the key alone, the same on every machine."""
    return random.Random("/".join(str(part) for part in key))


def reserved(content: str, *, one_in: int) -> bool:
    """Is a generated problem of this content held out? One in `one_in` (a power of two to 256) is.

    The content decides and not the seed or the order, so that a held-out problem cannot turn up in
    training however it is drawn, and runs with different seeds are measured on the same problems.
    """
    return hashlib.blake2b(content.encode(), digest_size=1).digest()[0] % one_in == 0
