"""The fixed modes on the quick start, on two lanes of one core each, against one process.

Every mode takes the same steps from the same model with the same seeds, in alternating blocks. The
one process (`eager`) may use both cores through torch's threads.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import ray
from harness import Target, arguments, conclude, table
from starting_point import quickstart

from m2flow.runtime.driver.launch import Run, launch
from m2flow.simulation.time_account import where_the_time_went
from m2flow.workloads.reasoning.flow import recipe_flow

MODES = ("eager", "collocated", "disaggregated", "hybrid")
BLOCK = 5


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    blocks = 3 if options.quick else 8
    recipe, experiment, source = quickstart()
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    idle: dict[str, list[float]] = {mode: [] for mode in MODES}
    first_rewards: dict[str, list[float]] = {}
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        ray.init(num_cpus=2 * len(MODES), include_dashboard=False, logging_level="ERROR")
        runs: dict[str, Run] = {}
        for mode in reversed(MODES):  # the eager one last, since it loads in this process
            flow = recipe_flow(recipe, source, experiment.rewards)
            runs[mode] = stack.enter_context(
                launch(flow, items_per_step=recipe.prompts_per_step, mode=mode, lanes="cpu:2")
            )
        for number in range(blocks + 1):
            steps = range(number * BLOCK, (number + 1) * BLOCK)
            batches = [experiment.batch(step) for step in steps]
            for mode in MODES:
                for batch in batches:
                    start = time.perf_counter()
                    result = runs[mode].step(batch)
                    spent = time.perf_counter() - start
                    first_rewards.setdefault(mode, result.output["reward"])
                    if number:  # the first block warms all of them up
                        seconds[mode].append(spent)
                        window = (result.started, result.started + result.seconds)
                        lanes = where_the_time_went(result.spans, window)
                        idle[mode].append(statistics.mean(x.share(x.idle) for x in lanes))
    median = {mode: statistics.median(some) for mode, some in seconds.items()}
    rate = {mode: recipe.samples_per_step / some for mode, some in median.items()}
    table(
        ["mode", "ms/step", "samples/s", "against eager", "idle share of a lane"],
        [
            [mode, 1e3 * median[mode], rate[mode], rate[mode] / rate["eager"],
             statistics.median(idle[mode])]
            for mode in MODES
        ],
    )  # fmt: skip
    same = all(first_rewards[mode] == first_rewards["eager"] for mode in MODES)
    conclude(
        "quickstart_modes",
        {
            "steps": len(seconds["eager"]),
            "milliseconds_per_step": {mode: 1e3 * some for mode, some in median.items()},
            "samples_per_s": rate,
            "against_eager": {mode: rate[mode] / rate["eager"] for mode in MODES},
            "idle_share": {mode: statistics.median(some) for mode, some in idle.items()},
        },
        [Target("rewards of the first step are the same (1: yes)", float(same), 1.0)],
        options,
    )


if __name__ == "__main__":
    main()
