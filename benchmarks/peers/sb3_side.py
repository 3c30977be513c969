"""The side of Stable-Baselines3: its PPO, one `learn` of one rollout for each step.

`extra["processes"]` chooses `SubprocVecEnv`, a process an environment, over `DummyVecEnv`;
`extra["threads"]` is how many torch has, the cores if it is not said.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from peers.control import ControlSettings
from peers.wire import StepRecord, Wire
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv


class Wrapped(gymnasium.Env[Any, Any]):
    """An environment that Gymnasium does not have, by the very adaptor that m2flow uses."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        from m2flow.environments.registry import make_environment

        self._made = make_environment(name, **options)
        spec = self._made.spec
        self._state = spec.observations[0]
        assert self._state.name == "state"
        self._limit, self._steps = spec.max_episode_steps, 0
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, self._state.shape)
        low, high = (np.array(bound, np.float32) for bound in (spec.action.low, spec.action.high))
        self.action_space = gymnasium.spaces.Box(low, high)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; its seed follows from the first one."""
        super().reset(seed=seed)
        self._steps = 0
        self._made.reset(int(self.np_random.integers(1 << 31)), None)
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, with the limit of steps."""
        did = self._made.step(action)
        self._steps += 1
        over = did.truncated or self._steps == self._limit
        return self._observed(), did.reward, did.terminated, over, {"is_success": did.success}

    def _observed(self) -> Any:
        return np.asarray(self._made.observe()["state"], np.float32)


class Episodes(BaseCallback):
    """Keeps what the monitors tell of each episode that ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[dict[str, float]] = []

    def _on_step(self) -> bool:
        self.ended += [info["episode"] for info in self.locals["infos"] if "episode" in info]
        return True


def main() -> None:
    """Serve steps until the other end closes."""
    wire = Wire()
    settings = wire.settings(ControlSettings)
    torch.set_num_threads(int(settings.extra.get("threads", settings.cores)))
    family, _, task = settings.environment.partition(":")
    make: Any = task
    if family != "gymnasium":
        make = partial(Wrapped, settings.environment, settings.options)
    processes = bool(settings.extra.get("processes"))
    model = PPO(
        "MlpPolicy",
        make_vec_env(
            make,
            settings.environments,
            seed=settings.seed,
            vec_env_cls=SubprocVecEnv if processes else DummyVecEnv,
        ),
        n_steps=settings.horizon,
        batch_size=settings.steps // settings.minibatches,
        n_epochs=settings.epochs,
        learning_rate=settings.learning_rate,
        gamma=settings.gamma,
        gae_lambda=settings.lam,
        policy_kwargs={"net_arch": {"pi": list(settings.hidden), "vf": list(settings.hidden)}},
        device="cpu",
        seed=settings.seed,
    )
    model.set_logger(Logger(None, []))
    done: list[StepRecord] = []
    while asked := wire.next_request(done):
        done = []
        for _ in range(asked):
            episodes = Episodes()
            began = time.perf_counter()
            model.learn(settings.steps, callback=episodes, reset_num_timesteps=False)
            seconds = time.perf_counter() - began
            returns = [float(one["r"]) for one in episodes.ended]
            done.append(StepRecord(seconds, returns, [int(one["l"]) for one in episodes.ended]))
    model.env.close()


if __name__ == "__main__":
    main()
