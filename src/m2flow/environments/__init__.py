"""Simulators behind one vector protocol, each usable alone.

    from m2flow.environments import make_environments
    environments = make_environments("gymnasium:CartPole-v1", 8, processes=2)
    observations = environments.reset(None, seeds=range(8))

Importing this package loads no torch, so that processes of simulators stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from m2flow.environments.deadlines import Deadlines
from m2flow.environments.environment import Environment, Transition
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec

if TYPE_CHECKING:
    from m2flow.environments.hosting import make_environments
    from m2flow.environments.protocol import StepOutcome, VectorEnvironment

__all__ = [
    "ActionSpec",
    "Deadlines",
    "Environment",
    "EnvironmentSpec",
    "ObservationSpec",
    "StepOutcome",
    "Transition",
    "VectorEnvironment",
    "make_environments",
]


def __getattr__(name: str) -> Any:
    if name == "make_environments":
        from m2flow.environments.hosting import make_environments

        return make_environments
    if name in ("StepOutcome", "VectorEnvironment"):
        from m2flow.environments import protocol

        return getattr(protocol, name)
    raise AttributeError(f"module 'm2flow.environments' has no attribute {name!r}")
