"""Gymnasium environments: spaces, seeds, pictures, and the very steps that Gymnasium takes."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from m2flow.environments import make_environments
from m2flow.environments.gymnasium import GymnasiumEnvironment, shrink
from m2flow.environments.registry import maker
from m2flow.environments.serial import SerialEnvironments
from m2flow.errors import UserError

gymnasium = pytest.importorskip("gymnasium", reason='needs the extra "embodied"')
spaces = gymnasium.spaces


class Everything(gymnasium.Env):
    """Observations and actions of many kinds."""

    def __init__(self, action=None, render_mode=None):
        self.render_mode = render_mode
        self.action_space = action or spaces.Box(-2, 2, (2, 2))
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (4, 6, 3), np.uint8),
                "joints": spaces.Box(-1, 1, (3,)),
                "door": spaces.Discrete(2),
                "mission": spaces.Text(20),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(), {}

    def seen(self):
        return {
            "camera": np.full((4, 6, 3), 7, np.uint8),
            "joints": np.array([0.1, 0.2, 0.3]),
            "door": 1,
            "mission": "open the door",
        }

    def step(self, action):
        self.action = action
        return self.seen(), 1.0, False, False, {"is_success": True}


def test_a_package_that_registers_when_it_is_imported(tmp_path, monkeypatch):
    """As Atari, MiniGrid and robotics packages do: the id alone is unknown before."""
    (tmp_path / "pole_shop.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Shop/Pole-v3', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"no such task.*Shop/Pole-v3.*gymnasium:PACKAGE:ID"):
        make_environments("gymnasium:Shop/Pole-v3", 1)
    with pytest.raises(UserError, match=r"no module of this name.*pole_shed"):
        make_environments("gymnasium:pole_shed:Shop/Pole-v3", 1)
    try:
        with pytest.raises(UserError, match=r"no such task.*Pole-v4.*'Shop/Pole-v3'"):
            make_environments("gymnasium:pole_shop:Shop/Pole-v4", 1)
        environments = make_environments("gymnasium:pole_shop:Shop/Pole-v3", 1)
        assert environments.spec.name == "gymnasium:pole_shop:Shop/Pole-v3"
        assert environments.reset([0], [3])["state"].shape == (1, 4)
    finally:
        gymnasium.registry.pop("Shop/Pole-v3", None)


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Registers environments of a package with little but what is told of drawing."""
    (tmp_path / "mode_shop.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Plain(gymnasium.Env):\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (1,))\n"
        "    def __init__(self, task='none'):\n"
        "        self.task = task\n"
        "class Window(Plain):\n"
        "    metadata = {'render_modes': ['human']}\n"
        "    def __init__(self, render_mode=None):\n"
        "        assert render_mode is None or render_mode in self.metadata['render_modes']\n"
        "        self.render_mode = render_mode\n"
        "def any_option(**options):\n"
        "    return CartPoleEnv(**options)\n"
        "gymnasium.register('Shop/Plain-v0', 'mode_shop:Plain')\n"
        "gymnasium.register('Shop/Window-v0', 'mode_shop:Window')\n"
        "gymnasium.register('Shop/Any-v0', any_option)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "gymnasium:mode_shop:Shop/"
    for name in ("Plain", "Window", "Any"):
        gymnasium.registry.pop(f"Shop/{name}-v0", None)
    sys.modules.pop("mode_shop", None)


def test_one_that_cannot_draw_is_not_asked_for_pictures(shop):
    """`render_mode="rgb_array"` went to every registered one, which not all of them take."""
    environment = maker(f"{shop}Plain-v0", {"task": "push"})()
    assert environment._made.unwrapped.task == "push"
    with pytest.raises(UserError, match="draws no pictures"):
        environment.render()
    assert maker(f"{shop}Window-v0", {})()._made.render_mode is None
    window = sys.modules["mode_shop"].Window
    assert GymnasiumEnvironment.of_class("mine:Window", window)._made.render_mode is None
    assert maker(f"{shop}Any-v0", {})()._made.render_mode == "rgb_array"
    assert maker("gymnasium:CartPole-v1", {})()._made.render_mode == "rgb_array"


def test_a_render_mode_of_the_users_is_passed_on():
    for mode in ("human", None):
        environment = maker("gymnasium:CartPole-v1", {"render_mode": mode})()
        assert environment._made.render_mode == mode


def test_cart_pole_steps_as_gymnasium_does():
    environments = make_environments("gymnasium:CartPole-v1", 2)
    spec = environments.spec
    assert (spec.action.num_discrete, spec.action.size, spec.max_episode_steps) == (2, 1, 500)
    other = gymnasium.make("CartPole-v1")
    for seed in (3, 4):
        state = environments.reset([seed - 3], [seed])["state"]
        expected, _ = other.reset(seed=seed)
        assert state.dtype == torch.float32
        np.testing.assert_array_equal(state[0].numpy(), expected)
        done = False
        while not done:
            outcome = environments.step(torch.ones(1, 1, 1), [seed - 3])
            expected, reward, terminated, truncated, _ = other.step(1)
            np.testing.assert_array_equal(outcome.observation["state"][0].numpy(), expected)
            assert float(outcome.reward) == reward
            assert (bool(outcome.terminated), bool(outcome.truncated)) == (terminated, truncated)
            done = terminated or truncated
    with pytest.raises(UserError, match="out of bounds"):
        environments.step(torch.full((1, 1, 1), 2.0), [0])


def test_truncation_is_told_from_termination():
    environments = make_environments("gymnasium:Pendulum-v1", 1)
    environments.reset(None, [0])
    outcome = environments.step(torch.zeros(1, 250, 1))
    assert outcome.truncated.all()
    assert not outcome.terminated.any()
    assert outcome.steps.tolist() == [200]


def test_replayed_episodes_go_on_alike():
    first, second = (make_environments("gymnasium:Pendulum-v1", 2) for _ in range(2))
    assert first.spec.restores == "replayed"
    first.reset(None, [1, 2])
    first.step(torch.full((2, 5, 1), 0.3))
    second.restore(first.state())
    left, right = (v.step(torch.full((2, 5, 1), -0.3)) for v in (first, second))
    assert torch.equal(left.observation["state"], right.observation["state"])


def test_pictures_in_place_of_the_state():
    pytest.importorskip("pygame")
    environments = make_environments("gymnasium:CartPole-v1", 2, pixels=32)
    image = environments.reset(None, [0, 1])["image"]
    assert image.shape == (2, 32, 32, 3)
    assert image.float().std() > 1
    assert environments.render([1]).shape == (1, 400, 600, 3)


class Stripe(gymnasium.Env):
    """Draws its count of steps as a shade of grey."""

    render_mode = "rgb_array"
    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 10
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def render(self):
        return np.full((60, 40, 3), self.count, np.uint8)


@pytest.mark.parametrize(
    ("motion", "wanted"),
    [
        (1, [[10, 10, 11], [10, 11, 12], [11, 12, 13]]),
        (2, [[10, 10, 11], [10, 10, 12], [10, 11, 13], [10, 12, 14], [11, 13, 15]]),
    ],
)
def test_motion_is_three_pictures_some_observations_apart(motion, wanted):
    def shades(environment):
        image = environment.observe()["image"]
        assert image.shape == (8, 8, 3)
        assert image.dtype == np.uint8
        assert (image == image[:1, :1]).all()
        return image[0, 0].tolist()

    environment = GymnasiumEnvironment.of_class("mine:Stripe", Stripe, pixels=8, motion=motion)
    assert environment.spec.observation("image").shape == (8, 8, 3)
    environment.reset(0, None)
    assert shades(environment) == [10, 10, 10]
    for three in wanted:
        environment.step(np.zeros(1, np.float32))
        assert shades(environment) == three
    environment.reset(1, None)
    assert shades(environment) == [10, 10, 10]
    for _ in range(2):
        environment.step(np.zeros(1, np.float32))
    assert shades(environment) == [10, 10, 12], "one look at two steps"
    assert shades(environment) == [10, 10, 12], "looking again changes nothing"
    for wrong in ({"motion": motion}, *({"motion": no, "pixels": 8} for no in (-1, 1.5, "a"))):
        with pytest.raises(
            UserError, match=r"environment\.options\.motion: is a number of observations between"
        ):
            GymnasiumEnvironment.of_class("mine:Stripe", Stripe, **wrong)


def test_motion_goes_on_where_an_episode_is_carried_on_elsewhere():
    pytest.importorskip("pygame")
    name, options = "gymnasium:CartPole-v1", {"pixels": 24, "motion": 2}
    first, second = (make_environments(name, 1, **options) for _ in range(2))
    first.reset(None, [1])
    for _ in range(4):
        seen = first.step(torch.ones(1, 2, 1)).observation["image"]
    assert seen.float().std(-1).max() > 1, "the pole has moved"
    second.restore(first.state())
    left, right = (v.step(torch.zeros(1, 1, 1)) for v in (first, second))
    assert torch.equal(left.observation["image"], right.observation["image"])


def test_dictionaries_fall_into_state_image_and_instruction():
    environment = GymnasiumEnvironment.of_class("mine:Everything", Everything)
    spec = environment.spec
    assert [(part.name, part.shape) for part in spec.observations] == [
        ("image", (4, 6, 3)),
        ("state", (5,)),
    ]
    assert (spec.action.size, spec.action.low) == (4, (-2.0,) * 4)
    environment.reset(0, None)
    seen = environment.observe()
    np.testing.assert_allclose(seen["state"], [0, 1, 0.1, 0.2, 0.3])
    assert environment.instruction() == "open the door"
    assert environment.step(np.zeros(4, np.float32)).success
    assert environment._made.action.shape == (2, 2)


def test_actions_of_another_kind_are_refused():
    with pytest.raises(UserError, match=r"MultiDiscrete.*expected Box or Discrete"):
        GymnasiumEnvironment.of_class(
            "mine:Everything", Everything, action=spaces.MultiDiscrete([2, 2])
        )


def test_a_choice_begins_where_the_space_does():
    environment = GymnasiumEnvironment.of_class(
        "mine:Everything", Everything, action=spaces.Discrete(3, start=5)
    )
    environment.reset(0, None)
    environment.step(np.array([2.0], np.float32))
    assert environment._made.action == 7


def test_actions_in_whole_numbers_are_the_nearest_ones():
    environment = GymnasiumEnvironment.of_class(
        "mine:Everything", Everything, action=spaces.Box(-1, 3, (3,), np.int64)
    )
    environment.reset(0, None)
    environment.step(np.array([2.9, -0.9, 0.4], np.float32))
    assert environment._made.action.tolist() == [3, -1, 0]
    assert environment._made.action.dtype == np.int64


def test_actions_of_truth_values_are_the_nearest_ones():
    """All that was not 0 was True: a squashed policy never chose the other."""
    space = spaces.Box(0, 1, (3,), np.bool_)
    environment = GymnasiumEnvironment.of_class("mine:Everything", Everything, action=space)
    environment.reset(0, None)
    environment.step(np.array([0.1, 0.9, 0.0], np.float32))
    assert environment._made.action.tolist() == [False, True, False]
    assert space.contains(environment._made.action)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_what_rounding_has_put_out_of_bounds_is_at_the_bound(shape):
    """Of the space, too: environments assert that an action is in it."""
    environment = GymnasiumEnvironment.of_class(
        "mine:Everything", Everything, action=spaces.Box(-2, 2, shape)
    )
    host, made = SerialEnvironments(lambda: environment, 1), environment._made
    host.reset([0], [0])
    decided = torch.tensor([[[2 + 5e-5, -1.5]]])
    host.step(decided, [0])
    assert made.action.shape == shape
    assert made.action_space.contains(made.action)
    assert made.action.ravel().tolist() == [2, -1.5]
    made.action[:] = 0  # a simulator may keep what it is given, and write there
    assert decided[0, 0, 1] == -1.5
    assert host._slots._episodes[0].actions[0].tolist() == [2, -1.5]


@pytest.mark.parametrize(
    ("space", "decided", "wanted"),
    [
        (spaces.Box(-0.1, 0.1, (2,), np.float64), [0.1, -0.1], [0.1, -0.1]),
        (spaces.Box(-0.1, 0.1, (2,), np.float16), [1.0, -1.0], None),
        (spaces.Box(0, 2**31 - 1, (2,), np.int32), [2.0**31, 3.0], [2**31 - 1, 3]),
    ],
)
def test_bounds_that_float32_has_not_are_kept(space, decided, wanted):
    """The float32 nearest to 0.1 is above it: of a space of another dtype it was outside."""
    environment = GymnasiumEnvironment.of_class("mine:Everything", Everything, action=space)
    host = SerialEnvironments(lambda: environment, 1)
    host.reset([0], [0])
    action = environment.spec.action.within(np.array([[decided]], np.float32))
    host.step(torch.from_numpy(action), [0])
    taken = environment._made.action
    assert space.contains(taken)
    assert taken.tolist() == (wanted or [space.high[0], space.low[0]])


def test_unknown_ids_name_the_nearest():
    with pytest.raises(UserError, match="did you mean 'CartPole-v1'"):
        make_environments("gymnasium:CartPol-v1", 1)


def test_in_processes():
    environments = make_environments("gymnasium:CartPole-v1", 3, processes=2)
    try:
        here = make_environments("gymnasium:CartPole-v1", 3)
        seeds = [1, 2, 3]
        assert torch.equal(
            environments.reset(None, seeds)["state"], here.reset(None, seeds)["state"]
        )
        left, right = (v.step(torch.ones(3, 4, 1)) for v in (environments, here))
        assert torch.equal(left.observation["state"], right.observation["state"])
    finally:
        environments.close()


def test_shrinking_takes_means():
    picture = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    small = shrink(picture, 2, 3)
    expected = picture.reshape(2, 4, 3, 4, 3).mean(axis=(1, 3)).round()
    np.testing.assert_array_equal(small, expected)
    assert shrink(picture, 16, 24).shape == (16, 24, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("Box(-1, 1, (0,))", "have no figures"),
        ("Dict({})", "have no figures"),
        ("Dict({'a': Box(-1, 1, (0,))})", "have no figures"),
        ("Tuple(())", "have no figures"),
        ("Sequence(Discrete(3))", r"\(Sequence\) are no vector"),
    ],
)
def test_observations_without_figures_are_refused_in_a_line(given, said):
    space = eval(given, vars(spaces))

    class Blind(gymnasium.Env):
        observation_space = space
        action_space = spaces.Discrete(2)

    with pytest.raises(UserError, match=f"mine:Blind: its observations {said}") as caught:
        GymnasiumEnvironment.of_class("mine:Blind", Blind)
    assert "\n" not in str(caught.value)


