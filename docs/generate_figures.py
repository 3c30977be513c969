"""Writes the tables of measured figures from `benchmarks/results`, with the commit of each.

    python docs/generate_figures.py            # write them
    python docs/generate_figures.py --check    # exit 1 where a page is out of date

Every table of `PAGES` between two marks `figures: NAME` is made by the function of that name here.
No figure of them is typed by hand.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
PAGES = (
    PROJECT / "README.md",
    PROJECT / "docs" / "explanation" / "measured.md",
    PROJECT / "docs" / "explanation" / "analytic-profiles.md",
    PROJECT / "docs" / "explanation" / "comparison.md",
    PROJECT / "recipes" / "README.md",
)
MARKED = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures: \2 -->)", re.DOTALL)

MODES = ("collocated", "disaggregated", "hybrid")
STEPS = {
    "quickstart": "quick start",
    "ppo": "PPO with a critic",
    "long_tail": "GRPO, answers with a long tail",
    "judged": "GRPO, a heavy verifier",
    "cart_pole": "episodes of a batched simulator",
}
OF_RECIPES = {
    "wider": "the quick start with a wider model",
    "with_reference": "with log-probabilities computed again, and a reference",
    "one_step_ahead": "the quick start, one step ahead",
    "ppo_one_minibatch": "PPO with one mini-batch",
}
IN_TURNS = {
    "fast": "a fast simulator",
    "slow": "a slow simulator",
    "balanced": "environments as slow as the policy",
    "one_sided": "environments ten times as slow",
    "balanced_on_one_lane": "the first on one lane, environments in a process",
    "one_sided_on_one_lane": "the second on one lane, environments in a process",
}

Table = tuple[str, list[Sequence[str]]]
"""The cells of the header, separated by " | ", and those of each row."""


@cache
def read(name: str) -> Any:
    """What a benchmark has written."""
    return json.loads((PROJECT / "benchmarks" / "results" / f"{name}.json").read_text())


def target(name: str, what: str) -> float:
    """The value of one target of a result."""
    (value,) = (one["value"] for one in read(name)["targets"] if one["name"] == what)
    return float(value)


def table(rows: Table) -> str:
    """The lines of a Markdown table."""
    header = rows[0].split(" | ")
    lines = [header, ["---"] * len(header), *rows[1]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def quickstart_modes() -> Table:
    """Rates of the quick start under each mode."""
    found = read("quickstart_modes")["results"]
    return "mode | samples/s | against `eager` | idle share of a lane", [
        (f"`{mode}`", f"{rate:,.0f}", f"{found['against_eager'][mode]:.2f}",
         f"{found['idle_share'][mode]:.0%}")
        for mode, rate in found["samples_per_s"].items()
    ]  # fmt: skip


def auto() -> Table:
    """Whole runs under `auto` beside those under fixed modes."""
    rows = []
    for name, title in STEPS.items():
        found = read("auto")["results"][name]
        fixed = [median(found["seconds"][mode]) for mode in MODES]
        ratios = (
            target("auto", f"{name}: auto {words}")
            for words in (
                "over the best mode, whole run",
                "with a stored profile over the best mode, whole run",
                "over the best mode, from step 20 on",
            )
        )
        rows.append(
            (title, f"{min(fixed):.1f}", f"{max(fixed):.1f}", *(f"{one:.2f}" for one in ratios),
             f"{found['noise_floor']:.0%}")
        )  # fmt: skip
    header = "workload | best fixed mode | worst | `auto` | with a profile | settled | noise"
    return header, rows


def modes(*files: str) -> Table:
    """Milliseconds a step under each mode."""
    rows = []
    for name, found in (pair for file in files for pair in read(file)["results"].items()):
        if "milliseconds_per_step" not in found:
            continue
        taken = found["milliseconds_per_step"]
        cells = [f"{taken[mode]:,.0f}" for mode in (*MODES, "auto")]
        title = (STEPS | OF_RECIPES | IN_TURNS)[name]
        rows.append((title, *cells, f"{found['predicted_milliseconds']['auto']:,.0f}"))
    header = "workload | `collocated` | `disaggregated` | `hybrid` | `auto` | predicted"
    return header, rows


def groups() -> Table:
    """Milliseconds of a rollout in one group of environments and in several that take turns."""
    rows = []
    for name, found in read("embodied")["results"].items():
        if "milliseconds_a_rollout" not in found:
            continue
        taken = found["milliseconds_a_rollout"]
        saved = found["saved_seconds_of_a_step"]["2 groups"]
        cells = [f"{taken[count]:,.0f}" for count in ("1 group", "2 groups", "4 groups")]
        rows.append((IN_TURNS[name], *cells, f"{1e3 * saved['predicted']:,.0f}",
                     f"{1e3 * saved['measured']:,.0f}", f"{found['noise_floor']:.0%}"))  # fmt: skip
    return "workload | 1 group | 2 | 4 | saved by 2, predicted | measured | noise", rows


def stepping_aside() -> Table:
    """Milliseconds in which environments of a lane make way and come back."""
    parts = ("save", "free", "make", "restore")
    rows = [
        (f"`{name}`", f"{found['megabytes given back']:,.0f}",
         *(f"{found[f'milliseconds to {part}']:,.0f}" for part in parts))
        for name, found in read("embodied_aside")["results"]["stepping_aside"].items()
    ]  # fmt: skip
    return "eight in two processes | MB given back | ms to save | to end | to make | to go on", rows


def never_fitted() -> Table:
    """Published figures of other systems that no price was fitted to."""

    def short(value: float) -> str:
        rounded = float(f"{value:.3g}")
        return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"

    rows = [
        (f"{source}: {what}", short(predicted), short(published), f"{ratio:.2f}", assumed)
        for source, what, predicted, published, ratio, assumed in read("paper_tables")["results"][
            "never_fitted"
        ]
    ]
    return "figure | predicted | published | ratio | assumed", rows


LANES = (16, 64, 128)
"""That were emulated."""


def emulated() -> Table:
    """Seconds a step on many lanes that wait instead of computing."""
    rows = []
    for step, title in (("grpo_7b", "GRPO, 7B"), ("ppo_7b", "PPO, 7B"), ("openvla", "OpenVLA")):
        for lanes in LANES:
            found = read(f"emulated_{lanes}")["results"][f"{step} on {lanes}"]
            taken, predicted = found["seconds_per_step"], found["predicted_seconds"]
            best = min(MODES, key=taken.__getitem__)
            same = " (the same plan as `auto`)" if predicted[best] == predicted["auto"] else ""
            others = min(taken[plan] for plan in taken if plan not in (*MODES, "auto"))
            rows.append(
                (title, str(lanes), f"{taken[best]:.2f}{same}", f"{others:.2f}",
                 f"{taken['auto']:.2f}", f"{predicted['auto']:.2f}")
            )  # fmt: skip
    return "step | lanes | best fixed mode | best of the other plans | `auto` | predicted", rows


PUBLISHED_GAINS = {"collocated": 1.67, "disaggregated": 1.87}
"""Seconds of the other modes over the hybrid's, OpenVLA on ManiSkill, 8 GPUs (arXiv 2509.15965)."""


