"""The worker that says what a state is worth, and learns it."""

from __future__ import annotations

from m2flow.flow import Batch, Place, Ragged, stage
from m2flow.workloads.reasoning.workers.columns import (
    last_places,
    one_longer,
    token_pairs,
    value_targets,
)
from m2flow.workloads.reasoning.workers.trained import Trained


class Critic(Trained):
    """A value model with the policy's body; it learns from every sample, in the same mini-batches.

    Its `model` is a critic of a checkpoint, or the policy that it is made of.
    """

    part = "critic"

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.training.values import ValueTrainer
        from m2flow.workloads.reasoning.learning import critic_config, critic_loss_of

        loss, config = critic_loss_of(self.recipe), critic_config(self.recipe, place.device)
        self.begin(
            place,
            self.model.load_critic,
            lambda model, shards: ValueTrainer(model, loss, config, shards),
        )

    @stage
    def values(self, samples: Batch) -> Batch:
        """Gives `values`: for each token what the state before it is worth.

        Where truncation is not the end, `beyond` too: what the state behind an answer is worth
        that was cut off, 0 behind others.
        """
        import torch

        pairs, lengths = token_pairs(samples), samples["completion_ids"].lengths
        if self.recipe.algorithm.truncated != "bootstrap":
            values = Ragged(self.trainer.values(pairs), lengths)
            return samples.with_columns(values=values).only("values")
        # Any further token: the value of the state before it is that behind the answer.
        longer = one_longer(pairs)
        found_T, last_T = self.trainer.values(longer), last_places(longer.completion_lengths_B)
        cut = [reason != "stop" for reason in samples["finish_reason"]]
        beyond_B = found_T[last_T] * torch.tensor(cut, dtype=torch.bool)
        values = Ragged(found_T[~last_T], lengths)
        return samples.with_columns(values=values, beyond=beyond_B).only("values", "beyond")

    @stage(accumulates=True, minibatches="minibatches", by_arrival="by_arrival")
    def train(self, samples: Batch) -> Batch:
        """Accumulates the gradient of these samples."""
        self.fold(samples, value_targets(samples))
        return samples.only("reward")

    @train.finish
    def train_finish(self) -> dict[str, float]:
        """One optimizer step on the mini-batch; its figures, as `critic/...`."""
        return {f"{self.part}/{name}": value for name, value in self.finish_minibatch().items()}
