"""Environments in processes of their own, several in each: what they do there ends nobody else.

Commands and rewards go over a connection, observations through memory that all processes share.
A process that ends, or does not move on in time, is started again while the others go on; each
running episode in it is given up and counted, as "killed" or "hung". Its environments answer
`failed` until they are reset, and a reset waits for the new process. A process in which an
environment could not be reset is started again as soon as no episode runs in it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m2flow.environments.deadlines import Deadlines
from m2flow.environments.memory import ObservationMemory, anonymous_memory
from m2flow.environments.process import Lost, SimulatorProcess, Source, await_replies
from m2flow.environments.protocol import Observations, VectorEnvironment, gather
from m2flow.environments.slots import (
    RESET_ATTEMPTS,
    Episode,
    Failure,
    Steps,
    record_of,
    stack_pictures,
)
from m2flow.errors import RunFailed, UserError

START_ATTEMPTS = 3


@dataclass(eq=False, slots=True)
class _Sent:
    """Commands that processes were sent together.

    Attributes:
        pids: by number of the process.
        seconds: how long a process may go without moving on.
        results: of the processes that have answered.
        lost: the processes that were lost over it, and how.
        raised: what one of them refused.
    """

    pids: Mapping[int, int]
    seconds: float
    results: dict[int, Any] = field(default_factory=dict)
    lost: dict[int, Lost] = field(default_factory=dict)
    raised: Exception | None = None


class ProcessEnvironments(VectorEnvironment):
    """`num_envs` environments in `num_processes` processes; see the module docstring.

    Args:
        source: what each process makes.
        num_envs: environments in all, dealt out as evenly as they go.
        num_processes: how many processes; at most `num_envs`.
        deadlines: when a process counts as hung.
        copy: observations are tensors of their own. False gives views of the shared memory where
            the environments concerned follow each other: no copy at all, but the next call that
            concerns them overwrites what is seen there.

    Raises:
        UserError: what the environment refuses, or more processes than environments.
        RunFailed: a process does not start, in three attempts.
    """

    def __init__(
        self,
        source: Source,
        num_envs: int,
        num_processes: int,
        *,
        deadlines: Deadlines | None = None,
        copy: bool = True,
    ) -> None:
        if not 1 <= num_processes <= num_envs:
            raise UserError(
                "each process needs an environment",
                key="processes",
                value=num_processes,
                expected=f"1 to {num_envs}",
            )
        self._deadlines, self._copy = deadlines or Deadlines(), copy
        self._descriptor = anonymous_memory()
        self._memory: ObservationMemory | None = None
        self._processes: list[SimulatorProcess] = []
        for number in range(num_processes):
            first, behind = (num_envs * n // num_processes for n in (number, number + 1))
            ids = range(first, behind)
            self._processes.append(SimulatorProcess(number, ids, source, self._descriptor))
        self._process_of = [process for process in self._processes for _ in process.ids]
        self._running: set[int] = set()
        self._unanswered: list[_Sent] = []
        self._worn: set[int] = set()  # processes in which a reset failed
        self._lost: list[Failure] = []  # found out since the last report
        self._instructions = [""] * num_envs
        self._num_envs = num_envs
        try:
            self._settle(self._processes)
        except BaseException:
            self.close()
            raise
        super().__init__(self._spec)

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes that run now."""
        return [process.pid for process in self._processes]

    @property
    def nbytes(self) -> int:
        """Of the processes, less what they have mapped from files, and of the observations."""
        rows = () if self._memory is None else self._memory.rows.values()
        return sum(process.nbytes for process in self._processes) + sum(one.nbytes for one in rows)

    def render(self, ids: Sequence[int] | None = None) -> Tensor:
        chosen = self._chosen(ids)
        pictures: dict[int, Any] = {}
        results = self._call(
            {p.number: ("render", _slots(p, mine)) for p, mine in self._dealt(chosen)},
            self._deadlines.render,
        ).results
        for process, mine in self._dealt(chosen):
            pictures.update(zip(mine, results.get(process.number, []), strict=False))
        self._note(self._report())
        return torch.from_numpy(stack_pictures([pictures.get(index) for index in chosen]))

    def state(self) -> bytes:
        commands = {process.number: ("state",) for process in self._processes}
        results = self._call(commands, self._deadlines.render).results
        episodes: list[Episode | None] = []
        for process in self._processes:
            episodes += results.get(process.number) or [None] * len(process.ids)
        self._note(self._report())
        return pickle.dumps(episodes)

    def restore(self, state: bytes) -> None:
        episodes: list[Episode | None] = pickle.loads(state)
        self._settle(self._processes)
        self._running = {
            index for index, episode in enumerate(episodes) if episode and not episode.over
        }
        commands = {
            process.number: ("restore", episodes[process.ids.start : process.ids.stop])
            for process in self._processes
        }
        self._call(commands, self._deadlines.render)
        self._note(self._report())

    def close(self) -> None:
        for process in self._processes:  # which then end beside each other
            process.leave()
        for process in self._processes:
            process.close()
        self._processes = []
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _reset(
        self, ids: Sequence[int], seeds: Sequence[int], initial_states: Sequence[int | None]
    ) -> Sequence[Failure]:
        self._running -= set(ids)
        begin = dict(zip(ids, zip(seeds, initial_states, strict=True), strict=True))
        left = list(ids)
        for _ in range(RESET_ATTEMPTS):
            dealt = self._dealt(left)
            concerned = [process for process, _ in dealt]
            self._replace_worn(concerned)
            self._settle(concerned)
            commands = {
                process.number: (
                    "reset",
                    _slots(process, mine),
                    [begin[index][0] for index in mine],
                    [begin[index][1] for index in mine],
                )
                for process, mine in dealt
            }
            sent = self._call(commands, self._deadlines.reset)
            failed = {failure.slot for failure in self._lost if failure.cause == "reset"}
            left = []
            for process, mine in dealt:
                lost = sent.lost.get(process.number)
                if process.number in sent.results:
                    self._running |= set(mine) - failed
                    process.shorten_log()
                elif lost is not None and lost.cause == "hung":  # as it would once more
                    self._lost += [Failure(index, *lost) for index in mine]
                else:
                    left += mine
            if not left:
                break
        for index in left:
            self._lost.append(Failure(index, "reset", "its process was lost in every attempt"))
        return self._report()

    def _step(self, ids: Sequence[int], action_BKA: Any) -> tuple[Steps, Sequence[Failure]]:
        return self._begin_step(ids, action_BKA)()

    def _begin_step(
        self, ids: Sequence[int], action_BKA: Any
    ) -> Callable[[], tuple[Steps, Sequence[Failure]]]:
        row_of = {index: row for row, index in enumerate(ids)}
        dealt = self._dealt(ids)
        commands = {}
        for process, mine in dealt:
            rows = [row_of[index] for index in mine]
            figures = action_BKA[rows]  # as bytes: another version of NumPy may read them
            told = figures.shape, figures.dtype.str, figures.tobytes()
            commands[process.number] = ("step", _slots(process, mine), *told)
        sent = self._send(commands, self._deadlines.step)

        def end() -> tuple[Steps, Sequence[Failure]]:
            results = self._answers(sent)
            records = np.zeros(len(ids), record_of(action_BKA.shape[1]))
            whole = Steps.of(records)
            for process, mine in dealt:
                rows = [row_of[index] for index in mine]
                part = results.get(process.number)
                # One that was lost since its answer has given up what ran in it: rows of zeros.
                if part is None or process.pid != sent.pids[process.number]:
                    whole.failed[rows] = True
                else:
                    records[rows] = np.frombuffer(part, records.dtype)
            over = whole.terminated | whole.truncated | whole.failed
            self._running -= {ids[row] for row in np.flatnonzero(over).tolist()}
            return whole, self._report()

        return end

    def _observe(self, ids: Sequence[int]) -> Observations:
        assert self._memory is not None, "settled"
        instructions = self._instructions if self.spec.instructions is not None else None
        return gather(self._memory.rows, instructions, ids, copy=self._copy)

    def _dealt(self, ids: Sequence[int]) -> list[tuple[SimulatorProcess, list[int]]]:
        """The processes that hold these environments, each with its own of them."""
        dealt: dict[int, list[int]] = {}
        for index in ids:
            dealt.setdefault(self._process_of[index].number, []).append(index)
        return [(self._processes[number], mine) for number, mine in dealt.items()]

    def _call(self, commands: Mapping[int, tuple[Any, ...]], seconds: float) -> _Sent:
        """What the processes answer; nothing of those that are starting or are lost over it."""
        while self._unanswered:
            self._receive(self._unanswered.pop(0))
        sent = self._send(commands, seconds)
        self._answers(sent)
        return sent

    def _send(self, commands: Mapping[int, tuple[Any, ...]], seconds: float) -> _Sent:
        """Send commands to the processes that are ready. A process answers them in order."""
        called = [self._processes[number] for number in commands if self._processes[number].ready]
        for process in called:
            process.send(commands[process.number], seconds)
        sent = _Sent({process.number: process.pid for process in called}, seconds)
        self._unanswered.append(sent)
        return sent

    def _answers(self, sent: _Sent) -> dict[int, Any]:
        """What the processes answer to commands, after what was sent before these."""
        while sent in self._unanswered:
            self._receive(self._unanswered.pop(0))
        if sent.raised is not None:
            raise sent.raised
        return sent.results

    def _receive(self, sent: _Sent) -> None:
        """Take the next answers; none comes of processes that were replaced meanwhile."""
        called = [
            self._processes[n] for n, pid in sent.pids.items() if self._processes[n].pid == pid
        ]
        for number, reply in await_replies(called, sent.seconds, self._progress).items():
            process = self._processes[number]
            if isinstance(reply, Lost):
                sent.lost[number] = reply
                self._replace(process, reply)
            elif reply[0] == "error":
                sent.raised = reply[1]
            else:
                _, sent.results[number], failures, instructions = reply
                first = process.ids.start
                self._lost += [failure._replace(slot=first + failure.slot) for failure in failures]
                self._running -= {first + failure.slot for failure in failures}
                self._worn |= {number for failure in failures if failure.cause == "reset"}
                self._instructions[first : process.ids.stop] = instructions

    def _progress(self, number: int) -> int:
        return 0 if self._memory is None else int(self._memory.progress[number])

    def _replace(self, process: SimulatorProcess, lost: Lost) -> None:
        """Start a process that was lost again, and give up what ran in it."""
        process.kill()
        for index in process.ids:
            if index in self._running:
                self._lost.append(Failure(index, *lost))
        self._running -= set(process.ids)
        if self._memory is not None:
            for rows in self._memory.rows.values():
                rows[process.ids.start : process.ids.stop] = 0
        process.start()

    def _replace_worn(self, processes: Sequence[SimulatorProcess]) -> None:
        for process in processes:
            if process.number in self._worn and not self._running & set(process.ids):
                self._worn.remove(process.number)
                self._replace(process, Lost("reset", ""))

    def _settle(self, processes: Sequence[SimulatorProcess]) -> None:
        """Wait until the processes that are starting have made their environments."""
        lost = Lost("killed", "")
        for _ in range(START_ATTEMPTS):
            starting = [process for process in processes if not process.ready]
            made = []
            for number, reply in await_replies(
                starting, self._deadlines.start, self._progress
            ).items():
                process = self._processes[number]
                if isinstance(reply, Lost):
                    lost = reply
                    self._replace(process, reply)
                elif reply[0] == "error":
                    raise reply[1]
                else:
                    made.append(process)
                    if self._memory is None:
                        self._spec = replace(reply[1], num_envs=self._num_envs)
                        self._memory = ObservationMemory(
                            self._spec, len(self._processes), self._descriptor
                        )
            for process in made:
                where = self._descriptor, self._spec, len(self._processes)
                process.send(("attach", *where, process.number, process.ids.start))
            for number, reply in await_replies(made, self._deadlines.start, self._progress).items():
                if isinstance(reply, Lost):
                    lost = reply
                    self._replace(self._processes[number], reply)
                else:
                    self._processes[number].ready = True
            if all(process.ready for process in processes):
                return
        raise RunFailed(
            f"a process of environments did not start in {START_ATTEMPTS} attempts "
            f"({lost.cause}): {lost.detail}"
        )

    def _report(self) -> list[Failure]:
        """The failures since the last report."""
        lost, self._lost = self._lost, []
        return lost


def _slots(process: SimulatorProcess, ids: Sequence[int]) -> list[int]:
    """Environments of a process, as it numbers them itself."""
    return [index - process.ids.start for index in ids]
