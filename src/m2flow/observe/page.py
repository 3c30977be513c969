"""The frame of the report: its style, its script and the HTML around its sections.

Promises: one self-contained document. A content security policy in its head forbids every fetch,
and every script but the one that draws charts and searches rollouts, which it knows by its hash; so
even markup that slipped through escaping could neither run nor call home. Without scripts, and on
paper, drawings stand where the charts are.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from html import escape
from pathlib import Path

from m2flow.observe.charts import CHART_CSS
from m2flow.observe.gantt import GANTT_CSS
from m2flow.observe.jsonl import encode
from m2flow.observe.theme import MONO, SANS, variables

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "report.js", "rollouts.js")

PAGE_CSS = f"""
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 {SANS};
-webkit-font-smoothing:antialiased}}
main{{max-width:1240px;margin:0 auto;padding:36px 28px 64px}}
h1{{font-size:30px;line-height:1.2;letter-spacing:-.018em;font-weight:680;margin:2px 0 0;
overflow-wrap:anywhere}}
h2{{font-size:19px;letter-spacing:-.01em;font-weight:650;margin:0}}
h3{{font-size:13.5px;font-weight:600;margin:0}}
p{{margin:0}}
code,pre{{font-family:{MONO};font-size:12.5px}}
a{{color:inherit}}
section{{margin-top:40px}}
.heading{{display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 12px;margin-bottom:14px}}
.heading p,.note{{color:var(--muted);font-size:13.5px}}
.top{{display:flex;justify-content:space-between;align-items:flex-start;gap:24px;flex-wrap:wrap}}
.brand{{color:var(--muted);font-size:13px;font-weight:550;letter-spacing:.01em}}
.facts{{display:flex;flex-wrap:wrap;gap:6px 22px;margin:14px 0 0;font-size:13.5px}}
.facts div{{display:flex;gap:7px}}
.facts dt{{color:var(--muted)}}
.facts dd{{margin:0;font-weight:500;overflow-wrap:anywhere}}
.pill{{display:inline-block;padding:3px 11px;border-radius:999px;font-size:12.5px;font-weight:600;
white-space:nowrap}}
.good{{color:var(--good);background:var(--good-back)}}
.warn{{color:var(--warn);background:var(--warn-back)}}
.bad{{color:var(--bad);background:var(--bad-back)}}
.plain{{color:var(--muted);background:var(--track)}}
.card{{background:var(--surface);border:1px solid var(--line);border-radius:12px;padding:16px 18px}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:14px;
margin-top:26px}}
.tile .what{{color:var(--muted);font-size:13px}}
.tile .figure{{font-size:27px;line-height:1.3;font-weight:650;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}}
.tile .figure small{{font-size:14px;font-weight:500;color:var(--muted);letter-spacing:0}}
.tile .from{{color:var(--muted);font-weight:500}}
.tile .more{{color:var(--muted);font-size:12.5px}}
.charts{{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:14px}}
.charts .card{{padding:13px 14px 10px;min-width:0}}
.charts header{{display:flex;justify-content:space-between;align-items:baseline;gap:10px;
margin:0 2px 8px}}
.charts .latest{{font-size:13.5px;font-weight:600;font-variant-numeric:tabular-nums;
text-align:right}}
.charts .pointed h3{{overflow:hidden;white-space:nowrap;text-overflow:ellipsis}}
.charts .pointed .latest{{white-space:nowrap}}
.charts .latest span{{color:var(--faint);font-weight:500}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 2px 0;font-size:12px;
color:var(--muted)}}
.legend i{{display:inline-block;width:12px;height:3px;border-radius:2px;margin-right:6px;
vertical-align:middle}}
.legend i.box{{width:11px;height:11px;border-radius:3px}}
.legend i.idle{{border:1px solid var(--hatch);
background:repeating-linear-gradient(135deg,var(--hatch) 0 2px,var(--track) 2px 5px)}}
.scroll{{overflow-x:auto;-webkit-overflow-scrolling:touch;
background:linear-gradient(90deg,var(--surface) 40%,transparent) 0 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--surface) 40%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(90deg,var(--hatch),transparent) 0 0/14px 100% no-repeat scroll,
linear-gradient(270deg,var(--hatch),transparent) 100% 0/14px 100% no-repeat scroll var(--surface)}}
.scroll .gantt,.scroll .bars{{min-width:860px}}.pair .scroll .gantt{{min-width:500px}}
.tools{{display:flex;flex-wrap:wrap;gap:8px 12px;align-items:center;margin-bottom:12px;
font-size:13.5px;color:var(--muted)}}
.tools input,.tools select,.tools button{{font:inherit;color:var(--ink);background:var(--surface);
border:1px solid var(--muted);border-radius:8px;padding:5px 10px;max-width:100%}}
.tools button{{cursor:pointer;margin-right:4px}}.tools label{{max-width:100%}}
.tools input[type=search]{{flex:0 1 300px;min-width:0}}
.plot{{height:190px}}.plot.lanes{{height:auto}}
.u-select{{background:var(--ink);opacity:.1}}
:focus-visible{{outline:3px solid var(--series-0);outline-offset:2px;border-radius:4px}}
@media screen{{.live .drawn{{display:none}}}}
table{{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}}
th{{text-align:right;font-weight:550;color:var(--muted);font-size:12.5px;white-space:nowrap;
padding:6px 10px;border-bottom:1px solid var(--line);vertical-align:bottom}}
td{{text-align:right;padding:7px 10px;border-bottom:1px solid var(--grid);white-space:nowrap;
line-height:1.35}}
tr:last-child td{{border-bottom:0}}
tr.sum td{{font-weight:600;border-top:1px solid var(--line)}}
th:first-child,td:first-child{{text-align:left;padding-left:2px}}
td small{{color:var(--faint);font-size:12px;display:block;line-height:1.25;font-weight:400}}
td.bar{{width:22%;min-width:150px;padding-right:2px}}
.stack{{display:flex;height:12px;border-radius:3px;overflow:hidden;background:var(--track)}}
.stack i{{display:block;height:100%}}
.findings{{display:grid;gap:10px}}
.finding{{display:flex;gap:12px;align-items:baseline;border-radius:10px;padding:11px 15px}}
.finding .pill{{padding:0;min-width:58px}}
.finding b{{font-weight:650}}
.finding p{{color:var(--ink);font-size:14px}}
.pair{{display:grid;grid-template-columns:1fr 1fr;gap:18px;align-items:start}}
.pair>div{{min-width:0}}.pair>div>h3{{color:var(--muted);margin:0 0 10px 2px}}
.sample{{margin-bottom:12px;padding:13px 15px}}
.sample header{{display:flex;flex-wrap:wrap;gap:6px 10px;align-items:center;margin-bottom:9px;
font-size:12.5px;color:var(--muted)}}
.sample .text{{display:grid;grid-template-columns:78px minmax(0,1fr);gap:5px 10px;
align-items:baseline}}
.sample .label{{font-size:12px;color:var(--faint)}}
.sample pre{{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;max-height:260px;overflow-y:auto;
line-height:1.5}}
.sample pre.prompt{{color:var(--muted)}}
.cards{{display:grid;grid-template-columns:minmax(0,1fr);gap:14px}}
.plan{{display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:14px 36px;
align-items:start}}
.plan pre{{white-space:pre-wrap;margin:0;grid-column:1/-1;color:var(--muted)}}
details{{margin-top:12px}}
summary{{cursor:pointer;font-size:13.5px;font-weight:550;color:var(--muted);padding:4px 0}}
summary:hover{{color:var(--ink)}}
details>pre{{overflow-x:auto;background:var(--surface);border:1px solid var(--line);
border-radius:12px;padding:14px 18px;margin:8px 0 0;line-height:1.55}}
details>.charts,details>.card{{margin-top:10px}}
.empty{{color:var(--muted);padding:26px 18px;text-align:center}}
footer{{margin-top:52px;padding-top:16px;border-top:1px solid var(--line);color:var(--muted);
font-size:12.5px;display:flex;flex-wrap:wrap;gap:4px 18px}}
@media(max-width:1020px){{.charts{{grid-template-columns:repeat(2,minmax(0,1fr))}}}}
@media(max-width:680px){{
main{{padding:22px 14px 40px}}h1{{font-size:25px}}section{{margin-top:32px}}
.charts,.pair{{grid-template-columns:minmax(0,1fr)}}
.tiles{{grid-template-columns:repeat(2,minmax(0,1fr));gap:10px}}
.tile{{padding:12px 13px}}.tile .figure{{font-size:19px}}.finding{{display:block}}
.finding .pill{{margin:0 0 6px}}}}
@media print{{
@page{{margin:14mm}}*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
body{{background:#fff;font-size:12px}}main{{padding:0;max-width:none}}
.card,.finding,tr{{break-inside:avoid}}.heading,h3{{break-after:avoid}}section{{margin-top:22px}}
.tools,.plot,.timeline>.legend,details:not([open]){{display:none}}
.sample pre{{max-height:none}}
.scroll{{overflow:visible}}.scroll svg{{min-width:0!important}}
.scroll table,td small{{font-size:10px}}
th,td{{padding:4px 6px}}th{{font-size:10px}}td.bar{{min-width:60px}}}}
"""


def page(title: str, sections: Iterable[str]) -> str:
    """The document around its sections, which are markup already.

    Args:
        title: plain text.
        sections: those that are empty leave no trace.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_policy())}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style()}{_file('uPlot.min.css')}</style>\n"
        "</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n</main>\n<script>{script()}</script>\n</body>\n</html>\n"
    )


