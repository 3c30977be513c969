"""EnvPool's simulators by state: Meta-World, MuJoCo, Fetch, MiniGrid and others, compiled.

EnvPool seeds an environment when it is made, and never again. Here each episode is a pool of one,
made with the episode's seed (milliseconds, some tens for Meta-World), so that it follows from that
seed wherever it is run, as other environments' do. It draws no pictures: its renderer ends the
process where it finds no display. Goals of Meta-World are seen, as by `metaworld:`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from m2flow.environments.environment import Array
from m2flow.environments.gymnasium import GymnasiumEnvironment
from m2flow.errors import UserError, suggestion

OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_num_players")
"""Settings of EnvPool that are not the user's: an episode is a pool of one."""

SUCCESS_KEYS = ("success", "is_success", "reward_success")


class EnvPoolEnvironment(GymnasiumEnvironment):
    """One task; restored by replaying.

    Args:
        task: EnvPool's id, such as "MetaWorld/Reach-v3".
        options: EnvPool's settings of it, such as `max_episode_steps`.
    """

    def __init__(self, task: str, /, **options: Any) -> None:
        self._wrap(f"envpool:{task}", _Episodes(task, options), 0, 0)

    @staticmethod
    def tasks() -> list[str]:
        """All ids."""
        return list(_tasks())


class _Episodes:
    """What `GymnasiumEnvironment` needs of a `gymnasium.Env`: one episode after another."""

    render_mode = None

    def __init__(self, task: str, options: dict[str, Any]) -> None:
        import envpool

        known = envpool.make_spec(task).config._fields
        if "partially_observable" in known:
            options = {"partially_observable": False, **options}
        for key in options:
            if key not in known or key in OURS:
                raise UserError(
                    f"envpool:{task} has no such option",
                    key=f"environment.{key}",
                    hint=suggestion(key, [name for name in known if name not in OURS]),
                )
        self._task, self._options = task, options
        self._pool: Any = None
        told = envpool.make_spec(task, **options)
        self.spec = told.config
        self.observation_space = told.gymnasium_observation_space
        self.action_space = told.gymnasium_action_space

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        import envpool

        self.close()
        self._pool = envpool.make(
            self._task, env_type="gymnasium", num_envs=1, num_threads=1, seed=seed, **self._options
        )
        observed, _ = self._pool.reset()
        return _first(observed), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observed, reward, terminated, truncated, info = self._pool.step(np.asarray(action)[None])
        success = {"success": True} if _succeeds(info) else {}
        return _first(observed), reward[0], terminated[0], truncated[0], success

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@lru_cache(maxsize=1)
def _tasks() -> tuple[str, ...]:
    import envpool

    return tuple(sorted(envpool.list_all_envs()))


def _first(observed: Any) -> Any:
    """The only environment's part of what is observed, which may lie in dictionaries."""
    if isinstance(observed, dict):
        return {key: _first(part) for key, part in observed.items()}
    part: Array = observed[0]
    return part.copy()


def _succeeds(info: dict[str, Any]) -> bool:
    return any(bool(info[key][0]) for key in SUCCESS_KEYS if key in info)
