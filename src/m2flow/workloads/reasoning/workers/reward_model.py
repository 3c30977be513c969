"""The worker that scores answers by a sequence classifier."""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.flow import Batch, Layout, Place, stage
from m2flow.training.division import Division
from m2flow.workloads.reasoning.reward_sections import RewardModelSection
from m2flow.workloads.reasoning.workers.columns import unjudged, with_score
from m2flow.workloads.reasoning.workers.source import Divided, ModelSource, divided, layout_of


class RewardModel(Divided):
    """A classifier that reads prompt and answer; its weighted score is a part of the reward."""

    name = "reward_model"

    def __init__(self, section: RewardModelSection) -> None:
        self.section = section
        self.source = ModelSource.at(section.path, section.dtype)

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        """On one lane, or in shards."""
        return [layout_of(Division(fsdp=size), None) for size in range(1, lanes + 1)]

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.models.classifier import Conversations, label_index
        from m2flow.runtime.lane.state import MovableState, module_tensors

        path = self.source.path
        self.classifier, self.shards = divided(place, self.source, self.source.load_classifier)
        self.conversations = Conversations.of(path)
        self.label = label_index(path, self.section.label)
        self.state = MovableState(lambda: module_tensors(self.classifier), place, frozen=True)

    @stage
    def score(self, samples: Batch) -> Batch:
        """Adds the weighted score to `reward`, and `reward_model_score`.

        A sample without a reward is not read, nor an answer that goes on in a later step; one that
        is longer than the classifier's context has none (`failure`).
        """
        from m2flow.models.classifier import sequence_scores

        before = samples["before"] if "before" in samples else [()] * len(samples)
        columns = (samples["prompt"], samples["text"], before, unjudged(samples))
        context = self.conversations.context
        asked, rows = [], []
        scores: list[float | None] = [None] * len(samples)
        why = [f"reads at most {context} tokens, and prompt and answer have more"] * len(samples)
        for row, (prompt, text, turns, silent) in enumerate(zip(*columns, strict=True)):
            if silent:
                why[row] = ""
                continue
            encoded = self.conversations.encoded(prompt, text, turns)
            if encoded["input_ids"] and (context is None or len(encoded["input_ids"]) <= context):
                asked.append(row)
                rows.append(encoded)
        found = sequence_scores(
            self.classifier, rows, self.label, self.section.tokens_per_microbatch, self.shards
        )
        for row, score in zip(asked, found, strict=True):
            scores[row] = score
        return with_score(samples, self.name, scores, why, self.section.weight)
