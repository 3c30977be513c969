"""The workers of embodied flows, and their stages that need none."""

from m2flow.workloads.embodied.workers.actor import Actor
from m2flow.workloads.embodied.workers.further_draws import begin_others, first_drawn, put_in
from m2flow.workloads.embodied.workers.learner import EmbodiedLearner
from m2flow.workloads.embodied.workers.simulator import Simulator
from m2flow.workloads.embodied.workers.source import PolicySource
from m2flow.workloads.embodied.workers.stages import (
    begin_alike,
    critic_advantage,
    group_advantage,
    outcome,
)

__all__ = [
    "Actor",
    "EmbodiedLearner",
    "PolicySource",
    "Simulator",
    "begin_alike",
    "begin_others",
    "critic_advantage",
    "first_drawn",
    "group_advantage",
    "outcome",
    "put_in",
]
