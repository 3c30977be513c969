"""The worker that trains the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from m2flow.flow import Batch, Layout, Place, Ragged, stage
from m2flow.workloads.reasoning.workers.columns import rollouts, token_pairs
from m2flow.workloads.reasoning.workers.stages import outcome
from m2flow.workloads.reasoning.workers.trained import Trained


class Learner(Trained):
    """Trains the policy: folds samples in as they come, one optimizer step a mini-batch."""

    _steps = 0  # of the optimizer in this training step

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        """Adapters are not trained by lanes that divide in two ways."""
        known = super().layouts(kind, lanes)
        return [one for one in known if not self.recipe.model.lora_rank or "." not in one.name]

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.training.policy import PolicyTrainer
        from m2flow.workloads.reasoning.learning import loss_of, trainer_config

        self._version = place.version
        loss, config = loss_of(self.recipe), trainer_config(self.recipe, place.device)
        self.adapts = self.recipe.model.lora_rank > 0
        self.begin(
            place,
            self._adapted if self.adapts else self.model.load,
            lambda policy, shards: PolicyTrainer(policy, loss, config, shards),
        )

    def _adapted(self, device: str, *, stays: bool = True) -> Any:
        """The model with adapters."""
        from m2flow.models.lora import add_lora

        section = self.recipe.model
        model = self.model.load(device, stays=stays)
        add_lora(model, section.lora_rank, section.lora_alpha, self.recipe.seed)
        return model

    @stage
    def logprobs(self, samples: Batch) -> Batch:
        """Adds `old_logprobs`: under the weights at the start of the step."""
        values = self.trainer.logprobs(token_pairs(samples)).cpu()
        return samples.with_columns(old_logprobs=Ragged(values, samples["completion_ids"].lengths))

    @stage(accumulates=True, minibatches="minibatches", by_arrival="by_arrival")
    def train(self, samples: Batch) -> Batch:
        """Accumulates the gradient of these samples."""
        self.fold(samples, rollouts(samples, self._version))
        return outcome(samples)

    def _step(self) -> dict[str, float]:
        """Of the first step the engine's gap is known too, on what the present weights drew.

        Nothing but the engine stands between the two log-probabilities then.
        """
        figures, first = super()._step(), self._steps == 0
        self._steps = (self._steps + 1) % (self.minibatches * self.recipe.algorithm.epochs)
        self._version += self._steps == 0
        if first and (engine := self.trainer.engine_figures):
            largest = self._largest(self.trainer.largest_gap)  # collective
            figures |= {**engine, "engine_gap_max": largest}
        return figures

    def _largest(self, figure: float) -> float:
        """The largest of a figure of all lanes; collective."""
        import torch

        found = torch.zeros(self.place.size, dtype=torch.float64, device=self.place.device)
        found[self.place.rank] = figure
        if self.place.size > 1:
            self.place.all_reduce([found])
        return float(found.max())

    def discard(self) -> None:
        super().discard()
        self._steps = 0

    @train.finish
    def train_finish(self) -> dict[str, float]:
        """One optimizer step on the mini-batch; its figures."""
        return self.finish_minibatch()
