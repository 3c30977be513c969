"""The worker that hosts environments: it begins rollouts, steps them, and keeps what they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.environments.registry import FAMILIES
from m2flow.errors import UserError
from m2flow.flow import Batch, Place, Ragged, Worker, stage
from m2flow.workloads.embodied.config import EnvironmentSection
from m2flow.workloads.embodied.workers.columns import (
    ACTED,
    CUT,
    INSTRUCTION,
    OBSERVATION,
    TURN,
    WHO,
    as_columns,
)
from m2flow.workloads.embodied.workers.film import encoded
from m2flow.workloads.embodied.workers.pool import EnvironmentPool
from m2flow.workloads.embodied.workers.recording import Recording

LIGHT = ("gymnasium", "table")
"""Families whose simulators run in the lane's own process, unless it is said otherwise."""


FIGURES = {"steps": 0, "ends": False, "cut": False}
"""Figures of a turn that are Python values, and what they are like."""


class Simulator(Worker):
    """Environments on a lane; an item is a rollout, and stays with the lane that began it.

    Args:
        environment: which simulator, and in how many processes.
        horizon: environment steps of a rollout at most.
    """

    def __init__(self, environment: EnvironmentSection, horizon: int) -> None:
        self.environment, self.horizon = environment, horizon

    def load(self, place: Place) -> None:
        super().load(place)
        self._pool = EnvironmentPool(self._made)
        self._recordings: dict[int, Recording] = {}

    def _made(self, count: int) -> Any:
        from m2flow.environments import make_environments

        return make_environments(
            self.environment.name,
            count,
            processes=min(count, self._processes()),
            **self.environment.options,
        )

    def _processes(self) -> int:
        if self.environment.processes is not None:
            return self.environment.processes
        family = self.environment.name.partition(":")[0]
        light = family in LIGHT or family not in FAMILIES
        return 0 if light else self.place.num_threads

    @stage(sticky=True)
    def begin(self, rollouts: Batch) -> Batch:
        """Begin each rollout; its first observation."""
        numbers = rollouts["rollout"].tolist()
        names = ("seed", "initial_state", "single")
        facts = zip(*(rollouts[name].tolist() for name in names), strict=True)
        for number, (seed, state, single) in zip(numbers, facts, strict=True):
            self._recordings[number] = Recording(seed, state, single, {})
        for number, film in zip(numbers, rollouts["film"].tolist(), strict=True):
            self._recordings[number].film = [] if film else None
        self._begin_episodes(numbers)
        return self._seen(rollouts.only(*WHO), [self._recordings[number] for number in numbers])

    def _begin_episodes(self, numbers: Sequence[int]) -> None:
        """The next episode of each rollout; its seed follows from the rollout's."""
        from m2flow.algorithms.sampling import derive_seed

        known = [self._recordings[number] for number in numbers]
        seeds = [derive_seed(one.seed, 1, len(one.episodes) + one.failed) for one in known]
        states = [one.state for one in known]
        given = None if min(states) < 0 else states
        for rows, observations in self._pool.begin(numbers, seeds, given):
            for row, now in zip(rows, _each(observations, len(rows)), strict=True):
                known[row].now = now
        self._film(numbers)

    @stage(sticky=True)
    def step(self, acted: Batch) -> Batch:
        """Carry out what was decided; rollouts that are over come with all their turns."""
        import torch

        numbers = acted["rollout"].tolist()
        decided = {name: acted[name] for name in ACTED[1:] if name in acted}
        for rows, outcome in self._pool.step(numbers, acted["action"]):
            self._note(numbers, decided, rows, outcome)
        figures = {name: column[0] for name, column in decided.items()} | FIGURES
        figures["reward"] = outcome.reward[0]
        self._film(numbers)
        recordings = [self._recordings[number] for number in numbers]
        done = [recording.is_over(self.horizon) for recording in recordings]
        again = []
        for number, recording, over in zip(numbers, recordings, done, strict=True):
            if over:
                recording.stop()
                del self._recordings[number]
                self._pool.release(number)
            elif recording.waits:
                again.append(number)
        if again:
            self._begin_episodes(again)
        seen = self._seen(acted.only(*WHO), recordings)
        return seen.with_columns(
            turn=acted["turn"] + 1,
            done=torch.tensor(done),
            episodes=[
                [episode.figures() for episode in one.episodes] if over else []
                for one, over in zip(recordings, done, strict=True)
            ],
            failed=torch.tensor([one.failed for one in recordings]),
            film=[
                encoded(one.film) if over else b""
                for one, over in zip(recordings, done, strict=True)
            ],
            **_told(
                [one if over else None for one, over in zip(recordings, done, strict=True)],
                figures | as_columns(recordings[0].now),
            ),
        )

    def _note(
        self, numbers: Sequence[int], decided: Mapping[str, Any], rows: Sequence[int], outcome: Any
    ) -> None:
        """Add a turn to the recordings of some rollouts."""
        observations = _each(outcome.observation, len(rows))
        chunk = outcome.reward.shape[1]
        columns = (
            outcome.terminated, outcome.truncated, outcome.success, outcome.success_once,
            outcome.failed, outcome.steps,
        )  # fmt: skip
        figures = zip(*(column.tolist() for column in columns), strict=True)
        for place, (terminated, truncated, success, once, failed, steps) in enumerate(figures):
            row = rows[place]
            recording = self._recordings[numbers[row]]
            if failed:
                recording.fail(chunk)
                recording.now = observations[place]
            else:
                recording.add(
                    {name: column[row] for name, column in decided.items()},
                    outcome.reward[place],
                    steps,
                    success=success,
                    success_once=once,
                )
                recording.now = observations[place]
                if terminated or truncated:
                    recording.end(terminated=terminated)

    def _film(self, numbers: Sequence[int]) -> None:
        """Add a picture to the films that are wanted; an environment that cannot draw has none."""
        for number in numbers:
            film = self._recordings[number].film
            if film is None or self._recordings[number].episodes:
                continue
            try:
                film.append(self._pool.render(number))
            except UserError:
                self._recordings[number].film = None

    def _seen(self, who: Batch, recordings: Sequence[Recording]) -> Batch:
        """Rollouts with what there is to see now."""
        import torch

        columns = {
            name: [one.now[name] for one in recordings]
            if name == INSTRUCTION
            else torch.stack([one.now[name] for one in recordings])
            for name in recordings[0].now
        }
        return who.with_columns(**as_columns(columns))

    def close(self) -> None:
        self._pool.close()


def _each(observations: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Observations of several environments, one by one."""
    return [{name: part[row] for name, part in observations.items()} for row in range(count)]


def _told(recordings: Sequence[Recording | None], one: Mapping[str, Any]) -> dict[str, Any]:
    """The turns of rollouts that are over as ragged columns; nothing of those that go on.

    Args:
        recordings: None for a rollout that goes on.
        one: by name of a figure one of its values, for its shape and dtype.
    """
    rows = [{} if over is None else over.rows() for over in recordings]
    cuts = [{} if over is None else as_columns(over.cut_rows()) for over in recordings]
    told = {
        f"{TURN}{name}": _ragged(name, [row.get(name) for row in rows], value)
        for name, value in one.items()
    }
    for name, value in one.items():
        if name.startswith(OBSERVATION):
            told[f"{CUT}{name}"] = _ragged(name, [cut.get(name) for cut in cuts], value)
    return told


def _ragged(name: str, columns: Sequence[Any], one: Any) -> Any:
    """A row for each rollout, empty where it has nothing to tell."""
    import torch

    if name.endswith(INSTRUCTION):
        return [column or [] for column in columns]
    empty = torch.as_tensor(one)[None][:0]
    return Ragged.from_rows([empty if column is None else column for column in columns])
