"""The worker that trains the policy on whole rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2flow.flow import Batch, Place, Worker, stage
from m2flow.workloads.embodied.config import IN_BLOCKS, EmbodiedRecipe
from m2flow.workloads.embodied.workers.columns import lengths_of
from m2flow.workloads.embodied.workers.source import WEIGHTS, PolicySource
from m2flow.workloads.embodied.workers.stages import outcome

TRAINER, MODEL = "trainer.safetensors", "model"
IN_POLICY, IN_TRAINER = "policy/", "trainer/"


class EmbodiedLearner(Worker):
    """Collects the rollouts of a step, and then makes all optimizer steps of it.

    Args:
        source: the policy that it begins with.
        recipe: loss, passes, optimizer.
        checkpoint: folder of the checkpoint whose trainer state to go on from, or None.
    """

    def __init__(
        self, source: PolicySource, recipe: EmbodiedRecipe, checkpoint: str | None = None
    ) -> None:
        self.source, self.recipe, self.checkpoint = source, recipe, checkpoint

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.runtime.lane.state import MovableState
        from m2flow.workloads.embodied.learning import PolicyUpdate
        from m2flow.workloads.embodied.soft_update import SoftUpdate

        self.source.set_threads(place.num_threads)
        self.policy = self.source.make(place.device)
        blocks = self.recipe.policy.kind in IN_BLOCKS
        if blocks and self.recipe.update.checkpoints_on(place.device):
            self.policy.compute_activations_again()  # type: ignore[operator]
        self.update: PolicyUpdate | SoftUpdate
        if self.recipe.algorithm.name == "sac":
            assert self.source.spec is not None
            self.update = SoftUpdate(self.policy, self.recipe, self.source.spec, place)
        else:
            self.update = PolicyUpdate(self.policy, self.recipe)
        self._rollouts: list[Batch] = []
        if self.checkpoint is not None:
            from safetensors.torch import load_file

            self.update.load_state_dict(load_file(Path(self.checkpoint) / TRAINER))
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
        """Weights and trainer state; the first lane's are those of all."""
        parts = {IN_POLICY: self.weights().items(), IN_TRAINER: self.update.state_items()}
        return {part + name: x for part, items in parts.items() for name, x in items}

    def restore(self, state: Mapping[str, Any]) -> None:
        def part(start: str) -> dict[str, Any]:
            return {k.removeprefix(start): x for k, x in state.items() if k.startswith(start)}

        self.policy.load_state_dict(part(IN_POLICY))
        self.update.load_state_dict(part(IN_TRAINER))

    def save_checkpoint(self, checkpoints: str, step: int, keep: int) -> None:
        """Write the checkpoint of a step; to be called on the worker's first lane.

        OpenVLA and OpenVLA-OFT are written as they are published too, adapters added, in `model/`.
        """
        from safetensors.torch import save_file

        from m2flow.training import checkpoint

        root = Path(checkpoints)
        folder = checkpoint.begin(root, step)
        with self.state.present():
            weights = {name: x.contiguous().clone() for name, x in self.weights().items()}
            state = {name: x.contiguous() for name, x in self.update.state_items()}
            if self.recipe.policy.kind in IN_BLOCKS:
                from m2flow.models.policies.vla.checkpoint import save_policy

                save_policy(self.policy, folder / MODEL)  # type: ignore[arg-type]
        save_file(weights, folder / WEIGHTS)
        save_file(state, folder / TRAINER)
        goes_on = self.checkpoint is not None and step < self.recipe.steps
        in_use = Path(str(self.checkpoint)) if goes_on else None
        checkpoint.commit(root, step, keep=keep, in_use=in_use)


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
