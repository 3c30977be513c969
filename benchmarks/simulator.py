"""The simulator against real lanes: a recorded run, replayed under its own plan and under others.

The quick start runs on two CPU lanes in each fixed mode, in alternating blocks of steps. Then each
run is replayed: under the plan that it had, where the step time must come out as it was, and under
the plans of the other modes, where it is a prediction. All figures are medians over steps.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import ray
from harness import Target, arguments, conclude, table
from starting_point import quickstart

from m2flow.plan.measured import Observed
from m2flow.plan.replay import replay_steps
from m2flow.runtime.driver.launch import Run, launch
from m2flow.runtime.driver.runner import StepResult
from m2flow.workloads.reasoning.flow import recipe_flow

MODES = ("collocated", "disaggregated", "hybrid")
BLOCK = 3
WITHIN = 0.05
"""How far a replay under the recorded plan may be from the record."""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    blocks = 3 if options.quick else 8
    recipe, experiment, source = quickstart()
    results: dict[str, list[StepResult]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        ray.init(num_cpus=2 * len(MODES), include_dashboard=False, logging_level="ERROR")
        runs: dict[str, Run] = {}
        for mode in MODES:
            flow = recipe_flow(recipe, source, experiment.rewards)
            runs[mode] = stack.enter_context(
                launch(flow, items_per_step=recipe.prompts_per_step, mode=mode, lanes="cpu:2")
            )
        for number in range(blocks + 1):
            steps = range(number * BLOCK, (number + 1) * BLOCK)
            batches = [experiment.batch(step) for step in steps]
            for mode in MODES:
                done = list(runs[mode].steps(batches))
                results[mode] += done if number else []  # the first block warms all of them up
        graph = runs[MODES[0]].graph
        observed = {
            mode: Observed.of(runs[mode].plan, recipe.prompts_per_step, results[mode], warm=True)
            for mode in MODES
        }
    measured = {
        mode: statistics.median(seconds for _, seconds in one.steps)
        for mode, one in observed.items()
    }
    rows, ratios, spent = [], {}, []
    for recorded, one in observed.items():
        for mode in MODES:
            start = time.perf_counter()
            _, seconds = replay_steps(graph, one, observed[mode].plan)
            spent.append((time.perf_counter() - start) / len(seconds))
            replayed = statistics.median(seconds)
            ratios[recorded, mode] = replayed / measured[mode]
            rows.append(
                [recorded, mode, 1e3 * measured[mode], 1e3 * replayed, ratios[recorded, mode]]
            )
    table(["recorded under", "replayed under", "ms measured", "ms replayed", "ratio"], rows)
    own = max(abs(ratios[mode, mode] - 1.0) for mode in MODES)
    other = max(abs(ratio - 1.0) for (one, two), ratio in ratios.items() if one != two)
    print(f"under another plan: at most {other:.1%} from what was measured")
    conclude(
        "simulator",
        {
            "steps": blocks * BLOCK,
            "measured_milliseconds": {mode: 1e3 * seconds for mode, seconds in measured.items()},
            "replayed_over_measured": {f"{a} as {b}": ratio for (a, b), ratio in ratios.items()},
            "furthest_under_another_plan": other,
            "replay_milliseconds_a_step": 1e3 * statistics.median(spent),
        },
        [Target("replay under the recorded plan: error", own, WITHIN, at_most=True)],
        options,
    )


if __name__ == "__main__":
    main()
