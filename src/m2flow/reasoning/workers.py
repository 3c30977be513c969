"""The workers of a reasoning flow: generator, verifier, learner and reference.

Columns of an item, as they come into being:
  prompt_ids (Ragged int64), prompt, answer, metadata, seed     from the data
  completion_ids, behaviour_logprobs (Ragged), finish_reason, version   Generator
  text, reward                                                  Verifier
  advantage (float64)                                           group_advantage
  old_logprobs, reference_logprobs (Ragged)                     Learner, Reference

Each worker is cheap until `load`, which brings up torch and the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from m2flow.errors import UserError
from m2flow.flow import Batch, Place, Ragged, Worker, stage
from m2flow.reasoning.config import ReasoningRecipe

if TYPE_CHECKING:
    from m2flow.generation.protocol import Completion, SamplingParams
    from m2flow.training.rollouts import Rollouts, TokenPairs
    from m2flow.training.sharded import Shards

HANDED_ON = 4
"""Completions are handed on once they are 1 / HANDED_ON of those that still run: many at a time
while many run, and one by one in the tail."""

OUTCOME = ("prompt", "text", "answer", "reward", "finish_reason", "num_tokens", "num_prompt_tokens")
"""Columns that a step hands back for metrics and samples; token ids stay on the lanes."""


@dataclass(frozen=True)
class ModelSource:
    """Where a worker loads its weights from: a folder in Hugging Face layout, and a dtype."""

    path: str
    dtype: str = "float32"

    def load(self, device: str) -> Any:
        """The transformers model, on the device."""
        import torch

        from m2flow.models.causal_lm import load_model

        return load_model(self.path, getattr(torch, self.dtype)).to(device)

    def stop_ids(self, configured: int | list[int] | None) -> tuple[int, ...]:
        """Tokens that end an answer: what the generation config says, else the tokenizer.

        Raises:
            UserError: neither names one, so that no answer would ever end by itself.
        """
        if configured is None:
            configured = self.tokenizer().eos_token_id
        if configured is None:
            raise UserError(
                "names no end token, so no answer would end by itself",
                key=self.path,
                hint="set eos_token_id in its generation_config.json",
            )
        return tuple(configured) if isinstance(configured, list) else (configured,)

    def tokenizer(self) -> Any:
        from m2flow.models.causal_lm import load_tokenizer

        return load_tokenizer(self.path)


class Generator(Worker):
    """Draws completions by continuous batching.

    Args:
        model: initial weights.
        samples_per_prompt: completions for each prompt.
        max_new_tokens, temperature: how they are drawn.
        max_running: sequences decoded together at most.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        samples_per_prompt: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        max_running: int = 256,
    ) -> None:
        self.model = model
        self.samples_per_prompt = samples_per_prompt
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.max_running = max_running

    def load(self, place: Place) -> None:
        super().load(place)
        import torch

        from m2flow.generation.native import NativeEngine

        model = self.model.load("cpu")
        self.engine = NativeEngine(
            model.config,
            max_running=self.max_running,
            dtype=getattr(torch, self.model.dtype),
            device=place.device,
            spill=place.spill,
        )
        self.engine.install(model.state_dict(), place.version)
        self._stop_ids = self.model.stop_ids(model.generation_config.eos_token_id)

    @stage(streaming=True, expands="samples_per_prompt")
    def generate(
        self,
        prompts: Batch,
        *,
        samples_per_prompt: int | None = None,
        temperature: float | None = None,
    ) -> Iterator[Batch]:
        """One prompt in, several samples out, each when it is finished."""
        from m2flow.generation.protocol import SamplingParams

        params = SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            stop_token_ids=self._stop_ids,
        )
        count = samples_per_prompt or self.samples_per_prompt
        running: dict[int, tuple[Batch, int]] = {}
        self._submit(prompts, count, params, running)
        finished: list[Completion] = []
        while self.engine.busy:
            finished += self.engine.step()
            if len(finished) * HANDED_ON < self.engine.num_running or not finished:
                continue
            arrived = yield _completed(finished, [running.pop(done.id) for done in finished])
            finished = []
            if arrived is not None:
                self._submit(arrived, count, params, running)

    def _submit(
        self,
        prompts: Batch,
        count: int,
        params: SamplingParams,
        running: dict[int, tuple[Batch, int]],
    ) -> None:
        from m2flow.algorithms.sampling import derive_seed
        from m2flow.generation.protocol import Request

        samples = prompts.repeat(count)
        prompt_rows, seeds = prompts["prompt_ids"].rows(), prompts["seed"]
        requests = []
        for row, item in enumerate(samples.ids):
            parent, number = divmod(row, count)
            seed = derive_seed(seeds[parent], number)
            requests.append(Request(item, prompt_rows[parent], seed, params))
            running[item] = (samples, row)
        self.engine.submit(requests)

    def install(self, weights: Mapping[str, Any], version: int) -> None:
        self.engine.install(weights, version)

    def offload(self) -> None:
        self.engine.sleep()

    def onload(self) -> None:
        self.engine.wake()

    def state_bytes(self) -> int:
        return self.engine.state_bytes()