def emulated_aims() -> Table:
    """What the emulated steps are to show beside what they did; figures are in the steps' order."""
    gained = "steps of 3 in which `auto` is 15 % faster than the best fixed mode"
    rows: dict[str, list[str]] = {
        **{f"OpenVLA: `{mode}` over `hybrid`": [f"{gain}, published on 8 GPUs"]
           for mode, gain in PUBLISHED_GAINS.items()},
        gained: ["2"],
        "`auto` over the best of all plans": ["1.03 at most"],
        "worst error of a prediction": ["5 % at most"],
        "control plane's share of a step under `auto`": ["5 % at most, on 128"],
    }  # fmt: skip
    for lanes in LANES:
        found = list(read(f"emulated_{lanes}")["results"].values())
        taken = [one["seconds_per_step"] for one in found]
        predicted = [one["predicted_seconds"] for one in found]
        errors = [
            max(abs(says[plan] / seconds - 1) for plan, seconds in took.items())
            for took, says in zip(taken, predicted, strict=True)
        ]
        shares = [one["control_seconds_per_step"]["auto"] / one["seconds_per_step"]["auto"]
                  for one in found]  # fmt: skip
        cells = [
            *(f"{taken[-1][mode] / taken[-1]['hybrid']:.2f}" for mode in PUBLISHED_GAINS),
            str(sum(one["best_fixed_over_auto"] >= 1.15 for one in found)),
            ", ".join(f"{one['auto_over_best_of_all']:.3f}" for one in found),
            ", ".join(f"{100 * error:.1f} %" for error in errors),
            ", ".join(f"{100 * share:.1f} %" for share in shares),
        ]
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    header = "figure (GRPO, PPO, OpenVLA) | aim | 16 lanes | 64 lanes | 128 lanes"
    return header, [(name, *cells) for name, cells in rows.items()]


