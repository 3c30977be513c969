"""The report in a browser: curves and lanes zoom, a phone shows it, paper and no script do too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from m2flow.observe.report import write_report
from m2flow.plan.race import Tried
from tests.observe.browser import Watched, opened_browser, watched_page
from tests.observe.conftest import write_fake_run
from tests.observe.test_plan_section import DECISION, decided

PHONE = {"width": 390, "height": 844}
TOO_WIDE = """width => [...document.querySelectorAll("main *")]
  .filter((one) => one.getBoundingClientRect().right > width + 1 && !one.closest(".scroll, pre"))
  .map((one) => one.outerHTML.slice(0, 100))"""
"""Elements that reach out of the page, but those within a part that scrolls by itself."""
RANGE = "document.querySelector('section .tools [role=status]').textContent"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = write_fake_run(tmp_path_factory.mktemp("runs") / "run", num_steps=400)
    race = (Tried("a plan of a long name " * 5, 0.5, (0.52, 0.54), "out of memory on lane 1 " * 5),)
    return write_report(decided(run, replace(DECISION, race=race))).resolve().as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Any, report: str) -> Iterator[Watched]:
    with watched_page(browser) as watched:
        watched.page.goto(report)
        watched.page.locator("body[data-ready=yes]").wait_for()
        yield watched
        assert watched.said == []
        assert [url for url in watched.asked if not url.startswith("data:")] == [report]


def dragged(page: Any, selector: str, begin: float, end: float) -> None:
    """Drag over a picture, from one share of its width to another."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], middle + 5, steps=4)
    page.mouse.up()


def test_curves_zoom_together(opened: Watched) -> None:
    page = opened.page
    cards = page.locator("section > .charts article[data-chart]")
    assert cards.locator("canvas").count() == cards.count() == 6
    assert page.locator(".drawn svg").first.is_hidden()
    dragged(page, "[data-chart=Reward] .u-over", 0.25, 0.5)
    page.wait_for_function(f"{RANGE}.startsWith('steps ')")
    _, low, _, high = page.locator("section .tools [role=status]").first.inner_text().split()
    assert 90 < int(low) < 110
    assert 190 < int(high) < 210
    page.locator("[data-chart=Loss] .u-over").dblclick()
    page.wait_for_function(f"{RANGE}.startsWith('drag ')")


def test_the_pointer_reads_all_curves_at_a_step(opened: Watched) -> None:
    page = opened.page
    page.locator("[data-chart=Reward] .u-over").hover()
    said = page.locator("[data-chart=Reward] .latest").inner_text()
    assert said.startswith("step 20")
    assert " to " in said, "the band"
    others = page.locator("[data-chart='Seconds per step'] .latest").inner_text()
    assert others.startswith(said.split(":")[0])
    assert others.count(" ms") == 2, "measured and predicted"


def test_other_figures_are_drawn_when_they_are_opened(opened: Watched) -> None:
    page = opened.page
    assert page.locator("[data-chart=grad_norm] canvas").count() == 0
    page.get_by_text("All other figures").click()
    page.locator("[data-chart=grad_norm] canvas").wait_for()


def test_the_timeline_zooms_by_pointer_wheel_keys_and_buttons(opened: Watched) -> None:
    page = opened.page

    def picture() -> str:
        found: str = page.locator(".lanes canvas").evaluate("one => one.toDataURL()")
        return found

    seen = [picture()]

    def changed() -> None:
        page.wait_for_function(
            "seen => !seen.includes(document.querySelector('.lanes canvas').toDataURL())",
            arg=seen,
        )
        seen.append(picture())

    dragged(page, ".lanes .u-over", 0.1, 0.6)
    changed()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    changed()
    page.locator(".lanes").focus()
    page.keyboard.press("+")
    changed()
    page.keyboard.press("ArrowRight")
    changed()
    page.locator(".timeline").get_by_role("button", name="Zoom in").click()
    changed()
    page.locator(".timeline").get_by_role("button", name="Show all").click()
    page.wait_for_function(
        "whole => whole === document.querySelector('.lanes canvas').toDataURL()", arg=seen[0]
    )


def test_the_timeline_says_what_a_piece_is(opened: Watched) -> None:
    page = opened.page
    over = page.locator(".lanes .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.25 * box["height"])
    said = page.locator(".timeline .note").inner_text()
    assert said.startswith("lane 0: generator.generate, ")
    legend = page.locator(".timeline > .legend").inner_text()
    for word in ("generate", "train", "switching", "links", "waiting", "publishing", "idle"):
        assert word in legend


def test_rollouts_are_found_and_sorted(opened: Watched) -> None:
    page = opened.page
    page.get_by_label("sort by").select_option("oldest step")
    assert page.locator("#found article").first.inner_text().startswith("step 1\n")
    page.get_by_label("find text").fill("no such text")
    page.get_by_text("0 of ").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(browser: Any, report: str, scheme: str, width: int) -> None:
    viewport = {"width": width, "height": 900}
    with watched_page(browser, color_scheme=scheme, viewport=viewport) as watched:
        watched.page.goto(report)
        watched.page.locator("body[data-ready=yes]").wait_for()
        assert watched.violations() == []


@pytest.mark.parametrize("script", [True, False])
def test_a_phone_scrolls_down_alone(browser: Any, report: str, script: bool) -> None:
    settings = {"viewport": PHONE, "has_touch": True, "is_mobile": True}
    with watched_page(browser, **settings, java_script_enabled=script) as watched:
        watched.page.goto(report)
        assert watched.page.evaluate(TOO_WIDE, PHONE["width"]) == []


def test_without_scripts_there_are_drawings(browser: Any, report: str) -> None:
    with watched_page(browser, java_script_enabled=False) as watched:
        watched.page.goto(report)
        assert watched.page.locator("section > .charts svg.chart").first.is_visible()
        assert watched.page.locator(".timeline svg.gantt").is_visible()
        assert watched.page.locator("canvas").count() == 0


def test_paper_shows_the_drawings_in_light_colours(browser: Any, report: str) -> None:
    with watched_page(browser, color_scheme="dark") as watched:
        watched.page.goto(report)
        watched.page.locator("body[data-ready=yes]").wait_for()
        watched.page.emulate_media(media="print")
        assert watched.page.locator("section > .charts svg.chart").first.is_visible()
        assert not watched.page.locator("[data-chart=Reward] canvas").is_visible()
        ink = watched.page.evaluate("getComputedStyle(document.body).color")
        assert ink == "rgb(23, 26, 33)"
        assert len(watched.page.pdf()) > 20_000