SHELF = spaces.Dict({"held": spaces.Discrete(3), "rows": spaces.Tuple((spaces.Box(0, 1, (2, 3)),))})
ROWS = (np.arange(6.0).reshape(2, 3),)


@pytest.mark.parametrize(
    ("space", "seen", "wanted"),
    [
        (spaces.Discrete(3, start=-1), -1, [1, 0, 0]),
        (spaces.Discrete(3), np.int64(2), [0, 0, 1]),
        (spaces.Discrete(3), -1, None),
        (spaces.Discrete(3, start=-1), 2, None),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 2]), [0, 1, 0, 0, 1]),
        (spaces.MultiDiscrete([2, 3]), np.array([2, 0]), None),
        (spaces.MultiDiscrete([2, 3]), np.array([0, -1]), None),
        (spaces.Box(0, 9, (2, 3)), ROWS[0], [0, 1, 2, 3, 4, 5]),
        (spaces.Box(0, 9, (2, 3)), ROWS[0].T, None),
        (spaces.Dict({"a": spaces.Box(0, 255, (2,), np.uint8)}), {"a": [0.5, 300]}, [0.5, 300]),
        (SHELF, {"held": 1, "rows": ROWS}, [0, 1, 0, 0, 1, 2, 3, 4, 5]),
        (SHELF, {"held": -1, "rows": ROWS}, None),
        (SHELF, {"held": 1, "rows": (ROWS[0].T,)}, None),
    ],
)
def test_an_observation_is_not_taken_for_another(space, seen, wanted):
    """A choice of -1 was seen as the last one, one too high as one of the next part."""

    class Shelf(gymnasium.Env):
        observation_space = space
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return seen, {}

    environment = GymnasiumEnvironment.of_class("mine:Shelf", Shelf)
    environment.reset(0, None)
    if wanted is None:
        with pytest.raises(ValueError, match=r"is not of its space, (Discrete|MultiD|Box)"):
            environment.observe()
    else:
        assert environment.observe()["state"].tolist() == wanted


@pytest.mark.parametrize(
    ("told", "solved"),
    [(True, True), (np.array([1]), True), (1.0, True), (math.nan, False), (None, False)],
)
def test_a_success_that_is_no_number_is_none(told, solved):
    """An environment tells NaN where it does not know yet."""

    class Telling(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (1,))
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, True, False, {"is_success": told}

    environment = GymnasiumEnvironment.of_class("mine:Telling", Telling)
    environment.reset(0, None)
    assert environment.step(np.zeros(1, np.float32)).success is solved
