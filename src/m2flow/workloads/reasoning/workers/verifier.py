"""The worker that scores completions by reward functions."""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.flow import Batch, Place, Worker, stage
from m2flow.rewards.reward import Judged, WeightedReward, weighted_sum
from m2flow.workloads.reasoning.workers.carried import OPEN
from m2flow.workloads.reasoning.workers.further_draws import put_back
from m2flow.workloads.reasoning.workers.source import ModelSource

PROMPT_END = 16
"""Tokens of a prompt, as the model has it, whose text reward functions are told."""


class Verifier(Worker):
    """Scores completions by the weighted sum of reward functions.

    Args:
        model: whose tokenizer turns token ids into text.
        rewards: the functions; none where models alone judge, None for a subclass that scores in
            another way.
    """

    def __init__(self, model: ModelSource, rewards: Sequence[WeightedReward] | None = ()) -> None:
        self.model = model
        self.rewards = None if rewards is None else tuple(rewards)

    def load(self, place: Place) -> None:
        super().load(place)
        self.tokenizer = self.model.tokenizer()
        for reward in self.rewards or ():
            reward.load()

    @stage
    def score(self, samples: Batch) -> Batch:
        """Adds `text`, `reward`, and `failure`: why a sample has none, "" where it has one.

        An answer that goes on in a later step is not scored; its reward is 0.
        """
        ids = [row.tolist() for row in samples["completion_ids"]]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        prompts, answers = samples["prompt"], samples["answer"]
        reasons, metadata = samples["finish_reason"], samples["metadata"]
        ends = [self.prompt_end(row.tolist()) for row in samples["prompt_ids"].rows()]
        ended = [row for row, reason in enumerate(reasons) if reason != OPEN]
        judged = Judged(
            [samples.ids[row] for row in ended],
            [prompts[row] for row in ended],
            [texts[row] for row in ended],
            [ids[row] for row in ended],
            [
                {
                    **metadata[row],
                    "answer": answers[row],
                    "finished": reasons[row] == "stop",
                    "prompt_end": ends[row],
                }
                for row in ended
            ],
        )
        assert self.rewards is not None, "a subclass scores"
        scores = weighted_sum(self.rewards, judged)
        rewards, failures = [0.0] * len(samples), [""] * len(samples)
        for row, reward, failure in zip(ended, scores.rewards, scores.failures, strict=True):
            rewards[row], failures[row] = reward, failure
        return samples.with_columns(text=texts, reward=rewards, failure=failures)

    def prompt_end(self, ids: Sequence[int]) -> str:
        """The end of what the model went on from, as text, special tokens among it."""
        text: str = self.tokenizer.decode(ids[-PROMPT_END:])
        return text

    @stage
    def score_again(self, samples: Batch) -> Batch:
        """Scores the samples that are new since they were scored (`again`), which it takes off."""
        rows = [row for row, again in enumerate(samples["again"]) if again]
        samples = samples.without("again")
        if not rows:
            return samples
        scored: Batch = self.score(samples.select(rows))
        return put_back(samples, rows, scored)
