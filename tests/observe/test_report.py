"""The report: well-formed, self-contained, safe against what models write, and honest."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from m2flow.errors import UserError
from m2flow.observe.ending import ending_of
from m2flow.observe.films import Film
from m2flow.observe.health import findings
from m2flow.observe.lane_time import pictured_steps
from m2flow.observe.page import STATIC, script
from m2flow.observe.record import MAX_ROLLOUTS, RunRecord, read_run
from m2flow.observe.report import details, write_report
from m2flow.observe.rollout_browser import MAX_CHARACTERS
from m2flow.observe.run_directory import RunDirectory
from m2flow.observe.step_bars import MAX_BARS
from m2flow.simulation.time_account import where_the_time_went
from tests.observe.conftest import write_fake_run

VOID = {"meta", "link", "br", "img", "input", "hr"}
LOADING = {"src", "srcset", "data", "action", "poster", "xlink:href", "formaction", "background"}


class Checker(HTMLParser):
    """Collects elements; fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: list[str] = []
        self.data: dict[str, str] = {}
        self.script = ""
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.attributes += [(tag, name, value) for name, value in [("", ""), *attrs]]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in [("", ""), *attrs]]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["script"]:
            self.text.append(data)
        elif self.elements[-1][1].get("type") == "application/json":
            name = self.elements[-1][1].get("id") or "timeline"
            self.data[name] = self.data.get(name, "") + data
        else:
            self.script += data


