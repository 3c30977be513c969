"""Which back ends can draw without a screen here, and how simulators are told to use one.

MuJoCo (LIBERO, MetaWorld, Gymnasium's own) draws through EGL or OSMesa and reads the choice once,
when it is imported; SAPIEN (ManiSkill) draws through Vulkan. So the variables of `variables` must
stand in the environment of a process before it imports its simulator: processes of environments
are started with them. What is there is found by asking the libraries, in a process of its own,
since a broken driver may end the one that asks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from m2flow.errors import UserError

PROBE_SECONDS = 20.0
MUJOCO_BACKENDS = ("egl", "osmesa")
ON_A_SCREEN = ("glfw", "cgl", "wgl", "on", "true", "1", "enable", "enabled")
"""What else `MUJOCO_GL` may say where MuJoCo is to draw."""

HOW_TO = {
    "mujoco": "install OSMesa (Debian: apt-get install libosmesa6) or a GPU driver with EGL",
    "vulkan": "install a Vulkan driver (Debian: mesa-vulkan-drivers of Mesa 25, or the GPU's)",
}

_EGL = """
import ctypes
egl = ctypes.CDLL("libEGL.so.1")
egl.eglGetProcAddress.restype = ctypes.c_void_p
query = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
display_of = egl.eglGetProcAddress(b"eglGetPlatformDisplayEXT")
if not query or not display_of:
    raise SystemExit("libEGL knows no devices")
made, count = (ctypes.c_void_p * 16)(), ctypes.c_int()
of_kind = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
of_kind(query)(16, made, ctypes.byref(count))
kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)
egl.eglInitialize.argtypes = [ctypes.c_void_p] * 3
displays = [kind(display_of)(0x313F, made[n], None) for n in range(count.value)]
works = [n for n, display in enumerate(displays)
    if display and egl.eglInitialize(display, None, None)]
print(*works)
print(f"{len(works)} of {count.value} devices")
raise SystemExit(0 if works else "no device works")
"""
_OSMESA = """
import ctypes, ctypes.util
for name in ("libOSMesa.so.8", "libOSMesa.so.6", ctypes.util.find_library("OSMesa")):
    try:
        ctypes.CDLL(name or "libOSMesa.so")
    except OSError:
        continue
    print(name)
    break
else:
    raise SystemExit("libOSMesa is not installed")
"""
_VULKAN = """
import ctypes
vulkan = ctypes.CDLL("libvulkan.so.1")
class Create(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint),
        ("application", ctypes.c_void_p), ("layers", ctypes.c_uint), ("layer", ctypes.c_void_p),
        ("extensions", ctypes.c_uint), ("extension", ctypes.c_void_p)]
instance, count = ctypes.c_void_p(), ctypes.c_uint()
if vulkan.vkCreateInstance(ctypes.byref(Create(1)), None, ctypes.byref(instance)):
    raise SystemExit("no Vulkan instance can be made")
vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
print(f"{count.value} devices")
raise SystemExit(0 if count.value else "no device")
"""
_PROBES = {"egl": _EGL, "osmesa": _OSMESA, "vulkan": _VULKAN}


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to draw without a screen.

    Attributes:
        name: "egl", "osmesa" or "vulkan".
        works: whether it can be used here.
        detail: what was found, in a few words.
        devices: numbers of the devices that work, where the back end counts devices.
    """

    name: str
    works: bool
    detail: str
    devices: tuple[str, ...] = ()


@cache
def probe(name: str) -> Backend:
    """Ask the back end's library, once in a process."""
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-c", _PROBES[name]],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Backend(name, False, f"did not answer in {PROBE_SECONDS:g} s")
    except OSError as error:
        return Backend(name, False, f"no process could ask it: {error.strerror or error}")
    said = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
    works, detail = ran.returncode == 0, said[-1] if said else f"ended by {ran.returncode}"
    return Backend(name, works, detail, tuple(said[0].split()) if works and said[1:] else ())


def backends() -> list[Backend]:
    """What this machine has, for reports."""
    return [probe(name) for name in _PROBES]


def choose(renderer: str) -> str:
    """The back end that a simulator uses here.

    MuJoCo takes what `MUJOCO_GL` says; without it EGL where the machine has a GPU, then OSMesa,
    then EGL in software.

    Args:
        renderer: "mujoco" or "vulkan".

    Raises:
        UserError: none works.
    """
    if renderer == "vulkan":
        order: tuple[str, ...] = ("vulkan",)
    else:
        wanted = os.environ.get("MUJOCO_GL", "").lower()
        if wanted in ON_A_SCREEN:
            return wanted  # the user's own affair
        if wanted and wanted not in MUJOCO_BACKENDS:
            raise UserError(
                "is no back end that draws for MuJoCo",
                key="MUJOCO_GL",
                value=wanted,
                expected=", ".join((*MUJOCO_BACKENDS, "glfw")),
                hint="or leave it out: one that works is chosen",
            )
        order = (wanted,) if wanted else MUJOCO_BACKENDS if _has_gpu() else MUJOCO_BACKENDS[::-1]
    for name in order:
        if probe(name).works:
            return name
    found = "; ".join(f"{probe(name).name}: {probe(name).detail}" for name in order)
    raise UserError(
        f"nothing can draw pictures here ({found})", key="rendering", hint=HOW_TO[renderer]
    )


def variables(renderer: str, *, required: bool = True) -> Mapping[str, str]:
    """Environment variables that choose the back end; to be set before the simulator is imported.

    Args:
        renderer: "mujoco" or "vulkan".
        required: whether there must be a back end; else there are no variables without one.

    Raises:
        UserError: none works.
    """
    try:
        name = choose(renderer)
    except UserError:
        if required:
            raise
        return {}
    return {} if renderer == "vulkan" else {"MUJOCO_GL": name, "PYOPENGL_PLATFORM": name}


def device_variables(chosen: Mapping[str, str], gpus: Sequence[str]) -> Mapping[str, str]:
    """Environment variables by which a process of MuJoCo draws on the first of some accelerators.

    EGL counts all accelerators of the machine, whatever CUDA_VISIBLE_DEVICES names, and MuJoCo
    takes the first that works unless MUJOCO_EGL_DEVICE_ID names one. robosuite reads
    CUDA_VISIBLE_DEVICES too, and knows numbers alone; like robosuite, this takes EGL's numbers for
    the driver's. What the environment says already stays, and a number of which EGL knows no
    device that works is not named.

    Args:
        chosen: what `variables` gives; where that is nothing, the environment may name a back end.
        gpus: numbers that the driver gives to the accelerators of this process.

    Returns:
        No variables where another back end draws, or there are no numbers.
    """
    backend = chosen.get("MUJOCO_GL", os.environ.get("MUJOCO_GL", ""))
    if not gpus or backend.lower() != "egl":
        return {}
    found = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if "MUJOCO_EGL_DEVICE_ID" not in os.environ and gpus[0] in probe("egl").devices:
        found["MUJOCO_EGL_DEVICE_ID"] = gpus[0]
    return found


def use_here(chosen: Mapping[str, str], *, required: bool = True) -> None:
    """Set the variables in this process, unless it is too late and nothing depends on them.

    Raises:
        UserError: MuJoCo is imported already with another choice.
    """
    for name, value in chosen.items():
        if "mujoco" in sys.modules and os.environ.get(name) != value:
            if not required:
                return
            raise UserError(
                "must be set before mujoco is imported",
                key=name,
                expected=value,
                hint="set it before Python starts, or run the environments in processes",
            )
        os.environ[name] = value


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or any(Path("/dev/dri").glob("renderD*"))