def style() -> str:
    """The style sheet of every page: colours, drawings, sections."""
    return variables(":root") + CHART_CSS + GANTT_CSS + PAGE_CSS


@cache
def script() -> str:
    """The report's script: uPlot with its licence, and ours."""
    return "\n".join([f"/*\n{_file('uPlot.LICENSE')}*/", *map(_file, SCRIPTS)])


@cache
def _policy() -> str:
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )


@cache
def _file(name: str) -> str:
    return (STATIC / name).read_text("utf-8")


def json_block(data: object, *, ident: str = "") -> str:
    """Data for the script, within the page; it can end no element.

    Args:
        ident: the element's id, of which a page has one.
    """
    text = encode(data).decode("utf-8").replace("<", "\\u003c")
    identity = f' id="{ident}"' if ident else ""
    return f'<script type="application/json"{identity}>{text}</script>'


def section(title: str, body: str, note: str = "") -> str:
    """A headed part of the page; `body` is markup, `title` and `note` are plain text."""
    remark = f"<p>{escape(note)}</p>" if note else ""
    return f'<section><div class="heading"><h2>{escape(title)}</h2>{remark}</div>\n{body}</section>'


def pill(text: str, tone: str = "plain") -> str:
    """A small rounded label: `good`, `warn`, `bad` or `plain`."""
    return f'<span class="pill {tone}">{escape(text)}</span>'


def legend_entry(name: str, colour: str, box: bool = False) -> str:
    """A swatch with its name."""
    kind = ' class="box"' if box else ""
    return f'<span><i{kind} style="background:{colour}"></i>{escape(name)}</span>'
