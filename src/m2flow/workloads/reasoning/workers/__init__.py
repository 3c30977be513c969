"""The workers of a reasoning flow: generator, what judges, learner, reference and critic.

Columns of an item, as they come into being:
  prompt_ids (Ragged int64), prompt, answer, metadata, seed     from the data
  before                                                        from data that are conversations
  begun                                                         of answers that were carried over
  completion_ids, behaviour_logprobs (Ragged), finish_reason, version   Generator
  text, reward, failure                                         Verifier
  reward_model_score; judge_score, judge                        RewardModel, JudgeModel
  shaped (float64)                                              shape_reward
  advantage (float64), dropped (bool), carried                  group_advantage
  values (Ragged), beyond                                       Critic
  advantages, returns (Ragged float64)                          gae, reward_to_go, whiten
  old_logprobs, reference_logprobs (Ragged)                     Learner, Reference

Each worker is cheap until `load`, which brings up torch and the model.
"""

from __future__ import annotations

from m2flow.workloads.reasoning.workers.critic import Critic
from m2flow.workloads.reasoning.workers.drawing import HANDED_ON
from m2flow.workloads.reasoning.workers.generator import Generator
from m2flow.workloads.reasoning.workers.judge_model import JudgeModel
from m2flow.workloads.reasoning.workers.learner import Learner
from m2flow.workloads.reasoning.workers.reference import Reference
from m2flow.workloads.reasoning.workers.reward_model import RewardModel
from m2flow.workloads.reasoning.workers.source import AdaptedSource, ModelSource
from m2flow.workloads.reasoning.workers.stages import (
    OUTCOME,
    gae,
    group_advantage,
    outcome,
    reward_to_go,
    shape_reward,
    whiten,
)
from m2flow.workloads.reasoning.workers.verifier import Verifier

__all__ = [
    "HANDED_ON",
    "OUTCOME",
    "AdaptedSource",
    "Critic",
    "Generator",
    "JudgeModel",
    "Learner",
    "ModelSource",
    "Reference",
    "RewardModel",
    "Verifier",
    "gae",
    "group_advantage",
    "outcome",
    "reward_to_go",
    "shape_reward",
    "whiten",
]
