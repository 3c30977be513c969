"""What judges a completion: functions by dotted path, each usable alone.

from m2flow.rewards import math_reward
math_reward("What is 2+3?", "It is 5.", [], {"answer": "5"})
"""

from __future__ import annotations

from m2flow.rewards.addition import addition_reward
from m2flow.rewards.code import code_reward
from m2flow.rewards.format import format_reward
from m2flow.rewards.gym import gym_reward
from m2flow.rewards.mathematics import math_reward
from m2flow.rewards.reward import Reward, batched, threaded

__all__ = [
    "Reward",
    "addition_reward",
    "batched",
    "code_reward",
    "format_reward",
    "gym_reward",
    "math_reward",
    "threaded",
]
