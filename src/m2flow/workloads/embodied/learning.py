"""`PolicyUpdate`: several passes over the turns of a step, each in mini-batches of optimizer steps.

Which mini-batch a turn belongs to follows from its rollout's number, its place in the rollout and
the pass, and never from the lane that holds it. Gradients and denominators are summed over all
lanes before each optimizer step. So placement changes the result by rounding at most.

Legend: T turns, K steps of a turn, D coordinates drawn for a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m2flow.algorithms.policy_loss import clipped_policy_loss
from m2flow.algorithms.sampling import derive_seed, uniform
from m2flow.algorithms.value_loss import clipped_value_loss
from m2flow.models.policies.actor_critic import ReturnScale
from m2flow.models.policies.protocol import Level, Policy, at_level
from m2flow.training.optimizer import AdamWConfig, AllReduce, SumOptimizer
from m2flow.training.schedule import Schedule
from m2flow.workloads.embodied.config import EmbodiedRecipe

SUMS = (
    "loss", "denominator", "policy", "value", "entropy", "clipped", "ratio", "kl", "turns",
    "return", "return_square", "error", "error_square",
)  # fmt: skip
"""What is added up over the pieces of a mini-batch; gradients are divided by the second."""


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
                    "advantage_T", "values_T", "returns_T",
                )
            ),
        )  # fmt: skip


class PolicyUpdate:
    """A policy in training, with its optimizer.

    Args:
        policy: trained in place.
        recipe: loss, passes, optimizer.
    """

    def __init__(self, policy: Policy, recipe: EmbodiedRecipe) -> None:
        self.policy, self.recipe = policy, recipe
        settings = recipe.optimizer
        schedule = Schedule(settings.schedule, settings.warmup_steps, recipe.optimizer_steps)
        config = AdamWConfig(
            learning_rate=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            schedule=schedule,
            max_grad_norm=settings.max_grad_norm,
        )
        self.optimizer = SumOptimizer(policy.named_parameters(), config)

    def run(self, turns: Turns | None, all_reduce: AllReduce | None) -> dict[str, float]:
        """All passes over the turns of a step; every lane of the worker calls it.

        Args:
            turns: those of this lane; None where it has none.
            all_reduce: sums tensors over the lanes; None for one lane.

        Returns:
            Means over the optimizer steps, the same on every lane.
        """
        update, version = self.recipe.update, self.optimizer.num_steps
        if self.recipe.algorithm.name == "ppo" and self.recipe.algorithm.normalize_advantage:
            _normalise(turns, all_reduce)
        self._return_scale = self._scale()
        found: list[dict[str, float]] = []
        for epoch in range(update.epochs):
            part_T = None if turns is None else self._parts(turns, version, epoch)
            for number in range(update.minibatches):
                sums = torch.zeros(len(SUMS), dtype=torch.float64)
                if turns is not None and part_T is not None:
                    for piece in self._pieces(turns, part_T == number):
                        sums += self._learn(piece)
                found.append(self._step(sums, all_reduce))
        self._see(turns, all_reduce)
        return {name: sum(one[name] for one in found) / len(found) for name in found[0]}

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
        advantage = turns.advantage_T.to(device).view(-1, *(1,) * (logprobs.dim() - 1))
        advantage = advantage.expand_as(logprobs)[real]
        count = advantage.numel()
        policy = clipped_policy_loss(
            logprobs[real],
            old[real],
            advantage,
            torch.ones(count, dtype=torch.int64, device=device),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        entropy = figures(judged.entropy)[real]
        loss = policy.loss_T.sum() - algorithm.entropy_coefficient * entropy.sum()
        sums = {
            "denominator": count, "turns": len(turns), "entropy": entropy, "ratio": policy.ratio_T,
            "clipped": policy.clipped_T, "policy": policy.loss_T,
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
            weight = algorithm.value_coefficient * count / len(turns)
            loss = loss + weight * value.loss_T.sum().to(loss.dtype)
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
        count, turns = max(totals["denominator"], 1.0), max(totals["turns"], 1.0)
        spread = totals["return_square"] / turns - (totals["return"] / turns) ** 2
        left = totals["error_square"] / turns - (totals["error"] / turns) ** 2
        found = {
            "loss": totals["loss"] / count,
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
