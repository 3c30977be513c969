"""The worker that scores completions by reward functions."""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.flow import Batch, Place, Worker, stage
from m2flow.rewards.reward import Judged, WeightedReward, weighted_sum
from m2flow.workloads.reasoning.workers.further_draws import put_back
from m2flow.workloads.reasoning.workers.source import ModelSource


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
        """Adds `text`, `reward`, and `failure`: why a sample has none, "" where it has one."""
        ids = [row.tolist() for row in samples["completion_ids"]]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        rows = [
            {**metadata, "answer": answer, "finished": reason == "stop"}
            for answer, reason, metadata in zip(
                samples["answer"], samples["finish_reason"], samples["metadata"], strict=True
            )
        ]
        assert self.rewards is not None, "a subclass scores"
        judged = Judged(samples.ids, samples["prompt"], texts, ids, rows)
        scores = weighted_sum(self.rewards, judged)
        return samples.with_columns(text=texts, reward=scores.rewards, failure=scores.failures)

    @stage
    def score_again(self, samples: Batch) -> Batch:
        """Scores the samples that are new since they were scored (`again`), which it takes off."""
        rows = [row for row, again in enumerate(samples["again"]) if again]
        samples = samples.without("again")
        if not rows:
            return samples
        scored: Batch = self.score(samples.select(rows))
        return put_back(samples, rows, scored)
