"""m2flow against TRL's GRPOTrainer on CPU: the same model, task, batch, algorithm and cores.

Both sides start from one checkpoint and train for real, in processes of their own (TRL in its own
environment, made on first use), on alternating blocks of steps: while one works, the others wait.
`addition` is the quick start's workload, `countdown` has answers of log-normal length, and `0.1 B`
is addition by a model of 0.1 billion random weights, on a quarter of the prompts: it is rewarded
for nothing, so every sample is trained on there and rewards are not compared.

What is left out of the work is told apart from what is done faster. Like for like stands first:
m2flow does all that TRL does. Then the m2flow side runs with everything on, and, one after another,
without dropping samples of zero advantage, without sharing what completions of a group have in
common, without sharing their prompt, and with the log-probability pass that TRL makes, which is
like for like again.
"""

from __future__ import annotations

import os
import statistics
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import CACHE, ROOT, Target, arguments, conclude, table
from peers.agreement import Agreement, compare_rewards
from peers.environment import TRL_VERSION, trl_python
from peers.side import Block, Side
from peers.starting_points import LARGE, starting_point
from peers.wire import Settings, StepRecord

SEED = 0


@dataclass(frozen=True)
class Row:
    """One side of a workload: what it is called, and what makes it differ from the others."""

    name: str
    module: str
    extra: dict[str, Any]

    @property
    def is_trl(self) -> bool:
        return self.module == "peers.trl_side"


@dataclass(frozen=True)
class Workload:
    """A task with its sizes, the sides that run it, and what m2flow has to reach on it.

    Attributes:
        target: samples a second over TRL's with everything on; None where that is not run.
        name: of the model, where it is not the task's own.
    """

    task: str
    max_new_tokens: int
    target: float | None
    rounds: int
    steps_per_round: int
    rows: tuple[Row, ...]
    prompts: int = Settings.prompts_per_step
    name: str = ""

    @property
    def called(self) -> str:
        return self.name or self.task

    @property
    def steps(self) -> int:
        """The first step of each side only warms it up; its rewards count, its time does not."""
        return 1 + self.rounds * self.steps_per_round


CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {
        "page_size": 32,
        "num_blocks": 2048,
        "max_batch_tokens": 2048,
        "max_requests_per_batch": 128,
    },
}
DROPPED: dict[str, Any] = {"drop_zero_advantage": True}
TRAINED: dict[str, Any] = {"drop_zero_advantage": False}
RECOMPUTED: dict[str, Any] = {"drop_zero_advantage": False, "recompute_logprobs": True}
SWITCHES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("m2flow", DROPPED, "prefix"),
    ("m2flow, every sample trained", TRAINED, "prefix"),
    ("m2flow, also only prompts shared", TRAINED, "prompt"),
    ("m2flow, also nothing shared", TRAINED, "none"),
    ("m2flow, also a log-probability pass", RECOMPUTED, "none"),
)
"""Each row switches one more saving off; the last one does all the work that TRL does."""

ON, LIKE_FOR_LIKE = SWITCHES[0][0], SWITCHES[-1][0]
LEVEL = 1.0
"""What m2flow has to reach like for like."""


def workloads(options: Namespace) -> tuple[Workload, ...]:
    """All workloads; the quick ones have fewer steps and fewer rows.

    Every row stays alive with its two or more processes, so the second workload, whose answers
    also take memory, has only the rows that matter most.
    """
    extra = CONTINUOUS if options.trl_generation == "continuous" else {}
    trl = Row("TRL", "peers.trl_side", extra)
    on, trained, prompts, alone, everything = (
        Row(
            name,
            "peers.m2flow_side",
            {"mode": options.mode, "training": {**training, "sharing": sharing}},
        )
        for name, training, sharing in SWITCHES
    )
    if options.quick:
        return (
            Workload("addition", 24, 1.6, 3, 3, (trl, everything, on)),
            Workload("countdown", 384, 2.5, 2, 1, (trl, everything, on)),
            Workload("addition", 24, None, 2, 1, (trl, everything), 2, LARGE),
        )
    return (
        Workload("addition", 24, 1.6, 16, 5, (trl, everything, on, trained, prompts, alone)),
        Workload("countdown", 384, 2.5, 8, 2, (trl, everything, on, prompts)),
        Workload("addition", 24, None, 5, 1, (trl, everything, trained), 8, LARGE),
    )


def run(workload: Workload, cores: int, logs: Path) -> dict[str, list[Block]]:
    """The blocks of each row, the warming one first. All rows are alive; one works at a time."""
    checkpoint = starting_point(workload.task, workload.name)
    here = str(Path(__file__).parent)
    search_path = os.pathsep.join([here, str(ROOT / "src")])
    with ExitStack() as stack:
        sides = {}
        for number, row in enumerate(workload.rows):
            settings = Settings(
                workload.task,
                str(checkpoint),
                workload.max_new_tokens,
                SEED,
                workload.steps,
                cores,
                prompts_per_step=workload.prompts,
                extra=row.extra,
            )
            python = trl_python(CACHE / "trl") if row.is_trl else sys.executable
            log = logs / f"{workload.called.replace(' ', '')}-{number}.log"
            sides[row.name] = stack.enter_context(
                Side(row.module, Path(python), settings, search_path, log)
            )
        for side in sides.values():
            side.ready()
        blocks = {name: [side.run(1)] for name, side in sides.items()}
        for _ in range(workload.rounds):
            for name, side in sides.items():
                blocks[name].append(side.run(workload.steps_per_round))
    return blocks


