"""From the command to the first stage call, the import, and what a lane takes that has no work.

A real `m2flow train` of the quick start's model, without warm-up, in a process of its own; the
first call is read off the run's timeline. An import of m2flow is what an interpreter takes longer
with it than without. A lane's memory is what the kernel says of its process once it is up, before
any worker is loaded.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, Target, arguments, conclude, table
from starting_point import quickstart

from m2flow.plan import parse_lanes
from m2flow.runtime.driver.pool import LanePool

MODES = ("eager", "collocated", "disaggregated")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    repeats = 1 if options.quick else 3
    _, _, source = quickstart()
    seconds = {
        mode: [_first_call(mode, str(source.path)) for _ in range(repeats)] for mode in MODES
    }
    imported = _import_seconds(10 * repeats)
    memory = _idle_lanes()
    median = {mode: statistics.median(some) for mode, some in seconds.items()}
    table(["mode", "seconds to the first call"], [[mode, median[mode]] for mode in MODES])
    table(["import m2flow", "seconds"], [["least", imported]])
    table(
        ["idle lane", "MB resident", "MB of its own"],
        [[lane, figures["resident"], figures["own"]] for lane, figures in memory.items()],
    )
    conclude(
        "start_up",
        {
            "seconds_to_first_call": median,
            "all_seconds": seconds,
            "seconds_to_import": imported,
            "idle_lane_megabytes": memory,
        },
        [
            Target("seconds to the first stage call", max(median.values()), 8.0, at_most=True),
            Target("seconds to import m2flow", imported, 0.5, at_most=True),
            Target(
                "MB resident in an idle lane",
                max(figures["resident"] for figures in memory.values()),
                450.0,
                at_most=True,
            ),
        ],
        options,
    )


def _first_call(mode: str, model: str) -> float:
    """Seconds from starting the command to the beginning of the first step's first stage call."""
    with tempfile.TemporaryDirectory(prefix="m2flow-start-up-") as folder:
        run = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "m2flow", "train", str(ROOT / "recipes" / "quickstart.yaml")),
            *("--mode", mode, "--run-dir", str(run), "lanes=cpu:2", f"model.path={model}"),
            *("steps=1", "warmup.steps=0", "evaluation.problems=0"),
        ]
        start = time.time()
        subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
        trace = json.loads((run / "timeline.json").read_text())
        first = min(event["ts"] for event in trace["traceEvents"] if event.get("cat") == "call")
        return float(trace["otherData"]["m2flow"]["began"] + first * 1e-6 - start)


def _import_seconds(times: int) -> float:
    """The least that an interpreter takes with `import m2flow`, less the least that it takes."""
    least = {}
    for program in ("pass", "import m2flow"):
        seconds = []
        for _ in range(times):
            start = time.monotonic()
            subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
            seconds.append(time.monotonic() - start)
        least[program] = min(seconds)
    return least["import m2flow"] - least["pass"]


def _idle_lanes() -> dict[int, dict[str, float]]:
    """Megabytes that lanes take before anything is loaded: resident, and no other process's."""
    with LanePool(parse_lanes("cpu:2")) as pool:
        return {lane: _megabytes(address.process_id) for lane, address in pool.addresses.items()}


def _megabytes(process: int) -> dict[str, float]:
    rows = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )
    resident, own = (int(rows[key].split()[0]) / 1024 for key in ("VmRSS", "RssAnon"))
    return {"resident": resident, "own": own}


if __name__ == "__main__":
    main()
