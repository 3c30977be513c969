"""Environments by name, and one clear error for each thing that may be wrong with a name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from m2flow.environments import make_environments, registry, rendering
from m2flow.environments.hosting import hosted
from m2flow.environments.registry import make_environment, maker
from m2flow.environments.rendering import Backend
from m2flow.errors import UserError


def refused(name, message, **options):
    with pytest.raises(UserError, match=message):
        make_environment(name, **options)


def test_names_that_name_nothing(monkeypatch):
    refused("CartPole-v1", 'expected "family:task"')
    refused("gymnasum:CartPole-v1", "did you mean 'gymnasium'")
    refused("toy_environments:Wlk", "did you mean 'Walk'")
    refused("toy_environments:SENTENCES", "is no environment")
    refused("toy_environments:Walk", "did you mean 'goal'", gaol=1)
    refused("toy_environments:Faulty", r"folder: .*Faulty needs this option")


def test_a_package_that_is_absent_names_its_extra(monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    for name, extra in (
        ("gymnasium:CartPole-v1", "embodied"),
        ("libero:libero_spatial", "libero"),
        ("maniskill:PushCube-v1", "maniskill"),
        ("metaworld:reach-v3", "metaworld"),
        ("envpool:MetaWorld/Reach-v3", "envpool"),
    ):
        refused(name, rf"not installed.*m2flow\[{extra}\]")


def test_a_module_that_fails_to_import_is_not_called_unknown(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        make_environment("half_there:Thing")


def test_an_environment_of_ones_own_by_its_path():
    environments = make_environments("toy_environments:Walk", 2, limit=5)
    assert environments.spec.max_episode_steps == 5
    assert environments.reset(None, [0, 1])["state"].shape == (2, 2)


@pytest.mark.parametrize("processes", [0, 1])
def test_options_may_have_any_name(processes):
    """`task` was refused for a class of one's own; `name` and `num_envs` met our own arguments."""
    options = {"task": "tidy", "name": "mine", "num_envs": 7, "copy": 2}
    made = maker("toy_environments:Reserved", options)()
    assert made.info == options
    host = hosted("toy_environments:Reserved", options, 2, processes=processes)
    try:
        host.reset(None, [0, 1])
        assert host.step(torch.zeros(2, 1, 2)).reward.tolist() == [[7.0], [7.0]]
    finally:
        host.close()
    with pytest.raises(UserError, match=r"environment\.options\.task: .*needs this option"):
        maker("toy_environments:Reserved", {"name": "mine", "num_envs": 7})
    with pytest.raises(
        UserError, match=r"environment\.options\.task: table:reach has no such option"
    ):
        maker("table:reach", {"task": "push"})


def test_importing_the_package_loads_no_torch():
    code = (
        "import sys, m2flow.environments.child\n"
        "assert not {'torch', 'ray', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def machine(monkeypatch):
    """Set which back ends work."""

    def has(*names, gpu=False):
        monkeypatch.setattr(rendering, "_has_gpu", lambda: gpu)
        monkeypatch.setattr(rendering, "probe", lambda n: Backend(n, n in names, "as told"))

    monkeypatch.delenv("MUJOCO_GL", raising=False)
    return has


def test_the_back_end_is_chosen_by_what_works(machine, monkeypatch):
    machine("egl", "osmesa", gpu=True)
    assert rendering.choose("mujoco") == "egl"
    machine("egl", "osmesa")
    assert rendering.choose("mujoco") == "osmesa"
    machine("egl")
    assert rendering.variables("mujoco") == {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(UserError, match=r"osmesa: as told.*libosmesa6"):
        rendering.choose("mujoco")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert rendering.choose("mujoco") == "glfw"
    monkeypatch.setenv("MUJOCO_GL", "osmessa")
    with pytest.raises(UserError, match=r"MUJOCO_GL.*'osmessa'.*expected egl, osmesa, glfw"):
        rendering.choose("mujoco")
    assert rendering.variables("mujoco", required=False) == {}
    machine("vulkan")
    assert rendering.variables("vulkan") == {}
    machine()
    with pytest.raises(UserError, match="Vulkan driver"):
        rendering.choose("vulkan")
    assert rendering.variables("vulkan", required=False) == {}


def test_a_choice_that_comes_too_late_is_said(machine, monkeypatch):
    machine("osmesa")
    monkeypatch.setitem(sys.modules, "mujoco", sys)
    with pytest.raises(UserError, match="before mujoco is imported"):
        rendering.use_here(rendering.variables("mujoco"))
    rendering.use_here(rendering.variables("mujoco"), required=False)
    assert "MUJOCO_GL" not in os.environ
    monkeypatch.delitem(sys.modules, "mujoco")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    rendering.use_here(rendering.variables("mujoco"))
    assert os.environ["PYOPENGL_PLATFORM"] == "osmesa"


def test_every_back_end_gives_an_answer():
    rendering.probe.cache_clear()
    found = rendering.backends()
    assert [backend.name for backend in found] == ["egl", "osmesa", "vulkan"]
    assert all(backend.detail for backend in found)
