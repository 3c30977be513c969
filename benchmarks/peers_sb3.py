"""m2flow against Stable-Baselines3's PPO on CPU: environment steps per second of training.

The same environment, network, batch, epochs, mini-batches and cores; every side trains for real, in
a process of its own (Stable-Baselines3 in its own environment, made on first use), on alternating
blocks of steps: while one works, the others wait. Stable-Baselines3 steps its environments one
after the other in its own process, with torch on every core (its default) and on one (faster for
such small networks), or each in a process; m2flow is held against the fastest of the three. m2flow
runs in one process without lanes, the same with its environments in a process for each core, on one
lane, and on a lane for each core.

What a side's processor seconds for a million environment steps are is told beside it: what a busy
machine disturbs least.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import CACHE, ROOT, Target, arguments, conclude, table
from peers.control import ControlSettings
from peers.environment import SB3_VERSION, sb3_python
from peers.side import Block, Side

SEED = 0
TARGET = 1.5

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "gymnasium:CartPole-v1": {},
    "gymnasium:Pendulum-v1": {},
    "metaworld:reach-v3": {"max_episode_steps": 128},
}
"""With their options; the last one where Meta-World is installed. Episodes are no longer than a
step of training, at which m2flow begins new ones."""

WARMING = 2
"""Steps of each side that do not count."""


@dataclass(frozen=True)
class Row:
    """One side: what it is called, its module, and what it is told beside the settings."""

    name: str
    module: str
    extra: dict[str, Any]

    @property
    def is_peer(self) -> bool:
        return self.module == "peers.sb3_side"


def rows(cores: int) -> list[Row]:
    """All sides."""
    ours = [
        Row("m2flow, eager", "peers.m2flow_control_side", {"mode": "eager", "lanes": 1}),
        Row("m2flow, processes", "peers.m2flow_control_side",
            {"mode": "eager", "lanes": 1, "processes": cores}),
        *(
            Row(f"m2flow, {lanes} lane{'s' * (lanes > 1)}", "peers.m2flow_control_side",
                {"mode": "collocated", "lanes": lanes})
            for lanes in sorted({1, cores})
        ),
    ]  # fmt: skip
    return [
        Row("SB3", "peers.sb3_side", {}),
        Row("SB3, 1 thread", "peers.sb3_side", {"threads": 1}),
        Row("SB3, processes", "peers.sb3_side", {"processes": True}),
        *ours,
    ]


def run(settings: ControlSettings, rounds: int, steps: int, logs: Path) -> dict[str, list[Block]]:
    """The blocks of each row. All rows are alive; one works at a time."""
    search_path = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "src"), *_given_path()])
    name = settings.environment.replace(":", "-")
    with ExitStack() as stack:
        sides = {}
        for number, row in enumerate(rows(settings.cores)):
            python = sb3_python(CACHE / "sb3") if row.is_peer else Path(sys.executable)
            mine = replace(settings, extra=row.extra)
            side = Side(row.module, python, mine, search_path, logs / f"{name}-{number}.log")
            sides[row.name] = stack.enter_context(side)
        for side in sides.values():
            side.ready()
        blocks: dict[str, list[Block]] = {name: [] for name in sides}
        for side in sides.values():
            side.run(WARMING)
        for _ in range(rounds):
            for name, side in sides.items():
                blocks[name].append(side.run(steps))
    return blocks


def _given_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def figures(blocks: Sequence[Block], peer: Sequence[Block], steps: int) -> dict[str, Any]:
    """What a row came to; the ratio is the median over rounds."""
    count = sum(len(block.records) for block in blocks)
    returns = [value for record in blocks[-1].records for value in record.rewards]
    ratios = [b.seconds / a.seconds for a, b in zip(blocks, peer, strict=True)]
    return {
        "steps_per_s": steps * count / sum(block.seconds for block in blocks),
        "ratio": statistics.median(ratios),
        "ratio_of_rounds": [min(ratios), max(ratios)],
        "cpu_s_per_million": 1e6 * sum(block.cpu_seconds for block in blocks) / (steps * count),
        "return": statistics.mean(returns) if returns else None,
    }


def report(settings: ControlSettings, blocks: Mapping[str, list[Block]]) -> dict[str, Any]:
    """Print an environment's table; its figures, each row against the faster of the peer's."""
    peers = [row.name for row in rows(settings.cores) if row.is_peer]
    best = min(peers, key=lambda name: sum(block.seconds for block in blocks[name]))
    found = {name: figures(some, blocks[best], settings.steps) for name, some in blocks.items()}
    table(
        [settings.environment, "steps/s", f"of {best}", "CPU s/million", "last returns"],
        [
            [name, f"{one['steps_per_s']:.0f}", one["ratio"], f"{one['cpu_s_per_million']:.0f}",
             "-" if one["return"] is None else one["return"]]
            for name, one in found.items()
        ],
    )  # fmt: skip
    print(flush=True)
    return {"peer": best, "rows": found}


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--environments", help="some of them, by name")
    parser.add_argument("--cores", type=int, default=2, help="processor cores for each side")
    options: Namespace = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)
    logs = CACHE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    chosen = list(ENVIRONMENTS)[: 1 if options.quick else None]
    if options.environments:
        chosen = options.environments.split(",")
    elif importlib.util.find_spec("metaworld") is None:
        chosen = [name for name in chosen if not name.startswith("metaworld")]
    rounds, steps = (3, 2) if options.quick else (12, 4)
    results: dict[str, Any] = {"stable_baselines3": SB3_VERSION, "cores": len(cores)}
    targets: list[Target] = []
    for name in chosen:
        settings = ControlSettings(name, SEED, len(cores), options=ENVIRONMENTS[name])
        results[name] = report(settings, run(settings, rounds, steps, logs))
        ours = [row.name for row in rows(len(cores)) if not row.is_peer]
        ratio = max(results[name]["rows"][row]["ratio"] for row in ours)
        targets.append(Target(f"{name}: steps/s against Stable-Baselines3", ratio, TARGET))
    conclude("peers_sb3", results, targets, options)


if __name__ == "__main__":
    main()
