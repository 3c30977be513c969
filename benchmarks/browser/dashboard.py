"""How soon the live page shows a run of 10,000 steps, in a headless Chromium.

From the request of the page until all leading curves are drawn, and until the parts of the report
below them are there too; then from a new row in `metrics.jsonl` until the page says so. A fresh
server and a fresh browser context each time, the median of several.

    pip install 'm2flow[browser]'; apt-get install chromium
"""

from __future__ import annotations

import math
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import Target, arguments, conclude, table
from playwright.sync_api import Browser, sync_playwright

from m2flow.observe.dashboard import Dashboard
from m2flow.observe.run_directory import RunDirectory

STEPS, FIGURES = 10_000, 30
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def write_run(folder: Path) -> Path:
    """A run of so many steps with so many figures, as `m2flow train` writes it."""
    draw = random.Random(0)
    run = RunDirectory.create(folder / "long", "long")
    run.write_run(recipe="long.yaml", steps=2 * STEPS, seed=0)
    run.write_config({"seed": 0, "steps": 2 * STEPS})
    for step in range(1, STEPS + 1):
        reward = 1 - math.exp(-step / 2000) + draw.gauss(0, 0.05)
        row = {"reward/mean": reward, "loss/policy": draw.gauss(0, 0.01), "seconds/step": 1.5}
        row |= {f"train/figure_{n:02d}": draw.random() for n in range(FIGURES - len(row))}
        run.append_metrics(step, row)
        run.append_samples(step, [{"prompt": "1+1=", "completion": "#2", "reward": 1.0}])
    return run.path


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    times: dict[str, list[float]] = {"curves": [], "details": [], "update": []}
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = write_run(Path(folder))
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        for _ in range(3 if options.quick else 9):
            for name, seconds in measured(browser, run).items():
                times[name].append(seconds)
        browser.close()
    found = {name: median(values) for name, values in times.items()}
    table(
        ["until", "seconds", "worst"],
        [[name, found[name], max(values)] for name, values in times.items()],
    )
    conclude(
        "dashboard",
        {"steps": STEPS, "figures": FIGURES, "seconds": found},
        [Target("seconds until the curves of 10,000 steps", found["curves"], 2.0, at_most=True)],
        options,
    )


def measured(browser: Browser, run: Path) -> dict[str, float]:
    """Seconds until the curves, the details and an update are there."""
    with Dashboard([run]) as dashboard:
        context = browser.new_context()
        page = context.new_page()
        start = time.perf_counter()
        page.goto(dashboard.url)
        page.locator("body[data-ready=yes]").wait_for()
        curves = time.perf_counter() - start
        page.locator("body[data-details=yes]").wait_for()
        details = time.perf_counter() - start
        directory = RunDirectory(run)
        last = int(directory.metrics.read_bytes().splitlines()[-1].split(b",")[0].split()[-1])
        start = time.perf_counter()
        directory.append_metrics(last + 1, {"reward/mean": 1.0})
        page.get_by_text(f"step {last + 1:,} of").wait_for()
        update = time.perf_counter() - start
        context.close()
    return {"curves": curves, "details": details, "update": update}


if __name__ == "__main__":
    main()