@dataclass(frozen=True)
class Figures:
    """What one row came to; times leave the warming step out.

    Attributes:
        ratio: samples per second over TRL's, the median over rounds.
        ratio_quartiles: of the rounds.
        cpu_seconds_per_step: of all the side's processes; what a busy machine disturbs least.
        tokens_mean: completion tokens a sample.
        tokens_histogram: samples by length: up to 8 tokens, 16, 32 and so on.
        idle_share: share of samples whose group's rewards are all alike (advantage zero).
    """

    samples_per_s: float
    seconds_per_step: float
    cpu_seconds_per_step: float
    ratio: float
    ratio_quartiles: list[float]
    tokens_mean: float
    tokens_p99: int
    tokens_max: int
    tokens_histogram: dict[int, int]
    idle_share: float

    @classmethod
    def of(cls, blocks: list[Block], peer: list[Block], samples_per_prompt: int) -> Figures:
        """The figures of a row against the blocks of the peer."""
        timed, steps = blocks[1:], _steps(blocks[1:])
        seconds = sum(block.seconds for block in timed)
        ratios = [b.seconds / a.seconds for a, b in zip(timed, peer[1:], strict=True)]
        tokens = sorted(n for step in _steps(blocks) for n in step.num_tokens)
        return cls(
            samples_per_s=sum(len(step.rewards) for step in steps) / seconds,
            seconds_per_step=statistics.median(step.seconds for step in steps),
            cpu_seconds_per_step=sum(block.cpu_seconds for block in timed) / len(steps),
            ratio=statistics.median(ratios),
            ratio_quartiles=statistics.quantiles(ratios, n=4),
            tokens_mean=statistics.mean(tokens),
            tokens_p99=tokens[int(0.99 * len(tokens))],
            tokens_max=tokens[-1],
            tokens_histogram=_histogram(tokens),
            idle_share=_idle_share(_steps(blocks), samples_per_prompt),
        )


def _steps(blocks: Sequence[Block]) -> list[StepRecord]:
    return [record for block in blocks for record in block.records]


def _histogram(lengths: Sequence[int]) -> dict[int, int]:
    """How many lengths lie in (bound / 2, bound], for bounds that are powers of two from 8 on."""
    counted = Counter(max(8, 1 << (length - 1).bit_length()) for length in lengths)
    return dict(sorted(counted.items()))


def _idle_share(steps: Sequence[StepRecord], group: int) -> float:
    groups = [
        step.rewards[at : at + group] for step in steps for at in range(0, len(step.rewards), group)
    ]
    return sum(min(rewards) == max(rewards) for rewards in groups) / len(groups)


def report(
    workload: Workload, blocks: dict[str, list[Block]]
) -> tuple[dict[str, Any], list[Target]]:
    """Print the tables of a workload; its results and its targets."""
    peer = blocks["TRL"]
    group = Settings.samples_per_prompt
    figures = {name: Figures.of(some, peer, group) for name, some in blocks.items()}
    agreement = {}
    if ON in blocks:
        agreement = compare_rewards(_steps(peer), _steps(blocks[ON]), group)
    print(f"\n{workload.called}: {workload.steps - 1} steps of {workload.prompts} x {group}")
    table(
        ["", "samples/s", "of TRL", "s/step", "CPU s/step", "tokens", "p99", "max", "idle"],
        [
            [
                name,
                f"{row.samples_per_s:.0f}",
                f"{row.ratio:.2f}",
                row.seconds_per_step,
                row.cpu_seconds_per_step,
                f"{row.tokens_mean:.1f}",
                row.tokens_p99,
                row.tokens_max,
                f"{row.idle_share:.0%}",
            ]
            for name, row in figures.items()
        ],
    )
    if agreement:
        table(
            ["mean reward", "TRL", "m2flow", "difference", "noise"],
            [[f"{end} {at.steps} steps", at.peer, at.ours, at.difference, at.noise]
             for end, at in agreement.items()],
        )  # fmt: skip
    results = {
        "rows": {name: vars(row) for name, row in figures.items()},
        "rewards": {end: vars(at) for end, at in agreement.items()},
        "reward_of_each_step": {
            name: [round(statistics.mean(step.rewards), 4) for step in _steps(some)]
            for name, some in blocks.items()
        },
    }
    return results, list(_targets(workload, figures, agreement))


def _targets(
    workload: Workload, figures: dict[str, Figures], agreement: dict[str, Agreement]
) -> Iterator[Target]:
    """Like for like first."""
    name, ratio = workload.called, figures[LIKE_FOR_LIKE].ratio
    yield Target(f"{name}: like for like, samples/s against TRL", ratio, LEVEL)
    if workload.target is not None:
        yield Target(f"{name}: samples/s against TRL", figures[ON].ratio, workload.target)
    for end, at in agreement.items():
        yield Target(f"{name}: rewards of the {end} steps agree (1: yes)", float(at.holds), 1)


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", choices=("addition", "countdown", LARGE), help="one workload alone"
    )
    parser.add_argument("--mode", default="collocated", help="m2flow's plan")
    parser.add_argument(
        "--trl-generation",
        default="generate",
        choices=("generate", "continuous"),
        help="TRL's way to generate: transformers' generate, or its continuous batching",
    )
    parser.add_argument("--cores", type=int, default=2, help="processor cores for each side")
    options: Namespace = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)
    logs = CACHE / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "trl": TRL_VERSION,
        "cores": len(cores),
        "mode": options.mode,
        "trl_generation": options.trl_generation,
    }
    targets: list[Target] = []
    for workload in workloads(options):
        if options.only in (None, workload.called):
            results[workload.called], verdicts = report(workload, run(workload, len(cores), logs))
            targets += verdicts
    conclude("peers_trl", results, targets, options)


if __name__ == "__main__":
    main()
