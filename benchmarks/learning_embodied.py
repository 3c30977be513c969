"""What embodied recipes that two cores can learn come to, and in what time.

Whole `m2flow train` commands as a user types them, two seeds each, one after the other: the
evaluation before training and those after, and the seconds of the command with everything that it
does, such as cloning. They run in an environment with the simulators, which is made on first use.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import CACHE, ROOT, Target, arguments, conclude, table
from peers.environment import simulators_python

from m2flow.observe.run_directory import read_metrics

SEEDS = (0, 1)
MINUTES = 10.0


@dataclass(frozen=True)
class Aim:
    """What a recipe is to come to with every seed.

    Attributes:
        figure: of the evaluations.
        end: least that it is at the end; None where only the rise counts.
        rise: least that it rises by.
    """

    figure: str
    end: float | None = None
    rise: float | None = None


RECIPES: Mapping[str, Aim] = {
    "ppo-mlp-reach": Aim("eval/success", end=0.8),
    "quickstart-embodied": Aim("eval/success", rise=0.5),
    "grpo-tiny-vla-table": Aim("eval/success", rise=0.25),
    "ppo-cnn-cartpole": Aim("eval/return", end=150.0),
    "sac-mlp-pendulum": Aim("eval/return", end=-250.0),
}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args()
    seeds = SEEDS[:1] if options.quick else SEEDS
    python = simulators_python(CACHE / "simulators")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in options.recipes:
        found[name] = {str(seed): _run(python, name, seed) for seed in seeds}
    table(
        ["recipe", "seed", "evaluations", "seconds"],
        [
            [name, seed, ", ".join(f"{x:.2f}" for x in one["evaluations"]), f"{one['seconds']:.0f}"]
            for name, some in found.items()
            for seed, one in some.items()
        ],
    )
    targets = [target for name, some in found.items() for target in _targets(name, some)]
    conclude("learning_embodied", found, targets, options)


def _targets(name: str, some: Mapping[str, Mapping[str, Any]]) -> list[Target]:
    aim, runs = RECIPES[name], [one["evaluations"] for one in some.values()]
    found = []
    if aim.end is not None:
        least = min(run[-1] for run in runs)
        found.append(Target(f"{name}: least {aim.figure} at the end", least, aim.end))
    if aim.rise is not None:
        least = min(run[-1] - run[0] for run in runs)
        found.append(Target(f"{name}: least rise of {aim.figure}", least, aim.rise))
    longest = max(one["seconds"] for one in some.values()) / 60
    return [*found, Target(f"{name}: minutes of the command", longest, MINUTES, at_most=True)]


def _run(python: Path, name: str, seed: int) -> dict[str, Any]:
    """A recipe's evaluations in order, the first one before training, and the command's seconds."""
    with tempfile.TemporaryDirectory(prefix="m2flow-learning-") as folder:
        run, start = Path(folder) / "run", time.monotonic()
        recipe = ROOT / "recipes" / f"{name}.yaml"
        command = [str(python), "-m", "m2flow", "train", str(recipe), "--run-dir", str(run)]
        subprocess.run(
            [*command, f"seed={seed}"], check=True, timeout=3600, stdout=subprocess.DEVNULL
        )
        seconds = time.monotonic() - start
        figure = RECIPES[name].figure
        rows = [float(row[figure]) for row in read_metrics(run) if figure in row]
    print(f"{name}, seed {seed}: {rows[0]:.2f} to {rows[-1]:.2f}, {seconds:.0f} s", flush=True)
    return {"evaluations": rows, "seconds": seconds}


if __name__ == "__main__":
    main()
