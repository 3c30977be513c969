"""The report's rollouts: what the model wrote at the first recorded step, and at the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from m2flow.observe.formatting import number
from m2flow.observe.page import pill
from m2flow.observe.record import SHOWN, as_number

MAX_CHARACTERS = 12_000


def rollout_columns(samples: Sequence[Mapping[str, Any]]) -> str:
    """Two columns, first against last step; one while there is only one step; empty for none."""
    steps = sorted({sample["step"] for sample in samples})
    if not steps:
        return ""
    columns = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        chosen = [sample for sample in samples if sample["step"] == step][:SHOWN]
        cards = "".join(_card(sample) for sample in chosen)
        columns.append(f"<div><h3>Step {step}</h3>{cards}</div>")
    return f'<div class="pair">{"".join(columns)}</div>'


def _card(sample: Mapping[str, Any]) -> str:
    marks = [_reward(sample.get("reward"))]
    if sample.get("finish_reason") is not None:
        reason = str(sample["finish_reason"])
        marks.append(pill("cut off" if reason == "length" else reason, "plain"))
    if sample.get("answer") is not None:
        marks.append(f"<span>expected <code>{escape(_text(sample['answer'], 200))}</code></span>")
    return (
        f'<article class="card sample"><header>{"".join(marks)}</header>'
        '<div class="text"><span class="label">prompt</span>'
        f'<pre class="prompt">{escape(_text(sample.get("prompt", "")))}</pre>'
        '<span class="label">completion</span>'
        f"<pre>{escape(_text(sample.get('completion', '')))}</pre></div></article>"
    )


def _reward(value: object) -> str:
    reward = as_number(value)
    if reward is None:
        return pill("no reward")
    tone = "good" if reward > 0.5 else "plain" if reward > 0 else "bad"
    return pill(f"reward {number(reward)}", tone)


def _text(value: object, limit: int = MAX_CHARACTERS) -> str:
    text = value if isinstance(value, str) else str(value)
    if len(text) <= limit:
        return text
    return text[:limit] + f"… ({len(text) - limit:,} more characters)"