def peers() -> Table:
    """Rates beside TRL's."""
    results = read("peers_trl")["results"]
    rows = results["addition"]["rows"]
    long_tail = target("peers_trl", "countdown: samples/s against TRL")
    alike = "like for like, samples/s against TRL"
    return "comparison | figure", [
        (
            (
                f"m2flow against TRL {results['trl']} on two cores, samples/s: the quick start, "
                "like for like (every sample trained, nothing shared within a group, TRL's "
                "log-probability pass)"
            ),
            f"{target('peers_trl', f'addition: {alike}'):.2f} times",
        ),
        (
            "the same, without the log-probability pass, which the step does not need",
            f"{rows['m2flow, also nothing shared']['ratio']:.1f} times",
        ),
        (
            "the same, as the recipe is: what teaches nothing is skipped, prefixes are shared",
            f"{rows['m2flow']['ratio']:.1f} times",
        ),
        (
            "m2flow against TRL on two cores, samples/s: a model of 0.1 B, like for like",
            f"{target('peers_trl', f'0.1 B: {alike}'):.1f} times",
        ),
        (
            "m2flow against TRL on two cores, samples/s: answers with a long tail, like for like",
            f"{target('peers_trl', f'countdown: {alike}'):.1f} times",
        ),
        (
            "the same, as the recipe is",
            f"{long_tail:.1f} times",
        ),
    ]


def overhead() -> Table:
    """Rates beside a plain loop's, and beside TRL's."""
    header, rows = peers()
    share = target("overhead", "samples/s of the flow against the plain loop")
    what = "m2flow on one lane against a plain loop over the same objects, samples/s"
    return header, [(what, f"{share:.2f} times"), *rows]


def mechanisms() -> Table:
    """What each part costs or gains."""
    hand_over = read("links")["results"]["hand_over_us"]
    against_raw = (
        hand_over[f"m2flow/copied/{size}"] / hand_over[f"raw/copied/{size}"]
        for size in ("1 KiB", "1 MiB", "100 MiB")
    )
    longer = read("mechanisms")["results"]["times_as_long"]
    channel = target("links", "channel put and get of 1 KiB, ms")
    faster = target("links", "times as fast as Ray's queue at 1 KiB")
    engine = target("engine_scale", "events per second of the engine alone")
    return "what | figure", [
        (
            "a call sent to a lane and its end known, median",
            f"{target('links', 'dispatch of a call, p50, ms'):.2f} ms",
        ),
        (
            ("a tensor handed from lane to lane of one machine, against raw pooled shared memory: "
            "1 KiB, 1 MiB, 100 MiB"),
            f"{', '.join(f'{one:.2f}' for one in against_raw)} times",
        ),
        (
            "put and get of 1 KiB through a `Channel`",
            f"{channel:.2f} ms, {faster:.1f} times as fast as Ray's queue",
        ),
        (
            "weights of 200 MB published to another lane, against the rate of a plain copy",
            f"{target('links', 'publish, share of the rate of a copy'):.2f}",
        ),
        (
            "a step without pipelining (GRPO with a verifier that computes)",
            f"{longer['grpo']['pipelining off']:.2f} times as long",
        ),
        (
            "a loop of environment and policy without fusing",
            f"{longer['playing']['fused loops off']:.1f} times as long",
        ),
        (
            (f"engine alone, {read('engine_scale')['results']['lanes']:,} lanes, 100,000 items a "
            "step"),
            f"{round(engine, -3):,.0f} events/s",
        ),
        (
            "from the command to the first stage call, two lanes",
            f"{target('start_up', 'seconds to the first stage call'):.1f} s",
        ),
        ("a span of the timeline: made, sent, written",
         f"{target('timeline', 'us a span, all parts together'):.0f} µs"),
    ]  # fmt: skip


