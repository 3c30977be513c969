"""A Gantt chart as SVG: a line for each row, a hue per worker, idleness hatched.

Promises: what is drawn is the partition of time that the account of lanes sums up, and the shares
written beside it are the same sums; a row of very many pieces is drawn in columns of half a pixel
that cover as much of each colour as the pieces do, so the file stays small. Stands alone
(`standalone=True`, for a file) or inside a page that defines the variables of `theme`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from m2flow.observe.charts import round_ticks
from m2flow.observe.formatting import percent, seconds
from m2flow.observe.theme import SANS, stage_colours, variables
from m2flow.plan.gantt import Gantt, GanttRow, in_columns, joined, lane_names
from m2flow.simulation.time_account import TERM_OF, WORK, Piece

GANTT_CSS = """
.gantt{display:block;width:100%;height:auto}
.gantt text{font-size:12px;fill:var(--muted);font-variant-numeric:tabular-nums}
.gantt .name{fill:var(--ink);font-weight:550}
.gantt .head{font-size:15px;font-weight:650;fill:var(--ink)}
.gantt .inside{fill:var(--on-series);font-weight:550;pointer-events:none}
.gantt .tick{fill:var(--faint);font-size:11px}
.gantt .grid{stroke:var(--grid);stroke-width:1}
.gantt .border{stroke:var(--faint);stroke-width:1;stroke-dasharray:2 3}
.gantt .track{fill:var(--track)}
.gantt .idle{stroke:var(--hatch);stroke-width:2.5}
.gantt .piece:hover{opacity:.82}
"""

MAX_ROWS = 64
WIDTH, LABEL_WIDTH, SHARE_WIDTH, LEGEND_LINE = 1120, 96, 84, 22
MAX_PIECES, COLUMN, HOVER_FROM = 500, 0.5, 2.0
"""Pieces of a row that are drawn one by one; beyond, columns of `COLUMN` pixels. A piece answers
to the pointer from `HOVER_FROM` pixels on."""


def gantt_svg(
    chart: Gantt,
    *,
    steps: Sequence[tuple[int, float, float]] = (),
    colours: Mapping[str, str] | None = None,
    width: int = WIDTH,
    title: str | None = None,
    standalone: bool = False,
    ident: str = "gantt",
) -> str:
    """Draw a chart.

    Args:
        chart: what is drawn.
        steps: (number, start, end) of steps; each beginning is marked.
        colours: a CSS colour per stage; None: by order of appearance.
        width: of the drawing in pixels; the page may scale it.
        title: a heading inside the picture.
        standalone: an SVG file with its own style, namespace and background.
        ident: prefix of ids, unique in the page.
    """
    if colours is None:
        colours = stage_colours(appearing_stages(chart))
    shown = chart.rows[:MAX_ROWS]
    entries = [(words, fill or f"url(#{ident}-idle)") for words, fill in legend(chart, colours)]
    column = 35 + 6.9 * max(len(text) for text, _ in entries)
    a_line = max(1, int((width - LABEL_WIDTH) / column))
    canvas = Canvas(chart, width, len(shown), title is not None, math.ceil(len(entries) / a_line))
    body = [] if title is None else [_text(0, 16, title, name="head")]
    body += [*_legend(entries, canvas, a_line, column), *_time_axis(canvas)]
    for index, row in enumerate(shown):
        body += _row(row, index, canvas, colours, ident)
    body += _step_marks(steps, canvas)
    if len(chart.rows) > len(shown):
        left_out = f"{len(shown)} of {len(chart.rows)} lanes"
        body.append(_text(LABEL_WIDTH, canvas.height - 6, left_out))
    return _document(body, canvas, standalone, ident, title or "Timeline of lanes")


def appearing_stages(chart: Gantt) -> list[str]:
    """The stages of calls and finishes, by the time they first begin."""
    working = [piece for row in chart.rows for piece in row.pieces if piece.kind in WORK]
    return list(dict.fromkeys(piece.name for piece in sorted(working, key=lambda p: p.start)))


def short_names(stages: Iterable[str]) -> dict[str, str]:
    """`worker.method` becomes `method` where no other stage has that method."""
    listed = list(dict.fromkeys(stages))
    methods = [stage.rpartition(".")[2] for stage in listed]
    return {
        stage: method if methods.count(method) == 1 else stage
        for stage, method in zip(listed, methods, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Canvas:
    """Where things stand, in pixels."""

    chart: Gantt
    width: int
    num_rows: int
    has_title: bool
    legend_lines: int

    @property
    def row(self) -> int:
        """Height of a row with its gap."""
        return 34 if self.num_rows <= 16 else 18

    @property
    def bar(self) -> int:
        return self.row - (8 if self.num_rows <= 16 else 4)

    @property
    def column(self) -> float:
        """Width of a column of a lane with very many pieces; more lanes, wider columns."""
        return COLUMN * max(1.0, self.num_rows / 8)

    @property
    def top(self) -> int:
        """Where the first lane begins: below title, legend and step marks."""
        return (30 if self.has_title else 0) + 32 + LEGEND_LINE * self.legend_lines

    @property
    def bottom(self) -> int:
        return self.top + self.row * self.num_rows

    @property
    def height(self) -> int:
        return self.bottom + 30

    @property
    def right(self) -> int:
        return self.width - SHARE_WIDTH

    @property
    def pixels_per_second(self) -> float:
        length = self.chart.seconds
        return (self.right - LABEL_WIDTH) / length if length > 0 else 0.0

    def x(self, moment: float) -> float:
        return LABEL_WIDTH + (moment - self.chart.start) * self.pixels_per_second


def told(piece: Piece) -> str:
    """What a piece is, in words."""
    return piece.name if piece.kind in WORK else f"{piece.term}: {piece.name}"


def busy(row: GanttRow, chart: Gantt) -> str:
    """The share of a row's time that stages take."""
    working = sum(piece.seconds for piece in row.pieces if piece.kind in WORK)
    return percent(working / chart.seconds if chart.seconds > 0 else 0.0)


