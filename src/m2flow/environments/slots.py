"""Environments side by side in one process; each holds an episode, or none.

A slot without an episode (never reset, or given up) answers every step with `failed` until it is
reset. An episode is given up, and counted by cause, when its simulator raises ("error"), gives a
figure that is not finite ("nan"), or cannot be reset in `RESET_ATTEMPTS` attempts ("reset"), before
all but the first of which it is built anew. The other slots go on. Observations are written into
`memory`, which may be shared between processes. NumPy alone; knows neither torch nor processes.

Legend: B slots concerned, K actions of a chunk, A figures of an action.
"""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from m2flow.environments.environment import Array, Environment, as_picture
from m2flow.environments.spec import EnvironmentSpec, ObservationSpec
from m2flow.errors import UserError
from m2flow.user_code import what_raised

RESET_ATTEMPTS = 3

BREAKS = (Exception, SystemExit)
"""What costs an episode where a simulator raises it: its `exit()` does not end the run."""

_log = logging.getLogger(__name__)

LARGEST = float(np.finfo(np.float32).max)


@dataclass
class Episode:
    """A running episode, so that it can be carried on elsewhere.

    Attributes:
        seed, initial_state: as given to `reset`.
        actions: those taken so far, float32 [A] each; empty where the simulator saves its state.
        observed: the steps after which it was observed, where the environment looks back.
        steps: how many.
        over: it has terminated or was truncated.
        saved: the simulator's own state, pickled where the simulator is, in what `state` returns.
    """

    seed: int
    initial_state: int | None
    actions: list[Array] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    steps: int = 0
    over: bool = False
    saved: bytes = b""

    def __getstate__(self) -> dict[str, Any]:
        """Its fields, with actions as bytes: another version of NumPy may read them."""
        return {**vars(self), "actions": [action.tobytes() for action in self.actions]}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        actions = [np.frombuffer(figures, np.float32).copy() for figures in fields["actions"]]
        vars(self).update(fields, actions=actions)


class Failure(NamedTuple):
    """An episode that was given up: its slot, the cause in a word, and what there is to read."""

    slot: int
    cause: str
    detail: str


class Steps(NamedTuple):
    """What a chunk did, one row for each slot concerned; see `protocol.StepOutcome`."""

    reward: Array  # float32 [B, K]
    terminated: Array
    truncated: Array
    success: Array
    success_once: Array
    failed: Array
    steps: Array  # int64 [B]

    def fail(self, row: int) -> None:
        """The episode is given up: nothing of it counts."""
        self.reward[row] = 0
        self.terminated[row] = self.truncated[row] = False
        self.success[row] = self.success_once[row] = False
        self.failed[row] = True

    @classmethod
    def of(cls, records: Array) -> Steps:
        """The columns of records [B] of `record_of`; what is written to them is written there."""
        return cls(*(records[name] for name in cls._fields))

    @classmethod
    def nothing(cls, rows: int, chunk: int) -> Steps:
        """No step taken, nothing ended."""
        return cls.of(np.zeros(rows, record_of(chunk)))


@lru_cache
def record_of(chunk: int) -> np.dtype[Any]:
    """What `Steps` says of one slot, for chunks of so many actions."""
    kinds = [("reward", np.float32, (chunk,)), *((name, np.bool_) for name in Steps._fields[1:-1])]
    return np.dtype([*kinds, ("steps", np.int64)], align=True)


def allocate(spec: EnvironmentSpec) -> dict[str, Array]:
    """Memory for the observations of all environments: name to [num_envs, ...]."""
    return {
        part.name: np.zeros((spec.num_envs, *part.shape), part.dtype) for part in spec.observations
    }


def check_observation(part: ObservationSpec, seen: Any) -> None:
    """Refuse what NumPy would stretch to the spec's shape, or cut to whole numbers.

    Raises:
        ValueError: the shapes differ, or a part of bytes has figures that are no whole numbers.
    """
    seen = np.asarray(seen)
    if seen.shape != part.shape:
        raise ValueError(
            f"observation {part.name!r} is {seen.shape}, and its spec says {part.shape}"
        )
    if part.dtype == "uint8" and seen.dtype.kind not in "iub":
        raise ValueError(f"observation {part.name!r} is {seen.dtype}, and its spec says uint8")


