"""The worker that scores completions by the rule of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from m2flow.flow import Batch, Place, Worker, stage
from m2flow.workloads.reasoning.workers.source import ModelSource


class Scorer(Protocol):
    """The part of a task that a verifier needs."""

    def score(
        self,
        answer: str,
        completion: str,
        *,
        finished: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> float:
        """The reward of a completion; see `m2flow.workloads.reasoning.tasks.Task.score`."""
        ...


class Verifier(Worker):
    """Scores completions by the task's rule.

    Args:
        model: whose tokenizer turns token ids into text.
        task: the rule; None for a verifier that is never loaded.
    """

    def __init__(self, model: ModelSource, task: Scorer | None) -> None:
        self.model, self.task = model, task

    def load(self, place: Place) -> None:
        super().load(place)
        self.tokenizer = self.model.tokenizer()

    @stage
    def score(self, samples: Batch) -> Batch:
        """Adds `text` and `reward`."""
        texts = self.tokenizer.batch_decode(
            [row.tolist() for row in samples["completion_ids"]], skip_special_tokens=True
        )
        task = self.task
        assert task is not None, "a verifier needs a task to score by"
        rewards = [
            task.score(answer, text, finished=reason == "stop", metadata=metadata)
            for answer, text, reason, metadata in zip(
                samples["answer"],
                texts,
                samples["finish_reason"],
                samples["metadata"],
                strict=True,
            )
        ]
        return samples.with_columns(text=texts, reward=rewards)
