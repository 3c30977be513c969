"""A picture of lanes over time as SVG: one row per lane, one colour per stage, idleness hatched.

Promises: what is drawn is the partition of time that `where_the_time_went` sums up, and the shares
written beside it are that function's; a lane of very many pieces is drawn in columns of half a
pixel that cover as much of each colour as the pieces do, so the file stays small. Stands alone
(`standalone=True`, for a file) or inside a page that defines the variables of `theme`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from m2flow.observe.charts import round_ticks
from m2flow.observe.formatting import percent, seconds
from m2flow.observe.spans import (
    Lane,
    LaneTime,
    SpanLike,
    covered,
    extent,
    lane_order,
    where_the_time_went,
)
from m2flow.observe.theme import SANS, stage_colours, variables
from m2flow.observe.trace import lane_label

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

OVERHEAD = {"switch": "switching", "transfer": "transfer", "publish": "publish", "wait": "waiting"}
MAX_LANES = 64
LABEL_WIDTH, SHARE_WIDTH, LEGEND_LINE = 96, 84, 22
MAX_PIECES, COLUMN, HOVER_FROM = 500, 0.5, 2.0
"""Pieces of a lane that are drawn one by one; beyond, columns of `COLUMN` pixels. A piece answers
to the pointer from `HOVER_FROM` pixels on."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one lane with one colour, in seconds."""

    kind: str
    name: str
    start: float
    end: float

    @property
    def key(self) -> str:
        """What the colour stands for: the stage, or the kind of overhead."""
        return OVERHEAD.get(self.kind, self.name)


def gantt_svg(
    spans: Sequence[SpanLike],
    *,
    window: tuple[float, float] | None = None,
    steps: Sequence[tuple[int, float, float]] = (),
    colours: Mapping[str, str] | None = None,
    width: int = 1120,
    title: str | None = None,
    standalone: bool = False,
    ident: str = "gantt",
) -> str:
    """Draw the lanes of `spans`.

    Args:
        spans: of any lanes, in seconds of one clock.
        window: seconds shown; None: all.
        steps: (number, start, end) of steps; each beginning is marked.
        colours: a CSS colour per stage; None: by order of appearance.
        width: of the drawing in pixels; the page may scale it.
        title: a heading inside the picture.
        standalone: an SVG file with its own style, namespace and background.
        ident: prefix of ids, unique in the page.
    """
    window = extent(spans) if window is None else window
    lanes = sorted({span.lane for span in spans}, key=lane_order)
    shown = lanes[:MAX_LANES]
    if colours is None:
        colours = stage_colours(appearing_stages(spans))
    by_lane: dict[Lane, list[SpanLike]] = {lane: [] for lane in lanes}
    for span in spans:
        by_lane[span.lane].append(span)
    accounts = where_the_time_went(spans, window)
    entries = _legend_entries(accounts, colours, width, ident)
    num_lines = max(entry.line for entry in entries) + 1
    layout = Layout(window, width, len(shown), title is not None, num_lines)
    body = [] if title is None else [_text(0, 16, title, name="head")]
    body += [*_legend(entries, layout, ident), *_time_axis(layout)]
    for index, (lane, account) in enumerate(zip(shown, accounts, strict=False)):
        body += _row(account, _pieces(by_lane[lane], layout), index, layout, colours, ident)
    body += _step_marks(steps, layout)
    if len(lanes) > len(shown):
        body.append(_text(LABEL_WIDTH, layout.height - 6, f"{len(shown)} of {len(lanes)} lanes"))
    return _document(body, layout, standalone, ident, title or "Timeline of lanes")


def appearing_stages(spans: Sequence[SpanLike]) -> list[str]:
    """The stages of calls and finishes, by the time they first begin."""
    working = [span for span in spans if span.kind not in OVERHEAD]
    return list(dict.fromkeys(span.name for span in sorted(working, key=lambda span: span.start)))


