"""What workers that train a model have in common: their state, where it goes, and checkpoints.

A subclass sets `policy`, `trainer` and `shards` by `begin`. Everything that is written here is
collective in a gang: it is called on all lanes of the worker, and the first one writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from m2flow.flow import Batch, Place
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.workers.columns import kept_rows
from m2flow.workloads.reasoning.workers.source import Divided, ModelSource, divided

ADAPTER = "adapter/"
"""How names of adapters begin in a trainer's state."""


class Trained(Divided):
    """A model that learns, with its trainer.

    Args:
        model: initial weights.
        recipe: algorithm, optimizers, packing, mini-batches.
        checkpoint: folder of the checkpoint whose trainer state to go on from, or None.
    """

    adapts = False
    """Whether adapters are trained and the model that they stand on is frozen."""

    part = ""
    """Folder within a checkpoint; "" for the checkpoint's own model."""

    policy: Any
    trainer: Any
    shards: Any

    def __init__(
        self,
        model: ModelSource,
        recipe: ReasoningRecipe,
        checkpoint: str | None = None,
    ) -> None:
        self.model, self.recipe, self.checkpoint = model, recipe, checkpoint
        self.minibatches = recipe.minibatches
        self.by_arrival = recipe.minibatch_order == "arrival"
        self._folded: list[list[Any]] = [[]]  # of each mini-batch of the step, for more epochs
        self._found: list[dict[str, float]] = []  # of each optimizer step, where there are more

    def begin(
        self,
        place: Place,
        load: Callable[..., Any],
        make_trainer: Callable[[Any, Any], Any],
    ) -> None:
        """Load the model and go on from the checkpoint's trainer state.

        Args:
            place: where the worker stands.
            load: `load` or `load_critic` of where the model comes from.
            make_trainer: gives its trainer, from the model and how it is divided.
        """
        from m2flow.runtime.lane.state import MovableState
        from m2flow.training.skipping import Skips

        self._skips = Skips(self.recipe.max_skipped_updates)
        fused = self.recipe.training.fused_kernels
        self.policy, self.shards = divided(place, self.model, load, fused=fused)
        self.trainer = make_trainer(self.policy, self.shards)
        if self.checkpoint is not None:
            self._go_on_from(self.checkpoint)
        self.state = MovableState(self.trainer.tensors, place, to_come=self.bytes_to_come)

    def fold(self, samples: Batch, columns: Any) -> None:
        """Accumulate the gradient of those of the samples that are trained on.

        Args:
            samples: of the mini-batch at hand.
            columns: what the trainer folds of them: rollouts, or values and returns.
        """
        drop_truncated = self.recipe.algorithm.truncated == "drop"
        rows = kept_rows(samples, drop_truncated=drop_truncated)
        some = columns if rows is None else columns.select(rows)
        self.trainer.fold(some)
        if self.recipe.algorithm.epochs > 1:
            self._folded[-1].append(some)

    def finish_minibatch(self) -> dict[str, float]:
        """One optimizer step, together with the other replicas; its figures.

        With `algorithm.epochs` above 1 all mini-batches are gone through again after the last one.
        The figures come then, as means over all optimizer steps of the training step; there are
        none before. A mini-batch that is left out in several epochs counts once among those that
        end a run.
        """
        epochs = self.recipe.algorithm.epochs
        if epochs == 1:
            return self._step()
        self._found.append(self._step())
        if len(self._folded) < self.minibatches:
            self._folded.append([])
            return {}
        for _ in range(1, epochs):
            for minibatch in self._folded:
                for some in minibatch:
                    self.place.goes_on()
                    self.trainer.fold(some)
                self._found.append(self._step())
        found, self._folded, self._found = self._found, [[]], []
        names = dict.fromkeys(name for one in found for name in one)
        return {name: fmean(one[name] for one in found if name in one) for name in names}

    def _step(self) -> dict[str, float]:
        from m2flow.training.skipping import SKIPPED

        place = self.place
        replicated = place.size > 1 and place.gang.size == 1
        all_reduce = place.all_reduce if replicated else None
        epochs_before = self._found[len(self._found) % self.minibatches :: self.minibatches]
        figures: dict[str, float] = self._skips.figures(
            lambda: self.trainer.finish(all_reduce),
            again=any(one[SKIPPED] for one in epochs_before),
        )
        return figures

    def take_note(self) -> str:
        return self._skips.take_note()

    def discard(self) -> None:
        self._folded, self._found = [[]], []
        self.trainer.discard()

    def weights(self) -> Mapping[str, Any]:
        """What is published: on a gang DTensors, of which each lane has its shard."""
        from m2flow.models.lora import adapter_weights, merged_weights

        if self.adapts and self.recipe.model.lora_publish == "adapter":
            return adapter_weights(self.policy)
        return dict(merged_weights(self.policy))

    def bytes_to_come(self) -> int:
        """Bytes of optimizer state that the first step will make."""
        num_bytes: int = self.trainer.optimizer.bytes_to_come()
        return num_bytes

    def state_bytes(self) -> int:
        return super().state_bytes() + self.bytes_to_come()

    def save(self) -> Mapping[str, Any]:
        """Weights and trainer state; to be called on every lane of a gang."""
        from m2flow.training import learner_state

        first = self.place.gang.rank == 0
        return learner_state.gathered(self.policy, self.trainer.optimizer, first=first)

    def restore(self, state: Mapping[str, Any]) -> None:
        from m2flow.training import learner_state

        learner_state.take_over(state, self.policy, self.trainer.optimizer, self.shards)

    def save_checkpoint(self, checkpoints: str, step: int, keep: int) -> str:
        """Write a checkpoint, which a worker on any lanes can go on from; returns its folder.

        Parts of other workers, which `save_part` has written, are in it.

        To be called on every lane of the worker. The checkpoint is whole when the first lane has
        returned.

        Args:
            checkpoints: the run's folder of checkpoints.
            step: training steps done.
            keep: how many checkpoints to keep.
        """
        from m2flow.training import checkpoint

        root = Path(checkpoints)
        self._write(root, step)
        if self.place.rank == 0:
            goes_on = self.checkpoint is not None and step < self.recipe.steps
            in_use = Path(str(self.checkpoint)) if goes_on else None
            checkpoint.commit(root, step, keep=keep, in_use=in_use)
        return str(checkpoint.folder_of(root, step))

    def save_part(self, checkpoints: str, step: int) -> None:
        """Write this worker's part of a checkpoint; another worker's `save_checkpoint` ends it."""
        self._write(Path(checkpoints), step)

    def _write(self, root: Path, step: int) -> None:
        """Write trainer state, each lane its parts, and then the model, which the first gathers.

        Replicas other than the first hold the same, and write nothing.
        """
        from m2flow.training import checkpoint, trainer_state
        from m2flow.training.sharded import WholeModel

        if self.place.rank >= self.place.gang.size:
            return
        first = self.place.rank == 0
        folder = checkpoint.begin(root, step) / self.part
        if first:
            checkpoint.clear_part(folder)  # nobody writes before this lane has taken part in a plan
        with self.state.present():
            parts = self.trainer.optimizer.parts() | self._adapters()
            trainer_state.write(folder / checkpoint.TRAINER, parts, self.shards.group)
            weights = {}
            for name, tensor in self._whole_weights():
                self.place.goes_on()
                if first:
                    weights[name] = tensor
            if first:
                tokenizer = None if self.part else self.model.tokenizer()
                checkpoint.write_model(folder, WholeModel(self.policy, weights), tokenizer)

    def _go_on_from(self, folder: str) -> None:
        """Take over the trainer state of a checkpoint, of which this lane reads its parts."""
        from m2flow.training import checkpoint
        from m2flow.training.trainer_state import SavedState

        saved = SavedState(checkpoint.trainer_folder(folder, self.part))
        adapters = self._adapters()
        saved.read(adapters)
        self.trainer.optimizer.load(saved.names - adapters.keys(), saved.read)

    def parameters(self) -> dict[str, Any]:
        """Copies of the weights, whole, on the CPU; to be called on every lane of a gang."""
        with self.state.present():
            return {name: tensor.clone() for name, tensor in self._whole_weights()}

    def _whole_weights(self) -> Iterator[tuple[str, Any]]:
        """Each tensor of the model as it is published, whole, on the CPU. Collective in a gang."""
        from m2flow.models.lora import merged_weights
        from m2flow.training.sharded import whole_weights

        return whole_weights(self.policy, merged_weights(self.policy))

    def _adapters(self) -> dict[str, Any]:
        """This lane's parts of what trains of a model that is adapted, for the trainer's state."""
        return {
            f"{ADAPTER}{name}": self.shards.placed(self.shards.piece(parameter), parameter)
            for name, parameter in (self.policy.named_parameters() if self.adapts else ())
            if parameter.requires_grad
        }
