"""The report's browser of rollouts: all that were recorded, to be searched and sorted.

Promises: the rollouts lie in the page as data, which a script of the page turns into text and
never into markup; without the script the page says only that they are in `samples.jsonl`. At most
`MAX_ROLLOUTS`, spread evenly over the run, each text cut at `MAX_CHARACTERS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.observe.jsonl import encode
from m2flow.observe.record import as_number

MAX_ROLLOUTS, MAX_CHARACTERS = 1000, 1500

BROWSER_CSS = """
.browse{display:flex;flex-wrap:wrap;gap:8px 14px;align-items:center;margin-bottom:12px;
font-size:13.5px;color:var(--muted)}
.browse input,.browse select{font:inherit;color:var(--ink);background:var(--surface);
border:1px solid var(--line);border-radius:8px;padding:5px 9px;max-width:100%}
.browse input[type=search]{flex:1 1 220px}
@media print{.browse{display:none}}
"""

SCRIPT = r"""
(() => {
  const rows = JSON.parse(document.getElementById("rollouts").textContent);
  const [text, why, sort, list, count] =
    ["find", "why", "sort", "found", "count"].map((id) => document.getElementById(id));
  const SHOWN = 40;
  let shown = SHOWN;
  for (const one of [...new Set(rows.map((row) => row.why))].sort())
    why.append(new Option(one, one));
  const make = (tag, name, content) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.textContent = content;
    return made;
  };
  const card = (row) => {
    const made = make("article", "card sample", ""), head = make("header", "", "");
    const tone = row.reward === null ? "plain" : row.reward > 0.5 ? "good" : "bad";
    head.append(make("span", "pill plain", "step " + row.step));
    head.append(make("span", "pill " + tone,
      row.reward === null ? "no reward" : "reward " + +row.reward.toPrecision(4)));
    if (row.turns.length) head.append(make("span", "", row.turns.length + " turns, " +
      row.turns.reduce((sum, turn) => sum + turn.tools.length, 0) + " calls"));
    for (const [name, value] of [["advantage", row.advantage], ["version", row.version]])
      if (value !== null) head.append(make("span", "", name + " " + +value.toPrecision(4)));
    if (row.why) head.append(make("span", "", row.why));
    if (row.answer !== null) head.append(make("span", "", "expected " + row.answer));
    const body = make("div", "text", "");
    body.append(make("span", "label", "prompt"), make("pre", "prompt", row.prompt));
    if (row.turns.length < 2)
      body.append(make("span", "label", "completion"), make("pre", "", row.completion));
    else row.turns.forEach((turn, number) => {
      body.append(make("span", "label", "turn " + (number + 1)), make("pre", "", turn.text));
      if (turn.result) body.append(
        make("span", "label", "answer of " + (turn.tools.join(", ") || "nobody")),
        make("pre", "prompt", turn.result));
    });
    made.append(head, body);
    return made;
  };
  const show = () => {
    const wanted = text.value.toLowerCase(), [key, sign] = sort.value.split(" ");
    const found = rows.filter((row) => (!why.value || row.why === why.value) &&
      (row.prompt + "\n" + row.completion).toLowerCase().includes(wanted));
    const value = (row) => ["length", "turns"].includes(key) ?
      row[key === "length" ? "completion" : key].length : row[key];
    found.sort((a, b) => (value(a) === null) - (value(b) === null) || sign * (value(a) - value(b)));
    list.replaceChildren(...found.slice(0, shown).map(card));
    count.textContent = found.length + " of " + rows.length;
    if (found.length > shown) {
      const more = make("button", "pill plain", "show more");
      more.addEventListener("click", () => { shown += SHOWN; show(); });
      list.append(more);
    }
  };
  for (const one of [text, why, sort])
    one.addEventListener("input", () => { shown = SHOWN; show(); });
  document.getElementById("browser").hidden = false;
  show();
})();
"""

_FORM = """<div id="browser" hidden><div class="browse">
<input id="find" type="search" placeholder="text in prompt or completion" aria-label="find text">
<label>ended by <select id="why"><option value="">anything</option></select></label>
<label>sort by <select id="sort">
<option value="step -1">newest step</option><option value="step 1">oldest step</option>
<option value="reward -1">highest reward</option><option value="reward 1">lowest reward</option>
<option value="advantage -1">highest advantage</option>
<option value="advantage 1">lowest advantage</option>
<option value="length -1">longest</option><option value="length 1">shortest</option>
<option value="turns -1">most turns</option>
</select></label><span id="count" role="status"></span></div><div id="found"></div></div>
<noscript><p class="note">Without scripts: see samples.jsonl.</p></noscript>
"""


def rollout_browser(samples: Sequence[Mapping[str, Any]]) -> str:
    """The form, the data and the script; empty without rollouts."""
    if not samples:
        return ""
    every = -(-len(samples) // MAX_ROLLOUTS)
    data = encode([_row(sample) for sample in samples[::every]]).decode("utf-8")
    # Within a script's element `<` alone can end it.
    data = data.replace("<", "\\u003c")
    return (
        f'{_FORM}<script type="application/json" id="rollouts">{data}</script>'
        f"<script>{SCRIPT}</script>"
    )


def _row(sample: Mapping[str, Any]) -> dict[str, object]:
    answer = sample.get("answer")
    return {
        "step": sample["step"],
        "prompt": _cut(sample.get("prompt", "")),
        "completion": _cut(sample.get("completion", "")),
        "reward": as_number(sample.get("reward")),
        "advantage": as_number(sample.get("advantage")),
        "version": as_number(sample.get("version")),
        "why": _cut(sample.get("failure") or sample.get("finish_reason") or ""),
        "answer": None if answer is None else _cut(answer),
        "turns": [
            {
                "text": _cut(turn.get("text", "")),
                "tools": [_cut(tool) for tool in turn.get("tools", ())],
                "result": _cut(turn.get("result", "")),
            }
            for turn in sample.get("turns", ())
        ],
    }


def _cut(value: object) -> str:
    text = str(value)
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… ({len(text) - MAX_CHARACTERS:,} more)"