def short_names(stages: Iterable[str]) -> dict[str, str]:
    """`worker.method` becomes `method` where no other stage has that method."""
    listed = list(dict.fromkeys(stages))
    methods = [stage.rpartition(".")[2] for stage in listed]
    return {
        stage: method if methods.count(method) == 1 else stage
        for stage, method in zip(listed, methods, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things stand, in pixels."""

    window: tuple[float, float]
    width: int
    num_lanes: int
    has_title: bool
    legend_lines: int

    @property
    def row(self) -> int:
        """Height of a lane with its gap."""
        return 34 if self.num_lanes <= 16 else 18

    @property
    def bar(self) -> int:
        return self.row - (8 if self.num_lanes <= 16 else 4)

    @property
    def column(self) -> float:
        """Width of a column of a lane with very many pieces; more lanes, wider columns."""
        return COLUMN * max(1.0, self.num_lanes / 8)

    @property
    def top(self) -> int:
        """Where the first lane begins: below title, legend and step marks."""
        return (30 if self.has_title else 0) + 32 + LEGEND_LINE * self.legend_lines

    @property
    def bottom(self) -> int:
        return self.top + self.row * self.num_lanes

    @property
    def height(self) -> int:
        return self.bottom + 30

    @property
    def right(self) -> int:
        return self.width - SHARE_WIDTH

    @property
    def pixels_per_second(self) -> float:
        length = self.window[1] - self.window[0]
        return (self.right - LABEL_WIDTH) / length if length > 0 else 0.0

    def x(self, moment: float) -> float:
        return LABEL_WIDTH + (moment - self.window[0]) * self.pixels_per_second


def _pieces(spans: Sequence[SpanLike], layout: Layout) -> list[Piece]:
    """What to draw of one lane: its partition, with neighbours of one colour joined."""
    pieces: list[Piece] = []
    for kind, name, start, end in covered(spans, layout.window):
        last = pieces[-1] if pieces else None
        if last is not None and (last.kind, last.name, last.end) == (kind, name, start):
            pieces[-1] = Piece(kind, name, last.start, end)
        else:
            pieces.append(Piece(kind, name, start, end))
    return _columns(pieces, layout) if len(pieces) > MAX_PIECES else pieces


def _columns(pieces: Sequence[Piece], layout: Layout) -> list[Piece]:
    """The pieces in columns of equal width, each of one colour or idle.

    What a column holds but cannot show is owed to the next one (error diffusion), so over the
    lane each colour covers as much as its pieces do, to within a column.
    """
    first, last = layout.window
    length = layout.column / layout.pixels_per_second
    held: list[dict[tuple[str, str], float]] = [{} for _ in range(int((last - first) / length) + 2)]
    for piece in pieces:
        columns = int((piece.start - first) / length), int((piece.end - first) / length)
        for column in range(columns[0], columns[1] + 1):
            left = first + column * length
            amount = min(piece.end, left + length) - max(piece.start, left)
            key = piece.kind, piece.name
            held[column][key] = held[column].get(key, 0.0) + amount
    idle = ("idle", "")
    owed: dict[tuple[str, str], float] = {}
    result: list[Piece] = []
    for column, amounts in enumerate(held):
        for key, amount in (*amounts.items(), (idle, length - sum(amounts.values()))):
            owed[key] = owed.get(key, 0.0) + amount
        shown = max(owed, key=lambda key: owed[key])
        owed[shown] -= length
        start, end = first + column * length, min(first + (column + 1) * length, last)
        if result and (result[-1].kind, result[-1].name) == shown:
            result[-1] = Piece(*shown, result[-1].start, end)
        elif end > start:
            result.append(Piece(*shown, start, end))
    return [piece for piece in result if piece.kind != "idle"]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A swatch and its words, placed on a line of the legend."""

    text: str
    fill: str
    x: float
    line: int


def _legend_entries(
    accounts: Sequence[LaneTime], colours: Mapping[str, str], width: int, ident: str
) -> list[LegendEntry]:
    total = sum(account.seconds for account in accounts)
    stages: dict[str, float] = {}
    for account in accounts:
        for stage, amount in account.stages.items():
            stages[stage] = stages.get(stage, 0.0) + amount
    entries = [
        (stage, colour, stages[stage]) for stage, colour in colours.items() if stage in stages
    ]
    overhead = {
        "switch": sum(account.switching for account in accounts),
        "transfer": sum(account.transfer for account in accounts),
        "publish": sum(account.publishing for account in accounts),
        "wait": sum(account.waiting for account in accounts),
    }
    entries += [
        (OVERHEAD[kind], f"var(--{kind})", amount) for kind, amount in overhead.items() if amount
    ]
    entries.append(("idle", f"url(#{ident}-idle)", sum(account.idle for account in accounts)))
    placed: list[LegendEntry] = []
    x, line = float(LABEL_WIDTH), 0
    names = short_names(colours)
    for name, fill, amount in entries:
        text = names.get(name, name) + (f" {percent(amount / total)}" if total > 0 else "")
        length = 17 + 6.9 * len(text)
        if x + length > width and x > LABEL_WIDTH:
            x, line = float(LABEL_WIDTH), line + 1
        placed.append(LegendEntry(text, fill, x, line))
        x += length + 18
    return placed


def _legend(entries: Sequence[LegendEntry], layout: Layout, ident: str) -> Iterator[str]:
    for entry in entries:
        y = (30 if layout.has_title else 0) + LEGEND_LINE * entry.line
        idle = entry.fill == f"url(#{ident}-idle)"
        border = ' stroke="var(--hatch)"' if idle else ""
        box = f'x="{entry.x:.0f}" y="{y + 2}" width="11" height="11" rx="2.5"'
        yield f'<rect {box} fill="{entry.fill}"{border}/>'
        yield _text(entry.x + 17, y + 12, entry.text)


def _time_axis(layout: Layout) -> Iterator[str]:
    length = layout.window[1] - layout.window[0]
    for tick in round_ticks(0.0, length, 8) if length > 0 else []:
        if tick > length * 1.0001:
            break
        x = layout.x(layout.window[0] + tick)
        yield (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{layout.top - 4}" '
            f'y2="{layout.bottom + 4}"/>'
        )
        yield _text(x, layout.bottom + 18, seconds(tick), name="tick", anchor="middle")


def _row(
    account: LaneTime,
    pieces: Sequence[Piece],
    index: int,
    layout: Layout,
    colours: Mapping[str, str],
    ident: str,
) -> Iterator[str]:
    lane = account.lane
    top = layout.top + index * layout.row + (layout.row - layout.bar) // 2
    middle = top + layout.bar / 2 + 4
    box = f'x="{LABEL_WIDTH}" y="{top}" width="{layout.right - LABEL_WIDTH}" height="{layout.bar}"'
    yield _text(LABEL_WIDTH - 12, middle, _shortened(lane_label(lane), 12), "name", "end")
    yield f'<rect class="track" {box} rx="3"/><rect {box} rx="3" fill="url(#{ident}-idle)"/>'
    for piece in pieces:
        left, wide = layout.x(piece.start), (piece.end - piece.start) * layout.pixels_per_second
        fill = colours.get(piece.key) or f"var(--{piece.kind})"
        what = piece.name if piece.kind not in OVERHEAD else f"{piece.key}: {piece.name}"
        begin = seconds(piece.start - layout.window[0])
        hover = f"{what}\n{lane_label(lane)}\n{seconds(piece.end - piece.start)}, from {begin}"
        box = f'x="{left:.2f}" y="{top}" width="{max(wide, 0.5):.2f}" height="{layout.bar}"'
        if wide < HOVER_FROM:
            yield f'<rect {box} fill="{fill}"/>'
            continue
        yield (
            f'<rect class="piece" {box} rx="1.5" fill="{fill}">'
            f"<title>{escape(hover)}</title></rect>"
        )
        label = piece.name.rpartition(".")[2]
        if piece.kind not in OVERHEAD and layout.bar >= 20 and wide > 7 * len(label) + 12:
            yield _text(left + wide / 2, middle, label, name="inside", anchor="middle")
    busy = percent(account.share(account.working))
    yield _text(layout.right + 12, middle, f"{busy} busy")


def _step_marks(steps: Sequence[tuple[int, float, float]], layout: Layout) -> Iterator[str]:
    for number, start, end in steps:
        left, right = layout.x(max(start, layout.window[0])), layout.x(min(end, layout.window[1]))
        if right <= left:
            continue
        if start > layout.window[0]:
            yield (
                f'<line class="border" x1="{left:.1f}" x2="{left:.1f}" y1="{layout.top - 20}" '
                f'y2="{layout.bottom + 4}"/>'
            )
        text = f"step {number}, {seconds(end - start)}"
        if right - left > 7 * len(text):
            yield _text(left + 5, layout.top - 10, text, name="tick")


def _document(body: Sequence[str], layout: Layout, standalone: bool, ident: str, label: str) -> str:
    size = f'viewBox="0 0 {layout.width} {layout.height}"'
    space = background = style = ""
    if standalone:
        edge = 18
        outer = layout.width + 2 * edge, layout.height + 2 * edge - 8
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
