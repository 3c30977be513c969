"""What an environment does otherwise than it says is found before a run, in one line."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from m2flow.environments import Environment, Transition
from m2flow.environments.demonstrations import played
from m2flow.environments.environment import Array, as_picture
from m2flow.environments.gymnasium import GymnasiumEnvironment
from m2flow.environments.registry import maker
from m2flow.environments.slots import RESET_ATTEMPTS, Slots
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec, image_spec
from m2flow.environments.trial import made, try_out
from m2flow.errors import UserError
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.config import PolicySection
from m2flow.workloads.embodied.experiment import spec_of
from m2flow.workloads.embodied.workers.source import PolicySource

SPEC = EnvironmentSpec(
    "mine", 1, (ObservationSpec("state", (3,)),), ActionSpec(2, (-1.0, 0.0), (1.0, np.inf))
)


class Mine(Environment):
    """Does what it says."""

    def __init__(self) -> None:
        self.spec, self.closed = SPEC, False

    def reset(self, seed: int, initial_state: int | None) -> None:
        self.seed = seed

    def step(self, action: Array) -> Transition:
        assert action.tolist() == [0.0, 0.0]
        assert action.dtype == np.float32
        return Transition(1.0)

    def observe(self) -> Mapping[str, Array]:
        return {"state": np.zeros(3, np.float32)}

    def close(self) -> None:
        self.closed = True


class Unspoken(Mine):
    """Has no spec."""

    def __init__(self) -> None:
        pass


class OfFour(Mine):
    """Says that it is four."""

    def __init__(self) -> None:
        self.spec = replace(SPEC, num_envs=4)


class Unmade(Mine):
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no licence\nand more")


class Leaves(Mine):
    """Ends its process."""

    def reset(self, seed: int, initial_state: int | None) -> None:
        raise SystemExit(3)


class Scalar(Mine):
    """Gives an observation that NumPy would stretch."""

    def observe(self) -> Any:
        return {"state": np.float32(0.5)}


class FloatPicture(Mine):
    """Gives a picture of floats from 0 to 1, of which bytes are black."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(SPEC, observations=(image_spec("image", 4, 4),))

    def observe(self) -> Mapping[str, Array]:
        return {"image": np.full((4, 4, 3), 0.5)}


class Nameless(Mine):
    """Gives an observation of another name."""

    def observe(self) -> Mapping[str, Array]:
        return {"obs": np.zeros(3, np.float32)}


class FourTuple(Mine):
    """Answers as older interfaces do."""

    def step(self, action: Array) -> Any:
        return {}, 1.0, False, {}


class Silent(Mine):
    """Forgets its reward."""

    def step(self, action: Array) -> Transition:
        return Transition(None)  # type: ignore[arg-type]


class Wrapped(Mine):
    """Gives its reward in an array."""

    def step(self, action: Array) -> Transition:
        return Transition(np.ones(1))  # type: ignore[arg-type]


class Undecided(Mine):
    """Does not know whether it stands solved."""

    def step(self, action: Array) -> Transition:
        return Transition(1.0, success=None)  # type: ignore[arg-type]


class OfNumpy(Mine):
    """Gives NumPy's numbers."""

    def step(self, action: Array) -> Transition:
        return Transition(np.float32(1), np.bool_(False), np.array(False), np.int64(1))  # type: ignore[arg-type]


