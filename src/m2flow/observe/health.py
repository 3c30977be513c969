"""What looks wrong in a run: the findings that a person would otherwise make after a night.

Promises: each check looks at what is recorded alone, says in a sentence what it found, where,
and what usually helps; no finding means that all checks passed. Health figures are recognised by
a word in their key (`zero_variance`, `truncated`), whoever writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.record import EVALUATION, LARGEST, RunRecord, as_number
from m2flow.observe.run_directory import alarms_of

Level = Literal["bad", "warn"]

RECENT = 10
"""Steps that count as the recent ones."""
ZERO_VARIANCE_LIMIT, TRUNCATED_LIMIT, DRIFT_LIMIT = 0.8, 0.2, 0.25
CHECKED = (
    "values that are not finite",
    "groups without a signal",
    "truncated answers",
    "samples without a reward",
    "reward and held-out accuracy",
    "measured against predicted time",
    "alarms of the run",
    "unreadable lines",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to look at. `title` says what it is, `detail` what was seen and what helps."""

    level: Level
    title: str
    detail: str


def findings(record: RunRecord) -> list[Finding]:
    """All findings, the worst first."""
    found = [
        *_not_finite(record),
        *_unreadable(record),
        *_falling(record),
        *_share(
            record,
            "zero_variance",
            ZERO_VARIANCE_LIMIT,
            "Most groups carry no signal",
            "all their answers have the same reward, so they move nothing. Harder or easier "
            "prompts, or more samples per prompt, help.",
        ),
        *_share(
            record,
            "reward/failed_share",
            0.0,
            "Samples could not be judged",
            "the reward function raised, took too long or gave no number; they are not trained on. "
            "samples.jsonl says why.",
        ),
        *_share(
            record,
            "tools/failed_share",
            0.0,
            "Trajectories were given up",
            "a tool or an agent failed or took too long; they are not trained on. samples.jsonl "
            "says why.",
        ),
        *_share(
            record,
            "truncat",
            TRUNCATED_LIMIT,
            "Many answers are cut off",
            "they reached the token limit before they ended, and are scored on what is there. "
            "Raise the limit of new tokens, or shape the reward by length.",
        ),
        *_drift(record),
        *_told(record),
    ]
    return sorted(found, key=lambda finding: finding.level != "bad")


def _not_finite(record: RunRecord) -> Iterator[Finding]:
    """A null is what was NaN or infinite when it was written; a plan may predict nothing.

    What is too large to be drawn has run away as well.
    """
    steps: dict[str, list[int]] = {}
    for row in record.metrics:
        for key, value in row.items():
            runaway = isinstance(value, int | float) and not -LARGEST <= value <= LARGEST
            if (value is None or runaway) and not key.startswith("plan/"):
                steps.setdefault(key, []).append(row["step"])
    for key, where in steps.items():
        times = f"at {len(where)} steps, first at step" if len(where) > 1 else "at step"
        yield Finding(
            "bad",
            f"{key} was not finite",
            f"NaN or infinite {times} {where[0]}. Look at the samples and the learning rate "
            "just before it.",
        )


def _unreadable(record: RunRecord) -> Iterator[Finding]:
    for problem in record.problems:
        yield Finding("warn", "A file could not be read whole", problem)


def _falling(record: RunRecord) -> Iterator[Finding]:
    rewards = record.values("reward/mean")
    quarter = len(rewards) // 4
    if quarter >= 5:
        early, late = fmean(rewards[:quarter]), fmean(rewards[-quarter:])
        falls = late < early - 0.1 * (max(rewards) - min(rewards))
        if falls or (len(rewards) >= 40 and late <= early):
            yield Finding(
                "bad" if falls else "warn",
                "The reward is falling" if falls else "The reward does not rise",
                f"It averaged {number(early)} in the first quarter of the run and "
                f"{number(late)} in the last.",
            )
    key = record.first_key(EVALUATION)
    if key is not None:
        values = record.values(key)
        if values[-1] < values[0] - 0.02:
            yield Finding(
                "bad",
                f"{key} is lower than before training",
                f"{number(values[0])} at the start, {number(values[-1])} now.",
            )


def _share(
    record: RunRecord, word: str, limit: float, title: str, explanation: str
) -> Iterator[Finding]:
    keys = {key for row in record.metrics for key in row if word in key}
    for key in sorted(keys):
        recent = record.values(key)[-RECENT:]
        if recent and fmean(recent) > limit:
            share = percent(fmean(recent))
            yield Finding(
                "warn", title, f"{share} over the last {len(recent)} steps ({key}): {explanation}"
            )


def _told(record: RunRecord) -> Iterator[Finding]:
    """What the run itself has said is wrong, such as a gap between engine and trainer."""
    for one in alarms_of(record.run):
        yield Finding("warn", f"Told at step {one['step']}", one["alarm"])


def _drift(record: RunRecord) -> Iterator[Finding]:
    ratios = []
    measured: list[float] = []
    for row in record.metrics[-RECENT:]:
        taken = as_number(row.get("seconds/step"))
        predicted = as_number(row.get("plan/predicted_seconds"))
        if taken is not None and predicted:
            measured.append(taken)
            ratios.append(taken / predicted)
    if len(ratios) >= 5 and abs(fmean(ratios) - 1) > DRIFT_LIMIT:
        expected = fmean(measured) / fmean(ratios)
        yield Finding(
            "warn",
            "The plan's prediction is off",
            f"A step took {seconds(fmean(measured))} over the last {len(ratios)} steps; the plan "
            f"expected {seconds(expected)}. Profile again if the machine has changed.",
        )
