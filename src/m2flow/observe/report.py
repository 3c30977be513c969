"""`report.html`: what happened in a run, on one page that can be mailed.

Promises: reads the run directory alone; every file may be missing or half written (a run in
progress), and the page then shows what there is; everything that a model or a user wrote is
escaped; no address outside the page. Writes `timeline.svg` beside it when the run has
recorded spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from statistics import median

from m2flow.observe.curves import chart_data, curve_cards
from m2flow.observe.films import film_cards
from m2flow.observe.formatting import date, number, percent, seconds
from m2flow.observe.health import CHECKED, findings
from m2flow.observe.jsonl import write_atomically
from m2flow.observe.lane_time import (
    pictured_steps,
    time_note,
    time_table,
    timeline_data,
    timeline_svg,
)
from m2flow.observe.page import json_block, page, pill, section
from m2flow.observe.plan_section import plan_section
from m2flow.observe.record import ACCURACY, EVALUATION, RunRecord, as_number, read_run
from m2flow.observe.rollout_browser import rollout_browser
from m2flow.observe.rollouts import rollout_columns
from m2flow.observe.run_directory import ends
from m2flow.observe.step_bars import step_bars


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html`, and `timeline.svg` if spans were recorded, into a run directory.

    Returns:
        The path of the report.

    Raises:
        UserError: there is no such directory.
    """
    record = read_run(run_dir)
    picture = timeline_svg(record.trace, title=_picture_title(record), standalone=True)
    if picture:
        write_atomically(record.directory.timeline_picture, picture.encode())
    write_atomically(record.directory.report, render_report(record).encode("utf-8", "replace"))
    return record.directory.report


def render_report(record: RunRecord) -> str:
    """The report as HTML."""
    browser = rollout_browser(record.samples)
    return page(
        f"{record.name} · m2flow",
        [
            _header(record),
            *_overview(record),
            _curves(record),
            *_times(record),
            *_rollouts(record),
            section("All rollouts", browser, "those of samples.jsonl") if browser else "",
            *_rest(record),
            _footer(record),
        ],
    )


def details(record: RunRecord) -> list[str]:
    """The report's sections, without its curves and its browser of rollouts."""
    parts = [*_overview(record), *_times(record), *_rollouts(record), *_rest(record)]
    return [part for part in parts if part]


def _overview(record: RunRecord) -> list[str]:
    return [_tiles(record), _health(record)]


def _times(record: RunRecord) -> list[str]:
    bars, table = step_bars(record), time_table(record.trace)
    return [
        _timeline(record),
        section("Seconds of each step", bars, "mean over the lanes, by stage") if bars else "",
        section("Where the time went", table, time_note(record.trace)) if table else "",
    ]


def _rollouts(record: RunRecord) -> list[str]:
    columns = rollout_columns(record.samples_of_ends)
    note = "the first recorded step against the last"
    return [section("Rollouts", columns, note)] if columns else []


def _rest(record: RunRecord) -> list[str]:
    return [_films(record), plan_section(record), _configuration(record)]


def _header(record: RunRecord) -> str:
    facts = {
        "mode": record.plan.get("mode") or record.run.get("mode"),
        "seed": record.run.get("seed"),
        "machine": record.run.get("machine"),
        "started": _moment(record),
        "took": seconds(record.seconds_elapsed) if record.seconds_elapsed else None,
        **record.versions,
    }
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(fact))}</dd></div>"
        for name, fact in facts.items()
        if fact is not None
    )
    return (
        '<header><div class="top"><div><div class="brand">m2flow · training run</div>'
        f"<h1>{escape(record.name)}</h1></div>{_state(record)}</div>"
        f'<dl class="facts">{shown}</dl></header>'
    )


def _state(record: RunRecord) -> str:
    done, planned = record.last_step, record.planned_steps
    if not record.metrics:
        return pill("no step yet")
    if record.run.get("finished") is not None or (planned is not None and done >= planned):
        return pill(f"finished, {done:,} steps", "good")
    return pill(f"step {done:,}" + (f" of {planned:,}" if planned is not None else ""), "warn")


def _moment(record: RunRecord) -> str | None:
    started = record.run.get("started")
    if started is None and record.metrics:
        started = record.metrics[0].get("time")
    unix = as_number(started)
    if unix is None:
        return None if started is None else str(started)
    return date(unix, "%Y-%m-%d %H:%M")


def _tiles(record: RunRecord) -> str:
    tiles = [
        _change("Held-out accuracy", record, EVALUATION, percent),
        _change("Reward", record, ("reward/mean",), number),
        _throughput(record),
        _step_time(record),
        _change("Accuracy in training", record, ACCURACY, percent),
    ]
    shown = [tile for tile in tiles if tile][:4]
    return f'<div class="tiles">{"".join(shown)}</div>' if shown else ""


