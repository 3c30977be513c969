"""Published throughputs of an RL system and its baselines, predicted from one of its steps.

The table is of RLinf (OSDI 2026, arXiv 2509.15965) on H100. Two constants are fitted to one row
alone, GRPO on a 7B model with 64 lanes (rollout 591 s, log-probabilities 102 s, training 368 s):
those of a trainer's passes, the defaults of `m2flow.models.work.Rates`. What generation attains is
from measured tables (`analytic.py`), so that the row's rollout is predicted too. The baseline's
step in the same row (646, 187, 393 s) gives three factors for baselines on veRL. Everything else is
predicted, none of it row by row.

A row is a workload on a number of lanes: 11 beside the fitted one. Its mode is right if the fixed
mode with the least predicted seconds is the one that the paper runs as its best; its throughput is
that of this mode. The other figures of a row (the modes not taken, the baselines) are printed too.

These rows count as fitted: what is not published of them was chosen with the table at hand. Figures
of other systems that nothing was fitted to stand apart (`paper_unseen.py`).

What is known of the workloads, from the paper and from recipes in RLinf's public repository, and
what is assumed (all of it chosen with the table at hand, so that only its agreement with sources
outside of it speaks for it):

* GRPO 7B (`qwen2.5-7b-grpo-megatron.yaml`): 512 prompts, 32 answers each, at most 28,672 tokens
  with 1,024 of a prompt; rollout on pairs of lanes, training on fours, 128 requests at once in a
  replica, four mini-batches. Throughput times step then is 7,654 tokens an answer, prompt included.
  Assumed: 150 tokens a prompt; 2 % of the answers reach the maximum.
* PPO 7B: the one published recipe for PPO (`qwen2.5-1.5b-ppo-megatron-dynamicbatch-4gpu.yaml`) has
  the row's maximum of 12,288 tokens with 512 of a prompt, 256 prompts, one answer each, 64 requests
  at once, one mini-batch. It is for a smaller model, so that batch and layout of the 7B row are a
  guess; with 512 prompts all three throughputs would be 1.2 to 1.6 times as large. Layouts are
  those of GRPO. Two passes (log-probabilities, values), two models trained; the published split.
* Qwen3-30B-A3B (`qwen3-30b-grpo-megatron.yaml`): groups of 16, rollout on four lanes, training on
  TP4 EP4 (on 128 lanes PP4 too, for which parts of 32 lanes have no room). Where trainers share the
  lanes, rollout has 0.3 of the memory and 64 requests at once; on lanes of its own, 128, the
  largest batch that the recipe captures. The fastest split that this model finds.
* Lengths of all answers are one distribution, cut at each row's maximum.
* States move to and from memory that is not pinned (the recipes' `optimizer_enable_pin: false`).
* Embodied: a step of the table is one decision of the policy in each environment: OpenVLA acts for
  one step at a time, OpenVLA-OFT for chunks of 8. Seconds of simulators and of acting are those of
  RLinf's public tests (`embodied_prices`). One epoch; mini-batches of 640 and
  16,384.
* An advantage in GRPO needs its whole group, so no answer is trained on before.
* Slime (colocated) has no published breakdown: it is predicted as the temporal mode is.
* Answers are dealt to replicas without looking, lengths in a group are independent; preemption, the
  reward's seconds, and the time in which all wait between two phases are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from embodied_prices import LIBERO, MANISKILL, OPENVLA, OPENVLA_OFT
from harness import Target, arguments, conclude, table
from paper_model import (
    Embodied,
    Parallel,
    Reasoning,
    Slower,
    best_spatial,
    embodied_hybrid,
    embodied_spatial,
    embodied_temporal,
    spatial,
    temporal,
)
from paper_plans import embodied_gain, reasoning_gain
from paper_unseen import figures as unseen_figures

from m2flow.models.lengths import Answers, fit_lengths
from m2flow.models.shape import KNOWN_MODELS
from m2flow.models.work import Rates
from m2flow.plan.profile.hardware import DEVICES

H100 = DEVICES["H100"]
FITTED_ROW = {"rollout": 591.0, "log-prob": 102.0, "train": 368.0}
FITTED_THROUGHPUT = 118_160.0
BASELINE_ROW = {"rollout": 646.0, "log-prob": 187.0, "train": 393.0}
STEPS_AT_256 = {"RLinf": (236.0, 30.0, 111.5), "veRL": (278.0, 108.0, 157.0)}
"""Published seconds of rollout, log-probabilities and training of the fitted workload."""

PROMPTS, GROUP, PROMPT_TOKENS = 512, 32, 150
TOKENS_PER_ANSWER = FITTED_THROUGHPUT * sum(FITTED_ROW.values()) / (PROMPTS * GROUP)
LENGTHS = fit_lengths(TOKENS_PER_ANSWER - PROMPT_TOKENS, 28_672 - 1024)


def answers(longest: int, longest_prompt: int) -> Answers:
    """The same distribution of lengths under another limit, prompts included."""
    return Answers(PROMPT_TOKENS, LENGTHS.cut(longest - longest_prompt))


GRPO_7B = Reasoning(
    KNOWN_MODELS["Qwen2.5-7B"], H100, PROMPTS * GROUP, GROUP, answers(28_672, 1024), 2, Parallel(4),
    128, 128,
)  # fmt: skip
PPO_7B = replace(
    GRPO_7B, number=256, group=1, answers=answers(12_288, 512), max_running=64, sharing=64,
    updates=1, passes=2, trained=2,
)  # fmt: skip
GRPO_MOE = Reasoning(
    KNOWN_MODELS["Qwen3-30B-A3B"], H100, 1536, 16, answers(20_480, 1024), 4,
    Parallel(4, 1, 4), 128, 64,
)  # fmt: skip
ON_MANISKILL = Embodied(OPENVLA, MANISKILL, H100, 256, 80, 32)
ON_LIBERO = Embodied(OPENVLA_OFT, LIBERO, H100, 512, 64, 2)
WITHIN = 0.25
"""Relative difference up to which a throughput counts as predicted."""

FIXED = ("temporal", "spatial", "hybrid")
VERL = Slower(*(BASELINE_ROW[phase] / FITTED_ROW[phase] for phase in FITTED_ROW))


@dataclass(frozen=True)
class Row:
    """A row of the published table.

    Attributes:
        published: throughput by mode; of baselines too.
        winner: the mode that the paper runs as its best.
    """

    name: str
    lanes: int
    work: Reasoning | Embodied
    published: dict[str, float]
    winner: str


ROWS = [
    *(
        Row("GRPO 7B", lanes, GRPO_7B, {"veRL": verl, "temporal": ours}, "temporal")
        for lanes, verl, ours in ((128, 159_697.0, 196_144.0), (256, 217_782.0, 303_905.0))
    ),
    *(
        Row("PPO 7B", lanes, PPO_7B, {"veRL": v, "temporal": t, "spatial": s}, "spatial")
        for lanes, v, t, s in (
            (32, 11_710.0, 12_531.0, 17_159.0),
            (64, 14_430.0, 16_013.0, 23_185.0),
            (128, 23_720.0, 27_644.0, 32_893.0),
        )
    ),
    *(
        Row("Qwen3-30B-A3B", lanes, GRPO_MOE, {"Slime": m, "temporal": t, "spatial": s}, winner)
        for lanes, m, t, s, winner in (
            (32, 14_018.0, 14_171.0, 18_389.0, "spatial"),
            (128, 35_422.0, 36_726.0, 33_965.0, "temporal"),
        )
    ),
    Row(
        "OpenVLA ManiSkill", 8, ON_MANISKILL,
        {"temporal": 18.55, "spatial": 16.52, "hybrid": 30.92}, "hybrid",
    ),
    *(
        Row("OpenVLA-OFT LIBERO", n, ON_LIBERO, {"SimpleVLA-RL": v, "temporal": t}, "temporal")
        for n, v, t in ((8, 27.4, 37.8), (16, 51.9, 74.1), (32, 56.0, 136.3))
    ),
]  # fmt: skip


def solved(seconds: Callable[[float], float], wanted: float) -> float:
    """The fraction at which falling seconds are the wanted ones."""
    low, high = 0.1, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) > wanted else (low, middle)
    return high


def fitted() -> Rates:
    """The rates at which the model gives what is fitted of the one row."""
    return Rates(
        forward=solved(lambda f: GRPO_7B.forward(64, Rates(forward=f)), FITTED_ROW["log-prob"]),
        training=solved(lambda f: GRPO_7B.training(64, Rates(training=f)), FITTED_ROW["train"]),
    )


def predicted(row: Row, rates: Rates) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of a step by mode, and what the mode chose."""
    work, lanes = row.work, row.lanes
    chosen: dict[str, str] = {}
    if isinstance(work, Embodied):
        seconds = {"temporal": embodied_temporal(work, lanes, rates, Slower())}
        seconds["SimpleVLA-RL"] = embodied_temporal(work, lanes, rates, VERL)
        seconds["spatial"], chosen["spatial"] = embodied_spatial(work, lanes, rates)
        seconds["hybrid"], chosen["hybrid"] = embodied_hybrid(work, lanes, rates)
        return seconds, chosen
    seconds = {"temporal": temporal(work, lanes, rates)}
    seconds["Slime"] = seconds["temporal"]
    seconds["veRL"] = temporal(work, lanes, rates, VERL)
    if work is PPO_7B:
        split = (lanes // 2, lanes // 8, lanes // 8)
        seconds["spatial"] = spatial(work, split, rates)
    else:
        seconds["spatial"], split = best_spatial(work, lanes, rates)
    chosen["spatial"] = ":".join(map(str, split))
    return seconds, chosen


def phases(rates: Rates) -> list[tuple[str, str, float, float, float]]:
    """The phases of the fitted workload on four times the lanes, beside the published ones."""
    ours = (
        GRPO_7B.rolling_out(256, rates, 128),
        GRPO_7B.forward(256, rates),
        GRPO_7B.training(256, rates),
    )
    found = []
    for system, slower in (("RLinf", Slower()), ("veRL", VERL)):
        factors = (slower.rollout, slower.forward, slower.training)
        for n, phase in enumerate(FITTED_ROW):
            seconds, published = ours[n] * factors[n], STEPS_AT_256[system][n]
            found.append((system, phase, seconds, published, seconds / published))
    return found


def gains(row: Row, rates: Rates, seconds: float) -> Iterator[tuple[object, ...]]:
    """What m2flow's own plan would gain in a row whose best fixed mode takes so long."""
    if isinstance(row.work, Embodied):
        found = {"not needed": embodied_gain(row.work, row.lanes)}
    else:
        found = {
            lengths: reasoning_gain(row.work, row.lanes, rates, lengths == "known")
            for lengths in ("unknown", "known")
        }
    for lengths, own in found.items():
        yield (
            row.name, row.lanes, lengths, own.best_fixed, own.fixed, own.seconds, own.gain,
            seconds / own.seconds, own.plan,
        )  # fmt: skip


def fit_again() -> Rates:
    """The fitted rates, which must be the product's own."""
    rates, defaults = fitted(), Rates()
    for name in ("forward", "training"):
        new, old = getattr(rates, name), getattr(defaults, name)
        print(f"fitted {name}: {new:.3f} of the peak (default {old:.3f})")
        assert abs(new - old) < 0.005, f"Rates has {old} for {name}, not {new:.3f}"
    rollout = GRPO_7B.rolling_out(64, rates, 128)
    published = FITTED_ROW["rollout"]
    print(f"its rollout: {rollout:.0f} s predicted, {published:.0f} s published")
    print(f"lengths: mean {LENGTHS.mean:.0f}, spread {LENGTHS.spread:.3f}, cut {LENGTHS.maximum}\n")
    return rates


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rates = fit_again()
    figures, modes, own = [], [], []
    for row in ROWS:
        seconds, chosen = predicted(row, rates)
        work = row.work
        amount = work.envs * work.steps if isinstance(work, Embodied) else work.tokens
        for mode, published in row.published.items():
            ours = amount / seconds[mode]
            figures.append((row.name, row.lanes, mode, ours, published, ours / published))
        fixed = {mode: seconds[mode] for mode in FIXED if mode in seconds}
        won, second = sorted(fixed, key=fixed.__getitem__)[:2]
        ratio = amount / seconds[row.winner] / row.published[row.winner]
        modes.append(
            (row.name, row.lanes, won, row.winner, won == row.winner, second,
             fixed[second] / fixed[won], ratio, abs(ratio - 1) <= WITHIN, chosen["spatial"])
        )  # fmt: skip
        if not options.quick:
            own += gains(row, rates, fixed[won])
    of_256 = phases(rates)
    table(("system", "phase on 256 lanes", "predicted s", "published s", "ratio"), of_256)
    print()
    table(("workload", "lanes", "system or mode", "predicted", "published", "ratio"), figures)
    print()
    header = (
        "workload", "lanes", "wins", "published", "right", "second", "behind", "throughput",
        "within 25 %", "spatial",
    )  # fmt: skip
    table(header, modes)
    print()
    header = (
        "workload", "lanes", "lengths", "best fixed plan", "seconds", "own plan's", "gain",
        "over the table's best mode", "own plan",
    )  # fmt: skip
    if own:
        table(header, own)
    unseen = [
        (one.source, one.what, one.predicted, one.published, one.ratio, one.assumed)
        for one in unseen_figures(rates)
    ]
    print()
    table(("never fitted", "figure", "predicted", "published", "ratio", "assumed"), unseen)
    close = sum(abs(one[4] - 1) <= WITHIN for one in unseen)
    print(f"\nof {len(unseen)} figures of other systems {close} are within 25 %")
    every = sum(abs(figure[-1] - 1) <= WITHIN for figure in figures)
    print(f"\nof all {len(figures)} figures {every} are within 25 %\n")
    conclude(
        "paper_tables",
        {
            "phases": of_256, "figures": figures, "figures_within": [every, len(figures)],
            "rows": modes, "own_plan": own, "never_fitted": unseen,
            "never_fitted_within": [close, len(unseen)],
        },
        [
            Target("winning mode right, share of rows", share(row[4] for row in modes), 0.9),
            Target("throughput within 25 %, share of rows", share(row[8] for row in modes), 2 / 3),
        ],
        options,
    )  # fmt: skip


def share(flags: Iterable[object]) -> float:
    """How many of them are true, of all."""
    known = [bool(flag) for flag in flags]
    return sum(known) / len(known)


if __name__ == "__main__":
    main()