def check(path: Path) -> Checker:
    """Parse a report; it must be well-formed, load nothing, and run our own script alone.

    What axe would say without a browser, too: ids are unique, and everything has a name.
    """
    html = path.read_text("utf-8")
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert not {tag for tag, _, _ in checker.attributes} & {"iframe", "object", "link"}
    assert checker.script == script()
    assert all(json.loads(data) for data in checker.data.values())
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    policies = [v for tag, name, v in checker.attributes if (tag, name) == ("meta", "content")]
    rules = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    assert f"{rules}script-src 'sha256-{digest}'" in policies
    for tag, name, value in checker.attributes:
        assert name not in LOADING, f"<{tag} {name}={value!r}>"
        assert not name.startswith("on")
    assert not re.search(r"@import|url\((?!#)", html)
    without_namespaces = re.sub(r'xmlns="[^"]*"', "", html.replace(script(), ""))
    assert not re.search(r"https?://|//[a-z]+\.", without_namespaces)
    ids = [str(value) for _, name, value in checker.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for number, (tag, attributes) in enumerate(checker.elements):
        named = attributes.get("aria-label") or attributes.get("alt")
        within_a_label = ("label", {}) in checker.elements[number - 1 : number]
        if tag in ("img", "svg", "input", "select") or "tabindex" in attributes:
            assert named or within_a_label, (tag, attributes)
    return checker


def words(checker: Checker) -> str:
    return " ".join(checker.text)


def test_the_report_of_a_run_shows_every_part(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    path = write_report(fake_run(tmp_path / "run"))
    text = words(check(path))
    for part in (
        "grpo_addition",
        "finished, 80 steps",
        "AMD EPYC 9B14",
        "Held-out accuracy",
        "Response length",
        "All other figures",
        "steps 79 and 80",
        "Seconds of each step",
        "not in a stage",
        "All rollouts",
        "torch 2.13.0",
        "Where the time went",
        "80 steps, ",
        "prompts_per_step: 32",
        "Nothing to report",
    ):
        assert part in text, part


def test_the_timeline_is_written_as_a_picture_of_its_own(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    run = fake_run(tmp_path / "run", num_steps=4)
    write_report(run)
    svg = (run / "timeline.svg").read_text()
    assert ET.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert "grpo_addition, mode hybrid" in svg
    assert "prefers-color-scheme:dark" in svg


def test_the_script_has_the_values_of_each_drawing(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    checker = check(write_report(fake_run(tmp_path / "run")))
    told = json.loads(checker.data["curves"])
    drawn = [value for _, name, value in checker.attributes if name == "data-chart"]
    assert [chart["title"] for chart in told["charts"]] == drawn
    for chart in told["charts"]:
        for curve in chart["curves"]:
            assert len(curve["mean"]) == len(told["axes"][chart["axis"]])
    seconds = next(chart for chart in told["charts"] if chart["title"] == "Seconds per step")
    measured = [row["seconds/step"] for row in read_run(tmp_path / "run").metrics[1:]]
    assert seconds["curves"][0]["mean"][1:] == pytest.approx(measured, rel=1e-5)
    assert [curve["name"] for curve in seconds["curves"]] == ["measured", "predicted"]


def test_no_figure_is_left_out_and_none_is_drawn_twice(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    for step in (1, 2):
        figures = {"reward/mean": 0.5, "throughput/steps_per_s": 90.0, "train/odd": step * 1.0}
        run.append_metrics(step, {**figures, "seconds/step": 1.0, "success/mean": 0.1})
    checker = check(write_report(run.path))
    titles = [chart["title"] for chart in json.loads(checker.data["curves"])["charts"]]
    leading = ["Reward", "Accuracy", "Environment steps per second", "Seconds per step"]
    assert titles == [*leading, "train/odd"]


def test_the_script_has_every_piece_of_the_timeline(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    """Its seconds by stage, switch, transfer and wait are those that the account says."""
    told = json.loads(check(write_report(fake_run(tmp_path / "run"))).data["timeline"])
    steps = pictured_steps(read_run(tmp_path / "run").trace)
    spans = [span for step in steps for span in step.spans]
    expected, _ = where_the_time_went(spans, (steps[0].start, steps[-1].end))
    account = {**expected.stages, **expected.beside}
    spent: dict[str, float] = {}
    for _, seconds, term in told["rows"][0]["pieces"]:
        name = told["terms"][term]["name"].partition(":")[0]
        spent[name] = spent.get(name, 0.0) + seconds
    assert spent.keys() >= {"generator.generate", "learner.train", "switching", "links", "waiting"}
    assert spent == pytest.approx({name: account[name] for name in spent}, abs=1e-4)
    assert sum(spent.values()) == pytest.approx(sum(account.values()), abs=1e-4)
    colours = {term["name"]: term["colour"] for term in told["terms"]}
    hues = {name: colour[: len("var(--series-0")] for name, colour in colours.items()}
    assert hues["learner.train"] == hues["learner.logprobs"] != hues["generator.generate"]
    assert colours["learner.train"] != colours["learner.logprobs"]
    assert [words.split()[0] for words, _ in told["legend"]][-1] == "idle"


@pytest.mark.parametrize("name", ["charts.js", "report.js", "rollouts.js", "dashboard.js"])
def test_the_scripts_are_javascript(name: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    words = [node, "--check", STATIC / name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_an_empty_directory_gives_a_page(tmp_path: Path) -> None:
    text = words(check(write_report(tmp_path)))
    assert "No figures have been recorded yet." in text
    assert "no step yet" in text
    assert not (tmp_path / "timeline.svg").exists()


def test_a_missing_directory_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        write_report(tmp_path / "none")


@pytest.mark.parametrize(
    "name",
    ["run.json", "config.yaml", "plan.json", "metrics.jsonl", "samples.jsonl", "timeline.json"],
)
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "garbage"])
def test_any_file_may_be_missing_or_spoiled(
    tmp_path: Path, fake_run: Callable[..., Path], name: str, damage: str
) -> None:
    run = fake_run(tmp_path / "run", num_steps=3)
    path = run / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        spoiled = {"empty": b"", "half": content[: len(content) // 2], "garbage": b"\x00\xff[\n{\n"}
        path.write_bytes(spoiled[damage])
    text = words(check(write_report(run)))
    if damage == "garbage":
        assert "could not be read whole" in text
        assert name in text
        assert str(tmp_path) not in text


ODD_FIGURES = {
    "huge": [1e308 * (-1) ** step for step in range(30)],
    "huge, all alike": [1.7e308] * 30,
    "tiny": [5e-324 * (step % 2) for step in range(30)],
    "denormal": [1e-310 * (step % 3) for step in range(3)],
    "huge and tiny": [1e200, 1e-200, -1e200] * 10,
    "apart by rounding": [1e16, 1e16 + 2] * 15,
    "of 400 digits": [10**400, 1, 2],
    "not finite": [math.inf, math.nan, 1.0],
    "no number": [True, "x", None, [1], {"a": 1}],
}


def test_a_figure_that_one_step_alone_has_is_drawn(tmp_path: Path) -> None:
    """As `plan/pause_seconds`, or all of a run of one step: they were left out."""
    run = RunDirectory(tmp_path)
    for step in (1, 2):
        once = {"rollouts/recalled": 7.0} if step == 2 else {}
        run.append_metrics(step, {"reward/mean": 0.5, **once})
    checker = check(write_report(tmp_path))
    assert "rollouts/recalled" in words(checker)
    (chart,) = (
        one
        for one in json.loads(checker.data["curves"])["charts"]
        if one["title"] == "rollouts/recalled"
    )
    assert chart["curves"][0]["mean"] == [None, 7.0]


@pytest.mark.parametrize("name", ODD_FIGURES)
@pytest.mark.parametrize("key", ["reward/mean", "seconds/step", "eval/accuracy", "other"])
def test_figures_that_no_picture_has_a_place_for(tmp_path: Path, name: str, key: str) -> None:
    """The report is the last act of a run, which a single figure would have made a failed one."""
    rows = [{"step": step, "time": 1.7e9, key: one} for step, one in enumerate(ODD_FIGURES[name])]
    steps: list[Any] = [10**400, -(2**63), "1", None, True]
    rows += [{"step": step, "seconds/step": 1.0} for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in check(write_report(tmp_path)).data.values():
        json.loads(data, parse_constant=pytest.fail)
    details(read_run(tmp_path))
    titles = [finding.title for finding in findings(read_run(tmp_path))]
    lost = ("huge", "huge, all alike", "of 400 digits", "not finite", "no number")
    assert (f"{key} was not finite" in titles) == (name in lost)


ODD_SAMPLES: list[dict[str, Any]] = [
    {"turns": None},
    {"turns": [1, None, "x"]},
    {"turns": {"a": 1}},
    {"turns": [{"text": None, "tools": None, "result": 3}]},
    {"turns": [{"tools": "search"}, {"tools": 3}]},
    {"prompt": None, "completion": ["x"], "reward": "a", "finish_reason": 3, "answer": {}},
    {"reward": 10**400, "advantage": math.nan, "version": [1]},
]


@pytest.mark.parametrize("sample", ODD_SAMPLES, ids=str)
def test_samples_that_are_odd(tmp_path: Path, sample: dict[str, Any]) -> None:
    rows = [{"step": 1, **sample}, {"step": 10**400}, {"step": 2, "prompt": "the other"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "the other" in words(check(write_report(tmp_path)))


@pytest.mark.parametrize("started", [1e300, 1e18, -1e300, math.nan, 10**400, "2020", [1]])
def test_a_start_that_no_clock_knows(tmp_path: Path, started: object) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"started": started, "finished": started}))
    check(write_report(tmp_path))
    ending_of(tmp_path)


def spoil(document: Any, path: Sequence[Any], value: object) -> None:
    for key in path[:-1]:
        document = document[key]
    if value is KeyError:
        del document[path[-1]]
    else:
        document[path[-1]] = value


@pytest.mark.parametrize("value", [KeyError, None, "x", [1], {}, -1e300, math.nan, True], ids=repr)
@pytest.mark.parametrize(
    "path",
    [
        ("otherData", "m2flow", "num_steps"),
        ("otherData", "m2flow", "steps"),
        ("otherData", "m2flow", "steps", 0),
        ("otherData", "m2flow", "steps", 0, "step"),
        ("otherData", "m2flow", "steps", 0, "start"),
        ("otherData", "m2flow", "totals", 0, "lane"),
        ("otherData", "m2flow", "totals", 0, "seconds"),
        ("otherData", "m2flow", "totals", 0, "beside"),
        ("otherData", "m2flow", "totals", 0, "stages"),
        ("traceEvents", 0, "args"),
        ("traceEvents", 3, "args", "lane"),
        ("traceEvents", -1, "ts"),
        ("traceEvents", -1, "dur"),
        ("traceEvents", -1, "tid"),
        ("traceEvents", -1, "cat"),
        ("traceEvents", -1, "name"),
        ("traceEvents", -1, "args"),
        ("traceEvents", -1, "args", "step"),
        ("traceEvents",),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_a_timeline_that_is_odd(
    tmp_path: Path, timeline_of_two_steps: str, path: Sequence[Any], value: object
) -> None:
    document = json.loads(timeline_of_two_steps)
    spoil(document, path, value)
    (tmp_path / "timeline.json").write_text(json.dumps(document))
    write_report(tmp_path)
    details(read_run(tmp_path))


@pytest.fixture(scope="module")
def timeline_of_two_steps(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = write_fake_run(tmp_path_factory.mktemp("whole") / "run", num_steps=2)
    return (run / "timeline.json").read_text()


def test_a_run_in_progress_says_how_far_it_is(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    run = fake_run(tmp_path / "run", num_steps=7, planned_steps=80)
    assert "step 7 of 80" in words(check(write_report(run)))


HOSTILE = "</pre></article><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\u202e\ud800"


def test_what_a_model_writes_is_text(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    run.write_run(recipe=HOSTILE, machine=HOSTILE)
    run.write_config({"name": HOSTILE, "steps": 2})
    run.write_json(
        run.plan, json.dumps({"mode": HOSTILE, "placements": {HOSTILE: {"replicas": [[0]]}}})
    )
    for step in (1, 2):
        run.append_metrics(step, {"reward/mean": 0.5, f"loss/{HOSTILE}": 1.0})
        sample = {"prompt": HOSTILE, "completion": HOSTILE, "answer": HOSTILE}
        run.append_samples(step, [{**sample, "reward": 1, "finish_reason": HOSTILE}])
    text = words(check(write_report(run.path)))
    assert "<script>alert(1)</script>" in text


def test_a_very_long_completion_is_cut_and_says_so(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    run.append_samples(1, [{"prompt": "p", "completion": "x" * 50_000, "reward": 0.0}])
    path = write_report(run.path)
    assert "38,000 more characters" in words(check(path))
    assert path.stat().st_size < 60_000 + len(script())


def test_films_have_a_title_and_a_strip_for_where_nothing_moves(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "filmed")
    for step in (0, 1, 2):
        film = Film(b"moves %d" % step, b"strip %d" % step, f"solved · reach <{step}>")
        assert [path.name for path in run.write_films(step, [film])] == [f"step_00000{step}_0.webp"]
    (run.films / "title_000000_0.txt").unlink()
    (run.films / "strip_000000_0.webp").unlink()
    html = write_report(run.path).read_text()
    found = re.findall(r"data:image/webp;base64,([\w=+/]+)", html)
    assert [base64.b64decode(one) for one in found] == [b"moves 0", b"moves 2", b"strip 2"]
    assert "solved · reach &lt;2&gt;" in html
    assert "an episode" in html, "of one whose title is missing"
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert all(attributes.get("alt") for tag, attributes in checker.elements if tag == "img")


def test_rollouts_of_the_first_and_last_step_stand_side_by_side(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    for step in (1, 2, 3):
        rows = [{"prompt": f"p{item // 4}", "completion": f"{step}-{item}"} for item in range(20)]
        run.append_samples(step, rows)
    text = words(check(write_report(run.path)))
    assert re.findall(r"\b\d-\d+\b", text) == [
        "1-0",
        "1-1",
        "1-2",
        "1-3",
        "3-0",
        "3-1",
        "3-2",
        "3-3",
    ]


def browsed(run: RunDirectory) -> list[dict[str, Any]]:
    """The rollouts that the page's browser has."""
    found: list[dict[str, Any]] = json.loads(check(write_report(run.path)).data["rollouts"])
    return found


def test_the_browser_has_what_samples_jsonl_says(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    sample = {"prompt": HOSTILE, "completion": "x" * 5000, "answer": 7, "reward": 0.25}
    more = {"advantage": -1.5, "version": 3, "finish_reason": "length"}
    run.append_samples(4, [{**sample, **more}, {"prompt": "p", "failure": "no judge"}])
    first, second = browsed(run)
    assert first["prompt"].startswith(HOSTILE[:40])
    assert first["completion"] == "x" * MAX_CHARACTERS + "… (3,500 more)"
    assert (first["step"], first["reward"], first["advantage"]) == (4, 0.25, -1.5)
    assert (first["version"], first["why"], first["answer"]) == (3, "length", "7")
    assert (second["reward"], second["advantage"], second["why"]) == (None, None, "no judge")


def test_the_browser_of_a_long_run_is_spread_over_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    for step in range(1, 601):
        run.append_samples(step, [{"prompt": "p", "completion": str(n)} for n in range(4)])
    found = browsed(run)
    assert MAX_ROLLOUTS / 2 < len(found) <= MAX_ROLLOUTS
    assert found[0]["step"] == 1
    assert found[-1]["step"] > 598


def test_a_bar_is_as_high_as_its_step(tmp_path: Path, fake_run: Callable[..., Path]) -> None:
    """Two lanes: what they spent in stages, halved, and the rest of the step."""
    run = fake_run(tmp_path / "run", num_steps=3)
    html = write_report(run).read_text()
    picture = html[html.index("Seconds of each step by stage") :]
    bars = re.findall(r"<g><title>(.*?)</title>(.*?)</g>", picture[: picture.index("</svg>")])
    taken = [row["seconds/step"] for row in read_run(run).metrics if "seconds/step" in row]
    heights = [sum(map(float, re.findall(r' height="([\d.]+)"', bar))) for _, bar in bars]
    assert len(bars) == 3
    for height, seconds in zip(heights, taken, strict=True):
        assert height / heights[0] == pytest.approx(seconds / taken[0], rel=1e-2)
    assert bars[0][0].startswith("step 1, ")
    train = re.findall(r'fill="([^"]+)"', bars[0][1])
    assert len(set(train)) == len(train) == 5


def test_a_bar_is_no_higher_than_its_step_where_calls_began_before_it(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    spent = {"seconds/generator.generate": 1.5, "seconds/learner.train": 0.5}
    run.append_metrics(1, {"seconds/step": 1.0, **spent})
    html = write_report(run.path).read_text()
    (bar,) = re.findall(r"<g><title>(step .*?)</title>", html)
    assert bar == "step 1, generator.generate 750 ms, learner.train 250 ms"


def test_a_long_run_has_few_bars(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    for step in range(1, 1001):
        run.append_metrics(step, {"seconds/step": 1.0, "seconds/learner.train": 0.5})
    html = write_report(run.path).read_text()
    bars = re.findall(r"<g><title>(steps .*?)</title>", html)
    assert MAX_BARS / 2 < len(bars) <= MAX_BARS
    assert bars[0].startswith("steps 1 to 17, learner.train 500 ms, not in a stage 500 ms")


def titles(rows: list[Mapping[str, Any]]) -> set[str]:
    record = RunRecord(RunDirectory("."), metrics=rows)
    return {finding.title for finding in findings(record)}


def row(step: int, **figures: float | None) -> dict[str, Any]:
    return {"step": step, **{key.replace("__", "/"): value for key, value in figures.items()}}


def test_nan_is_found() -> None:
    rows = [
        row(1, loss__policy=0.1),
        row(2, loss__policy=None),
        row(3, plan__predicted_seconds=None),
    ]
    assert titles(rows) == {"loss/policy was not finite"}


def test_what_the_run_was_alarmed_about_is_found() -> None:
    alarms = [{"step": 3, "alarm": "log-probabilities are 2 apart in the mean"}]
    record = RunRecord(RunDirectory("."), run={"alarms": alarms}, metrics=[row(1)])
    spoiled = [{"step": "3"}, "words", {"step": 4, "alarm": None}]
    for run in ({"alarms": [*alarms, *spoiled]}, {"alarms": "words"}, {"alarms": None}):
        told = findings(RunRecord(RunDirectory("."), run=run, metrics=[row(1)]))
        assert len(told) == isinstance(run["alarms"], list)
    (found,) = findings(record)
    assert (found.level, found.title, found.detail) == (
        "warn", "Told at step 3", "log-probabilities are 2 apart in the mean"
    )  # fmt: skip


def test_groups_without_signal_and_truncation_are_found() -> None:
    rows = [row(s, zero_variance_share=0.9, health__truncated_share=0.5) for s in range(12)]
    assert titles(rows) == {"Most groups carry no signal", "Many answers are cut off"}
    rows = [row(s, zero_variance_share=0.5, health__truncated_share=0.1) for s in range(12)]
    assert titles(rows) == set()


def test_who_has_failed_is_told_apart() -> None:
    rows = [{**row(s), "reward/failed_share": 0.1} for s in range(12)]
    assert titles(rows) == {"Samples could not be judged"}
    rows = [{**row(s), "tools/failed_share": 0.1} for s in range(12)]
    assert titles(rows) == {"Trajectories were given up"}


def test_a_reward_that_falls_or_stands_still_is_found() -> None:
    falling = [row(s, reward__mean=1 - s / 50) for s in range(40)]
    assert titles(falling) == {"The reward is falling"}
    flat = [row(s, reward__mean=0.5 + 0.1 * (s % 2)) for s in range(40)]
    assert titles(flat) == {"The reward does not rise"}
    rising = [row(s, reward__mean=s / 50) for s in range(40)]
    assert titles(rising) == set()


def test_evaluation_below_its_start_is_found() -> None:
    assert titles([row(0, eval__accuracy=0.5), row(9, eval__accuracy=0.4)]) == {
        "eval/accuracy is lower than before training"
    }


def test_a_plan_that_mispredicts_is_found() -> None:
    rows = [row(s, seconds__step=0.8, plan__predicted_seconds=0.4) for s in range(6)]
    assert titles(rows) == {"The plan's prediction is off"}


def test_the_record_reads_back_what_was_written(
    tmp_path: Path, fake_run: Callable[..., Path]
) -> None:
    record = read_run(fake_run(tmp_path / "run", num_steps=5))
    assert record.name == "grpo_addition"
    assert (record.last_step, record.planned_steps) == (5, 5)
    assert record.first_key(("nothing", "reward/mean")) == "reward/mean"
    assert record.trace.num_steps == 5
    assert json.loads(json.dumps(record.plan))["mode"] == "hybrid"


def test_a_film_that_somebody_has_put_there_is_no_obstacle(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "filmed")
    run.write_films(1, [Film(b"moves", b"strip", "solved")])
    (run.films / "step_best.webp").write_bytes(b"mine")
    assert "solved" in write_report(run.path).read_text()
