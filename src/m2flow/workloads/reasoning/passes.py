"""What passes over whole answers ask of a lane, and the training of a model by them.

Log-probabilities, values, a classifier's scores, and gradients: their work, their memory, and the
state of workers that compute them, in each layout that a trainer has. Nothing here draws answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from m2flow.models.lengths import Answers
from m2flow.models.shape import ModelShape
from m2flow.models.work import (
    HOST_STEP_BYTES,
    forward_pass,
    lane_parameters,
    on_host,
    trained_bytes,
    training_parts,
    training_pass,
    update,
)
from m2flow.plan.profile.hardware import Device
from m2flow.plan.profile.work import Held, LayoutWork, Work, WorkerWork, gang_sizes, rising
from m2flow.training.division import Division
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.workers.source import layout_of

NUMBER_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


PACKED = 256
"""Answers of which packs are filled; of more, prompts are computed as often."""


def number_bytes(dtype: str, device: Device) -> int:
    """Return the bytes of a number that is computed with."""
    return NUMBER_BYTES.get(dtype, 2 if device.kind == "gpu" else 4)


@lru_cache(4096)
def prompts_computed(answers: Answers, group: int, count: int, budget: int) -> float:
    """Return how many prompts are computed for each answer where those of a group share one.

    Packs are filled with answers of drawn lengths, in order; a prompt is computed again where a
    pack begins within a group.

    Args:
        answers: what they are drawn from.
        group: answers to a prompt.
        count: answers that are there, in whole groups but for the last.
        budget: tokens of a pack.
    """
    computed, room = 0, 0.0
    for number, length in enumerate(answers.lengths.sample(PACKED)[:count]):
        begins = number % group == 0
        if room < length + begins * answers.prompt_tokens:
            begins, room = True, float(budget)
        room -= length + begins * answers.prompt_tokens
        computed += begins
    return computed / count


@dataclass(frozen=True)
class PassWork:
    """A model that computes whole answers, on one kind of lane.

    Attributes:
        recipe: every setting.
        model: its shape.
        answers: what it reads.
        device: of each lane.
        lanes: how many there are.
        by_heads: whether the model is divided by heads.
        trained: share of the answers that are trained on.
    """

    recipe: ReasoningRecipe
    model: ModelShape
    answers: Answers
    device: Device
    lanes: int
    by_heads: bool = True
    trained: float = 1.0

    @property
    def number(self) -> int:
        """Return the bytes of a number that is computed with."""
        return number_bytes(self.recipe.model.dtype, self.device)

    @property
    def adapters(self) -> int | None:
        """Count the parameters of adapters; None where the model itself is trained."""
        rank = self.recipe.model.lora_rank
        return self.model.adapter_parameters(rank) if rank else None

    # --- layouts ----------------------------------------------------------------------------------

    def in_shards(self) -> Iterator[Division]:
        """Yield the layouts that divide the state alone."""
        yield from (Division(fsdp=n) for n in gang_sizes(self.lanes, self.device))

    def divisions(self) -> Iterator[Division]:
        """Yield the layouts of training and passes; those that exchange much, within a machine."""
        near = min(self.lanes, self.device.lanes_per_node)
        some = [2**n for n in range(1, near.bit_length())]
        yield from self.in_shards()
        adapts = self.recipe.model.lora_rank > 0
        for tp in some if self.by_heads and not self.model.experts else ():
            yield Division(tp=tp)
            if not adapts and layout_of(Division(tp=tp), self.model).obstacle() is None:
                shards = [2**n for n in range(1, (self.lanes // tp).bit_length())]
                yield from (Division(tp=tp, fsdp=fsdp) for fsdp in shards)
        yield from (Division(cp=n) for n in some)
        if self.model.experts:
            yield from (Division(ep=n) for n in rising(self.lanes) if n > 1)

    # --- state ------------------------------------------------------------------------------------

    def state(self, methods: set[str]) -> WorkerWork:
        """Return the state of a worker with these methods."""
        if not methods & {"logprobs", "values", "train"}:
            return WorkerWork(())
        each: Mapping[str, float] = {"weights": self.number}
        hosted: Mapping[str, float] = {}
        training = self.recipe.training
        moments_8bit, masters = training.moments == "8bit", training.rounding == "nearest"
        trained = trained_bytes(self.number, moments_8bit=moments_8bit, masters=masters)
        if "train" in methods and self.adapters is not None:
            adapters = self.adapters / self.model.parameters
            # Divided as what they stand on, or nearly so.
            each = {**each, "adapters and their optimizer": sum(trained.values()) * adapters}
        elif "train" in methods:
            each = trained
            if training.optimizer_on_host:
                each, hosted = on_host(trained)
        divisions = list(self.divisions())
        return WorkerWork(
            [(layout_of(one, self.model), self._times(each, one)) for one in divisions],
            hosted=[(layout_of(one, self.model), self._times(hosted, one)) for one in divisions],
        )

    def _times(self, each: Mapping[str, float], division: Division) -> Held:
        """Return the bytes of a lane's parameters, from those of one."""
        count = lane_parameters(self.model, division)
        return {what: size * count for what, size in each.items()}

    # --- calls ------------------------------------------------------------------------------------

    @property
    def at_a_time(self) -> int:
        """Count the tokens that a lane of a trainer computes at a time, at most."""
        return self.recipe.training.tokens_per_microbatch

    def _microbatch(self, size: int) -> float:
        """Return the tokens that a lane computes at a time in the mean, of at most `size`."""
        return max(size, self.answers.tokens)

    def _packed(self, count: int, division: Division, size: int) -> int:
        """Return the most tokens of so many answers that a lane computes at a time."""
        longest = math.ceil(self.answers.longest / division.cp)
        return min(max(size, longest), count * longest)

    def _prompts(self, count: float, division: Division, size: int) -> float:
        """Return how many prompts are computed for each of so many answers."""
        if self.recipe.training.sharing == "none":
            return 1.0
        rows = round(count / min(division.shares, max(1.0, count)))
        group, here = self.recipe.samples_per_prompt, min(PACKED, max(1, rows))
        return prompts_computed(self.answers, group, here, size * division.cp)

    def passing(self, division: Division, size: int, *, packs: bool = True) -> LayoutWork:
        """Return the work of a pass without a gradient.

        Args:
            size: tokens of a lane at a time.
            packs: whether answers share their prompts, and lanes even out their tokens.
        """
        model = self.model
        return LayoutWork(
            layout_of(division, model),
            lambda n: forward_pass(
                model,
                self.answers,
                n,
                division,
                self._microbatch(size),
                prompts=self._prompts(n, division, size) if packs else 1.0,
                number_bytes=self.number,
                balanced=packs,
            ),
            working_bytes=lambda n: training_parts(
                model,
                division,
                self._packed(n, division, size),
                True,
                self.number,
                gradients=False,
            ),
        )

    @property
    def _recomputes(self) -> bool:
        return self.recipe.training.checkpoints_on(self.device.kind)

    def training(self, division: Division) -> LayoutWork:
        """Return the work of gradients, and of the end of a mini-batch."""
        return LayoutWork(
            layout_of(division, self.model),
            lambda n: self._gradient(division, n),
            lambda replicas: self._finish(division, replicas),
            lambda n: training_parts(
                self.model,
                division,
                self._packed(n, division, self.at_a_time),
                self._recomputes,
                self.number,
                gradients=self.adapters is None,
            ),
        )

    def _gradient(self, division: Division, count: int) -> Work:
        size, trained = self._microbatch(self.at_a_time), self.trained * count
        return training_pass(
            self.model, self.answers, trained, division, size, self._recomputes,
            frozen=self.adapters is not None,
            prompts=self._prompts(trained, division, self.at_a_time),
            number_bytes=self.number,
        )  # fmt: skip

    def _finish(self, division: Division, replicas: int) -> Work:
        """Return the end of a mini-batch: its update, and all of it again in further epochs."""
        update, again = self._update(division, replicas), self.recipe.algorithm.epochs - 1
        if not again:
            return update
        count = math.ceil(self.recipe.samples_per_minibatch / replicas)
        epoch = replace(update, then=(*update.then, self._gradient(division, count)))
        return replace(update, then=(*update.then, epoch.times(again)))

    def _update(self, division: Division, replicas: int) -> Work:
        work = update(self.model, division, replicas, self.adapters)
        if not self.recipe.training.optimizer_on_host or self.adapters is not None:
            return work
        moved = HOST_STEP_BYTES * lane_parameters(self.model, division)
        return replace(work, read_bytes=0.0, seconds=self.device.host_copy_seconds(moved))