def _change(
    title: str, record: RunRecord, keys: Sequence[str], form: Callable[[float], str]
) -> str:
    key = record.first_key(keys)
    if key is None:
        return ""
    values = record.values(key)
    first, last, window = (values[0], values[-1], 1) if key in EVALUATION else ends(values)
    more = f"mean of the first and the last {window} steps"
    if window == 1:
        more = f"{len(values)} measurements"
    begin = f'<span class="from">{form(first)} → </span>' if len(values) > 1 else ""
    return _tile(title, begin + form(last), more)


def _throughput(record: RunRecord) -> str:
    values = record.values("throughput/tokens_per_s")
    if not values:
        steps = record.values("throughput/steps_per_s")
        figure = f"{number(median(steps))} <small>environment steps/s</small>" if steps else ""
        return _tile("Throughput", figure, "median") if steps else ""
    generated = sum(record.values("tokens/generated"))
    more = f"{number(generated)} generated in all" if generated else "median"
    return _tile("Throughput", f"{number(median(values))} <small>tokens/s</small>", more)


def _step_time(record: RunRecord) -> str:
    values = record.values("seconds/step")
    if not values:
        return ""
    predicted = record.values("plan/predicted_seconds")
    more = f"the plan expected {seconds(predicted[-1])}" if predicted else "median"
    return _tile("Time per step", seconds(median(values)), more)


def _tile(title: str, figure: str, more: str) -> str:
    return (
        f'<div class="card tile"><div class="what">{escape(title)}</div>'
        f'<div class="figure">{figure}</div><div class="more">{escape(more)}</div></div>'
    )


def _health(record: RunRecord) -> str:
    found = findings(record)
    if not found:
        if not record.metrics:
            return ""
        checked = ", ".join(CHECKED)
        body = (
            f'<div class="finding good">{pill("healthy", "good")}'
            f"<p>Nothing to report. Checked: {escape(checked)}.</p></div>"
        )
        return section("Health", f'<div class="findings">{body}</div>')
    rows = [
        f'<div class="finding {finding.level}">'
        f"{pill('problem' if finding.level == 'bad' else 'warning', finding.level)}"
        f"<p><b>{escape(finding.title)}.</b> {escape(finding.detail)}</p></div>"
        for finding in found
    ]
    return section("Health", f'<div class="findings">{"".join(rows)}</div>')


def _curves(record: RunRecord) -> str:
    cards, more = curve_cards(record)
    if not cards and not more:
        return section("Curves", '<div class="card empty">No figures have been recorded yet.</div>')
    rest = f"<details><summary>All other figures</summary>{more}</details>" if more else ""
    data = json_block(chart_data(record), ident="curves")
    note = "over steps; bands reach from the 10th to the 90th percentile of neighbouring steps"
    return section("Curves", data + cards + rest, note)


def _picture_title(record: RunRecord) -> str:
    mode = record.plan.get("mode") or record.run.get("mode")
    return record.name + (f", mode {mode}" if mode else "")


def _timeline(record: RunRecord) -> str:
    picture = timeline_svg(record.trace)
    if not picture:
        return ""
    steps = [str(step.step) for step in pictured_steps(record.trace)]
    note = f"step{'s' if len(steps) > 1 else ''} {' and '.join(steps)}, beside each lane its share "
    note += f"of time in stages; every span kept is in {record.directory.timeline.name}, which "
    note += "Perfetto opens"
    body = (
        '<div class="card timeline"><div class="scroll drawn" tabindex="0" role="region" '
        f'aria-label="timeline">{picture}</div>{json_block(timeline_data(record.trace))}</div>'
    )
    return section("Timeline", body, note)


def _films(record: RunRecord) -> str:
    cards = film_cards(record.directory.films)
    body = f'<div class="charts">{cards}</div>'
    return section("Episodes", body, "of the first and of the last evaluation") if cards else ""


def _configuration(record: RunRecord) -> str:
    if not record.config_text:
        return ""
    text = escape(record.config_text)
    body = f"<details><summary>{record.directory.config.name}</summary><pre>{text}</pre></details>"
    return section("Configuration", body, "resolved, every default included")


def _footer(record: RunRecord) -> str:
    files = [record.directory.metrics, record.directory.samples, record.directory.timeline]
    links = "".join(f'<a href="{file.name}">{file.name}</a>' for file in files if file.exists())
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    return f"<footer><span>Written by m2flow report, {written}</span>{links}</footer>"