def learning() -> Table:
    """Held-out accuracy before and after, by algorithm, precision and layout."""
    said = {
        "grpo": "nothing",
        "grpo, bfloat16": "`model.dtype=bfloat16`",
        "grpo, LoRA": "`model.lora_rank=16 optimizer.learning_rate=3e-3`",
        "dapo": "`algorithm.name=dapo`",
        "ppo": "`ppo_quickstart` in place of it",
        "grpo, staleness 1": "`max_staleness=1 training.recompute_logprobs=true`, disaggregated",
        "grpo, staleness 2": "`max_staleness=2 training.recompute_logprobs=true`, disaggregated",
        "grpo, mixture of experts in ep2": "a Qwen3 mixture of experts, `layouts.learner=ep2`",
    }
    return "what is said beside the recipe | seed 0 | seed 1", [
        (said[name], *(f"{begin:.3f} to {end:.3f}" for begin, end in seeds.values()))
        for name, seeds in read("learning")["results"].items()
    ]


RETURNS = ("ppo-cnn-cartpole", "sac-mlp-pendulum")
"""Recipes of tasks that have no success."""


def learning_embodied() -> Table:
    """Evaluations of embodied recipes before and during training, and the command's seconds."""

    def said(one: dict[str, Any]) -> str:
        digits = 2 if max(map(abs, one["evaluations"])) <= 1 else 0
        return f"{', '.join(f'{x:.{digits}f}' for x in one['evaluations'])}; {one['seconds']:.0f} s"

    return "recipe, and what its evaluations say | seed 0 | seed 1", [
        (f"`{name}`, `{'eval/return' if name in RETURNS else 'eval/success'}`",
         *map(said, seeds.values()))
        for name, seeds in read("learning_embodied")["results"].items()
    ]  # fmt: skip


def in_short() -> Table:
    """What README says of all that."""
    shares = read("quickstart_modes")["results"]["against_eager"]
    whole = [target("auto", f"{name}: auto over the best mode, whole run") for name in STEPS]
    alike = target("peers_trl", "addition: like for like, samples/s against TRL")
    rate = target("peers_trl", "addition: samples/s against TRL")
    plain = target("overhead", "samples/s of the flow against the plain loop")
    return "on two CPU cores | figure", [
        (
            "the quick start under the best fixed mode, against one process",
            f"{max(shares.values()):.2f} times the samples/s",
        ),
        (
            (
                "`auto` with nothing known beforehand, against the best fixed mode of each of five "
                "workloads, whole runs"
            ),
            f"{min(whole):.2f} to {max(whole):.2f} times the seconds",
        ),
        (
            "the quick start against TRL, like for like: the same task, model, budget and passes",
            f"{alike:.2f} times the samples/s",
        ),
        (
            "the same, as the recipe is: what teaches nothing is skipped, prefixes are shared",
            f"{rate:.1f} times the samples/s",
        ),
        (
            "one lane against a plain loop over the same objects: what flow, engine and lane cost",
            f"{plain:.2f} times the samples/s",
        ),
        (
            "from the command to the first stage call, two lanes",
            f"{target('start_up', 'seconds to the first stage call'):.1f} s",
        ),
    ]


