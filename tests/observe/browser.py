"""A headless Chromium that notes what a page says and asks for; skips where there is none.

With `M2FLOW_NEEDS_BROWSER=1` in the environment (`make test-browser`) it fails instead.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@dataclass
class Watched:
    """A page, what its console said that is no remark, and the addresses that it asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        """What axe finds wrong with the page: keyboard, names, contrast and the rest."""
        axe = pytest.importorskip("axe_playwright_python", reason="pip install 'm2flow[browser]'")
        script = Path(axe.__file__).parent / "axe.min.js"
        self.page.evaluate(script.read_text())  # a script element the page's policy forbids
        found = self.page.evaluate("async () => (await axe.run()).violations")
        return [
            f"{one['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
            for one in found
            for node in one["nodes"]
        ]


@contextmanager
def opened_browser() -> Iterator[Any]:
    """Playwright's browser on the system's Chromium."""
    reason = "needs a browser: pip install 'm2flow[browser]', apt-get install chromium"
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None or find_spec("playwright") is None:
        (pytest.fail if os.environ.get("M2FLOW_NEEDS_BROWSER") else pytest.skip)(reason)
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as made:
        browser = made.chromium.launch(executable_path=path, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched_page(browser: Any, **settings: Any) -> Iterator[Watched]:
    """A page in a context of its own."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
    context.set_default_timeout(20_000)
    watched = Watched(context.new_page())
    watched.page.on(
        "console",
        lambda line: watched.said.append(line.text) if line.type in ("error", "warning") else None,
    )
    watched.page.on("pageerror", lambda error: watched.said.append(str(error)))
    watched.page.on("request", lambda request: watched.asked.append(request.url))
    try:
        yield watched
    finally:
        context.close()
