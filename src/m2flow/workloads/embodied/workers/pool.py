"""`EnvironmentPool`: as many environments as rollouts are on a lane, made when they are needed.

How many rollouts a lane hosts is decided by the plan, and by chance where lanes take work as they
become free. Environments that are made stay, and serve the next rollouts. A rollout takes one that
had its task before if there is one: another task may need another simulator, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from m2flow.environments.protocol import Observations, StepOutcome, VectorEnvironment


class EnvironmentPool:
    """Rollouts, each in an environment of its own.

    Args:
        make: makes a vector of so many environments.
        share: rollouts that are to be expected here at once. A vector that is made while others run
            has all that are lacking for them: rollouts of a lane that was lost come back one by
            one, and each vector may have processes of its own.
    """

    def __init__(self, make: Callable[[int], VectorEnvironment], share: int = 0) -> None:
        self._make, self._share = make, share
        self._vectors: list[VectorEnvironment] = []
        self._free: list[tuple[int, int]] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._tasks: dict[tuple[int, int], str] = {}
        self._away: list[tuple[int, bytes]] = []

    @property
    def nbytes(self) -> int:
        """Memory that `put_away` gives back."""
        return sum(vector.nbytes for vector in self._vectors)

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes that run simulators."""
        return [pid for vector in self._vectors for pid in vector.pids]

    def provide(self, count: int) -> None:
        """Make as many environments as are lacking, to have so many in all."""
        there = len(self._free) + len(self._places)
        lacking = count - there
        if lacking > 0:
            if self._places:
                lacking = max(lacking, self._share - there)
            self._vectors.append(self._make(lacking))
            self._free += [(len(self._vectors) - 1, index) for index in range(lacking)]

    def begin(
        self, rollouts: Sequence[int], seeds: Sequence[int], states: Sequence[int] | None
    ) -> Iterator[tuple[list[int], Observations]]:
        """Begin rollouts; a rollout that runs already begins anew.

        Yields:
            positions among those given, and their first observations.
        """
        new = [rollout for rollout in rollouts if rollout not in self._places]
        self.provide(len(self._places) + len(new))
        state_of = dict(zip(rollouts, states or [-1] * len(rollouts), strict=True))
        for rollout in new:
            self._places[rollout] = self._taken(state_of[rollout])
        for vector, rows, ids in self._dealt(rollouts):
            chosen = None if states is None else [states[row] for row in rows]
            yield rows, vector.reset(ids, [seeds[row] for row in rows], chosen)

    def begin_step(
        self, rollouts: Sequence[int], action_BKA: Tensor
    ) -> list[tuple[list[int], Callable[[], StepOutcome]]]:
        """Begin to carry out a chunk of actions in each rollout.

        Returns:
            positions among those given, and what waits for what happened there.
        """
        begun = []
        for vector, rows, ids in self._dealt(rollouts):
            actions = action_BKA if len(rows) == len(rollouts) else action_BKA[rows]
            begun.append((rows, vector.begin_step(actions, ids)))
        return begun

    def render(self, rollout: int) -> Tensor:
        """A picture of a rollout for people, uint8 [H, W, 3]."""
        vector, index = self._places[rollout]
        return self._vectors[vector].render([index])[0]

    def release(self, rollout: int) -> None:
        """A rollout is over: its environment is free for another."""
        self._free.append(self._places.pop(rollout))

    def release_all(self) -> None:
        """No rollout is on this lane any more."""
        for rollout in list(self._places):
            self.release(rollout)

    def put_away(self) -> None:
        """Save all running episodes and end the simulators, with their renderers."""
        busy = {number for number, _ in self._places.values()}
        for number, vector in enumerate(self._vectors):
            state = vector.state() if number in busy else b""  # nobody goes on in what is there
            self._away.append((vector.spec.num_envs, state))
            vector.close()
        self._vectors = []

    def bring_back(self) -> None:
        """Make the simulators that were put away, and carry on their episodes."""
        away, self._away = self._away, []
        for count, state in away:
            self._vectors.append(self._make(count))
            if state:
                self._vectors[-1].restore(state)

    def close(self) -> None:
        """End all simulators."""
        for vector in self._vectors:
            vector.close()

    def _taken(self, state: int) -> tuple[int, int]:
        """A free place, the best for an episode that begins in this state (-1 for any)."""
        task = "" if state < 0 else self._vectors[0].spec.task_of(state)

        def worth(place: tuple[int, int]) -> tuple[bool, bool, tuple[int, int]]:
            last = self._tasks.get(place)
            return last != task, last is not None, place

        place = min(self._free, key=worth)
        self._free.remove(place)
        self._tasks[place] = task
        return place

    def _dealt(
        self, rollouts: Sequence[int]
    ) -> Iterator[tuple[VectorEnvironment, list[int], list[int]]]:
        """Each vector with the positions of the rollouts it hosts, and their places there."""
        for number, vector in enumerate(self._vectors):
            rows = [row for row, one in enumerate(rollouts) if self._places[one][0] == number]
            if rows:
                yield vector, rows, [self._places[rollouts[row]][1] for row in rows]