def faults() -> Table:
    """What goes on when something breaks: long runs, simulated crashes."""

    def grown(name: str) -> str:
        what = ("memory of the launcher", "memory of all", "handles of all")
        most = (f"{target(name, f'growth, {one}'):.2f}" for one in what)
        slopes = read(name)["results"].get("trends", {})
        if not slopes:  # of a result from before errors were told
            trends = [f"{100 * target(name, f'trend an hour, {one}'):+.0f} %" for one in what]
        else:
            trends = [f"{100 * a:+.0f} ± {100 * b:.0f} %" for a, b in map(slopes.get, what)]
        return f"{', '.join(most)}; {', '.join(trends)}"

    schedules = read("crash_schedules")["results"]
    fuzzed = read("fuzz")["results"].values()
    cases = sum(one["cases"] for one in fuzzed)
    lost = schedules["lanes lost"]
    broken = target("crash_schedules", "schedules that break a promise")
    minutes = {
        "soak": "the quick start for 30 minutes, a lane killed each minute",
        "soak_embodied": "an embodied run for 30 minutes, a lane or a process of simulators killed "
        "each minute",
    }
    back = target("recovery", "seconds until back with a spare, the longest")
    runs = read("recovery")["results"]
    calm, long = (
        f"{median(run['step'] for name in (kind, f'{kind}, twin') for run in runs[name]):.2g} s"
        for kind in ("undisturbed", "long steps")
    )
    disturbed = {
        calm: "the steps disturbed, with a spare",
        f"{calm}, with `spare_lanes=0`": "the steps disturbed",
        long: "long steps disturbed, with a spare",
        f"{long}, with `spare_lanes=0`": "long steps disturbed",
    }
    left = "most of the last third over most of the second, and trend in an hour"
    return f"what | {left}: launcher's memory, all memory, handles", [
        *((words, grown(name)) for name, words in minutes.items()),
        ("a lane of the quick start is killed: seconds until new work", f"{back:.1f} at most"),
        *(
            (
                f"share of the time that is effective, a lane killed every tenth step of {steps}",
                f"{target('recovery', f'effective time at a tenth of {what}'):.3f}",
            )
            for steps, what in disturbed.items()
        ),
        (
            f"{schedules['schedules']:,} simulated schedules, with {lost:,} lanes lost",
            f"{broken:.0f} break a promise",
        ),
        (
            f"{cases:,} files and messages of {len(fuzzed)} kinds, with mutated bytes",
            "each read rightly, or refused in one line",
        ),
    ]


def chaos() -> Table:
    """What became of whole runs of which somebody was hit, by who that was."""
    found = list(read("chaos")["results"].values())
    seeds = [one for one in found if "victim" in one]
    others = [one["outcome"] for one in found if "victim" not in one]

    def said(some: Sequence[Any], name: str) -> str:
        return ", ".join(sorted({one[name] for one in some}))

    rows: list[Sequence[str]] = []
    for victim in sorted({one["victim"] for one in seeds}):
        some = [one for one in seeds if one["victim"] == victim]
        ends = [one["outcome"] for one in some]
        counts = [str(ends.count(end)) for end in ("went on", "resumed", "failed")]
        rows.append((victim, said(some, "phase"), said(some, "workload"), *counts))
    if others:
        passed = others.count("passed")
        ends = [f"{passed} passed", "", str(len(others) - passed)]
        rows.append(("whom a test names: the slow tests without a seed", "", "", *ends))
    header = "who is hit | when | workload | went on by itself | went on with `--resume`"
    return f"{header} | failed", rows


def generation() -> Table:
    """Tokens a second of the native engine beside others."""
    found = read("generation")["results"]
    others = {
        "generate": "transformers' `generate`",
        "continuous": "its continuous batching",
        "vllm": "vLLM's CPU build",
    }
    rows = []
    for model in ("0.8 M", "0.1 B"):
        if model in found:
            native = found[model]["native"]
            ratios = (found[model][other]["native_is_so_many_times_as_fast"] for other in others)
            rows.append(
                (model, f"{native['tokens_per_s']:,.0f}", *(f"{one:.2f}" for one in ratios),
                 f"{native['share_of_the_limit']:.0%}", f"{found[model]['noise_floor']:.0%}")
            )  # fmt: skip
    header = f"parameters | tokens/s | times as fast as {' | as '.join(others.values())}"
    return f"{header} | of the limit | noise", rows


def training() -> Table:
    """Mini-batches of the packed trainer beside those of a padded loop."""
    rows = []
    for model, found in read("training")["results"].items():
        packed, unshared = found["packed"], found["packed, no prefix"]
        rows.append(
            (model, f"{packed['tokens/s']:,.0f}", f"{packed['times the padded loop']:.2f}",
             f"{unshared['times the padded loop']:.2f}", f"{unshared['of the matrix rate']:.0%}")
        )  # fmt: skip
    header = "parameters | tokens/s | times as fast as a padded loop | a group's prompt computed"
    return f"{header} for each answer | then of a matrix product", rows


