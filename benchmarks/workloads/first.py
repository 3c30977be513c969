"""Two earlier forms of `judged`, as the history has them, frozen.

  * `first_judged`: the verifier is a classifier of 64 M parameters on hashed n-grams, in the manner
    of those that filter web text, under a limit of memory at which it does not fit beside generator
    and learner; few and long answers.
  * `few_judged`: the reward model of `frozen.judged`, fewer and longer answers still, recomputed
    log-probabilities, one mini-batch.

`long_tail` and `ppo` have never been anything else than they are; `first_poles.py` has the first
`cart_pole`. The one difference from the text of then: a judge that nobody trains is put away once.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from zlib import crc32

import torch
from ray import cloudpickle
from torch import Tensor, nn

from m2flow import Batch, Place, stage
from m2flow.runtime.lane.state import MovableState
from m2flow.workloads.reasoning.workers import ModelSource, Verifier
from workloads.common import Lengths, Workload, replayed
from workloads.frozen import Judge

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file

BUCKETS, FEATURES = 2_000_000, 32
"""Of the judge's table of n-grams: 256 MB."""

NGRAM = 4
"""Characters of the longest n-gram."""

JUDGE_MEMORY = 270_000_000
"""Bytes that states on a lane may take: room for the judge and one of the two that hold the policy,
generator or learner, but not for all three."""


class NgramJudge(Verifier):
    """Scores by a linear classifier on hashed n-grams, as filters of web text do."""

    def __init__(self, model: ModelSource) -> None:
        super().__init__(model, None)

    def load(self, place: Place) -> None:
        super().load(place)
        generator = torch.Generator().manual_seed(0)
        self.table = nn.EmbeddingBag(BUCKETS, FEATURES, mode="mean")
        self.table.requires_grad_(False).weight.normal_(generator=generator)
        self.direction = torch.randn(FEATURES, generator=generator)
        self.held = MovableState(self.table.parameters, place, frozen=True)

    @stage
    def score(self, samples: Batch) -> Batch:
        """Adds `text` and `reward`."""
        texts = self.tokenizer.batch_decode(
            [row.tolist() for row in samples["completion_ids"]], skip_special_tokens=True
        )
        rewards = [float(self.table(self._ngrams(text)) @ self.direction) for text in texts]
        return samples.with_columns(text=texts, reward=rewards)

    def _ngrams(self, text: str) -> Tensor:
        """Buckets of all n-grams of a text, shape [1, n]."""
        words = [text[at : at + n] for n in range(1, NGRAM + 1) for at in range(len(text))]
        return torch.tensor([[crc32(word.encode()) % BUCKETS for word in words or [""]]])

    def offload(self) -> None:
        self.held.offload()

    def onload(self) -> None:
        self.held.onload()

    def state_bytes(self) -> int:
        return self.held.nbytes()


def first_judged() -> Workload:
    """6 prompts of 4 answers, 250 tokens in the median and 640 at most."""
    workload = replayed(
        "first_judged",
        Lengths(median=250, spread=0.6, limit=640),
        NgramJudge,
        "prompts_per_step=6",
        "samples_per_prompt=4",
        "minibatches=1",
        "training.tokens_per_microbatch=640",
    )
    return replace(workload, lane_memory=JUDGE_MEMORY)


def few_judged() -> Workload:
    """3 prompts of 4 answers, 190 tokens in the median and 400 at most."""
    return replayed(
        "few_judged",
        Lengths(median=190, spread=0.7, limit=400),
        Judge,
        "prompts_per_step=3",
        "samples_per_prompt=4",
        "minibatches=1",
        "training.tokens_per_microbatch=400",
        "training.recompute_logprobs=true",
    )
