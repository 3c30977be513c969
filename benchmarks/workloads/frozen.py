"""The workloads on which the planner was built, frozen: GRPO and PPO.

  * `long_tail`: GRPO on answers whose lengths are those of a reasoning model. A model of 0.8 M
    parameters writes no chains of thought, so lengths are replayed: log-normal, drawn from the
    item's own seed, and every token of them is really decoded, scored and trained on. Why: answers
    of reasoning models spread over two orders of magnitude, and the last few hold up everybody.
  * `judged`: GRPO with a heavy verifier: a reward model of seven times the policy's size reads all
    answers. Why: reward models are large, and take as long as generation.
  * `ppo`: PPO with a critic, two models trained, on the quick start's task. Why: half of all work
    is training, of which generation knows nothing.

The fourth is `poles.cart_pole`. All are on-policy. Draws belong to the item, so how the work is cut
changes no reward of a step. A change of what they do needs a decision record with the figures
before and after; a test holds their text.
"""

from __future__ import annotations

import sys

import torch
from harness import ROOT
from ray import cloudpickle
from starting_point import quickstart
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from m2flow import Batch, Place, stage
from m2flow.rewards.reward import WeightedReward
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.workers import ModelSource, Verifier
from workloads.common import LEARNING_RATE, Lengths, Workload, odd, replayed

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file


def long_tail() -> Workload:
    """28 prompts of 8 answers, 20 tokens in the median and 240 at most."""
    return replayed(
        "long_tail",
        Lengths(median=20, spread=1.0, limit=240),
        lambda source: Verifier(source, (WeightedReward(odd),)),
        "prompts_per_step=28",
    )


JUDGE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 7}
"""Of the reward model; 8 heads. 5.6 M parameters, seven times the policy's."""


class Judge(Verifier):
    """Scores by a reward model: a transformer that reads an answer and gives one number."""

    def __init__(self, model: ModelSource) -> None:
        super().__init__(model, None)

    def load(self, place: Place) -> None:
        super().load(place)
        config = Qwen2Config(
            vocab_size=len(self.tokenizer), num_attention_heads=8, num_key_value_heads=8,
            num_labels=1, **JUDGE,
        )  # fmt: skip
        torch.manual_seed(0)
        self.judge = Qwen2ForSequenceClassification(config).eval()

    @stage
    @torch.inference_mode()
    def score(self, samples: Batch) -> Batch:
        """Adds `text` and `reward`; answers are read one by one, so that none is padded."""
        answers = samples["completion_ids"].rows()
        texts = self.tokenizer.batch_decode(
            [answer.tolist() for answer in answers], skip_special_tokens=True
        )
        rewards = [float(self.judge(answer[None]).logits) for answer in answers]
        return samples.with_columns(text=texts, reward=rewards)


def judged() -> Workload:
    """16 prompts of 4 answers, 40 tokens in the median and 128 at most."""
    return replayed(
        "judged",
        Lengths(median=40, spread=0.5, limit=128),
        Judge,
        "prompts_per_step=16",
        "samples_per_prompt=4",
    )


def ppo() -> Workload:
    """The recipe `ppo_quickstart`, 256 answers a step, in two mini-batches."""
    _, _, source = quickstart()
    rates = [f"{part}.learning_rate={LEARNING_RATE}" for part in ("optimizer", "critic")]
    recipe = read_recipe(ROOT / "recipes" / "ppo_quickstart.yaml", rates)
    experiment = ReasoningExperiment(recipe, source)
    return Workload(
        "ppo",
        lambda: recipe_flow(recipe, source, experiment.rewards),
        experiment.batch,
        recipe.prompts_per_step,
    )