def peers_sb3() -> Table:
    """Environment steps a second beside Stable-Baselines3's."""
    rows = []
    for name, found in read("peers_sb3")["results"].items():
        if ":" not in name:
            continue
        ours = {row: one for row, one in found["rows"].items() if row.startswith("m2flow")}
        peer = found["rows"][found["peer"]]
        best = max(ours, key=lambda row: ours[row]["ratio"])
        rows.append(
            (f"`{name}`", f"{ours[best]['steps_per_s']:,.0f} ({best.removeprefix('m2flow, ')})",
             f"{peer['steps_per_s']:,.0f}", f"{ours[best]['ratio']:.2f}",
             f"{ours[best]['cpu_s_per_million']:,.0f}", f"{peer['cpu_s_per_million']:,.0f}")
        )  # fmt: skip
    header = "environment | m2flow, steps/s | Stable-Baselines3 | times as fast"
    return f"{header} | CPU seconds for a million steps | Stable-Baselines3", rows


SCRIPTS = {
    "fuzz": "tests/fuzz/mutations.py",
    "soak_embodied": "benchmarks/soak.py",
    "chaos": "tests/chaos/test_seeded_runs.py",
}
"""What measures where that is no benchmark of the same name."""

TABLES: dict[str, tuple[Callable[[], Table], Sequence[str]]] = {
    "in_short": (in_short, ("quickstart_modes", "auto", "peers_trl", "overhead", "start_up")),
    "quickstart_modes": (quickstart_modes, ("quickstart_modes",)),
    "auto": (auto, ("auto",)),
    "modes": (partial(modes, "modes", "modes_recipes"), ("modes", "modes_recipes")),
    "embodied": (partial(modes, "embodied"), ("embodied",)),
    "groups": (groups, ("embodied",)),
    "stepping_aside": (stepping_aside, ("embodied_aside",)),
    "never_fitted": (never_fitted, ("paper_tables",)),
    "emulated": (emulated, tuple(f"emulated_{lanes}" for lanes in LANES)),
    "emulated_aims": (emulated_aims, tuple(f"emulated_{lanes}" for lanes in LANES)),
    "peers": (peers, ("peers_trl",)),
    "overhead": (overhead, ("overhead", "peers_trl")),
    "mechanisms": (mechanisms, ("links", "mechanisms", "engine_scale", "start_up", "timeline")),
    "generation": (generation, ("generation",)),
    "training": (training, ("training",)),
    "peers_sb3": (peers_sb3, ("peers_sb3",)),
    "learning": (learning, ("learning",)),
    "learning_embodied": (learning_embodied, ("learning_embodied",)),
    "chaos": (chaos, ("chaos",)),
    "faults": (faults, ("soak", "soak_embodied", "recovery", "crash_schedules", "fuzz")),
}  # fmt: skip
"""By name what makes a table, and the results that it is made from."""


def generated(name: str, page: Path) -> str:
    """A table, and below it links to what measured its figures and to the results, with commits."""
    make, files = TABLES[name]

    def link(path: str) -> str:
        return f"[{Path(path).name}]({os.path.relpath(PROJECT / path, page.parent)})"

    names = (read(file)["benchmark"] for file in files)
    scripts = dict.fromkeys(SCRIPTS.get(name, f"benchmarks/{name}.py") for name in names)
    results = (
        f"{link(f'benchmarks/results/{file}.json')} at {read(file)['commit']}" for file in files
    )
    source = f"Measured by {', '.join(map(link, scripts))}: {', '.join(results)}."
    return f"\n{table(make())}\n\n{source}\n\n"


def up_to_date(page: Path) -> str:
    """The text of a page with its tables as they should be."""
    return MARKED.sub(
        lambda found: found[1] + generated(found[2], page) + found[4], page.read_text()
    )


def main() -> int:
    """Write the pages, or with `--check` say which are out of date."""
    stale = [page for page in PAGES if page.read_text() != up_to_date(page)]
    for page in stale:
        if "--check" in sys.argv:
            print(f"{page} is out of date: python docs/generate_figures.py")
        else:
            page.write_text(up_to_date(page))
            print(f"wrote {page}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
