"""Takes the pictures of live page and report in the documentation, in a headless Chromium.

    python docs/make_screenshots.py runs/first runs/second

`make screenshots` trains two small runs for it first.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from m2flow.observe.dashboard import Dashboard
from m2flow.observe.report import write_report

IMAGES = Path(__file__).parent / "images"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    """Take pictures of the live page in light and in dark colours, and one of the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dirs", type=Path, nargs="+")
    run_dirs = parser.parse_args().run_dirs
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    with Dashboard(run_dirs) as dashboard, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=OPTIONS)
        for scheme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": 1180, "height": 860}, color_scheme=scheme, device_scale_factor=1
            )
            page.goto(dashboard.url)
            page.locator("body[data-ready=yes][data-details=yes]").wait_for()
            keep(page.screenshot(), f"dashboard-{scheme}")
        page = browser.new_page(viewport={"width": 1180, "height": 1500}, color_scheme="light")
        page.goto(write_report(run_dirs[0]).resolve().as_uri())
        page.locator("body[data-ready=yes]").wait_for()
        keep(page.screenshot(), "report-light")
        browser.close()


def keep(picture: bytes, name: str) -> None:
    """Write a picture in few colours."""
    small = Image.open(io.BytesIO(picture)).convert("RGB").quantize(128)
    small.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
