"""The report's curves: which figures of a run are drawn, and each as a card.

Promises: a card for each of the leading figures that the run has, in a fixed order; every other
number in `metrics.jsonl` is drawn too, under "more", so nothing that was recorded is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from m2flow.observe.charts import Series, line_chart
from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.page import legend_entry
from m2flow.observe.record import ACCURACY, EVALUATION, LOSS, RunRecord
from m2flow.observe.theme import series_colour


@dataclass(frozen=True, slots=True)
class Curve:
    """One chart: its title, its lines, bounds the y axis must include, how values are written."""

    title: str
    series: Sequence[Series]
    low: float | None = None
    high: float | None = None
    form: Callable[[float], str] = number


def curve_cards(record: RunRecord) -> str:
    """The leading figures as a grid of cards; empty if the run has none."""
    cards = [_card(curve) for curve in _leading(record) if any(one.values for one in curve.series)]
    return f'<div class="charts">{"".join(cards)}</div>' if cards else ""


def more_cards(record: RunRecord) -> str:
    """Every other figure with at least two values."""
    drawn = {"step", "time", "reward/mean", "seconds/step", "throughput/tokens_per_s", *ACCURACY}
    drawn |= {*EVALUATION, "plan/predicted_seconds"}
    drawn |= {key for key in [record.first_key(LOSS)] if key}
    keys = sorted({key for row in record.metrics for key in row} - drawn)
    cards = []
    for key in keys:
        series = Series(key, record.series(key), colour=7)
        if len(series.values) > 1:
            form = seconds if key.startswith("seconds/") else number
            low = 0.0 if key.startswith("seconds/") else None
            cards.append(_card(Curve(key, [series], low=low, form=form)))
    return f'<div class="charts">{"".join(cards)}</div>' if cards else ""


def _leading(record: RunRecord) -> Iterator[Curve]:
    yield Curve("Reward", [Series("reward", record.series("reward/mean"))])
    yield _accuracy(record)
    loss = record.first_key(LOSS)
    if loss is not None:
        yield Curve("Loss", [Series(loss, record.series(loss), colour=3)])
    yield Curve(
        "Tokens per second",
        [Series("tokens/s", record.series("throughput/tokens_per_s"), colour=2)],
        low=0.0,
    )
    lengths = Series("tokens", record.series("length/mean"), colour=4)
    yield Curve("Response length", [lengths], low=0.0)
    yield Curve(
        "Seconds per step",
        [
            Series("measured", record.series("seconds/step"), colour=5),
            Series("predicted", record.series("plan/predicted_seconds"), 7, "dashed"),
        ],
        low=0.0,
        form=seconds,
    )


def _accuracy(record: RunRecord) -> Curve:
    """Held out first: it is the figure that stands on the card."""
    lines = []
    held_out = record.first_key(EVALUATION)
    if held_out is not None:
        lines.append(Series("held out", record.series(held_out), colour=1, style="dots"))
    sampled = record.first_key(ACCURACY)
    if sampled is not None:
        lines.append(Series("in training", record.series(sampled), colour=6))
    return Curve("Accuracy", lines, low=0.0, high=1.0, form=percent)


def _card(curve: Curve) -> str:
    shown = [one for one in curve.series if one.values]
    values = shown[0].values
    chart = line_chart(shown, label=curve.title, low=curve.low, high=curve.high, form=curve.form)
    begin = f"<span>{escape(curve.form(values[0]))} → </span>" if len(values) > 1 else ""
    legend = ""
    if len(shown) > 1:
        entries = "".join(legend_entry(one.name, series_colour(one.colour)) for one in shown)
        legend = f'<div class="legend">{entries}</div>'
    return (
        f'<article class="card"><header><h3>{escape(curve.title)}</h3>'
        f'<div class="latest">{begin}{escape(curve.form(values[-1]))}</div></header>'
        f"{chart}{legend}</article>"
    )
