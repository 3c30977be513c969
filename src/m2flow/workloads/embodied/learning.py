"""`PolicyUpdate`: several passes over the turns of a step, each in mini-batches of optimizer steps.

Which mini-batch a turn belongs to follows from its rollout's number, its place in the rollout and
the pass, and never from the lane that holds it. Gradients and denominators are summed over all
lanes before each optimizer step. So placement changes the result by rounding at most.

Legend: T turns, K steps of a turn, D coordinates drawn for a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from m2flow.algorithms.policy_loss import clipped_policy_loss
from m2flow.algorithms.sampling import derive_seed, uniform
from m2flow.algorithms.value_loss import clipped_value_loss
from m2flow.flow import Batch
from m2flow.models.policies.actor_critic import ReturnScale
from m2flow.models.policies.protocol import Level, Policy, at_level
from m2flow.training.optimizer import AdamWConfig, AllReduce, SumOptimizer
from m2flow.training.schedule import Schedule
from m2flow.training.skipping import Skips
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.workers.columns import TURN, lengths_of, observations_of

SUMS = (
    "loss", "denominator", "counted", "policy", "value", "entropy", "clipped", "ratio", "kl",
    "turns", "return", "return_square", "error", "error_square",
)  # fmt: skip
"""What is added up over the pieces of a mini-batch; gradients are divided by the second, the
weight of what the loss counts: each of the same, or each of an episode a share of its own."""


@dataclass
class Turns:
    """What is learned from.

    Attributes:
        observations: parts with a row for each turn; lists where they are sentences.
        rollout_T: int64 [T], the rollout's number in its step.
        place_T: int64 [T], which turn of the rollout.
        tokens_TKD, logprobs_TKD: what was drawn, and how likely it was.
        steps_T: int64 [T], steps of the turn that were carried out; others count for nothing.
        advantage_T: float64 [T].
        weight_T: float64 [T], of each thing in the turn that the loss counts.
        values_T, returns_T: float [T]; None without a critic.
    """

    observations: Mapping[str, Any]
    rollout_T: Tensor
    place_T: Tensor
    tokens_TKD: Tensor
    logprobs_TKD: Tensor
    steps_T: Tensor
    advantage_T: Tensor
    values_T: Tensor | None
    returns_T: Tensor | None
    weight_T: Tensor | None = None

    def __len__(self) -> int:
        return self.steps_T.numel()

    def rows(self, index: Tensor) -> Turns:
        """Some of the turns."""

        def some(part: Any) -> Any:
            if isinstance(part, list):
                return [part[row] for row in index.tolist()]
            return None if part is None else part[index]

        return Turns(
            {name: some(part) for name, part in self.observations.items()},
            *(
                some(getattr(self, name))
                for name in (
                    "rollout_T", "place_T", "tokens_TKD", "logprobs_TKD", "steps_T",
                    "advantage_T", "values_T", "returns_T", "weight_T",
                )
            ),
        )  # fmt: skip


def turns_of(rollouts: Batch) -> Turns:
    """The turns of whole rollouts, one after another."""

    def column(name: str) -> Any:
        found = f"{TURN}{name}"
        return rollouts[found].values if found in rollouts else None

    counts = torch.tensor(lengths_of(rollouts))
    firsts = counts.cumsum(0) - counts
    return Turns(
        observations=observations_of(rollouts, TURN),
        rollout_T=torch.tensor(rollouts.ids).repeat_interleave(counts),
        place_T=torch.arange(int(counts.sum())) - firsts.repeat_interleave(counts),
        tokens_TKD=column("tokens"),
        logprobs_TKD=column("logprobs"),
        steps_T=column("steps"),
        advantage_T=column("advantage"),
        values_T=column("values"),
        returns_T=column("return"),
    )


def optimizer_config(recipe: EmbodiedRecipe) -> AdamWConfig:
    """The optimizer that a recipe describes, its schedule over the whole run."""
    settings = recipe.optimizer
    return AdamWConfig(
        learning_rate=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        schedule=Schedule(settings.schedule, settings.warmup_steps, recipe.optimizer_steps),
        max_grad_norm=settings.max_grad_norm,
    )


class PolicyUpdate:
    """A policy in training, with its optimizer.

    Args:
        policy: trained in place.
        recipe: loss, passes, optimizer.
    """

    def __init__(self, policy: Policy, recipe: EmbodiedRecipe) -> None:
        self.policy, self.recipe = policy, recipe
        self.optimizer = SumOptimizer(policy.named_parameters(), optimizer_config(recipe))
        self._skips = Skips(recipe.max_skipped_updates)

    def run(self, rollouts: Batch | None, all_reduce: AllReduce | None) -> dict[str, float]:
        """All passes over the turns of a step; every lane of the worker calls it.

        Args:
            rollouts: those of this lane; None where it has no turn.
            all_reduce: sums tensors over the lanes; None for one lane.

        Returns:
            Means over the optimizer steps, the same on every lane.
        """
        update, version = self.recipe.update, self.optimizer.num_steps
        turns = None if rollouts is None else turns_of(rollouts)
        algorithm = self.recipe.algorithm
        if algorithm.name == "ppo" and algorithm.normalize_advantage:
            _normalise(turns, all_reduce)
        if turns is not None and algorithm.aggregation == "sequence-mean-token-mean":
            turns.weight_T = _shares(turns, algorithm.level)
        self._return_scale = self._scale()
        found: list[dict[str, float]] = []
        for epoch in range(update.epochs):
            part_T = None if turns is None else self._parts(turns, version, epoch)
            for number in range(update.minibatches):
                sums = torch.zeros(len(SUMS), dtype=torch.float64)
                if turns is not None and part_T is not None:
                    for piece in self._pieces(turns, part_T == number):
                        sums += self._learn(piece)
                found.append(self._skips.figures(partial(self._step, sums, all_reduce)))
        self._see(turns, all_reduce)
        return means_of(found)

    def tensors(self) -> Iterator[Tensor]:
        """What the optimizer keeps."""
        return self.optimizer.tensors()

    def bytes_to_come(self) -> int:
        """Bytes of what the first step will make."""
        return self.optimizer.bytes_to_come()

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """All that a run needs to go on, beside the policy's weights."""
        return self.optimizer.state_items()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state_items` gave."""
        self.optimizer.load_state_dict(state)

    def _parts(self, turns: Turns, version: int, epoch: int) -> Tensor:
        """Int64 [T], the mini-batch of each turn in a pass."""
        seed = torch.tensor(derive_seed(self.recipe.seed, 5, version, epoch))
        drawn_T = uniform(seed, turns.rollout_T * (1 << 24) + turns.place_T)
        return (drawn_T * self.recipe.update.minibatches).to(torch.int64)

    def _pieces(self, turns: Turns, chosen_T: Tensor) -> Iterator[Turns]:
        index = chosen_T.nonzero()[:, 0]
        for some in index.split(self.recipe.update.turns_per_microbatch):
            if some.numel():
                yield turns.rows(some)

    def _learn(self, turns: Turns) -> Tensor:
        """Add the gradient of some turns; the sums of `SUMS`."""
        algorithm = self.recipe.algorithm
        level: Level = algorithm.level
        device = next(self.policy.parameters()).device
        observations = {
            name: part if isinstance(part, list) else part.to(device)
            for name, part in turns.observations.items()
        }
        judged = self.policy.evaluate(observations, turns.tokens_TKD.to(device))
        steps = torch.arange(turns.logprobs_TKD.shape[1])
        taken_TK1 = (steps < turns.steps_T[:, None])[..., None].to(device)

        def figures(values_TKD: Tensor) -> Tensor:
            return at_level(values_TKD.to(device) * taken_TK1, level)

        logprobs, old = figures(judged.logprobs), figures(turns.logprobs_TKD)
        real: Any = at_level(taken_TK1.expand_as(judged.logprobs).double(), level) > 0
        if bool(real.all()):
            real = ...  # which costs nothing

        def of_turns(values_T: Tensor) -> Any:
            wide = values_T.to(device).view(-1, *(1,) * (logprobs.dim() - 1))
            return wide.expand_as(logprobs)[real]

        advantage = of_turns(turns.advantage_T)
        count = advantage.numel()
        weight = torch.ones_like(advantage) if turns.weight_T is None else of_turns(turns.weight_T)
        policy = clipped_policy_loss(
            logprobs[real],
            old[real],
            advantage,
            torch.ones(count, dtype=torch.int64, device=device),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        entropy = figures(judged.entropy)[real]
        bonus = (weight.to(entropy.dtype) * entropy).sum()
        loss = (weight * policy.loss_T).sum() - algorithm.entropy_coefficient * bonus
        sums = {
            "denominator": weight, "counted": count, "turns": len(turns), "entropy": entropy,
            "ratio": policy.ratio_T, "clipped": policy.clipped_T, "policy": policy.loss_T,
            "kl": policy.ratio_T - 1 - policy.log_ratio_T,
        }  # fmt: skip
        if judged.values is not None and turns.returns_T is not None:
            assert turns.values_T is not None
            scale = self._return_scale
            value = clipped_value_loss(
                judged.values / scale,
                turns.values_T.to(device) / scale,
                turns.returns_T.to(device) / scale,
                clip=algorithm.value_clip,
            )
            # The mean over turns, beside means over what the level counts.
            share = algorithm.value_coefficient * count / len(turns)
            loss = loss + share * value.loss_T.sum().to(loss.dtype)
            error_T = turns.returns_T - turns.values_T
            sums |= {
                "value": value.loss_T, "return": turns.returns_T, "error": error_T,
                "return_square": turns.returns_T.square(), "error_square": error_T.square(),
            }  # fmt: skip
        torch.autograd.backward(loss)
        return _added_up(sums | {"loss": loss})

    def _step(self, sums: Tensor, all_reduce: AllReduce | None) -> dict[str, float]:
        step = self.optimizer.step(sums, SUMS.index("denominator"), all_reduce)
        totals = dict(zip(SUMS, step.sums.tolist(), strict=True))
        count, turns = max(totals["counted"], 1.0), max(totals["turns"], 1.0)
        spread = totals["return_square"] / turns - (totals["return"] / turns) ** 2
        left = totals["error_square"] / turns - (totals["error"] / turns) ** 2
        found = {
            "loss": totals["loss"] / (totals["denominator"] or 1.0),
            "policy_loss": totals["policy"] / count,
            "entropy": totals["entropy"] / count,
            "ratio": totals["ratio"] / count,
            "clip_fraction": totals["clipped"] / count,
            "kl": totals["kl"] / count,
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
        }
        if self.recipe.algorithm.name == "ppo":
            found["value_loss"] = totals["value"] / turns
            found["explained_variance"] = 1 - left / spread if spread > 1e-12 else 0.0
        return found

    def _scale(self) -> float:
        """What returns are divided by in the loss: a critic learns shares of it."""
        found = [one for one in self.policy.running_statistics() if isinstance(one, ReturnScale)]
        return float(found[0].scale) if found else 1.0

    def _see(self, turns: Turns | None, all_reduce: AllReduce | None) -> None:
        """Take the states and returns of the step into the policy's running statistics."""
        for statistics in self.policy.running_statistics():
            values = None
            if turns is not None:
                returns = statistics.of == "return"
                values = turns.returns_T if returns else turns.observations["state"]
            sums = statistics.moments(values)
            if all_reduce is not None:
                all_reduce([sums])
            statistics.take_in(sums)


def means_of(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure over the steps that have it."""
    names = dict.fromkeys(name for one in found for name in one)
    return {name: fmean(one[name] for one in found if name in one) for name in names}


def _added_up(figures: Mapping[str, Any]) -> Tensor:
    """Float64, the sums of `SUMS`: figures of one size are added up together."""
    found = dict.fromkeys(SUMS, 0.0)
    alike: dict[int, dict[str, Tensor]] = {}
    for name, figure in figures.items():
        if isinstance(figure, Tensor):
            alike.setdefault(figure.numel(), {})[name] = figure.detach().flatten().double()
        else:
            found[name] = float(figure)
    for some in alike.values():
        sums = torch.stack(list(some.values())).sum(1)
        found |= dict(zip(some, sums.tolist(), strict=True))
    return torch.tensor(list(found.values()), dtype=torch.float64)


def _shares(turns: Turns, level: Level) -> Tensor:
    """[T] the weights with which all that the loss counts in a rollout weighs 1 together."""
    wide = turns.tokens_TKD.shape[-1] if level == "token" else 1
    counted_T = (turns.steps_T > 0).double() if level == "chunk" else turns.steps_T.double() * wide
    _, row_T = turns.rollout_T.unique(return_inverse=True)
    total_R = counted_T.new_zeros(int(row_T.max()) + 1).index_add(0, row_T, counted_T)
    return total_R.clamp(min=1.0).reciprocal()[row_T]


def _normalise(turns: Turns | None, all_reduce: AllReduce | None) -> None:
    """Bring advantages to mean 0 and deviation 1 over all turns of all lanes, in place."""
    sums = torch.zeros(3, dtype=torch.float64)
    if turns is not None:
        wide_T = turns.advantage_T.double()
        sums = torch.stack([wide_T.new_tensor(len(turns)), wide_T.sum(), wide_T.square().sum()])
    if all_reduce is not None:
        all_reduce([sums])
    count, total, square = sums.tolist()
    if turns is not None and count > 1:
        mean = total / count
        deviation = max(0.0, square / count - mean * mean) ** 0.5
        turns.advantage_T = (turns.advantage_T.double() - mean) / (deviation + 1e-8)
