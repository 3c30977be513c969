"""The report's browser of rollouts: all that were recorded, to be searched and sorted.

Promises: the rollouts lie in the page as data, which a script of the page turns into text and
never into markup; without the script the page says only that they are in `samples.jsonl`. At most
`MAX_ROLLOUTS`, spread evenly over the run, each text cut at `MAX_CHARACTERS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.observe.page import json_block
from m2flow.observe.record import MAX_ROLLOUTS, as_number

MAX_CHARACTERS = 1500

_FORM = """<div id="browser" hidden><div class="tools">
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
    """The form and the data for `static/rollouts.js`; empty without rollouts."""
    if not samples:
        return ""
    every = -(-len(samples) // MAX_ROLLOUTS)
    return _FORM + json_block([_row(sample) for sample in samples[::every]], ident="rollouts")


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
                "tools": [_cut(tool) for tool in _listed(turn.get("tools"))],
                "result": _cut(turn.get("result", "")),
            }
            for turn in _listed(sample.get("turns"))
            if isinstance(turn, Mapping)
        ],
    }


def _listed(value: object) -> Sequence[Any]:
    """What was read if it is a list, else an empty one."""
    return value if isinstance(value, list) else ()


def _cut(value: object) -> str:
    text = str(value)
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… ({len(text) - MAX_CHARACTERS:,} more)"
