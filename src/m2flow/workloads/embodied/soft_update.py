"""`SoftUpdate`: soft actor-critic on batches from a replay buffer.

Every lane of the learner keeps the whole buffer: what the lanes have rolled out is put together
before it is taken in, in the order of the rollouts' numbers. Which transitions are in a batch, and
what is drawn for each of them, follows from the recipe and the number of the update; a lane
computes its share of the batch. So placement changes the result by rounding at most, and the
first lane's checkpoint is that of all.

Legend: T transitions, W width of one, B rows of a batch on this lane, A size of a chunk's tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call

from m2flow.algorithms.sac import actor_loss, critic_loss, polyak, soft_targets, temperature_loss
from m2flow.algorithms.sampling import derive_seed
from m2flow.environments.spec import EnvironmentSpec
from m2flow.errors import UserError
from m2flow.flow import Batch, Place
from m2flow.models.policies.protocol import Policy, RunningStatistics
from m2flow.models.policies.twin_critics import TwinCritics
from m2flow.training.optimizer import AllReduce, SumOptimizer
from m2flow.training.skipping import SKIPPED, Skips
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.learning import means_of, optimizer_config
from m2flow.workloads.embodied.replay import Replay, Transitions, transitions_of
from m2flow.workloads.embodied.workers.columns import lengths_of

STATE = "state.safetensors"

Step = Callable[[Transitions, list[int], AllReduce | None], dict[str, float]]
"""Takes an optimizer step on a batch, with the seeds of its rows; its figures."""


class SoftUpdate:
    """A policy in training, with its critics, its temperature and its buffer.

    Args:
        policy: over states, with squashed actions; trained in place.
        recipe: every setting.
        spec: of the environment.
        place: where the learner stands.
    """

    def __init__(
        self, policy: Policy, recipe: EmbodiedRecipe, spec: EnvironmentSpec, place: Place
    ) -> None:
        self.policy, self.recipe, self.place = policy, recipe, place
        self.skips = Skips(recipe.max_skipped_updates)
        section, settings = recipe.policy, recipe.algorithm
        self.state_size = spec.state_size()
        actions = section.chunk * spec.action.size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(recipe.seed, 7))
            critics = TwinCritics(self.state_size, actions, section.hidden, section.normalize_state)
        self.critics = critics.to(place.device)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        first = torch.tensor(settings.first_temperature, device=place.device)
        self.log_temperature = nn.Parameter(first.log())
        target = settings.target_entropy
        self.target_entropy = -float(actions) if target is None else target
        self.width = 2 * self.state_size + actions + 2
        self.replay = Replay(recipe.replay.capacity, self.width)
        config = optimizer_config(recipe)
        trained = [*policy.named_parameters(), ("log_temperature", self.log_temperature)]
        self.actor_optimizer = SumOptimizer(trained, config)
        self.critic_optimizer = SumOptimizer(self.critics.named_parameters(), config)
        self.updates = 0
        """Begun in the run, those left out among them: the next one is of another batch."""

    def run(self, rollouts: Batch | None, all_reduce: AllReduce | None) -> dict[str, float]:
        """Take a step's rollouts in, and make its updates; every lane of the worker calls it.

        Args:
            rollouts: those of this lane; None where it has no turn.
            all_reduce: sums tensors over the lanes; None for one lane.

        Returns:
            Means over the updates that were made, none where there was none; how many there were,
            and the transitions in the buffer. The same on every lane.
        """
        rows_TW = self._together(rollouts, all_reduce)
        self._see(Transitions(rows_TW, self.state_size).state_TS)
        self.replay.add(rows_TW)
        settings = self.recipe.replay
        updates = settings.updates if len(self.replay) >= max(1, settings.begin) else 0
        found = [self._update(all_reduce) for _ in range(updates)]
        counts = {"updates": float(updates), "replay": float(len(self.replay))}
        return means_of(found) | counts

    def _together(self, rollouts: Batch | None, all_reduce: AllReduce | None) -> Tensor:
        """[T, W] the transitions of all lanes, in the order of their rollouts' numbers."""
        count_R = torch.zeros(self.recipe.rollouts_per_step, dtype=torch.int64)
        rows_OW = torch.zeros(0, self.width)
        if rollouts is not None:
            count_R[list(rollouts.ids)] = torch.tensor(lengths_of(rollouts))
            rows_OW = transitions_of(rollouts, self.recipe.algorithm.gamma).rows_TW
        if all_reduce is None:
            return rows_OW
        own_R = count_R > 0
        all_reduce([count_R])
        own_T = own_R.repeat_interleave(count_R)
        rows_TW = torch.zeros(len(own_T), self.width)
        rows_TW[own_T] = rows_OW
        if len(rows_TW):
            all_reduce([rows_TW])
        return rows_TW

    def _see(self, state_TS: Tensor) -> None:
        """Take states into the running statistics of policy, critics and target critics."""
        norms: list[RunningStatistics] = [
            one for one in self.policy.running_statistics() if one.of == "state"
        ]
        norms += [one.norm for one in (self.critics, self.targets) if one.norm is not None]
        for norm in norms:
            moments = norm.moments(state_TS)
            if bool(moments.isfinite().all()):  # others would spoil all updates to come
                norm.take_in(moments)

    def _update(self, all_reduce: AllReduce | None) -> dict[str, float]:
        """A step of the critics, and one of the policy, which is left out where theirs is."""
        self.place.goes_on()
        number, size = self.updates, self.recipe.replay.batch_size
        self.updates += 1
        place_B = torch.arange(size)[self.place.rank :: self.place.size]
        rows_BW = self.replay.sample(derive_seed(self.recipe.seed, 8, number), place_B)
        batch = Transitions(rows_BW.to(self.place.device), self.state_size)

        def taken(step: Step, kind: int) -> dict[str, float]:
            seeds = ((derive_seed(self.recipe.seed, kind, number) >> 1) + place_B).tolist()
            return self.skips.figures(partial(step, batch, seeds, all_reduce), step.__name__)

        critic = taken(self._critic_step, 9)
        if critic[SKIPPED]:
            return critic
        actor = taken(self._actor_step, 10)
        polyak(self.targets, self.critics, self.recipe.algorithm.polyak)
        return {**critic, **actor, SKIPPED: actor[SKIPPED] / 2}

    def _critic_step(
        self, batch: Transitions, seeds: list[int], all_reduce: AllReduce | None
    ) -> dict[str, float]:
        step = self.critic_optimizer.step(self._judge(batch, seeds), 1, all_reduce)
        loss, count, q = step.sums.tolist()
        return {"value_loss": loss / count, "q": q / count, "critic_grad_norm": step.grad_norm}

    def _actor_step(
        self, batch: Transitions, seeds: list[int], all_reduce: AllReduce | None
    ) -> dict[str, float]:
        step = self.actor_optimizer.step(self._act(batch, seeds), 1, all_reduce)
        loss, count, entropy = step.sums.tolist()
        return {
            "loss": loss / count,
            "entropy": entropy / count,
            "temperature": float(self.log_temperature.detach().exp()),
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
        }

    def _judge(self, batch: Transitions, seeds: list[int]) -> Tensor:
        """Add the critics' gradient; their loss, the rows, and the sum of what they said."""
        with torch.no_grad():
            token_BA, logprobs_B = self._drawn(batch.next_TS, seeds)
            target_B = soft_targets(
                batch.reward_T,
                batch.discount_T,
                self.targets(batch.next_TS, token_BA.tanh()),
                logprobs_B,
                self.log_temperature.exp(),
            )
        q_2B = self.critics(batch.state_TS, batch.token_TA.tanh())
        loss = critic_loss(q_2B, target_B).sum()
        loss.backward()
        return _sums(loss, len(seeds), q_2B.mean(dim=0).sum())

    def _act(self, batch: Transitions, seeds: list[int]) -> Tensor:
        """Add the gradient of policy and temperature; the loss, the rows, and the entropy."""
        token_BA, logprobs_B = self._drawn(batch.state_TS, seeds)
        fixed = {name: x.detach() for name, x in self.critics.named_parameters()}
        q_2B: Tensor = functional_call(self.critics, fixed, (batch.state_TS, token_BA.tanh()))
        loss = actor_loss(q_2B, logprobs_B, self.log_temperature.exp()).sum()
        warmth = temperature_loss(self.log_temperature, logprobs_B, self.target_entropy).sum()
        (loss + warmth).backward()
        return _sums(loss, len(seeds), -logprobs_B.sum())

    def _drawn(self, state_BS: Tensor, seeds: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens [B, A] that the policy draws, and the log-probabilities [B] of their actions."""
        drawn = self.policy.act({"state": state_BS}, seeds=seeds)
        return drawn.tokens.flatten(1), drawn.logprobs.flatten(1).sum(dim=1)

    # --- what a run needs to go on ----------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """What is moved with the policy. The buffer stays in main memory."""
        for module in (self.critics, self.targets):
            yield from module.parameters()
            yield from module.buffers()
        yield from self.actor_optimizer.tensors()  # the temperature among them
        yield from self.critic_optimizer.tensors()

    def bytes_to_come(self) -> int:
        """Bytes of what the first update will make."""
        return self.actor_optimizer.bytes_to_come() + self.critic_optimizer.bytes_to_come()

    def write(self, folder: Path) -> None:
        """Write what a run needs to go on, beside the policy's weights."""
        folder.mkdir()
        state = {name: x.contiguous() for name, x in self.state_items()}
        save_file(state, folder / STATE)

    def read(self, folder: Path) -> None:
        """Go on from what was written.

        Raises:
            UserError: it is of another policy.
        """
        file = folder / STATE
        try:
            self.load_state_dict(load_file(file))
        except (KeyError, RuntimeError) as error:  # as torch raises it for names and for shapes
            raise UserError(
                f"holds the state of another policy: {str(error).splitlines()[-1].strip()}",
                key=str(file),
                hint="go on with the recipe and the version of m2flow that wrote it, or start a "
                "new run",
            ) from error

    def state_items(self) -> Iterator[tuple[str, Tensor]]:
        """All that a run needs to go on, beside the policy's weights."""
        parts = {
            "critics": self.critics.state_dict(),
            "targets": self.targets.state_dict(),
            "actor_optimizer": dict(self.actor_optimizer.state_items()),
            "critic_optimizer": dict(self.critic_optimizer.state_items()),
            "replay": self.replay.state(),
            "temperature": {"log": self.log_temperature.detach()},
            "updates": {"begun": torch.tensor(self.updates)},
        }
        for part, tensors in parts.items():
            yield from ((f"{part}.{name}", tensor) for name, tensor in tensors.items())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state_items` gave."""

        def part(name: str) -> dict[str, Tensor]:
            start = f"{name}."
            return {k.removeprefix(start): x for k, x in state.items() if k.startswith(start)}

        self.critics.load_state_dict(part("critics"))
        self.targets.load_state_dict(part("targets"))
        self.actor_optimizer.load_state_dict(part("actor_optimizer"))
        self.critic_optimizer.load_state_dict(part("critic_optimizer"))
        self.replay.restore(state["replay.rows"], int(state["replay.total"]))
        self.log_temperature.copy_(state["temperature.log"])
        begun = state.get("updates.begun")  # older files have none, and left none out
        self.updates = self.critic_optimizer.num_steps if begun is None else int(begun)


def _sums(loss: Tensor, rows: int, third: Tensor) -> Tensor:
    parts = [float(loss.detach()), float(rows), float(third.detach())]
    return torch.tensor(parts, dtype=torch.float64)
