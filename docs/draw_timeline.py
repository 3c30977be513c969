"""Draws the timelines of the documentation from the run directory of a real run.

    m2flow train recipes/quickstart.yaml steps=10 lanes=cpu:2 --mode collocated --run-dir runs/c
    python docs/draw_timeline.py runs/c docs/images/timeline-collocated.svg --steps 9 10

The steps must be among those whose spans `timeline.json` keeps: the first two and the last four.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from m2flow.observe.gantt import gantt_svg
from m2flow.observe.lane_time import chart_of
from m2flow.observe.record import read_run
from m2flow.observe.theme import stage_colours

STAGES = ("generator.generate", "verifier.score", "group_advantage", "learner.train")
"""In the order of the flow, so that a stage has the same colour in every picture."""


def main() -> None:
    """Draw one picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", required=True)
    options = parser.parse_args()
    record = read_run(options.run_dir)
    steps = [step for step in record.trace.steps if step.step in options.steps]
    picture = gantt_svg(
        chart_of(steps),
        steps=[(step.step, step.start, step.end) for step in steps],
        colours=stage_colours(STAGES),
        width=1000,
        title=f"{record.name}, mode {record.plan['mode']}",
        standalone=True,
    )
    options.out.write_text(picture + "\n")


if __name__ == "__main__":
    main()