def _completed(finished: list[Any], sources: list[tuple[Batch, int]]) -> Batch:
    """Finished requests as a Batch; rows keep the columns of the prompts they came from."""
    rows_of: dict[int, tuple[Batch, list[int], list[Any]]] = {}
    for done, (batch, row) in zip(finished, sources, strict=True):
        _, rows, some = rows_of.setdefault(id(batch), (batch, [], []))
        rows.append(row)
        some.append(done)
    parts = []
    for batch, rows, some in rows_of.values():
        parts.append(
            batch.select(rows).with_columns(
                completion_ids=Ragged.from_rows([done.token_ids for done in some]),
                behaviour_logprobs=Ragged.from_rows([done.logprobs for done in some]),
                finish_reason=[done.finish_reason for done in some],
                version=[done.versions for done in some],
            )
        )
    return Batch.concat(parts)


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
        """The reward of a completion; see `m2flow.reasoning.tasks.Task.score`."""
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


@stage
def outcome(samples: Batch) -> Batch:
    """What is left of a sample when it has been used: figures and text, no token ids."""
    lengths = {
        "num_tokens": list(samples["completion_ids"].lengths),
        "num_prompt_tokens": list(samples["prompt_ids"].lengths),
    }
    return samples.with_columns(**lengths).only(*OUTCOME)


@stage(unit="group")
def group_advantage(samples: Batch, *, group_size: int, normalize_std: bool = True) -> Batch:
    """Adds `advantage`: the reward against the others of its group."""
    import torch

    from m2flow.algorithms.advantages import group_advantages

    rewards_B = torch.tensor(samples["reward"], dtype=torch.float64)
    advantages_B = group_advantages(rewards_B, group_size, normalize_std)
    return samples.with_columns(advantage=advantages_B)


class Learner(Worker):
    """Trains the policy: folds samples in as they come, one optimizer step a mini-batch.

    Args:
        model: initial weights.
        recipe: algorithm, optimizer, packing, mini-batches.
        checkpoint: folder of the checkpoint whose trainer state to go on from, or None.
    """

    collective = True

    def __init__(
        self,
        model: ModelSource,
        recipe: ReasoningRecipe,
        checkpoint: str | None = None,
    ) -> None:
        self.model, self.recipe, self.checkpoint = model, recipe, checkpoint
        self.minibatches = recipe.minibatches

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.reasoning.learning import loss_of, trainer_config
        from m2flow.runtime.state import MovableState
        from m2flow.training import checkpoint
        from m2flow.training.policy import PolicyTrainer

        self.policy, shards = _policy_on(place, self.model)
        self.trainer = PolicyTrainer(
            self.policy, loss_of(self.recipe), trainer_config(self.recipe), shards
        )
        if self.checkpoint is not None:
            saved = checkpoint.load(Path(self.checkpoint))
            self.trainer.load_state_dict(saved.trainer_state)
        self.state = MovableState(self.trainer.tensors, place)

    @stage
    def logprobs(self, samples: Batch) -> Batch:
        """Adds `old_logprobs`: under the weights at the start of the step."""
        values = self.trainer.logprobs(_pairs(samples)).cpu()
        return samples.with_columns(old_logprobs=Ragged(values, samples["completion_ids"].lengths))

    @stage(accumulates=True, minibatches="minibatches")
    def train(self, samples: Batch) -> Batch:
        """Accumulates the gradient of these samples."""
        self.trainer.fold(_rollouts(samples))
        return outcome(samples)

    @train.finish
    def train_finish(self) -> dict[str, float]:
        """One optimizer step on the mini-batch; its figures."""
        place = self.place
        replicated = place.size > 1 and place.gang.size == 1
        return self.trainer.finish(place.all_reduce if replicated else None)

    def weights(self) -> Mapping[str, Any]:
        """The policy's tensors: on a gang DTensors, of which each lane has its shard."""
        return dict(self.policy.state_dict())

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        return self.state.nbytes() + self.trainer.optimizer.bytes_to_come()

    def save_checkpoint(self, checkpoints: str, step: int, extra: dict[str, Any], keep: int) -> str:
        """Write a checkpoint, which a learner on any lanes can go on from; returns its folder.

        To be called on every lane of the worker: a gang gathers its shards, and the first lane
        writes. The checkpoint is whole when that one has returned.
        """
        from m2flow.training import checkpoint
        from m2flow.training.sharded import WholeModel, whole_weights

        root, place = Path(checkpoints), self.place
        if place.rank < place.gang.size:  # other replicas hold the same
            first = place.rank == 0
            with self.state.present():
                weights = {name: x for name, x in whole_weights(self.policy) if first}
                trainer_state = {name: x for name, x in self.trainer.state_items() if first}
                if first:
                    checkpoint.save(
                        root,
                        step,
                        model=WholeModel(self.policy, weights),
                        tokenizer=self.model.tokenizer(),
                        trainer_state=trainer_state,
                        extra=extra,
                        keep=keep,
                    )
        return str(checkpoint.folder_of(root, step))

    def parameters(self) -> dict[str, Any]:
        """Copies of the weights, whole, on the CPU; to be called on every lane of a gang."""
        from m2flow.training.sharded import whole_weights

        with self.state.present():
            return {name: tensor.clone() for name, tensor in whole_weights(self.policy)}


