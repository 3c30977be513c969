"""`Recordings`: what the rollouts of a lane have gone through, and what is learned from them.

All rollouts share one table for each figure of a turn, [rows, turns, ...]; a rollout has a row from
`begin` to `take`. The observation that a turn is decided on stands at that turn's place before it
is decided, so one call writes, or reads, a turn of all rollouts. Tables are dropped when no rollout
is left, and their size is remembered for the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m2flow.environments.protocol import StepOutcome
from m2flow.flow import Ragged
from m2flow.workloads.embodied.workers.columns import (
    CUT,
    INSTRUCTION,
    NO_FILM,
    OBSERVATION,
    OPTIONAL_FILM,
    TURN,
)
from m2flow.workloads.embodied.workers.film import Pictures

FIGURES = (
    ("kept", np.int64),  # turns of episodes that are over
    ("turns", np.int64),  # of all episodes but those given up
    ("steps", np.int64),  # environment steps taken, those of discarded episodes too
    ("failed", np.int64),  # episodes that were given up
    ("ended", np.int64),  # episodes that are over
    ("single", np.bool_),  # the rollout is over with its first episode
    ("reward", np.float64),  # of the running episode, as the three that follow
    ("length", np.int64),
    ("success", np.bool_),
    ("success_once", np.bool_),
)
"""What is known of each rollout beside its turns."""


@dataclass
class RolloutFacts:
    """What is told of a rollout by a few words.

    Attributes:
        seed, state: with which it began; the state is negative where the seed decides.
        episodes: those that are over.
        cuts: observations at which an episode was cut off, in order.
        film: pictures of the first episode, uint8 [H, W, 3] each; None where nobody wants them.
        film_optional: whether the film may be given up where drawing takes long.
    """

    seed: int
    state: int
    episodes: list[dict[str, float]] = field(default_factory=list)
    cuts: list[dict[str, Any]] = field(default_factory=list)
    film: Pictures | None = None
    film_optional: bool = False


Rows = slice | np.ndarray[Any, Any]
"""Where rollouts stand in the tables: a slice where they stand beside each other, which is read and
written in half the time; else int64 [B]."""


class Recordings:
    """See the module docstring."""

    def __init__(self) -> None:
        self.told: dict[int, RolloutFacts] = {}
        self.of: dict[str, Any] = {name: np.zeros(0, kind) for name, kind in FIGURES}
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._tables: dict[str, Tensor | list[list[str]]] = {}
        self._arrays: dict[str, Any] = {}  # the memory of the tables that are tensors
        self._capacity = 16  # turns

    def __len__(self) -> int:
        return len(self._rows)

    def begin(
        self,
        numbers: Sequence[int],
        seeds: Sequence[int],
        states: Sequence[int],
        single: Sequence[bool],
        filmed: Sequence[int],
    ) -> None:
        """Rollouts that have gone through nothing; of a number that is there what was is forgotten.

        Args:
            numbers: of the rollouts.
            seeds, states: see `RolloutFacts`.
            single: whether each is over with its first episode.
            filmed: whether there is to be a film: `NO_FILM`, `FILM` or `OPTIONAL_FILM` each.
        """
        self.forget(numbers)
        if not self._rows:
            self._tables, self._arrays = {}, {}
            self._free = list(range(len(self.of["kept"])))
        lacking = len(numbers) - len(self._free)
        if lacking > 0:
            known = len(self.of["kept"])
            self._free += range(known, known + lacking)
            for name, kind in FIGURES:
                self.of[name] = np.concatenate([self.of[name], np.zeros(lacking, kind)])
        self._free.sort(reverse=True)
        for number, seed, state, film in zip(numbers, seeds, states, filmed, strict=True):
            self._rows[number] = self._free.pop()
            pictures = None if film == NO_FILM else Pictures()
            optional = film == OPTIONAL_FILM
            self.told[number] = RolloutFacts(seed, state, film=pictures, film_optional=optional)
        rows = self.rows_of(numbers)
        for figure in self.of.values():
            figure[rows] = 0
        self.of["single"][rows] = single

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop rollouts; a number that is not there is no error."""
        for number in numbers:
            if number in self._rows:
                self._free.append(self._rows.pop(number))
                del self.told[number]
        if not self._rows:
            self._tables, self._arrays = {}, {}

    def rows_of(self, numbers: Sequence[int]) -> Rows:
        """Where rollouts stand in the tables."""
        rows = [self._rows[number] for number in numbers]
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return np.array(rows, np.int64)

    def see(self, rows: Rows, observations: Mapping[str, Any]) -> None:
        """What the next turn is decided on."""
        at = self.of["turns"][rows]
        where = _where(rows, at)
        for name, part in observations.items():
            if name == INSTRUCTION:
                self._write_sentences(f"{OBSERVATION}{name}", _numbers(rows), at, part)
            else:
                self._write(f"{OBSERVATION}{name}", where, part)

    def instruction(self, number: int) -> str:
        """The sentence that a rollout began with; "" where the environment has none."""
        table = self._tables.get(f"{OBSERVATION}{INSTRUCTION}")
        return table[self._rows[number]][0] if isinstance(table, list) else ""

    def now(self, rows: Rows) -> dict[str, Any]:
        """What the next turn is decided on, as columns."""
        at = self.of["turns"][rows]
        where = _where(rows, at)
        found: dict[str, Any] = {}
        for name, table in self._tables.items():
            if not name.startswith(OBSERVATION):
                continue
            if isinstance(table, list):
                places = zip(_numbers(rows).tolist(), at.tolist(), strict=True)
                found[name] = [table[row][turn] for row, turn in places]
            else:
                found[name] = torch.from_numpy(self._arrays[name][where].copy())
        return found

    def add(self, rows: Rows, decided: Mapping[str, Tensor], outcome: StepOutcome) -> Any:
        """A turn of each rollout: what was decided, and what came of it.

        Returns:
            bool [B]: an episode is over, or was given up.
        """
        failed, of = outcome.failed.numpy(), self.of
        reward, steps = outcome.reward.numpy(), outcome.steps.numpy()
        success, once = outcome.success.numpy(), outcome.success_once.numpy()
        ends = outcome.terminated.numpy() | outcome.truncated.numpy()
        over, mine = ends, rows
        if failed.any():
            numbers, good = _numbers(rows), np.flatnonzero(~failed)
            self._fail(numbers[failed], reward.shape[1])
            mine, over = numbers[good], ends | failed
            decided = {name: column[good] for name, column in decided.items()}
            reward, steps, ends, success, once = (
                column[good] for column in (reward, steps, ends, success, once)
            )
        where = _where(mine, of["turns"][mine])
        for name, column in decided.items():
            self._write(name, where, column)
        self._write("reward", where, reward)
        self._write("steps", where, steps)
        self._write("ends", where, ends)
        self._write("cut", where, np.zeros_like(ends))
        of["turns"][mine] += 1
        self.see(rows, outcome.observation)
        of["steps"][mine] += steps
        of["length"][mine] += steps
        of["reward"][mine] += reward.sum(1)
        of["success"][mine] = success
        of["success_once"][mine] |= once
        return over

    def end(self, number: int, *, terminated: bool) -> None:
        """The episode is over with the last turn; one that did not terminate was cut off."""
        row, of = self._rows[number], self.of
        self._table("ends")[row, of["turns"][row] - 1] = True
        if not terminated:
            self._cut(number)
        figures = ("reward", "length", "success_once", "success")
        self.told[number].episodes.append(
            {("return" if name == "reward" else name): float(of[name][row]) for name in figures}
        )
        of["ended"][row] += 1
        of["kept"][row] = of["turns"][row]
        self._begin_episode(row)

    def over(self, rows: Rows, horizon: int, longest: int) -> Any:
        """Bool [B]: whether rollouts have gone on for long enough, in environment steps.

        Those that are one episode may go on for `longest`, others for `horizon`.
        """
        import numpy as np

        of = self.of
        once = of["single"][rows] & (of["ended"][rows] + of["failed"][rows] > 0)
        return once | (of["steps"][rows] >= np.where(of["single"][rows], longest, horizon))

    def waiting(self, rows: Rows) -> Any:
        """Bool [B]: whether no episode runs, so that the next one has to begin."""
        of = self.of
        begun = of["ended"][rows] + of["failed"][rows] > 0
        return begun & (of["kept"][rows] == of["turns"][rows])

    def stop(self, number: int) -> None:
        """The rollout is over; an episode that still runs is cut off here.

        It is told of only where it is the rollout's only one.
        """
        row = self._rows[number]
        if self.of["turns"][row] > self.of["kept"][row]:
            if self.of["single"][row]:
                self.end(number, terminated=False)
            else:
                self._cut(number)

    def take(self, numbers: Sequence[int], over: Sequence[bool]) -> dict[str, Any]:
        """The turns of rollouts that are over, as ragged columns; nothing of those that go on."""
        rows = [self._rows[number] for number in numbers]
        turns = [
            int(self.of["turns"][row]) if done else 0 for row, done in zip(rows, over, strict=True)
        ]
        cuts = [
            self.told[number].cuts if done else []
            for number, done in zip(numbers, over, strict=True)
        ]
        found: dict[str, Any] = {}
        for name, table in self._tables.items():
            if isinstance(table, list):
                found[f"{TURN}{name}"] = [
                    table[row][:count] for row, count in zip(rows, turns, strict=True)
                ]
                found[f"{CUT}{name}"] = [[one[name] for one in some] for some in cuts]
                continue
            some = [table[row, :count] for row, count in zip(rows, turns, strict=True)]
            found[f"{TURN}{name}"] = Ragged(torch.cat(some), turns)
            if name.startswith(OBSERVATION):
                at_cuts = [one[name][None] for some in cuts for one in some]
                found[f"{CUT}{name}"] = Ragged(
                    torch.cat([table[:0, 0], *at_cuts]), [len(some) for some in cuts]
                )
        return found

    def _fail(self, rows: Rows, steps: int) -> None:
        """Running episodes were given up: nothing is learned from them.

        Args:
            rows: of the rollouts.
            steps: the most that their last turn may have taken.
        """
        of = self.of
        of["turns"][rows] = of["kept"][rows]
        of["failed"][rows] += 1
        of["steps"][rows] += steps
        self._begin_episode(rows)

    def _begin_episode(self, rows: Any) -> None:
        for name in ("reward", "length", "success", "success_once"):
            self.of[name][rows] = 0

    def _cut(self, number: int) -> None:
        row = self._rows[number]
        turns = int(self.of["turns"][row])
        self._table("cut")[row, turns - 1] = True
        self.told[number].cuts.append(
            {
                name: table[row][turns] if isinstance(table, list) else table[row, turns].clone()
                for name, table in self._tables.items()
                if name.startswith(OBSERVATION)
            }
        )

    # --- the tables -------------------------------------------------------------------------------

    def _table(self, name: str) -> Tensor:
        table = self._tables[name]
        assert isinstance(table, Tensor)
        return table

    def _write(self, name: str, where: Any, column: Any) -> None:
        """Write a turn of some rollouts, of a tensor or an array."""
        array, rows = self._arrays.get(name), len(self.of["kept"])
        last = where[1] if isinstance(where[1], int) else int(where[1].max())
        if array is None or last >= array.shape[1] or rows > array.shape[0]:
            array = self._widen(name, last, torch.as_tensor(column))
        array[where] = column if isinstance(column, np.ndarray) else _array(column)

    def _widen(self, name: str, last: int, column: Tensor) -> Any:
        """Make the table, with room for that turn of all rollouts; its memory."""
        table = self._tables.get(name)
        assert not isinstance(table, list)
        while last >= self._capacity:
            self._capacity *= 2
        size = (len(self.of["kept"]), self._capacity, *column.shape[1:])
        wider = torch.empty(size, dtype=column.dtype)
        if table is not None:
            wider[: table.shape[0], : table.shape[1]] = table
        self._tables[name], self._arrays[name] = wider, _array(wider)
        return self._arrays[name]

    def _write_sentences(self, name: str, rows: Any, at: Any, column: Sequence[str]) -> None:
        table = self._tables.setdefault(name, [])
        assert isinstance(table, list)
        table += [[] for _ in range(len(self.of["kept"]) - len(table))]
        for row, turn, sentence in zip(rows.tolist(), at.tolist(), column, strict=True):
            table[row][turn:] = [sentence]


def _numbers(rows: Rows) -> Any:
    """The numbers of rows, int64 [B]."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _where(rows: Rows, at_B: Any) -> tuple[Any, Any]:
    """The index of a turn of some rollouts."""
    at = at_B.tolist()
    if not at:
        return slice(0, 0), 0
    if isinstance(rows, slice) and at.count(at[0]) == len(at):
        return rows, at[0]
    return _numbers(rows), np.array(at)


def _array(tensor: Tensor) -> Any:
    """The memory of a tensor for NumPy, whose calls for a few rows are shorter."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
