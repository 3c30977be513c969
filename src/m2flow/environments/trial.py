"""A first step of an environment that runs in a lane's own process, before anything is started.

What it does otherwise than its spec says would go wrong in every episode, and is found here, in one
line. An environment that fails now and then is no mistake: it has a few attempts.
"""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from m2flow.environments.environment import Array, Environment, Transition
from m2flow.environments.slots import BREAKS, RESET_ATTEMPTS, check_observation, let_go
from m2flow.environments.spec import ActionSpec, EnvironmentSpec
from m2flow.errors import UserError
from m2flow.user_code import what_raised

KEY = "environment.name"


def made(name: str, make: Callable[[], Environment]) -> Environment:
    """Make an environment, and see that it says what it is.

    Args:
        name: as a recipe has it, for errors.
        make: makes it.

    Raises:
        UserError: making it has raised something, or it has no spec of one environment.
    """
    try:
        environment = make()
    except UserError:
        raise
    except BREAKS as error:
        raise _refused(name, "it cannot be made", error) from error
    spec = getattr(environment, "spec", None)
    if not isinstance(spec, EnvironmentSpec) or spec.num_envs != 1:
        raise UserError(
            "the environment does not say what it takes and gives",
            key=KEY,
            value=name,
            expected="`self.spec = EnvironmentSpec(..., num_envs=1, ...)` in `__init__`",
        )
    return environment


def try_out(environment: Environment, name: str, seconds: float) -> None:
    """Begin an episode, take a step, save and restore it where that is said, and close the
    environment.

    Args:
        environment: one of its kind, to be used by nobody else.
        name: as a recipe has it, for errors.
        seconds: that all of it may take; in another thread than the main one it may take any time.

    Raises:
        UserError: what is wrong with it.
    """
    try:
        with _within(seconds):
            _take_first_step(environment, name)
            let_go(environment)
    except UserError:
        raise
    except _TooLate as late:
        raise UserError(
            f"the environment has not come back from its first step within {seconds:g} s",
            key=KEY,
            value=name,
            hint="with environment.processes=1 one that hangs costs an episode",
        ) from late
    except BREAKS as error:
        raise _refused(name, "its first step cannot be taken", error) from error


class _TooLate(BaseException):
    """Time is up; whoever catches every `Exception` does not catch this."""


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise `_TooLate` in the main thread after so many seconds; an alarm set before goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(*_: object) -> None:
        raise _TooLate

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, expired)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            left = max(0.001, left - (time.monotonic() - began))
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _take_first_step(environment: Environment, name: str) -> None:
    for attempt in range(RESET_ATTEMPTS):
        try:
            _first_step(environment, name, attempt)
            return
        except UserError:
            raise
        except BREAKS:
            if attempt == RESET_ATTEMPTS - 1:
                raise


def _first_step(environment: Environment, name: str, seed: int) -> None:
    numbered = environment.spec.num_initial_states is not None
    start = 0 if numbered else None
    environment.reset(seed, start)
    _look(environment)
    did = environment.step(_any_action(environment.spec.action))
    if not isinstance(did, Transition):
        raise UserError(
            f"`step` gives a {type(did).__name__}", key=KEY, value=name, expected="a Transition"
        )
    for field, said in did._asdict().items():
        if np.ndim(said) or np.asarray(said).dtype.kind not in "fiub":
            raise UserError(f"`{field}` of `step` is no number: {said!r}", key=KEY, value=name)
    _look(environment)
    if environment.spec.restores == "saved":
        saved = environment.state()
        pickle.dumps(saved)  # as it is where the environment steps aside
        environment.reset(seed, start)
        environment.restore(saved)
        _look(environment)


def _look(environment: Environment) -> None:
    seen = environment.observe()
    for part in environment.spec.observations:
        check_observation(part, seen[part.name])
        np.empty(part.shape, part.dtype)[...] = seen[part.name]


def _any_action(spec: ActionSpec) -> Array:
    """The one in the middle, as float32 [A]; of choices the first."""
    if spec.num_discrete is not None:
        return np.zeros(1, np.float32)
    low, high = np.array(spec.low), np.array(spec.high)
    bounded = np.isfinite(low) & np.isfinite(high)
    action = np.clip(0.0, low, high)
    action[bounded] = (low[bounded] + high[bounded]) / 2
    return action.astype(np.float32)


def _refused(name: str, what: str, error: BaseException) -> UserError:
    return UserError(f"{what}: {' '.join(what_raised(error).split())}", key=KEY, value=name)
