"""The worker that hosts environments: it begins rollouts, steps them, and keeps what they were."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from m2flow.environments.process import accelerator_bytes
from m2flow.errors import UserError
from m2flow.flow import Batch, Place, Worker, stage
from m2flow.plan.machine import available_cores
from m2flow.workloads.embodied.config import EnvironmentSection
from m2flow.workloads.embodied.workers.columns import (
    ACTED,
    OBSERVATION,
    WHO,
    observations_of,
)
from m2flow.workloads.embodied.workers.film import filmed
from m2flow.workloads.embodied.workers.further_draws import RESTS
from m2flow.workloads.embodied.workers.pool import EnvironmentPool

if TYPE_CHECKING:
    from m2flow.environments.protocol import StepOutcome
    from m2flow.observe.films import Film

DRAWING_SECONDS = 2.0
"""So long drawing may take on a lane before films that are optional are given up."""

FIGURES = {"steps": 0, "ends": False, "cut": False}
"""Figures of a turn that are Python values, and what they are like."""

_log = logging.getLogger(__name__)


class Simulator(Worker):
    """Environments on a lane; an item is a rollout, and stays with the lane that began it.

    One that steps aside saves all running episodes in `offload` and ends the simulators; `onload`
    goes on with them, from the simulators' saved state or by replaying their actions. Another one
    stays where it is, and says that it has no state to move.

    Args:
        environment: which simulator, and in how many processes.
        horizon: environment steps of a rollout at most.
        longest: the same of a rollout that is one episode; None for `horizon`.
        rollouts: of a step, on all lanes.
        steps_aside: whether it does.
    """

    def __init__(
        self,
        environment: EnvironmentSection,
        horizon: int,
        rollouts: int = 1,
        steps_aside: bool = False,
        longest: int | None = None,
    ) -> None:
        self.environment, self.horizon = environment, horizon
        self.longest = horizon if longest is None else longest
        self.rollouts, self.steps_aside = rollouts, steps_aside

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.workloads.embodied.workers.recording import Recordings

        self._pool = EnvironmentPool(self._made, self._share)
        computes = place.num_threads if place.device == "cpu" else 0  # cores that the policy takes
        self._cores_beside = len(available_cores()) - computes
        self._recordings = Recordings()
        self._resting: set[int] = set()
        self._told_of_films = False
        self._bytes: int | None = None
        self._drawing_seconds = self._stepping_seconds = 0.0  # since no rollout was here

    @property
    def _share(self) -> int:
        """Rollouts of a step on this lane, where all lanes have as many."""
        return -(-self.rollouts // self.place.size)

    def _made(self, count: int) -> Any:
        from m2flow.environments.hosting import hosted
        from m2flow.plan.machine import gpu_numbers

        return hosted(
            self.environment.name,
            self.environment.arguments,
            count,
            processes=min(count, self._processes()),
            python=self.environment.python,
            deadlines=self.environment.hung_after,
            gpus=gpu_numbers(),
            copy=False,  # the recordings copy what they are shown
        )

    def _processes(self) -> int:
        if self.environment.processes is not None:
            return self.environment.processes
        return self.place.num_threads if self.environment.has_processes else 0

    @stage(sticky=True)
    def begin(self, rollouts: Batch) -> Batch:
        """Begin each rollout; its first observation. One that rests has one, and no simulator."""
        numbers = rollouts["rollout"].tolist()
        names = ("seed", "initial_state", "single", "film")
        if not self._recordings.told:
            self._drawing_seconds = self._stepping_seconds = 0.0
        self._recordings.begin(numbers, *(rollouts[name].tolist() for name in names))
        rests = rollouts[RESTS].tolist() if RESTS in rollouts else [False] * len(numbers)
        resting = [row for row, rest in enumerate(rests) if rest]
        if resting:
            told = observations_of(rollouts.select(resting))
            resters = [numbers[row] for row in resting]
            self._recordings.see(self._recordings.rows_of(resters), told)
            self._resting |= set(resters)
        self._begin_episodes([one for one, rest in zip(numbers, rests, strict=True) if not rest])
        now = self._recordings.now(self._recordings.rows_of(numbers))
        return rollouts.only(*WHO).with_columns(**now)

    def _begin_episodes(self, numbers: Sequence[int]) -> None:
        """The next episode of each rollout; its seed follows from the rollout's."""
        from m2flow.algorithms.sampling import derive_seed

        if not numbers:
            return
        rows, of = self._recordings.rows_of(numbers), self._recordings.of
        told = [self._recordings.told[number] for number in numbers]
        before = (of["ended"][rows] + of["failed"][rows]).tolist()
        seeds = [derive_seed(one.seed, 1, count) for one, count in zip(told, before, strict=True)]
        states = [one.state for one in told]
        given = None if min(states) < 0 else states
        for places, observations in self._pool.begin(numbers, seeds, given):
            mine = self._recordings.rows_of([numbers[place] for place in places])
            self._recordings.see(mine, observations)
        self._film([one for one, told in zip(numbers, told, strict=True) if not told.episodes])

    @stage(sticky=True, waits=True)
    def step(self, acted: Batch) -> Generator[None, None, Batch]:
        """Carry out what was decided; rollouts that are over come with all their turns."""
        import torch

        numbers, recordings = acted["rollout"].tolist(), self._recordings
        first = [number for number in numbers if not recordings.told[number].episodes]
        stepping = self._begun(numbers, acted["action"])
        if 0 < len(self._pool.pids) <= self._cores_beside:  # or the policy would slow them down
            yield
        rows = recordings.rows_of(numbers)
        decided = {name: acted[name] for name in ACTED[1:] if name in acted}
        ended, begun = False, time.monotonic()
        for places, end in stepping:
            outcome = end()
            mine, some = rows, decided
            if len(places) < len(numbers):
                mine = recordings.rows_of([numbers[place] for place in places])
                some = {name: column[places] for name, column in decided.items()}
            over = recordings.add(mine, some, outcome).nonzero()[0].tolist()
            ended |= bool(over)
            for place in over:
                number = numbers[places[place]]
                if not outcome.failed[place]:
                    recordings.end(number, terminated=bool(outcome.terminated[place]))
                elif not recordings.told[number].episodes:
                    recordings.told[number].film = None  # of an episode that does not count
        self._stepping_seconds += time.monotonic() - begun
        self._film(first)  # how an episode has ended, too
        done = recordings.over(rows, self.horizon, self.longest)
        columns = {"turn": acted["turn"] + 1, "done": torch.from_numpy(done)}
        left = [number for number, over in zip(numbers, done.tolist(), strict=True) if over]
        if left:
            columns |= self._told(numbers, done.tolist())
        if ended:
            again = (recordings.waiting(rows) & ~done).nonzero()[0].tolist()
            self._begin_episodes([numbers[place] for place in again])
        seen = acted.only(*WHO).with_columns(**recordings.now(rows), **columns)
        if left:
            recordings.forget(left)
        return seen

    def _begun(
        self, numbers: Sequence[int], action_BKA: Any
    ) -> list[tuple[list[int], Callable[[], StepOutcome]]]:
        """Begin a chunk of actions: positions of rollouts, and what tells what happened there."""
        if not self._resting:
            return self._pool.begin_step(numbers, action_BKA)
        resting = [place for place, number in enumerate(numbers) if number in self._resting]
        busy = [place for place, number in enumerate(numbers) if number not in self._resting]
        begun = self._pool.begin_step([numbers[place] for place in busy], action_BKA[busy])
        found = [([busy[place] for place in places], end) for places, end in begun]
        if resting:
            still = [numbers[place] for place in resting]
            found.append((resting, partial(self._at_rest, still, action_BKA.shape[1])))
        return found

    def _at_rest(self, numbers: Sequence[int], chunk: int) -> StepOutcome:
        """What a chunk of actions does where no episode is."""
        from m2flow.environments.protocol import StepOutcome

        now = self._recordings.now(self._recordings.rows_of(numbers))
        seen = {name.removeprefix(OBSERVATION): part for name, part in now.items()}
        return StepOutcome.none(seen, len(numbers), chunk)

    def _told(self, numbers: Sequence[int], done: Sequence[bool]) -> dict[str, Any]:
        """What rollouts that are over leave behind, as columns; nothing of those that go on."""
        import torch

        recordings = self._recordings
        for number, over in zip(numbers, done, strict=True):
            if over:
                recordings.stop(number)
                if number in self._resting:
                    self._resting.discard(number)
                else:
                    self._pool.release(number)
        told = [
            recordings.told[number] if over else None
            for number, over in zip(numbers, done, strict=True)
        ]
        films = [
            self._filmed(number) if over else None
            for number, over in zip(numbers, done, strict=True)
        ]
        return {
            "episodes": [[] if one is None else one.episodes for one in told],
            "failed": torch.from_numpy(recordings.of["failed"][recordings.rows_of(numbers)].copy()),
            "film": films,
            **recordings.take(numbers, done),
        }

    def _filmed(self, number: int) -> Film | None:
        """The film of a rollout's first episode, where it was wanted and is over."""
        told = self._recordings.told[number]
        episode = told.episodes[0] if told.episodes else None
        pictures = None if told.film is None else told.film.all()
        return filmed(pictures, episode, self._recordings.instruction(number))

    def _film(self, numbers: Sequence[int]) -> None:
        """Add a picture to the films that are wanted; an environment that cannot draw has none.

        Of rollouts in their first episode: no other is filmed.

        Optional films are given up when drawing has taken longer than the simulators' steps have:
        a software renderer may take a hundred times as long for a picture as a step takes.
        """
        most = max(DRAWING_SECONDS, self._stepping_seconds)
        for number in numbers:
            told = self._recordings.told[number]
            if told.film is None:
                continue
            if told.film_optional and self._drawing_seconds > most:
                told.film = None
                continue
            begun = time.monotonic()
            try:
                told.film.add(self._pool.render(number))
            except UserError as error:
                told.film = None
                if not self._told_of_films:
                    self._told_of_films = True
                    _log.warning("no films: %s", error)
            self._drawing_seconds += time.monotonic() - begun

    def discard(self) -> None:
        """Forget the rollouts that run: they begin again, here or elsewhere."""
        self._pool.release_all()
        self._recordings.forget(list(self._recordings.told))
        self._resting = set()

    def offload(self) -> None:
        if self.steps_aside:
            self._bytes = self.state_bytes()
            self._pool.put_away()

    def onload(self) -> None:
        self._pool.bring_back()
        self._bytes = None

    def state_bytes(self) -> int:
        """Of the simulators of this lane's share of the rollouts; 0 where they cannot be moved."""
        if not self.steps_aside:
            return 0
        if self._bytes is not None:
            return self._bytes
        self._pool.provide(self._share)
        return self._held()

    def beside_bytes(self) -> int:
        """Of simulators in processes that cannot step aside."""
        return self._held() if self._pool.pids and not self.steps_aside else 0

    def _held(self) -> int:
        """Of the lane's memory, by all simulators: on an accelerator what they draw in."""
        on_cpu = self.place.device == "cpu"
        return self._pool.nbytes if on_cpu else accelerator_bytes(self._pool.pids)

    def close(self) -> None:
        self._pool.close()