def _pieces(row: GanttRow, canvas: Canvas) -> Sequence[Piece]:
    """What is drawn of a row: its pieces, or columns that hold the same shares."""
    if len(row.pieces) <= MAX_PIECES:
        return row.pieces
    columns = int((canvas.right - LABEL_WIDTH) / COLUMN)
    return joined(in_columns(row.pieces, canvas.chart, columns), canvas.chart)


def legend(chart: Gantt, colours: Mapping[str, str]) -> list[tuple[str, str]]:
    """(words, colour) of all that the chart holds, with its share of all lanes' time.

    Idleness comes last, and has no colour.
    """
    total = chart.seconds * sum(len(row.lanes) for row in chart.rows)
    spent = dict.fromkeys((*colours, *TERM_OF.values()), 0.0)
    for row in chart.rows:
        for piece in row.pieces:
            spent[piece.term] = spent.get(piece.term, 0.0) + piece.seconds * len(row.lanes)
    fills = {**colours, **{term: f"var(--{kind})" for kind, term in TERM_OF.items()}}
    names = short_names(colours)
    shown = [(names.get(term, term), fill, spent[term]) for term, fill in fills.items()]
    shown = [entry for entry in shown if entry[2] > 0]
    shown.append(("idle", "", max(0.0, total - sum(spent.values()))))
    return [
        (name + (f" {percent(amount / total)}" if total > 0 else ""), fill)
        for name, fill, amount in shown
    ]


