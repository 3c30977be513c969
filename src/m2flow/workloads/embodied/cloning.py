"""Behaviour cloning: a policy that does as a scripted expert did, to begin reinforcement with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m2flow.algorithms.sampling import derive_seed
from m2flow.environments.environment import Environment
from m2flow.environments.registry import make_environment
from m2flow.errors import UserError
from m2flow.models.policies.protocol import Policy
from m2flow.user_code import user_function
from m2flow.workloads.common.workload import RunProgress
from m2flow.workloads.embodied.config import EmbodiedRecipe

Expert = Callable[[Any], Any]
"""Given the environment, what to do there: float32 [A]."""


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


def demonstrations(recipe: EmbodiedRecipe) -> tuple[dict[str, Any], Tensor]:
    """What an expert saw and did, turn by turn, in episodes with seeds of their own.

    Returns:
        observations with a row for each turn, and actions [turns, K, A]: what was done in the next
        K steps; behind the end of an episode the last action is repeated.
    """
    environment = make_environment(recipe.environment.name, **recipe.environment.arguments)
    expert, chunk = expert_of(recipe, environment), recipe.policy.chunk
    seen: dict[str, list[Any]] = {}
    actions: list[Tensor] = []
    for number in range(recipe.warmup.episodes):
        environment.reset(derive_seed(recipe.seed, 6, number), None)
        done: list[Any] = []
        for _ in range(environment.spec.max_episode_steps or recipe.rollout.horizon):
            observed = environment.observe()
            for part in environment.spec.observations:
                column = np.array(observed[part.name], part.dtype)
                seen.setdefault(part.name, []).append(torch.from_numpy(column))
            if environment.spec.instructions is not None:
                seen.setdefault("instruction", []).append(environment.instruction())
            done.append(np.asarray(expert(environment), np.float32))
            step = environment.step(done[-1])
            if step.terminated or step.truncated or step.success:
                break
        padded = done + [done[-1]] * (chunk - 1)
        actions += [torch.from_numpy(np.stack(padded[n : n + chunk])) for n in range(len(done))]
    environment.close()
    whole = {
        name: column if name == "instruction" else torch.stack(column)
        for name, column in seen.items()
    }
    return whole, torch.stack(actions)


def clone(policy: Policy, recipe: EmbodiedRecipe, progress: RunProgress | None = None) -> None:
    """Train a policy to give the expert's actions, in place; by maximum likelihood."""
    warmup = recipe.warmup
    if progress is not None:
        progress.phase("warm-up", warmup.steps)
    observations, actions = demonstrations(recipe)
    for statistics in policy.running_statistics():
        if statistics.of == "state":
            statistics.take_in(statistics.moments(observations["state"]))
    tokens = policy.tokens_of(actions)
    optimizer = torch.optim.AdamW(policy.parameters(), warmup.learning_rate)
    random = torch.Generator().manual_seed(recipe.seed)
    for step in range(1, warmup.steps + 1):
        rows = torch.randint(len(actions), (warmup.batch_size,), generator=random)
        some = {
            name: [part[row] for row in rows.tolist()] if isinstance(part, list) else part[rows]
            for name, part in observations.items()
        }
        loss = -policy.evaluate(some, tokens[rows]).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if progress is not None:
            progress.update(step, {"loss": float(loss.detach())})


def write(policy: Policy, folder: Path, name: str) -> None:
    """Write a policy's weights so that they are there whole or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}"
    save_file({key: x.contiguous().clone() for key, x in policy.state_dict().items()}, partial)
    os.replace(partial, folder / name)