class Unsaved(Mine):
    """Says that it saves its state, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(SPEC, restores="saved")


class Sleeps(Mine):
    """Never comes back."""

    def step(self, action: Array) -> Transition:
        time.sleep(3600)
        raise AssertionError


class Numbered(Mine):
    """Has a list of initial states, and no bounds."""

    def __init__(self) -> None:
        super().__init__()
        free = ActionSpec(2, (-np.inf, -np.inf), (np.inf, np.inf))
        self.spec = replace(SPEC, num_initial_states=2, action=free)

    def reset(self, seed: int, initial_state: int | None) -> None:
        assert initial_state is not None
        assert range(2)[initial_state] == 0


class Sometimes(Mine):
    """Fails at first."""

    def reset(self, seed: int, initial_state: int | None) -> None:
        if seed < RESET_ATTEMPTS - 1:
            raise OSError("not now")


def tried(make: Callable[[], Environment], seconds: float = 30.0) -> Environment:
    environment = made("my:Mine", make)
    try_out(environment, "my:Mine", seconds)
    return environment


@pytest.mark.parametrize("make", [Mine, Sometimes, Numbered, OfNumpy])
def test_one_that_works_is_tried_and_closed(make: type[Mine]) -> None:
    environment = tried(make)
    assert isinstance(environment, Mine)
    assert environment.closed


class Stuck(Mine):
    """Raises when it is closed."""

    def close(self) -> None:
        super().close()
        raise OSError("cannot close")


def test_what_is_raised_as_an_environment_is_closed_costs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It cost the run: at its beginning, or after all of it was trained."""
    environment = tried(Stuck)
    assert isinstance(environment, Stuck)
    assert environment.closed
    assert "mine cannot be closed: OSError: cannot close (test_trial.py:" in caplog.text
    slots = Slots(Stuck, 2)
    slots.close()
    assert all(one.closed for one in slots._environments)  # type: ignore[attr-defined]
    for processes in (0, 1):
        section = {"name": f"{__name__}:Stuck", "processes": processes}
        keys = {"environment": section, "rollout": {"horizon": 2}}
        assert spec_of(read_recipe({"workload": "embodied", **keys})) == SPEC


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Unspoken, "does not say what it takes and gives .*EnvironmentSpec"),
        (OfFour, "does not say what it takes and gives .*num_envs=1"),
        (Unmade, r"cannot be made: OSError: no licence and more \(test_trial.py:\d+\)"),
        (Leaves, r"first step cannot be taken: SystemExit: 3 \(test_trial.py:\d+\)"),
        (Scalar, r"ValueError: observation 'state' is \(\), and its spec says \(3,\)"),
        (FloatPicture, "ValueError: observation 'image' is float64, and its spec says uint8"),
        (Nameless, "KeyError: 'state'"),
        (FourTuple, "`step` gives a tuple .*expected a Transition"),
        (Silent, "`reward` of `step` is no number: None"),
        (Wrapped, r"`reward` of `step` is no number: array\(\[1\.\]\)"),
        (Undecided, "`success` of `step` is no number: None"),
        (Unsaved, "NotImplementedError: mine has no `state`"),
    ],
)
def test_what_does_not_fit_is_one_line(make: type[Mine], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        tried(make)
    assert "my:Mine" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_demonstration_has_no_picture_that_bytes_would_cut() -> None:
    """The pictures of a file were black."""
    with pytest.raises(UserError, match=r"environment\.name: .*'image' is float64"):
        played(FloatPicture(), lambda _: [0.0, 0.0], [0])


def test_an_alarm_of_somebody_else_goes_on() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        tried(Mine)
        deadline = time.monotonic() + 60
        while not heard and time.monotonic() < deadline:
            time.sleep(0.05)
        assert heard == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_one_that_hangs_is_refused_after_its_deadline() -> None:
    with pytest.raises(
        UserError, match=r"not come back .* within 0\.2 s.*environment\.processes=1"
    ):
        tried(Sleeps, seconds=0.2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"foo": 1}, "cannot be made: TypeError: .*'foo'"),
        (
            {"id": "Pendulum-v1"},
            r"environment\.options\.id: is what Gymnasium calls the environment's name",
        ),
        ({"task": "push"}, "cannot be made: TypeError: .*'task'"),
        ({"pixels": "big"}, r"environment\.options\.pixels: is no size of a picture \(got 'big'\)"),
        ({"pixels": -5}, r"environment\.options\.pixels: is no size of a picture \(got -5\)"),
        ({"max_episode_steps": 0}, "cannot be made: "),
    ],
)
def test_options_that_gymnasium_refuses(options: dict[str, object], said: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(UserError, match=said) as caught:
        made("gymnasium:CartPole-v1", maker("gymnasium:CartPole-v1", options))
    assert "\n" not in str(caught.value)


def test_an_environment_of_gymnasium_that_answers_as_older_ones_did() -> None:
    pytest.importorskip("gymnasium")
    from gymnasium import Env, spaces

    class Older(Env[Any, Any]):
        observation_space = spaces.Box(-1, 1, (3,), np.float32)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(3, np.float32)

    with pytest.raises(UserError, match=r"first step cannot be taken: .*(unpack|unexpected)"):
        tried(partial(GymnasiumEnvironment.of_class, "my:Older", Older))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: ObservationSpec("state", (3,), "float64"), "'float64'.*float32 or uint8"),
        (lambda: ActionSpec(0, (), ()), "an action has figures"),
        (lambda: ActionSpec(2, (0.0,), (1.0, 1.0)), "an action has figures"),
        (lambda: ActionSpec(1, (1.0,), (0.0,)), "the wrong way round"),
        (lambda: ActionSpec.discrete(0), "wrong way round|no choice"),
        (lambda: replace(SPEC, max_episode_steps=0), "max_episode_steps.*at least 1"),
        (lambda: replace(SPEC, max_episode_steps=2.5), r"max_episode_steps.*2\.5.*whole number"),
        (lambda: ObservationSpec("state", (0,)), r"'state'.*\(0,\).*whole numbers above 0"),
        (lambda: ObservationSpec("state", (-1,)), r"'state'.*\(-1,\).*whole numbers above 0"),
        (lambda: ObservationSpec("state", (2.0,)), r"'state'.*\(2\.0,\).*whole numbers above 0"),
        (lambda: ObservationSpec("state", 3), "'state'.*got 3.*a tuple of whole numbers"),
        (lambda: ActionSpec(1, (math.nan,), (0.0,)), "the wrong way round, or no numbers"),
        (lambda: ActionSpec(1.0, (0.0,), (1.0,)), "an action has figures"),
        (lambda: ActionSpec.discrete(3.0), r"there is no choice.*3\.0"),
        (lambda: replace(SPEC, num_initial_states=0), "num_initial_states.*got 0.*at least 1"),
        (lambda: replace(SPEC, num_initial_states=-3), "num_initial_states.*got -3.*at least 1"),
        (lambda: replace(SPEC, num_initial_states=2, tasks=(("a", 3),)), "tasks.*got 3.*2"),
        (lambda: replace(SPEC, tasks=(("a", 3),)), "tasks.*got 3.*num_initial_states"),
        (lambda: replace(SPEC, restores="save"), "restores.*'save'.*saved or replayed"),
        (lambda: replace(SPEC, instructions="go"), "instructions.*'go'.*(sentence,)"),
        (lambda: replace(SPEC, observations=SPEC.observations * 2), "'state'.*name of its own"),
        (
            lambda: replace(SPEC, observations=(ObservationSpec("instruction", (2,)),)),
            "'instruction'.*`instructions`",
        ),
    ],
)
def test_a_spec_that_cannot_be(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        wrong()


def test_bounds_may_be_lists_or_arrays() -> None:
    """They were taken, and every step raised that a list cannot be hashed."""
    wanted = ActionSpec(2, (-1.0, 0.0), (1.0, np.inf))
    low, high = np.array([-1, 0]), np.array([1, np.inf], np.float32)
    for given in (ActionSpec(2, [-1, 0], [1, np.inf]), ActionSpec(2, low, high)):  # type: ignore[arg-type]
        assert given == wanted
        given.check(np.zeros((1, 1, 2), np.float32))


def test_pictures_are_asked_for_by_their_own_names() -> None:
    left, right = (ObservationSpec(name, (40, 60, 3), "uint8") for name in ("left", "right"))
    small = ObservationSpec("small", (20, 20, 3), "uint8")
    spec = replace(SPEC, observations=(*SPEC.observations, left, right, small))
    assert spec.picture_size(("left", "right")) == (40, 60)
    with pytest.raises(
        UserError, match=r"policy\.cameras: .*'image'.*'left' or 'right' or 'small'"
    ):
        spec.picture_size(("image",))
    with pytest.raises(UserError, match="differ in size"):
        spec.picture_size(("left", "small"))
    with pytest.raises(UserError, match="it has none"):
        SPEC.picture_size(("image",))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (ObservationSpec("image", (40, 40, 1), "uint8"), r"uint8 \(40, 40, 1\)"),
        (ObservationSpec("image", (40, 40, 4), "uint8"), r"uint8 \(40, 40, 4\)"),
        (ObservationSpec("image", (40, 40), "uint8"), r"uint8 \(40, 40\)"),
        (ObservationSpec("image", (40, 40, 3)), r"float32 \(40, 40, 3\)"),
        (ObservationSpec("state", (2, 3)), r"float32 \(2, 3\)"),
        (ObservationSpec("state", ()), r"float32 \(\)"),
        (ObservationSpec("state", (4,), "uint8"), r"uint8 \(4,\)"),
    ],
)
def test_what_no_policy_reads_is_refused_beforehand(part: ObservationSpec, said: str) -> None:
    """Floats were divided by 255 as bytes are; all else went wrong in a lane."""
    spec = replace(SPEC, observations=(part,))
    if part.name == "state":
        section = PolicySection()
        wanted = r"state: .*gives a state that is no vector .*expected float32 \(figures,\)"
    else:
        section = PolicySection(kind="cnn")
        wanted = r"policy\.cameras: .*no picture by this name .*uint8 \(height, width, 3\)"
    with pytest.raises(UserError, match=said) as caught:
        PolicySource(section, spec).make()
    assert re.search(wanted, str(caught.value))
    if part.name == "state":
        seen = replace(SPEC, observations=(image_spec("image", 40, 40), part))
        with pytest.raises(UserError, match=said):
            PolicySource(PolicySection(kind="cnn"), seen).make()


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3), (4, 6, 4)])
@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_what_can_be_shown_is_a_picture(shape: tuple[int, ...], dtype: str) -> None:
    picture = as_picture("my:Mine", np.full(shape, 7, dtype))
    assert (picture.shape, picture.dtype) == ((4, 6, 3), np.uint8)
    assert (picture == 7).all()


@pytest.mark.parametrize(
    "drawn",
    [None, np.zeros((4, 6, 3)), np.zeros((4, 6, 2), np.uint8), np.zeros((0, 6, 3), np.uint8)],
)
def test_what_cannot_be_shown_is_no_picture(drawn: Any) -> None:
    with pytest.raises(UserError, match="my:Mine: draws no picture"):
        as_picture("my:Mine", drawn)
