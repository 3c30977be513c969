"""The worker that trains the policy on whole rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m2flow.flow import Batch, Layout, Place, Worker, stage
from m2flow.flow.worker import ONE_LANE
from m2flow.training.division import Division
from m2flow.workloads.common.loading import in_turn
from m2flow.workloads.embodied.config import IN_BLOCKS, EmbodiedRecipe
from m2flow.workloads.embodied.workers.columns import lengths_of
from m2flow.workloads.embodied.workers.source import WEIGHTS, PolicySource
from m2flow.workloads.embodied.workers.stages import outcome


class EmbodiedLearner(Worker):
    """Collects the rollouts of a step, and then makes all optimizer steps of it.

    A vision-language-action policy that trains in full may be divided over lanes, `fsdpN`. Each
    lane of the gang then has rollouts of its own, and whatever says so is collective.

    Args:
        source: the policy that it begins with.
        recipe: loss, passes, optimizer.
        checkpoint: folder of the checkpoint whose trainer state to go on from, or None.
    """

    def __init__(
        self, source: PolicySource, recipe: EmbodiedRecipe, checkpoint: str | None = None
    ) -> None:
        self.source, self.recipe, self.checkpoint = source, recipe, checkpoint

    def layouts(self, kind: str, lanes: int) -> Sequence[Layout]:
        if not is_divided(self.recipe):
            return (ONE_LANE,)
        return [in_shards(Division(fsdp=n)) for n in range(1, lanes + 1)]

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.runtime.lane.state import MovableState
        from m2flow.training import checkpoint
        from m2flow.training.sharded import Shards
        from m2flow.workloads.embodied.learning import PolicyUpdate
        from m2flow.workloads.embodied.soft_update import SoftUpdate

        self.source.set_threads(place.num_threads)
        self.shards = Shards.of(place.gang)
        if self.shards.size == 1:
            self.policy = self.source.make(place.device)
        else:
            with in_turn(place, self.source):
                self.policy = self.source.make()  # moves to the device piece by piece
                self.shards.shard(self.policy)
            self.shards.enter_by(self.policy, "evaluate")
        if self.recipe.computes_again(place.device):
            self.policy.compute_activations_again()  # type: ignore[operator]
        self.update: PolicyUpdate | SoftUpdate
        if self.recipe.algorithm.name == "sac":
            assert self.source.spec is not None
            self.update = SoftUpdate(self.policy, self.recipe, self.source.spec, place)
        else:
            self.update = PolicyUpdate(self.policy, self.recipe, self.shards, place.goes_on)
        self._rollouts: list[Batch] = []
        if self.checkpoint is not None:
            self.update.read(checkpoint.trainer_folder(self.checkpoint))
        self.state = MovableState(self._tensors, place, to_come=self.update.bytes_to_come)

    def _tensors(self) -> Any:
        yield from self.policy.parameters()
        yield from self.policy.buffers()
        yield from self.update.tensors()

    @stage(accumulates=True)
    def train(self, rollouts: Batch) -> Batch:
        """Keep rollouts for the end of the step."""
        self._rollouts.append(rollouts)
        return outcome(rollouts)

    @train.finish
    def train_finish(self) -> dict[str, float]:
        """All optimizer steps on the step's rollouts; their figures."""
        kept, self._rollouts = self._rollouts, []
        return self.update.run(
            _in_order(kept), self.place.all_reduce if self.place.size > 1 else None
        )

    def take_note(self) -> str:
        return self.update.skips.take_note()

    def discard(self) -> None:
        self._rollouts = []

    def weights(self) -> Mapping[str, Any]:
        return dict(self.policy.state_dict())

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        return self.state.nbytes() + self.update.bytes_to_come()

    def save(self) -> Mapping[str, Any]:
        """Weights and trainer state; the first lane's are those of all. Collective in a gang."""
        from m2flow.training import learner_state

        return learner_state.gathered(self.policy, self.update, first=self.place.gang.rank == 0)

    def restore(self, state: Mapping[str, Any]) -> None:
        from m2flow.training import learner_state

        learner_state.take_over(state, self.policy, self.update, self.shards)

    def save_checkpoint(self, checkpoints: str, step: int, keep: int) -> None:
        """Write the checkpoint of a step; to be called on every lane of the worker.

        OpenVLA and OpenVLA-OFT are written as they are published too, adapters added, in `model/`.
        Replicas other than the first hold the same, and write nothing.
        """
        from safetensors.torch import save_file

        from m2flow.training import checkpoint
        from m2flow.training.sharded import whole_weights

        if self.place.rank >= self.place.gang.size:
            return
        root, first = Path(checkpoints), self.place.rank == 0
        folder = checkpoint.begin(root, step)
        if first:
            checkpoint.clear_part(folder)  # nobody writes before this lane has taken part in a plan
        with self.state.present():
            self.update.write(folder / checkpoint.TRAINER)
            weights = {
                name: x.contiguous().clone() for name, x in whole_weights(self.policy) if first
            }
            if first and self.recipe.policy.kind in IN_BLOCKS:
                from m2flow.models.policies.vla.checkpoint import save_policy

                save_policy(self.policy, folder / checkpoint.MODEL, weights)  # type: ignore[arg-type]
        if not first:
            return
        save_file(weights, folder / WEIGHTS)
        goes_on = self.checkpoint is not None and step < self.recipe.steps
        in_use = Path(str(self.checkpoint)) if goes_on else None
        checkpoint.commit(root, step, keep=keep, in_use=in_use)


def in_shards(division: Division) -> Layout:
    """The layout in which each lane of a replica has a shard of the policy."""
    return Layout(division.layout, division.lanes)


def is_divided(recipe: EmbodiedRecipe) -> bool:
    """Whether the policy of a recipe can be trained in shards.

    What trains of a policy with adapters is small, and what they stand on one lane can hold.
    """
    return recipe.policy.kind in IN_BLOCKS and not recipe.policy.lora_rank


def _in_order(batches: list[Batch]) -> Batch | None:
    """The rollouts that are learned from, in the order of their numbers; None without a turn."""
    if not batches:
        return None
    whole = Batch.concat(batches)
    order = sorted(range(len(whole)), key=whole.ids.__getitem__)
    if "dropped" in whole:
        order = [row for row in order if not whole["dropped"][row]]
    whole = whole.select(order)
    return whole if sum(lengths_of(whole)) else None
