"""Behaviour cloning: a policy that does as was demonstrated, to begin reinforcement with.

Steps are AdamW's without weight decay, by the optimizer that reinforcement has: of 16-bit
parameters float32 master copies are stepped. Micro-batches change a step by rounding at most.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m2flow.algorithms.sampling import derive_seed
from m2flow.environments.demonstrations import Expert, played, read_demonstrations
from m2flow.environments.environment import Environment
from m2flow.environments.registry import maker
from m2flow.environments.slots import let_go
from m2flow.environments.spec import EnvironmentSpec
from m2flow.errors import UserError
from m2flow.models.policies.protocol import Observations, Policy
from m2flow.models.work import trained_bytes
from m2flow.plan.machine import free_gpu_memory
from m2flow.plan.profile.hardware import USABLE_MEMORY
from m2flow.plan.sizes import parse_bytes
from m2flow.training.optimizer import NOT_TAKEN, AdamWConfig, NotFinite, SumOptimizer
from m2flow.user_code import user_function
from m2flow.workloads.common.workload import RunProgress
from m2flow.workloads.embodied.config import EmbodiedRecipe


def device_with_room(policy: Policy, recipe: EmbodiedRecipe) -> str:
    """Return where to clone: the first accelerator that has room, or "cpu".

    Room is for weights and the optimizer's state in what is free now, up to the recipe's limit of
    a lane's memory. Where lanes are of cores the warm-up is on them too.
    """
    if "cpu:" in recipe.lanes:
        return "cpu"
    held = sum(
        p.numel() * sum(trained_bytes(p.element_size()).values()) if p.requires_grad else p.nbytes
        for p in policy.parameters()
    )
    limit = math.inf
    if recipe.lane_memory is not None:
        limit = parse_bytes(recipe.lane_memory, "lane_memory")
    count, told = torch.cuda.device_count(), free_gpu_memory()
    for number in range(count):
        # To ask torch makes a context on the accelerator, which stays as long as this process.
        free = told[number] if len(told) == count else torch.cuda.mem_get_info(number)[0]
        if held <= min(USABLE_MEMORY * free, limit):
            return f"cuda:{number}"
    return "cpu"


def expert_of(recipe: EmbodiedRecipe, environment: Environment) -> Expert:
    """Who shows what is to be done.

    Raises:
        UserError: there is no such function, and the environment has no expert of its own.
    """
    named = recipe.warmup.expert
    if named is None:
        if not hasattr(environment, "expert"):
            raise UserError(
                f"{recipe.environment.name} has no expert of its own",
                key="warmup.expert",
                expected="module:function, or warmup.steps: 0",
            )
        return lambda one: one.expert()
    return user_function(named, "warmup.expert")


def demonstrations(
    recipe: EmbodiedRecipe, spec: EnvironmentSpec, ahead: int
) -> tuple[dict[str, Any], Tensor]:
    """What was seen and done, turn by turn: read from a file, or in episodes that an expert plays.

    Returns:
        observations with a row for each turn, and actions [turns, ahead, A]: what was done in the
        next so many steps; behind the end of an episode the last action is repeated.
    """
    if recipe.warmup.data is not None:
        shown = read_demonstrations(recipe.warmup.data, spec)
    else:
        environment = maker(recipe.environment.name, recipe.environment.arguments)()
        seeds = [derive_seed(recipe.seed, 6, number) for number in range(recipe.warmup.episodes)]
        expert = expert_of(recipe, environment)
        shown = played(environment, expert, seeds, recipe.rollout.horizon)
        let_go(environment)
    action_TA, episode_T = shown.pop("action"), shown.pop("episode")
    at_T = np.arange(len(episode_T))
    ends = np.append(np.flatnonzero(np.diff(episode_T)), len(episode_T) - 1)
    last_T = ends[np.searchsorted(ends, at_T)]
    next_TH = np.minimum(at_T[:, None] + np.arange(ahead), last_T[:, None])
    seen: dict[str, Any] = {
        name: column.tolist() if name == "instruction" else torch.from_numpy(column)
        for name, column in shown.items()
    }
    return seen, torch.from_numpy(action_TA[next_TH])


def clone(
    policy: Policy,
    recipe: EmbodiedRecipe,
    spec: EnvironmentSpec,
    progress: RunProgress | None = None,
) -> None:
    """Train a policy to give the actions that were shown, in place, by its `cloning_loss`.

    It is trained on the device that it is on.

    Raises:
        NotFinite: the loss or a gradient became NaN or infinite; no step was taken with it.
    """
    warmup = recipe.warmup
    if progress is not None:
        progress.phase("warm-up", warmup.steps)
    ahead = policy.horizon or recipe.policy.chunk
    observations, actions = demonstrations(recipe, spec, ahead)
    for statistics in policy.running_statistics():
        if statistics.of == "state":
            statistics.take_in(statistics.moments(observations["state"]))
    device = next(policy.parameters()).device
    if recipe.computes_again(device.type):
        policy.compute_activations_again()  # type: ignore[operator]
    config = AdamWConfig(warmup.learning_rate, weight_decay=0.0, max_grad_norm=1.0)
    optimizer = SumOptimizer(policy.named_parameters(), config)
    random = torch.Generator().manual_seed(recipe.seed)
    for step in range(1, warmup.steps + 1):
        rows = torch.randint(len(actions), (warmup.batch_size,), generator=random)
        some: dict[str, Any] = {
            name: [part[row] for row in rows.tolist()]
            if isinstance(part, list)
            else part[rows].to(device)
            for name, part in observations.items()
        }
        seed, most = derive_seed(recipe.seed, 11, step), recipe.update.turns_per_microbatch
        loss = _add_gradients(policy, some, actions[rows].to(device), seed, most)
        try:
            optimizer.step(torch.tensor([loss, 1.0], dtype=torch.float64), 1, None)
        except NotFinite as error:
            why = str(error).removeprefix(f"{NOT_TAKEN}: ")
            raise NotFinite(f"{NOT_TAKEN}: step {step} of the warm-up: {why}") from error
        if progress is not None:
            progress.update(step, {"loss": loss})
    optimizer.release()


def _add_gradients(
    policy: Policy, observations: Observations, actions_BHA: Tensor, seed: int, most: int
) -> float:
    """Add the gradient of a batch's loss, of at most so many rows at a time; return the loss."""
    batch, total = len(actions_BHA), 0.0
    for first in range(0, batch, most):
        rows = slice(first, min(first + most, batch))
        loss = policy.cloning_loss(observations, actions_BHA, seed, rows)
        loss = loss * ((rows.stop - rows.start) / batch)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def write(policy: Policy, folder: Path, name: str) -> None:
    """Write a policy's weights so that they are there whole or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}"
    save_file({key: x.contiguous().clone() for key, x in policy.state_dict().items()}, partial)
    os.replace(partial, folder / name)
