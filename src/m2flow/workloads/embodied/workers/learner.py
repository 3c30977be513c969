"""The worker that trains the policy on whole rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2flow.flow import Batch, Place, Worker, stage
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.workers.columns import TURN, lengths_of, observations_of
from m2flow.workloads.embodied.workers.source import WEIGHTS, PolicySource
from m2flow.workloads.embodied.workers.stages import outcome

TRAINER = "trainer.safetensors"


class Learner(Worker):
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

        self.policy = self.source.make(place.device)
        self.update = PolicyUpdate(self.policy, self.recipe)
        self._rollouts: list[Batch] = []
        if self.checkpoint is not None:
            from safetensors.torch import load_file

            self.update.optimizer.load_state_dict(load_file(Path(self.checkpoint) / TRAINER))
        self.state = MovableState(self._tensors, place)

    def _tensors(self) -> Any:
        yield from self.policy.parameters()
        yield from self.policy.buffers()
        yield from self.update.optimizer.tensors()

    @stage(accumulates=True)
    def train(self, rollouts: Batch) -> Batch:
        """Keep rollouts for the end of the step."""
        self._rollouts.append(rollouts)
        return outcome(rollouts)

    @train.finish
    def train_finish(self) -> dict[str, float]:
        """All optimizer steps on the step's rollouts; their figures."""
        kept, self._rollouts = self._rollouts, []
        turns = _turns(kept)
        return self.update.run(turns, self.place.all_reduce if self.place.size > 1 else None)

    def discard(self) -> None:
        self._rollouts = []

    def weights(self) -> Mapping[str, Any]:
        return dict(self.policy.state_dict())

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        return self.state.nbytes() + self.update.optimizer.bytes_to_come()

    def save(self, folder: Path) -> None:
        """Write weights and trainer state; the first lane's are those of all."""
        from safetensors.torch import save_file

        with self.state.present():
            weights = {name: x.contiguous().clone() for name, x in self.weights().items()}
            state = {name: x.contiguous() for name, x in self.update.optimizer.state_items()}
        save_file(weights, folder / WEIGHTS)
        save_file(state, folder / TRAINER)

    def restore(self, folder: Path) -> None:
        from safetensors.torch import load_file

        self.policy.load_state_dict(load_file(folder / WEIGHTS))
        self.update.optimizer.load_state_dict(load_file(folder / TRAINER))

    def save_checkpoint(self, checkpoints: str, step: int, keep: int) -> None:
        """Write the checkpoint of a step; to be called on the worker's first lane."""
        from m2flow.training import checkpoint

        root = Path(checkpoints)
        self.save(checkpoint.begin(root, step))
        goes_on = self.checkpoint is not None and step < self.recipe.steps
        in_use = Path(str(self.checkpoint)) if goes_on else None
        checkpoint.commit(root, step, keep=keep, in_use=in_use)


def _turns(batches: list[Batch]) -> Any:
    """The turns of some rollouts, in the order of their numbers; None if there are none."""
    import torch

    from m2flow.workloads.embodied.learning import Turns

    if not batches:
        return None
    whole = Batch.concat(batches)
    order = sorted(range(len(whole)), key=whole.ids.__getitem__)
    whole = whole.select(order)
    lengths = list(lengths_of(whole))
    if not sum(lengths):
        return None

    def column(name: str) -> Any:
        found = f"{TURN}{name}"
        return whole[found].values if found in whole else None

    counts = torch.tensor(lengths)
    firsts = counts.cumsum(0) - counts
    return Turns(
        observations=observations_of(whole, TURN),
        rollout_T=torch.tensor(whole.ids).repeat_interleave(counts),
        place_T=torch.arange(int(counts.sum())) - firsts.repeat_interleave(counts),
        tokens_TKD=column("tokens"),
        logprobs_TKD=column("logprobs"),
        steps_T=column("steps"),
        advantage_T=column("advantage"),
        values_T=column("values"),
        returns_T=column("return"),
    )
