"""The report's curves: which figures of a run are drawn, and each as a card.

Promises: a card for each of the leading figures that the run has, in a fixed order; every other
number in `metrics.jsonl` is drawn too, under "more", so nothing that was recorded is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from m2flow.observe.charts import Series, line_chart
from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.page import legend_entry
from m2flow.observe.record import ACCURACY, EVALUATION, LOSS, RunRecord
from m2flow.observe.theme import series_colour


def curve_cards(record: RunRecord) -> str:
    """The leading figures as a grid of cards; empty if the run has none."""
    key, loss = "plan/predicted_seconds", record.first_key(LOSS)
    rewards = Series("reward", record.series("reward/mean"))
    losses = [] if loss is None else [Series(loss, record.series(loss), colour=3)]
    speeds = Series("tokens/s", record.series("throughput/tokens_per_s"), colour=2)
    lengths = Series("tokens", record.series("length/mean"), colour=4)
    steps = Series("measured", record.series("seconds/step"), colour=5)
    predicted = Series("predicted", record.series(key), 7, "dashed")
    return _grid(
        [
            _card("Reward", [rewards]),
            _card("Accuracy", _accuracy(record), low=0.0, high=1.0, form=percent),
            _card("Loss", losses),
            _card("Tokens per second", [speeds], low=0.0),
            _card("Response length", [lengths], low=0.0),
            _card("Seconds per step", [steps, predicted], low=0.0, form=seconds),
        ]
    )


def more_cards(record: RunRecord) -> str:
    """Every other figure with at least two values."""
    drawn = {"step", "time", "reward/mean", "seconds/step", "throughput/tokens_per_s", *ACCURACY}
    drawn |= {*EVALUATION, "plan/predicted_seconds"}
    drawn |= {key for key in [record.first_key(LOSS)] if key}
    cards = []
    for key in sorted({key for row in record.metrics for key in row} - drawn):
        series = Series(key, record.series(key), colour=7)
        if len(series.values) > 1:
            timed = key.startswith("seconds/")
            low, form = (0.0, seconds) if timed else (None, number)
            cards.append(_card(key, [series], low=low, form=form))
    return _grid(cards)


def _accuracy(record: RunRecord) -> list[Series]:
    """Held out first: it is the figure that stands on the card."""
    lines = []
    held_out = record.first_key(EVALUATION)
    if held_out is not None:
        lines.append(Series("held out", record.series(held_out), colour=1, style="dots"))
    sampled = record.first_key(ACCURACY)
    if sampled is not None:
        lines.append(Series("in training", record.series(sampled), colour=6))
    return lines


def _grid(cards: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(cards)}</div>' if any(cards) else ""


def _card(
    title: str,
    series: Sequence[Series],
    *,
    low: float | None = None,
    high: float | None = None,
    form: Callable[[float], str] = number,
) -> str:
    """One chart with its title, last value and legend; empty without values."""
    shown = [one for one in series if one.values]
    if not shown:
        return ""
    values = shown[0].values
    chart = line_chart(shown, label=title, low=low, high=high, form=form)
    begin = f"<span>{escape(form(values[0]))} → </span>" if len(values) > 1 else ""
    legend = ""
    if len(shown) > 1:
        entries = "".join(legend_entry(one.name, series_colour(one.colour)) for one in shown)
        legend = f'<div class="legend">{entries}</div>'
    return (
        f'<article class="card"><header><h3>{escape(title)}</h3>'
        f'<div class="latest">{begin}{escape(form(values[-1]))}</div></header>'
        f"{chart}{legend}</article>"
    )