class Reference(Worker):
    """A frozen model, for a KL term."""

    collective = True

    def __init__(self, model: ModelSource, recipe: ReasoningRecipe) -> None:
        self.model, self.recipe = model, recipe

    def load(self, place: Place) -> None:
        super().load(place)
        from m2flow.runtime.state import MovableState, module_tensors

        self.policy, self.shards = _policy_on(place, self.model)
        self.state = MovableState(lambda: module_tensors(self.policy), place)

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        return self.state.nbytes()

    @stage
    def logprobs(self, samples: Batch) -> Batch:
        """Adds `reference_logprobs`."""
        from m2flow.reasoning.learning import trainer_config
        from m2flow.training.policy import logprobs_of

        config = trainer_config(self.recipe)
        values = logprobs_of(
            self.policy,
            _pairs(samples),
            config.tokens_per_microbatch,
            sharing=config.sharing,
            temperature=config.temperature,
            shards=self.shards,
        ).cpu()
        return samples.with_columns(
            reference_logprobs=Ragged(values, samples["completion_ids"].lengths)
        )


def _policy_on(place: Place, model: ModelSource) -> tuple[Any, Shards]:
    """The model in evaluation mode, divided where the worker stands on gangs of several lanes."""
    from m2flow.training.sharded import Shards

    shards = Shards.of(place.gang)
    if shards.size == 1:
        return model.load(place.device).eval(), shards
    policy = model.load("cpu").eval()  # moves to the device shard by shard
    shards.shard(policy)
    return policy, shards


def _pairs(samples: Batch) -> TokenPairs:
    import torch

    from m2flow.training.rollouts import TokenPairs

    prompts, completions = samples["prompt_ids"], samples["completion_ids"]
    return TokenPairs(
        prompts.values,
        torch.tensor(prompts.lengths, dtype=torch.int64),
        completions.values,
        torch.tensor(completions.lengths, dtype=torch.int64),
    )


def _rollouts(samples: Batch) -> Rollouts:
    import torch

    from m2flow.training.rollouts import Rollouts

    pairs = _pairs(samples)
    behaviour = samples["behaviour_logprobs"].values
    advantages_T = torch.repeat_interleave(samples["advantage"], pairs.completion_lengths_B)
    rollouts = Rollouts(pairs, behaviour, advantages_T.to(behaviour.dtype))
    if "old_logprobs" in samples:
        rollouts = replace(rollouts, old_logprobs_T=samples["old_logprobs"].values)
    if "reference_logprobs" in samples:
        rollouts = replace(rollouts, reference_logprobs_T=samples["reference_logprobs"].values)
    return rollouts