def let_go(environment: Environment) -> None:
    """Close an environment that is needed no more; what that raises is said, and costs nothing.

    It may be broken, and what has been done in it stands.
    """
    try:
        environment.close()
    except BREAKS as error:
        _log.warning("%s cannot be closed: %s", environment.spec.name, what_raised(error))


def stack_pictures(pictures: Sequence[Array | None]) -> Array:
    """One array [B, H, W, 3] of pictures of one size; black where there is none."""
    shapes = [picture.shape for picture in pictures if picture is not None]
    black = np.zeros(shapes[0] if shapes else (64, 64, 3), np.uint8)
    return np.stack([black if picture is None else picture for picture in pictures])


class Slots:
    """The environments of one process.

    Args:
        make: makes one environment.
        count: how many.
        progress: called after every reset and step of one environment, to show that they go on.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        count: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._make, self._progress = make, progress
        self._environments = [make() for _ in range(count)]
        self._episodes: list[Episode | None] = [None] * count
        self.spec = replace(self._environments[0].spec, num_envs=count)
        self.memory = allocate(self.spec)
        self.instructions = [""] * count
        self.new_failures: list[Failure] = []

    def reset(
        self, slots: Sequence[int], seeds: Sequence[int], initial_states: Sequence[int | None]
    ) -> None:
        """Begin an episode in each of the slots."""
        for slot, seed, initial_state in zip(slots, seeds, initial_states, strict=True):
            self._begin(slot, seed, initial_state)
            self._progress()

    def step(self, slots: Sequence[int], action_BKA: Array) -> Array:
        """Carry out each slot's chunk, up to the end of its episode; records [B] of what it did."""
        records = np.zeros(len(slots), record_of(action_BKA.shape[1]))
        result = Steps.of(records)
        for row, slot in enumerate(slots):
            self._step(result, row, slot, action_BKA[row])
        wrong = ~(self._finite(slots) | result.failed)
        for row in wrong.nonzero()[0].tolist():
            self._give_up(slots[row], "nan", "the observation is not finite")
            result.fail(row)
        return records

    def render(self, slots: Sequence[int]) -> list[Array | None]:
        """Pictures for people, uint8 [H, W, 3] each; None where there is no episode."""
        return [self._render(slot) for slot in slots]

    def state(self) -> list[Episode | None]:
        """The episode of each slot, to be carried on by `restore` here or elsewhere."""
        for slot in range(len(self._episodes)):
            self._contained(slot, self._save)
        return list(self._episodes)

    def restore(self, episodes: Sequence[Episode | None]) -> None:
        """Carry on the episodes, by the simulator's saved state or by replaying their actions."""
        for slot, episode in enumerate(episodes):
            self._episodes[slot] = None
            if episode is not None:
                self._begin(slot, episode.seed, episode.initial_state)
                self._contained(slot, partial(self._carry_on, before=episode))

    def close(self) -> None:
        """Let go of all simulators."""
        for environment in self._environments:
            let_go(environment)

    def _contained(self, slot: int, do: Callable[[int], None]) -> None:
        """Do something with a slot's episode, if there is one; what it raises costs the episode."""
        if self._episodes[slot] is None:
            return
        try:
            do(slot)
        except UserError:
            raise
        except BREAKS:
            self._give_up(slot, "error", traceback.format_exc())

    def _save(self, slot: int) -> None:
        episode = self._episodes[slot]
        if episode is not None and self.spec.restores == "saved":
            saved = pickle.dumps(self._environments[slot].state())
            self._episodes[slot] = replace(episode, saved=saved)

    def _carry_on(self, slot: int, before: Episode) -> None:
        environment = self._environments[slot]
        if self.spec.restores == "saved":
            environment.restore(pickle.loads(before.saved))
        observed = set(before.observed)
        for step, action in enumerate(before.actions, start=1):
            environment.step(action)
            if step in observed:
                environment.observe()
            self._progress()
        actions, observed_at = list(before.actions), list(before.observed)
        carried_on = replace(before, actions=actions, observed=observed_at, saved=b"")
        self._episodes[slot] = carried_on
        self._observe(slot)
        self._progress()

    def _render(self, slot: int) -> Array | None:
        if self._episodes[slot] is None:
            return None
        try:
            return as_picture(self.spec.name, self._environments[slot].render())
        except UserError:
            raise
        except BREAKS as error:  # such as a renderer that is not there; its steps may go on
            why = what_raised(error)
            raise UserError("cannot draw itself", key=self.spec.name, hint=why) from error

    def _begin(self, slot: int, seed: int, initial_state: int | None) -> None:
        self._episodes[slot] = None
        detail = ""
        for attempt in range(RESET_ATTEMPTS):
            try:
                if attempt:
                    self._progress()
                    self._build_anew(slot)
                environment = self._environments[slot]
                environment.reset(seed, initial_state)
                self.instructions[slot] = environment.instruction()
                self._observe(slot)
            except UserError:
                raise
            except BREAKS:
                detail = traceback.format_exc()
                continue
            if self._finite([slot])[0]:
                self._episodes[slot] = Episode(seed, initial_state)
                return
            detail = "the first observation is not finite"
        self._give_up(slot, "reset", detail)

    def _step(self, result: Steps, row: int, slot: int, action_KA: Array) -> None:
        episode = self._episodes[slot]
        if episode is None:
            result.failed[row] = True
            return
        if episode.over:
            raise ValueError(f"the episode of environment {slot} is over: reset it")
        environment, limit = self._environments[slot], self.spec.max_episode_steps
        replayed = self.spec.restores == "replayed"
        cause, detail, success, success_once = "", "", False, False
        try:
            for k, action in enumerate(action_KA):
                if replayed:
                    episode.actions.append(action.copy())
                did = environment.step(action)
                self._progress()
                episode.steps += 1
                if not -LARGEST <= did.reward <= LARGEST:  # nor is what is no number
                    cause, detail = "nan", f"the reward is {did.reward}"
                    break
                truncated = did.truncated or (limit is not None and episode.steps >= limit)
                result.reward[row, k] = did.reward
                success = did.success
                success_once |= success
                result.steps[row] = k + 1
                if did.terminated or truncated:
                    result.terminated[row] = did.terminated
                    result.truncated[row] = not did.terminated
                    episode.over = True
                    break
            if success_once:
                result.success[row], result.success_once[row] = success, True
            if not cause:
                self._observe(slot)
                if environment.looks_back:
                    episode.observed.append(episode.steps)
            self._progress()
        except UserError:
            raise
        except BREAKS:
            cause, detail = "error", traceback.format_exc()
        if cause:
            self._give_up(slot, cause, detail)
            result.fail(row)

    def _observe(self, slot: int) -> None:
        """Write the slot's observation into the memory."""
        parts: Mapping[str, Array] = self._environments[slot].observe()
        for part in self.spec.observations:
            seen = parts[part.name]
            check_observation(part, seen)
            self.memory[part.name][slot] = seen

    def _finite(self, slots: Sequence[int]) -> Array:
        """Bool [B]: whether all of the observation that stands in the memory is finite."""
        found = np.ones(len(slots), bool)
        for part in self.spec.observations:
            if part.dtype == "float32" and not np.isfinite(self.memory[part.name]).all():
                rows = self.memory[part.name][list(slots)]
                found &= np.isfinite(rows).reshape(len(slots), -1).all(1)
        return found

    def _give_up(self, slot: int, cause: str, detail: str) -> None:
        self._episodes[slot] = None
        for rows in self.memory.values():
            rows[slot] = 0
        self.new_failures.append(Failure(slot, cause, detail))

    def _build_anew(self, slot: int) -> None:
        let_go(self._environments[slot])
        self._environments[slot] = self._make()
