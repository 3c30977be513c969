"""Problems from a file or folder of rows (GSM8K, AIME and the like).

Training walks the file in a shuffle that is seeded for each epoch, so problem `index` is known
without the ones before it. Held out are the rows of a second file, or the last rows of the first,
which training then never sees.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from m2flow.errors import UserError
from m2flow.workloads.reasoning.data import DEFAULT_TEMPLATE, OnBadRow, read_problems
from m2flow.workloads.reasoning.rows import TO_HOLD_OUT
from m2flow.workloads.reasoning.tasks.problem import Problem, generator

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowsRead:
    """What the walk of training goes over, as `data.json` of a checkpoint has it.

    Attributes:
        count: rows to train on.
        digest: of all that they say, in their order.
    """

    count: int
    digest: str


class Jsonl:
    """A data set in a file.

    Args:
        path: rows to train on; see `m2flow.workloads.reasoning.data` for their form.
        eval_path: rows to hold out. None holds out the last rows of `path`.
        held_out_rows: how many rows of `path` that is; None takes a tenth, at most 256. Training
            rows that ask the same as a held-out one are dropped, and the log says how many.
        seed: fixes the shuffle of each epoch.
        template: the prompt, with `{question}` where the question goes.
        on_bad_row: "fail" or "skip", as in `read_problems`.
        question_column, answer_column: as `question` and `answer` of `read_problems`.
        rewards: the functions that judge, as in `read_problems`.

    Raises:
        UserError: what `read_problems` refuses, or nothing left to train on.
    """

    name = "jsonl"
    characters: str | None = None

    def __init__(
        self,
        *,
        path: str | Path,
        eval_path: str | Path | None = None,
        held_out_rows: int | None = None,
        seed: int = 0,
        template: str = DEFAULT_TEMPLATE,
        on_bad_row: OnBadRow = "fail",
        question_column: str | None = None,
        answer_column: str | None = None,
        rewards: Sequence[str] = (),
    ) -> None:
        read = partial(
            read_problems,
            template=template,
            on_bad_row=on_bad_row,
            question=question_column,
            answer=answer_column,
            seed=seed,
            rewards=rewards,
        )
        problems = read(path)
        if eval_path is not None:
            if held_out_rows is not None:
                raise UserError(
                    "counts rows of path, but eval_path names a file to hold out",
                    key="data.options.held_out_rows",
                    value=held_out_rows,
                    hint="give one of the two",
                )
            held_out = read(eval_path, splits=TO_HOLD_OUT)
        else:
            problems, held_out = _split(problems, held_out_rows, path)
        asked = {_question(problem) for problem in held_out}
        fresh = [problem for problem in problems if _question(problem) not in asked]
        num_shared = len(problems) - len(fresh)
        if num_shared and eval_path is not None:
            # The user named both files: what to make of the overlap is the user's choice.
            _log.warning("%s: %d rows are also in %s", path, num_shared, eval_path)
        elif num_shared:
            _log.warning("%s: dropped %d training rows that are held out", path, num_shared)
            problems = fresh
        if not problems:
            raise UserError("every row asks what a held-out row asks", key=str(path))
        self.seed = seed
        self.num_train: int | None = len(problems)
        self._problems = problems
        self._held_out = held_out
        self._orders: dict[int, list[int]] = {}  # of the last two epochs: a step may be in both

    def keep(self, wanted: Callable[[Problem], bool]) -> tuple[int, int]:
        """Train on, and hold out, the rows that are wanted alone.

        Returns:
            How many rows to train on are not, and how many held-out ones.

        Raises:
            UserError: none to train on is.
        """
        kept = [problem for problem in self._problems if wanted(problem)]
        if not kept:
            raise UserError("leaves no row to train on", key="data.max_prompt_tokens")
        held_out = [problem for problem in self._held_out if wanted(problem)]
        dropped = len(self._problems) - len(kept), len(self._held_out) - len(held_out)
        self._problems, self.num_train, self._orders = kept, len(kept), {}
        self._held_out = held_out
        return dropped

    def rows_read(self) -> RowsRead:
        """Tell the rows to train on from any others: with them the same walk meets the same."""
        digest = hashlib.sha256()
        for one in self._problems:
            said = (one.prompt, one.answer, one.before, one.metadata)
            digest.update(repr(said).encode())
        return RowsRead(len(self._problems), digest.hexdigest())

    def train(self, index: int) -> Problem:
        """Problem number `index` of the walk; each epoch holds every training row once."""
        epoch, position = divmod(index, len(self._problems))
        if epoch not in self._orders:
            order = list(range(len(self._problems)))
            generator("jsonl", "epoch", self.seed, epoch).shuffle(order)
            self._orders = dict([*self._orders.items(), (epoch, order)][-2:])
        return self._problems[self._orders[epoch][position]]

    def held_out(self, count: int) -> list[Problem]:
        """The first `count` held-out rows, in file order; all of them where there are fewer."""
        return self._held_out[:count]


def _question(problem: Problem) -> tuple[object, ...]:
    """What is asked, with the turns before it: the last turn alone may be the same in all rows."""
    return problem.prompt, *((turn["role"], turn["content"]) for turn in problem.before)


def _split(
    problems: list[Problem], held_out_rows: int | None, path: str | Path
) -> tuple[list[Problem], list[Problem]]:
    """(training rows, held-out rows): the last ones are held out."""
    if held_out_rows is None:
        if len(problems) == 1:
            raise UserError(
                "has a single row, which cannot be trained on and held out",
                key=str(path),
                expected="2 rows or more",
                hint="or a file to hold out in data.eval_path, or data.options.held_out_rows: 0",
            )
        held_out_rows = max(1, min(256, len(problems) // 10))
    if not 0 <= held_out_rows < len(problems):
        raise UserError(
            f"{path}: some of its rows ({len(problems)}) must be left to train on",
            key="data.options.held_out_rows",
            value=held_out_rows,
            expected=f"0 to {len(problems) - 1}" if len(problems) > 1 else "0",
            hint="or name a file to hold out in data.eval_path",
        )
    cut = len(problems) - held_out_rows
    return problems[:cut], problems[cut:]