def _legend(
    entries: Sequence[tuple[str, str]], canvas: Canvas, a_line: int, column: float
) -> Iterator[str]:
    for number, (text, fill) in enumerate(entries):
        x = LABEL_WIDTH + column * (number % a_line)
        y = (30 if canvas.has_title else 0) + LEGEND_LINE * (number // a_line)
        border = ' stroke="var(--hatch)"' if fill.startswith("url") else ""
        box = f'x="{x:.0f}" y="{y + 2}" width="11" height="11" rx="2.5"'
        yield f'<rect {box} fill="{fill}"{border}/>'
        yield _text(x + 17, y + 12, text)


def _time_axis(canvas: Canvas) -> Iterator[str]:
    length = canvas.chart.seconds
    for tick in round_ticks(0.0, length, 8) if length > 0 else []:
        if tick > length * 1.0001:
            break
        x = canvas.x(canvas.chart.start + tick)
        yield (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{canvas.top - 4}" '
            f'y2="{canvas.bottom + 4}"/>'
        )
        yield _text(x, canvas.bottom + 18, seconds(tick), name="tick", anchor="middle")


def _row(
    row: GanttRow, index: int, canvas: Canvas, colours: Mapping[str, str], ident: str
) -> Iterator[str]:
    lanes = lane_names(row.lanes)
    top = canvas.top + index * canvas.row + (canvas.row - canvas.bar) // 2
    middle = top + canvas.bar / 2 + 4
    box = f'x="{LABEL_WIDTH}" y="{top}" width="{canvas.right - LABEL_WIDTH}" height="{canvas.bar}"'
    yield _text(LABEL_WIDTH - 12, middle, _shortened(lanes, 12), "name", "end")
    yield f'<rect class="track" {box} rx="3"/><rect {box} rx="3" fill="url(#{ident}-idle)"/>'
    for piece in _pieces(row, canvas):
        left, wide = canvas.x(piece.start), piece.seconds * canvas.pixels_per_second
        fill = colours.get(piece.term) or f"var(--{piece.kind})"
        box = f'x="{left:.2f}" y="{top}" width="{max(wide, 0.5):.2f}" height="{canvas.bar}"'
        if wide < HOVER_FROM:
            yield f'<rect {box} fill="{fill}"/>'
            continue
        begin = seconds(piece.start - canvas.chart.start)
        hover = f"{told(piece)}\n{lanes}\n{seconds(piece.seconds)}, from {begin}"
        yield (
            f'<rect class="piece" {box} rx="1.5" fill="{fill}">'
            f"<title>{escape(hover)}</title></rect>"
        )
        label = piece.name.rpartition(".")[2]
        if piece.kind in WORK and canvas.bar >= 20 and wide > 7 * len(label) + 12:
            yield _text(left + wide / 2, middle, label, name="inside", anchor="middle")
    yield _text(canvas.right + 12, middle, f"{busy(row, canvas.chart)} busy")


def _step_marks(steps: Sequence[tuple[int, float, float]], canvas: Canvas) -> Iterator[str]:
    for number, start, end in steps:
        chart = canvas.chart
        left, right = canvas.x(max(start, chart.start)), canvas.x(min(end, chart.end))
        if right <= left:
            continue
        if start > chart.start:
            yield (
                f'<line class="border" x1="{left:.1f}" x2="{left:.1f}" y1="{canvas.top - 20}" '
                f'y2="{canvas.bottom + 4}"/>'
            )
        text = f"step {number}, {seconds(end - start)}"
        if right - left > 7 * len(text):
            yield _text(left + 5, canvas.top - 10, text, name="tick")


def _document(body: Sequence[str], canvas: Canvas, standalone: bool, ident: str, label: str) -> str:
    size = f'viewBox="0 0 {canvas.width} {canvas.height}"'
    space = background = style = ""
    if standalone:
        edge = 18
        outer = canvas.width + 2 * edge, canvas.height + 2 * edge - 8
        size = f'viewBox="{-edge} {-edge} {outer[0]} {outer[1]}" width="{outer[0]}"'
        size += f' height="{outer[1]}" font-family="{escape(SANS)}"'
        space = ' xmlns="http://www.w3.org/2000/svg"'
        style = f"<style>{variables('.gantt')}{GANTT_CSS}</style>"
        background = (
            f'<rect x="{-edge}" y="{-edge}" width="{outer[0]}" height="{outer[1]}" rx="8" '
            'fill="var(--surface)"/>'
        )
    pattern = (
        f'<defs><pattern id="{ident}-idle" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line class="idle" x1="0" y1="0" x2="0" y2="7"/>'
        "</pattern></defs>"
    )
    return (
        f'<svg{space} class="gantt" {size} role="img" aria-label="{escape(label)}">'
        f"{style}{pattern}{background}{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, name: str = "", anchor: str = "") -> str:
    attributes = f' class="{name}"' if name else ""
    attributes += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
