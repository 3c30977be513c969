"""The worker that trains the policy."""

from __future__ import annotations

from m2flow.flow import Batch, Place, Ragged, stage
from m2flow.workloads.reasoning.workers.columns import rollouts, token_pairs
from m2flow.workloads.reasoning.workers.stages import outcome
from m2flow.workloads.reasoning.workers.trained import Trained


class Learner(Trained):
    """Trains the policy: folds samples in as they come, one optimizer step a mini-batch."""

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.training.policy import PolicyTrainer
        from m2flow.workloads.reasoning.learning import loss_of, trainer_config

        loss, config = loss_of(self.recipe), trainer_config(self.recipe)
        self.begin(
            place,
            self.model.load,
            lambda policy, shards: PolicyTrainer(policy, loss, config, shards),
        )

    @stage
    def logprobs(self, samples: Batch) -> Batch:
        """Adds `old_logprobs`: under the weights at the start of the step."""
        values = self.trainer.logprobs(token_pairs(samples)).cpu()
        return samples.with_columns(old_logprobs=Ragged(values, samples["completion_ids"].lengths))

    @stage(accumulates=True, minibatches="minibatches")
    def train(self, samples: Batch) -> Batch:
        """Accumulates the gradient of these samples."""
        self.fold(samples, rollouts(samples))
        return outcome(samples)

    @train.finish
    def train_finish(self) -> dict[str, float]:
        """One optimizer step on the mini-batch; its figures."""
        return self.finish_minibatch()
