"""The live page in a browser: it draws, follows a run, zooms, and can be used by everyone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m2flow.observe.dashboard import Dashboard
from m2flow.observe.run_directory import RunDirectory
from tests.observe.browser import Watched, opened_browser, watched_page
from tests.observe.conftest import write_fake_run

READY = "body[data-ready=yes][data-details=yes]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    first = write_fake_run(folder / "first", num_steps=600, planned_steps=900)
    second = write_fake_run(folder / "second", num_steps=40)
    config = second / "config.yaml"
    config.write_text(config.read_text().replace("0.0001", "0.001"))
    return [first, second]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Any, runs: list[Path]) -> Iterator[Watched]:
    with Dashboard(runs) as dashboard, watched_page(browser) as watched:
        watched.page.goto(dashboard.url)
        watched.page.locator(READY).wait_for()
        yield watched
        assert watched.said == []
        here = dashboard.url.rsplit("/", 2)[0]
        assert all(url.startswith((here, "data:")) for url in watched.asked), watched.asked


def test_it_draws_all_runs_and_what_differs(opened: Watched) -> None:
    page = opened.page
    names = page.locator("#leading article h3").all_inner_texts()
    assert names[0] == "reward/mean"
    assert page.locator("#leading article canvas").count() == len(names)
    assert page.locator("#runs label").count() == 2
    keys = page.locator("#keys td:first-child").all_inner_texts()
    assert "learning_rate" in keys
    assert "seed" not in keys
    assert page.locator("#details h2").first.inner_text() == "Health"
    page.get_by_text("All other figures").first.click()
    page.locator("[data-key=grad_norm] canvas").wait_for()
    page.get_by_label("Find a figure").fill("reward")
    assert page.locator("article[data-key]:visible h3").all_inner_texts() == ["reward/mean"]


def test_the_timeline_is_that_of_the_report(opened: Watched) -> None:
    page = opened.page
    assert page.locator(".timeline canvas").is_visible()
    assert not page.locator(".timeline svg.gantt").is_visible()
    page.locator(".timeline").get_by_role("button", name="Zoom in").click()
    box = page.locator(".lanes .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.25 * box["height"])
    assert page.locator(".timeline .note").inner_text().startswith("lane 0: ")


def test_a_run_can_be_hidden(opened: Watched) -> None:
    page = opened.page
    latest = page.locator("[data-key='reward/mean'] .latest")
    assert "·" in latest.inner_text()
    page.get_by_role("checkbox", name="second").uncheck()
    assert "·" not in latest.inner_text()


def test_it_follows_a_run(opened: Watched, runs: list[Path]) -> None:
    RunDirectory(runs[0]).append_metrics(601, {"reward/mean": 0.123, "new/figure": 1.0})
    opened.page.get_by_text("step 601 of 900").wait_for()
    opened.page.locator("[data-key='new/figure']").wait_for(state="attached")


def test_the_pointer_and_the_keyboard_zoom(opened: Watched) -> None:
    page = opened.page
    chart = page.locator("[data-key='reward/mean'] .plot")
    over = page.locator("[data-key='reward/mean'] .u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] * 0.25, over["y"] + 40)
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] * 0.5, over["y"] + 60, steps=4)
    page.mouse.up()
    page.locator("#range", has_text="steps").wait_for()
    _, low, _, high = page.locator("#range").inner_text().split()
    assert 130 < int(low) < 170
    assert 280 < int(high) < 320
    chart.focus()
    before = page.locator("#range").inner_text()
    page.keyboard.press("ArrowRight")
    page.locator(f"#range:not(:text-is({before!r}))").wait_for()
    page.keyboard.press("+")
    page.keyboard.press("0")
    page.locator("#range:empty").wait_for(state="attached")
    assert chart.evaluate("one => one === document.activeElement")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, runs: list[Path], scheme: str) -> None:
    with Dashboard(runs) as dashboard, watched_page(browser, color_scheme=scheme) as watched:
        watched.page.goto(dashboard.url)
        watched.page.locator(READY).wait_for()
        assert watched.violations() == []


def test_a_phone_scrolls_down_alone(browser: Any, runs: list[Path]) -> None:
    viewport = {"width": 390, "height": 844}
    with Dashboard(runs) as dashboard, watched_page(browser, viewport=viewport) as watched:
        watched.page.goto(dashboard.url)
        watched.page.locator(READY).wait_for()
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_report_of_a_run_is_there_too(opened: Watched) -> None:
    link = opened.page.get_by_text("Open its full report").get_attribute("href")
    opened.page.goto(opened.page.url + link)
    assert opened.page.locator("h2", has_text="All rollouts").count() == 1
    assert opened.page.locator("#found article").count() > 0
    assert opened.violations() == []
