"""A whole run of a workload that no recipe can say, as one process: for `auto.py`.

    python benchmarks/auto_run.py long_tail --mode auto --steps 60 --metrics metrics.jsonl

Writes what `m2flow train` writes of each step that the comparison reads: its number and the time at
which it ended.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import workloads
from workloads import Workload

from m2flow.runtime.driver.launch import Auto, Run, launch
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.profiling import cached, keep

MAKERS = {make.__name__: make for make in workloads.WORKLOADS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=sorted(MAKERS))
    parser.add_argument("--mode", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--metrics", type=Path, required=True)
    options = parser.parse_args()
    workload = MAKERS[options.workload]()
    with (
        LanePool(workload.lanes) as pool,
        _launched(workload, pool, options.mode, options.steps) as run,
        options.metrics.open("w") as rows,
    ):
        for result in run.steps(workload.batch(step) for step in range(options.steps)):
            row = {"step": result.step + 1, "time": time.time()}
            print(json.dumps(row), file=rows, flush=True)


def _launched(workload: Workload, pool: LanePool, mode: str, steps: int) -> Run:
    flow = workload.make_flow()
    if mode != "auto":
        return launch(flow, items_per_step=workload.items, mode=mode, lanes=pool)
    key = {"model": {"workload": workload.name}, "shapes": {"items": workload.items}}
    auto = Auto(
        profile=cached(key),
        max_staleness=workload.max_staleness,
        num_steps=steps,
        keep=lambda profile: keep(replace(profile, key=key)),
    )
    return launch(flow, items_per_step=workload.items, mode=mode, lanes=pool, auto=auto)


if __name__ == "__main__":
    main()
