"""Back ends that cannot be asked are told as such, and end nothing."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from m2flow.environments import hosting, rendering
from m2flow.flow import Place
from m2flow.plan.machine import gpu_numbers
from m2flow.workloads.embodied.config import EnvironmentSection
from m2flow.workloads.embodied.workers.simulator import Simulator


def test_devices_are_those_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = subprocess.CompletedProcess([], 0, "0 2\n2 of 3 devices\n", "")
    monkeypatch.setattr(rendering.subprocess, "run", lambda *_, **__: ran)
    found = rendering.probe.__wrapped__("egl")
    assert (found.detail, found.devices) == ("2 of 3 devices", ("0", "2"))
    ran.stdout = "libOSMesa.so.8\n"
    assert rendering.probe.__wrapped__("osmesa").devices == ()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EFAULT, os.strerror(errno.EFAULT)), "no process could ask it: Bad address"),
        (subprocess.TimeoutExpired("python", 1.0), "did not answer in"),
    ],
)
def test_one_that_cannot_be_asked_does_not_work(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def refused(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(rendering.subprocess, "run", refused)
    found = rendering.probe.__wrapped__("egl")
    assert not found.works
    assert said in found.detail


SMI = """#!/bin/sh
case "$1" in
  *index,uuid,index*) printf '0, GPU-aa11, 0\n3, GPU-bb22, 3\n' ;;
esac
"""


def four_devices(name: str) -> rendering.Backend:
    return rendering.Backend(name, True, "4 of 4 devices", ("0", "1", "2", "3"))


@pytest.mark.parametrize(
    ("visible", "backend", "told"),
    [
        ("3", "egl", {"MUJOCO_EGL_DEVICE_ID": "3", "CUDA_VISIBLE_DEVICES": "3"}),
        ("GPU-bb", "egl", {"MUJOCO_EGL_DEVICE_ID": "3", "CUDA_VISIBLE_DEVICES": "3"}),
        ("GPU-bb22,0", "egl", {"MUJOCO_EGL_DEVICE_ID": "3", "CUDA_VISIBLE_DEVICES": "3,0"}),
        ("7", "egl", {"CUDA_VISIBLE_DEVICES": "7"}),  # EGL has no such device
        ("MIG-77", "egl", {}),
        ("", "egl", {}),
        (None, "egl", {}),
        ("3", "osmesa", {}),
    ],
)
def test_simulators_draw_on_the_accelerator_of_their_lane(
    visible: str | None,
    backend: str,
    told: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them drew on the first one; and robosuite does not know a device by its UUID."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text(SMI)
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(rendering, "probe", four_devices)
    chosen = {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    assert rendering.device_variables(chosen, gpu_numbers()) == told
    assert rendering.device_variables({}, gpu_numbers()) == {}
    monkeypatch.setenv("MUJOCO_GL", backend)
    assert rendering.device_variables({}, gpu_numbers()) == told, "of a class of the user's"


def test_the_device_that_the_user_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "0")
    monkeypatch.setattr(rendering, "probe", four_devices)
    told = rendering.device_variables({"MUJOCO_GL": "egl"}, ["3"])
    assert told == {"CUDA_VISIBLE_DEVICES": "3"}


def test_processes_of_an_environment_are_told_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID", raising=False)
    monkeypatch.setattr(hosting, "variables_of", lambda *_: {"MUJOCO_GL": "egl"})
    monkeypatch.setattr(rendering, "probe", four_devices)
    section = EnvironmentSection(name="toy_environments:Walk", processes=1)
    simulator = Simulator(section, horizon=4)
    simulator.load(Place())
    vector: Any = simulator._made(1)
    try:
        (process,) = vector._processes
        assert process.source.variables["MUJOCO_EGL_DEVICE_ID"] == "3"
    finally:
        vector.close()
        simulator.close()
