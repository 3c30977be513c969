"""`PolicyUpdate`: several passes over the turns of a step, each in mini-batches of optimizer steps.

Which mini-batch a turn belongs to follows from its rollout's number, its place in the rollout and
the pass, and never from the lane that holds it. Gradients and denominators are summed over all
lanes before each optimizer step. So placement changes the result by rounding at most.

Of a policy that is divided over a gang each pass is collective: a lane without a micro-batch of its
own goes through one turn, of which nothing is learned.

Legend: T turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from m2flow.algorithms.ppo import explained_variance
from m2flow.algorithms.sampling import derive_seed, uniform
from m2flow.flow import Batch
from m2flow.flow.progress import goes_on
from m2flow.models.policies.actor_critic import ReturnScale
from m2flow.models.policies.protocol import Policy
from m2flow.training import trainer_state
from m2flow.training.optimizer import AdamWConfig, AllReduce, SumOptimizer
from m2flow.training.schedule import Schedule
from m2flow.training.sharded import WHOLE, Shards
from m2flow.training.skipping import SKIPPED, Skips
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.objective import SUMS, wanted
from m2flow.workloads.embodied.turns import Examples, TrainingTurns, turns_of

FIRST = torch.tensor([0])


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
        shards: how the policy is divided, which it has been already.
        goes_on: called with each micro-batch; see `Place`.
    """

    def __init__(
        self,
        policy: Policy,
        recipe: EmbodiedRecipe,
        shards: Shards = WHOLE,
        goes_on: Callable[[], None] = goes_on,
    ) -> None:
        self.policy, self.recipe, self._shards, self._goes_on = policy, recipe, shards, goes_on
        critic = set(policy.critic_parameters())
        self._critic_steps = recipe.idle_steps
        first_after: dict[Tensor, int] = {
            one: self._critic_steps for one in policy.parameters() if one not in critic
        }
        config = optimizer_config(recipe)
        self.optimizer = SumOptimizer(
            policy.named_parameters(), config, shards, first_after=first_after
        )
        self.skips = Skips(recipe.max_skipped_updates)
        of_critic = getattr(policy, "critic", None)
        self._of_critic = set() if of_critic is None else set(of_critic.modules())

    def run(self, rollouts: Batch | None, all_reduce: AllReduce | None) -> dict[str, float]:
        """All passes over the turns of a step; every lane of the worker calls it.

        Args:
            rollouts: those of this lane; None where it has no turn.
            all_reduce: sums tensors over the lanes; None for one lane.

        Returns:
            Means over the optimizer steps, the same on every lane; `turns` is a sum over them.
        """
        update, version = self.recipe.update, self.optimizer.num_steps
        critic_alone = self._critic_alone
        turns = None if rollouts is None else turns_of(rollouts)
        algorithm = self.recipe.algorithm
        if algorithm.name == "ppo" and algorithm.normalize_advantage:
            by_action = algorithm.advantage_level == "action"
            _normalise(turns, self.recipe.policy.chunk if by_action else 1, all_reduce)
        scale, device = self._scale(), next(self.policy.parameters()).device
        examples = None
        if turns is not None:
            by_episode = algorithm.aggregation == "sequence-mean-token-mean"
            examples = turns.examples(algorithm.level, scale, by_episode=by_episode)
        counted = _counted_in_a_turn(examples, all_reduce)
        stand_in = self._stand_in(examples)
        found: list[dict[str, float]] = []
        for epoch in range(update.epochs):
            members = None if turns is None else self._members(turns, version, epoch)
            for number in range(update.minibatches):
                sums, mine = None, []
                if members is not None:
                    parts = members[number].split(update.turns_per_microbatch)
                    mine = [index for index in parts if index.numel()]
                for index in self._shards.padded(mine):
                    self._goes_on()
                    if index is None:
                        assert stand_in is not None, "nobody has a turn"
                        self._pass_through(stand_in.rows(FIRST, device))
                        continue
                    assert examples is not None
                    added = self._learn(examples.rows(index, device), scale, counted)
                    sums = added if sums is None else sums + added
                if sums is None:
                    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
                # One mini-batch is the same in each pass; several are dealt anew.
                again = update.minibatches == 1 and any(one[SKIPPED] for one in found)
                step = partial(self._step, sums, all_reduce)
                found.append(self.skips.figures(step, again=again))
        figures = means_of(found)
        figures["turns"] = sum(one.get("turns", 0.0) for one in found)
        if algorithm.name == "ppo":
            figures["explained_variance"] = _explained_variance(turns, all_reduce)
        self._see(turns, all_reduce, critic_alone)
        return figures

    def tensors(self) -> Iterator[Tensor]:
        """What the optimizer keeps."""
        return self.optimizer.tensors()

    def bytes_to_come(self) -> int:
        """Bytes of what the first step will make."""
        return self.optimizer.bytes_to_come()

    def write(self, folder: Path) -> None:
        """Write what a run needs to go on, beside the policy's weights, each lane its parts."""
        trainer_state.write(folder, self.optimizer.parts(), self._shards.group)

    def read(self, folder: Path) -> None:
        """Go on from what was written, whatever the policy was divided over."""
        saved = trainer_state.SavedState(folder)
        self.optimizer.load(saved.names, saved.read)

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """What `write` writes, as whole tensors; collective in a gang."""
        return self.optimizer.state_items()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state_items` gave."""
        self.optimizer.load_state_dict(state)

    def _members(self, turns: TrainingTurns, version: int, epoch: int) -> Sequence[Tensor]:
        """The rows of each mini-batch of a pass, int64, in order."""
        count = self.recipe.update.minibatches
        seed = torch.tensor(derive_seed(self.recipe.seed, 5, version, epoch))
        drawn_T = uniform(seed, turns.rollout_T * (1 << 24) + turns.place_T)
        part_T = (drawn_T * count).to(torch.int64)
        return part_T.argsort(stable=True).split(part_T.bincount(minlength=count).tolist())

    def _learn(self, some: Examples, scale: float, counted: float) -> Tensor:
        """Add the gradient of some turns; the sums of `SUMS`."""
        judged, pull = self.policy.judge(some.observations, some.tokens_TKD)
        asked = wanted(judged, some, self.recipe.algorithm, scale, counted)
        pull(asked.logprobs_TKD, asked.entropy_TKD, asked.values_T)
        return asked.sums

    def _stand_in(self, examples: Examples | None) -> Examples | None:
        """A turn for passes without one of the lane's own; None where no lane of a gang has any."""
        if self._shards.size == 1:
            return None
        mine = None if examples is None else examples.rows(FIRST, torch.device("cpu"))
        return self._shards.one_of(mine)

    def _pass_through(self, some: Examples) -> None:
        """Gather and sum what the other lanes of the gang do, and learn nothing."""
        judged, pull = self.policy.judge(some.observations, some.tokens_TKD)
        logprobs_TKD, values_T = judged.logprobs, judged.values
        pull(
            torch.zeros_like(logprobs_TKD),
            None,
            None if values_T is None else torch.zeros_like(values_T),
        )

    def _step(self, sums: Tensor, all_reduce: AllReduce | None) -> dict[str, float]:
        """One optimizer step; its figures, of a mini-batch without a turn `turns` alone."""
        if self._critic_alone:  # of all that an action depends on, the gradient is dropped
            self.optimizer.zero_but(self.policy.critic_parameters())
        of_wholes = all_reduce if self._shards.size == 1 else None
        step = self.optimizer.step(sums, SUMS.index("denominator"), of_wholes)
        totals = dict(zip(SUMS, step.sums.tolist(), strict=True))
        count, turns = totals["counted"], totals["turns"]
        if not count:
            return {"turns": turns}
        found = {
            "turns": turns,
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "loss": totals["loss"] / totals["denominator"],
            "policy_loss": totals["policy"] / count,
            "entropy": totals["entropy"] / count,
            "ratio": totals["ratio"] / count,
            "clip_fraction": totals["clipped"] / count,
            "kl": totals["kl"] / count,
        }
        if self.recipe.algorithm.name == "ppo":
            found["value_loss"] = totals["value"] / turns
        return found

    @property
    def _critic_alone(self) -> bool:
        """Whether the run is in the steps in which the critic alone learns."""
        return self.optimizer.num_steps < self._critic_steps

    def _scale(self) -> float:
        """What returns are divided by in the loss: a critic learns shares of it."""
        found = [one for one in self.policy.running_statistics() if isinstance(one, ReturnScale)]
        return found[0].scale if found else 1.0

    def _see(
        self, turns: TrainingTurns | None, all_reduce: AllReduce | None, critic_alone: bool
    ) -> None:
        """Take the states and returns of the step into the policy's running statistics.

        Where the critic alone learns, into none that an action depends on.
        """
        for statistics in self.policy.running_statistics():
            if critic_alone and statistics.of == "state" and statistics not in self._of_critic:
                continue
            values = None
            if turns is not None:
                returns = statistics.of == "return"
                values = turns.returns_T if returns else turns.observations["state"]
            sums = statistics.moments(values)
            if all_reduce is not None:
                all_reduce([sums])
            if bool(sums.isfinite().all()):  # others would spoil all steps to come
                statistics.take_in(sums)


def _counted_in_a_turn(examples: Examples | None, all_reduce: AllReduce | None) -> float:
    """How many things the loss counts in a turn, in the mean over the step's turns of all lanes.

    Of some turns alone it would depend on which of them come together: on the plan.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    if examples is not None:
        sums += torch.tensor([examples.counted(examples.old).numel(), len(examples)])
    if all_reduce is not None:
        all_reduce([sums])
    counted, turns = sums.tolist()
    return counted / turns if turns else 1.0


def means_of(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each figure over the steps that have it."""
    names = dict.fromkeys(name for one in found for name in one)
    return {name: fmean(one[name] for one in found if name in one) for name in names}


def _explained_variance(turns: TrainingTurns | None, all_reduce: AllReduce | None) -> float:
    """How well the values of the rollouts foresaw their returns, over all lanes."""
    names = ("return", "return_square", "error", "error_square", "turns")
    sums = torch.zeros(len(names), dtype=torch.float64)
    if turns is not None:
        assert turns.values_T is not None and turns.returns_T is not None
        returns_T = turns.returns_T.double()
        error_T = returns_T - turns.values_T
        columns = (returns_T, returns_T.square(), error_T, error_T.square())
        sums = torch.stack([*columns, torch.ones_like(returns_T)]).sum(1)
    if all_reduce is not None:
        all_reduce([sums])
    totals = dict(zip(names, sums.tolist(), strict=True))
    return explained_variance(totals, totals["turns"])


def _normalise(turns: TrainingTurns | None, places: int, all_reduce: AllReduce | None) -> None:
    """Bring advantages to mean 0 and deviation 1 over all turns of all lanes, in place.

    Those of actions have the mean of their place in the chunk (K `places`; 1 for those of turns):
    the later an action, the more rewards its advantage leaves out, which is no merit of its own.
    """
    sums = torch.zeros(3, places, dtype=torch.float64)
    if turns is not None:
        wide_TK = turns.advantage.double().view(len(turns), places)
        taken_TK = torch.arange(places) < turns.steps_T[:, None]
        parts = (torch.ones_like(wide_TK), wide_TK, wide_TK.square())
        sums = torch.stack([(part * taken_TK).sum(0) for part in parts])
    if all_reduce is not None:
        all_reduce([sums])
    count_K, total_K, square_K = sums
    count = float(count_K.sum())
    if turns is not None and count > 1:
        mean_K = total_K / count_K.clamp(min=1)
        variance = max(0.0, float((square_K - count_K * mean_K.square()).sum()) / count)
        away_TK = turns.advantage.double().view(len(turns), places) - mean_K
        turns.advantage = (away_TK / (variance**0.5 + 1e-8)).view_as(turns.advantage)
