"""The documentation as a site: its navigation is complete, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

PROJECT = Path(__file__).resolve().parents[1]
DOCS = PROJECT / "docs"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once(hooks: ModuleType) -> None:
    nav = hooks.on_config(SimpleNamespace(nav=None)).nav
    assert [*nav[0].values()] == ["index.md"]
    listed = [
        path
        for tab in nav[1:]
        for pages in tab.values()
        for page in pages
        for path in page.values()
    ]
    assert len(listed) == len(set(listed))
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert {*listed, "index.md"} == there


def test_links_that_lead_out_of_the_site_become_paths(hooks: ModuleType) -> None:
    def written(markdown: str, source: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=source))
        return str(hooks.on_page_markdown(markdown, page=page, config=None, files=None))

    assert written("[C](../CONTRIBUTING.md) x", "index.md") == "C (`CONTRIBUTING.md`) x"
    assert written("[r](../../recipes/README.md#a)", "how-to/vla.md") == "r (`recipes/README.md`)"
    kept = "[p](../reference/plan.md#x), ![i](../images/a.svg), [w](https://example.com/a), [h](#h)"
    assert written(kept, "how-to/plan.md") == kept


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'm2flow[docs]'")
    pytest.importorskip("mkdocstrings", reason="pip install 'm2flow[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
    assert "items_per_step" in api, "signatures are filled in from the code"
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text()
        for mark in ('<script src="http', '<link rel="stylesheet" href="http', "fonts.googleapis"):
            assert mark not in text, f"{page.name} fetches from elsewhere"
