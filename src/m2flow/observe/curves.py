"""The report's curves: which figures of a run are drawn, and each as a card.

Promises: a card for each of the leading figures that the run has, in a fixed order; every other
number in `metrics.jsonl` is drawn too, under "more", so nothing that was recorded is hidden. Each
card holds a drawing; `chart_data` is what a script needs to draw the same with a zoom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from m2flow.observe.charts import ChartLine, line_chart
from m2flow.observe.curve_data import Curve, curves_of
from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.page import legend_entry
from m2flow.observe.record import ACCURACY, EVALUATION, LOSS, RunRecord
from m2flow.observe.theme import series_colour

DRAWN, ZOOMED, ZOOMED_OTHERS = 200, 1000, 40_000
"""The most values of a curve in a drawing, of a curve in the zoom, and of all but the leading ones
there together."""
EXPECTED = "plan/predicted_seconds"
FORMS = {"number": number, "percent": percent, "seconds": seconds}


@dataclass(frozen=True)
class Spec:
    """A chart to be drawn: what is in it, before its values are known.

    Attributes:
        title: of its card.
        keys: (key in `metrics.jsonl`, name, index of its colour), what stands on the card first.
        form: how values are written, of `FORMS`.
        low, high: bounds that the y axis includes.
    """

    title: str
    keys: Sequence[tuple[str | None, str, int]]
    form: str = "number"
    low: float | None = None
    high: float | None = None


def curve_cards(record: RunRecord) -> tuple[str, str]:
    """The leading figures as a grid of cards, and all others as another; empty for none."""
    leading, others = _specs(record)
    x, curves = _thinned(record, DRAWN)
    cards = [_card(spec, x, curves) for spec in (*leading, *others)]
    return _grid(cards[: len(leading)]), _grid(cards[len(leading) :])


def chart_data(record: RunRecord) -> dict[str, object]:
    """The values of the charts, by title, for `static/charts.js`."""
    leading, others = _specs(record)
    share = max(DRAWN, min(ZOOMED, ZOOMED_OTHERS // max(1, len(others))))
    axes = [_thinned(record, points) for points in (ZOOMED, share)]
    charts = [
        {
            "title": spec.title,
            "axis": axis,
            "form": spec.form,
            "low": spec.low,
            "high": spec.high,
            "curves": [
                {"name": line.name, "colour": line.colour, "dashed": line.dashed, **line.curve}
                for line in lines
            ],
        }
        for axis, specs in enumerate((leading, others))
        for spec in specs
        if (lines := _lines(spec, axes[axis][1]))
    ]
    return {"axes": [x for x, _ in axes], "charts": charts}


def _specs(record: RunRecord) -> tuple[list[Spec], list[Spec]]:
    """The leading charts, and one for every figure that is in none of them."""
    held_out, sampled = record.first_key(EVALUATION), record.first_key(ACCURACY)
    loss = record.first_key(LOSS)
    leading = [
        Spec("Reward", [("reward/mean", "reward", 0)]),
        Spec("Accuracy", [(held_out, "held out", 1), (sampled, "in training", 6)], "percent", 0, 1),
        Spec("Loss", [(loss, "loss", 3)]),
        Spec("Tokens per second", [("throughput/tokens_per_s", "tokens/s", 2)], low=0),
        Spec("Environment steps per second", [("throughput/steps_per_s", "steps/s", 2)], low=0),
        Spec("Response length", [("length/mean", "tokens", 4)], low=0),
        Spec(
            "Seconds per step",
            [("seconds/step", "measured", 5), (EXPECTED, "predicted", 7)],
            "seconds",
            0,
        ),
    ]
    drawn = {key for spec in leading for key, _, _ in spec.keys} | {"step", "time"}
    others = sorted({key for row in record.metrics for key in row} - drawn)
    timed = {key for key in others if key.startswith("seconds/")}
    return leading, [
        Spec(key, [(key, key, 7)], "seconds", 0) if key in timed else Spec(key, [(key, key, 7)])
        for key in others
        if record.values(key)
    ]


def _thinned(record: RunRecord, points: int) -> tuple[list[int], dict[str, Curve]]:
    """The axis of steps, and each figure's curve over it."""
    told = curves_of([{row["step"]: row for row in record.metrics}], points)
    return told["x"], {chart["key"]: chart["curves"][0] for chart in told["charts"]}


def _lines(spec: Spec, curves: Mapping[str, Curve]) -> list[ChartLine]:
    lines = []
    for key, name, colour in spec.keys:
        if key is not None and key in curves:
            curve, dashed = curves[key], key == EXPECTED
            if dashed:  # it is told, not measured: its steps are no noise
                curve = Curve(run=0, mean=curve["mean"], trend=[], low=[], high=[])
            lines.append(ChartLine(name, curve, series_colour(colour), dashed))
    return lines


def _grid(cards: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(cards)}</div>' if any(cards) else ""


def _card(spec: Spec, x: Sequence[int], curves: Mapping[str, Curve]) -> str:
    """One chart with its title, last value and legend; empty without values."""
    lines = _lines(spec, curves)
    if not lines:
        return ""
    form = FORMS[spec.form]
    values = lines[0].values
    chart = line_chart(x, lines, label=spec.title, low=spec.low, high=spec.high, form=form)
    begin = f"<span>{escape(form(values[0]))} → </span>" if len(values) > 1 else ""
    legend = ""
    if len(lines) > 1:
        entries = "".join(legend_entry(line.name, line.colour) for line in lines)
        legend = f'<div class="legend">{entries}</div>'
    return (
        f'<article class="card" data-chart="{escape(spec.title)}"><header>'
        f"<h3>{escape(spec.title)}</h3>"
        f'<div class="latest">{begin}{escape(form(values[-1]))}</div></header>'
        f'<div class="drawn">{chart}</div>{legend}</article>'
    )
