"""The worker that holds a frozen model, for a KL term."""

from __future__ import annotations

from m2flow.flow import Batch, Place, Ragged, stage
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.workers.columns import token_pairs
from m2flow.workloads.reasoning.workers.source import Divided, ModelSource, divided


class Reference(Divided):
    """A frozen model, for a KL term."""

    def __init__(self, model: ModelSource, recipe: ReasoningRecipe) -> None:
        self.model, self.recipe = model, recipe

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.runtime.lane.state import MovableState, module_tensors

        fused = self.recipe.training.fused_kernels
        self.policy, self.shards = divided(place, self.model, self.model.load, fused=fused)
        self.state = MovableState(lambda: module_tensors(self.policy), place, frozen=True)

    @stage
    def logprobs(self, samples: Batch) -> Batch:
        """Adds `reference_logprobs`."""
        from m2flow.training.policy import logprobs_of
        from m2flow.workloads.reasoning.learning import trainer_config

        config = trainer_config(self.recipe)
        values = logprobs_of(
            self.policy,
            token_pairs(samples),
            config.tokens_per_microbatch,
            sharing=config.sharing,
            temperature=config.temperature,
            shards=self.shards,
        ).cpu()
        return samples.with_columns(
            reference_logprobs=Ragged(values, samples["completion_ids"].lengths)
        )
