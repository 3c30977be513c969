"""Facts of invented people, found by searches: what a model cannot know by heart.

Each person has a code and a friend, and each fact is a passage of the corpus (`passages`):
`kavo: kavo code 7341`, `kavo: kavo friend lemu`. Whom a passage is about stands there twice, so
that `kavo friend` does not find whose friend kavo is. `kavo code=` is answered after a search,
`#7341`, or by a guess; `kavo friend code=` asks for the code of the friend, and takes two searches.
Codes of held-out people turn up in no training problem and no demonstration, so that a memory of
codes is of no use.
"""

from __future__ import annotations

import itertools
import random

from m2flow.tools import ToolCall
from m2flow.workloads.reasoning.tasks.pairs import check_share
from m2flow.workloads.reasoning.tasks.problem import Problem, generator

PEOPLE = 600
"""In the corpus; one in eight is held out."""

CODE_DIGITS = 4


def _names() -> list[str]:
    syllables = [a + b for a, b in itertools.product("bdfgklmnprstvz", "aeiou")]
    names = ["".join(pair) for pair in itertools.product(syllables, repeat=2)]
    generator("lookup", "names").shuffle(names)
    return names[:PEOPLE]


NAMES = tuple(_names())
HELD_OUT, KNOWN = NAMES[: PEOPLE // 8], NAMES[PEOPLE // 8 :]


def code(name: str) -> str:
    """The code of a person."""
    return "".join(map(str, generator("code", name).choices(range(10), k=CODE_DIGITS)))


def friend(name: str) -> str:
    """The friend of a person: held-out people have held-out friends, others have others."""
    group = HELD_OUT if name in HELD_OUT else KNOWN
    return generator("friend", name).choice([other for other in group if other != name])


def passages() -> list[str]:
    """The corpus: two facts of each person."""
    facts = [(f"code {code(name)}", f"friend {friend(name)}") for name in NAMES]
    return [
        f"{name}: {name} {one}" for name, both in zip(NAMES, facts, strict=True) for one in both
    ]


class Lookup:
    """Questions about invented people.

    Args:
        seed: fixes the training problems and the demonstrations.
        tool_share: the share of the demonstrations that search; the others guess.
        friend_share: the share of the problems that ask for the code of a friend.

    Raises:
        UserError: a share outside 0 to 1.
    """

    name = "lookup"
    characters: str | None = None
    num_train: int | None = None

    def __init__(
        self, *, seed: int = 0, tool_share: float = 0.3, friend_share: float = 0.5
    ) -> None:
        check_share("tool_share", tool_share)
        check_share("friend_share", friend_share)
        self.seed, self.tool_share, self.friend_share = seed, tool_share, friend_share

    def train(self, index: int) -> Problem:
        """Training problem number `index`."""
        return _problem(*self._drawn(generator("lookup", "train", self.seed, index)))

    def held_out(self, count: int) -> list[Problem]:
        """Problems about held-out people: as many that ask for a friend's code as their share."""
        people, share = len(HELD_OUT), self.friend_share
        most = min(people / part for part in (share, 1 - share) if part)  # that keep to the share
        count = min(count, int(most))
        friends = round(count * share)
        chosen = [(name, True) for name in HELD_OUT[:friends]]
        chosen += [(name, False) for name in HELD_OUT[: count - friends]]
        return [_problem(*one) for one in chosen]

    def demonstration(self, index: int) -> tuple[str, list[str | ToolCall]]:
        """(prompt, turns) number `index`."""
        draw = generator("lookup", "demonstration", self.seed, index)
        name, asks_friend = self._drawn(draw)
        problem, turns = _problem(name, asks_friend), list[str | ToolCall]()
        answer = "".join(map(str, draw.choices(range(10), k=CODE_DIGITS)))
        if draw.random() < self.tool_share:
            answer = problem.answer
            if asks_friend:
                turns.append(ToolCall("search", {"query": f"{name} friend"}))
            who = friend(name) if asks_friend else name
            turns.append(ToolCall("search", {"query": f"{who} code"}))
        return problem.prompt, [*turns, f"#{answer}"]

    def _drawn(self, draw: random.Random) -> tuple[str, bool]:
        return draw.choice(KNOWN), draw.random() < self.friend_share


def _problem(name: str, asks_friend: bool) -> Problem:
    if asks_friend:
        return Problem(f"{name} friend code=", code(friend(name)))
    return Problem(f"{name} code=", code(name))
