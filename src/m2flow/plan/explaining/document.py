"""An explanation as JSON: the plan itself, as a plan file has it, and beside it `decision`.

The keys are part of the interface and stay; the how-to on plans lists them. All times are seconds,
all sizes bytes, all shares between 0 and 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from m2flow.plan.explaining.differences import title, where
from m2flow.plan.explaining.explanation import Explanation, RunnerUp
from m2flow.plan.explaining.other_lanes import Flip
from m2flow.plan.explaining.path import Bottleneck
from m2flow.plan.explaining.rows import rows, window
from m2flow.plan.prediction import Candidate, Decision

COLUMNS = 240
"""Into how many the rows of `timeline` are cut."""


def to_document(explanation: Explanation) -> dict[str, Any]:
    """The keys of the chosen plan, and `decision`."""
    return {
        **dataclasses.asdict(explanation.chosen.plan),
        "decision": decision_document(explanation),
    }


def decision_document(explanation: Explanation) -> dict[str, Any]:
    """All that is known of a choice."""
    decision, chosen = explanation.decision, explanation.chosen
    flips = explanation.flips
    return {
        "title": title(chosen.plan),
        "items_per_step": decision.num_items,
        "seconds_to_decide": decision.seconds_to_decide,
        "stands": where(chosen.plan),
        **_candidate(chosen),
        "bottleneck": explanation.bottleneck and _bottleneck(explanation.bottleneck),
        "runners_up": [_runner_up(one, decision) for one in explanation.runners_up],
        "flips": None if flips is None else [_flip(flip) for flip in flips],
        "frontier": [_point(one, decision) for one in decision.frontier],
        "considered": 1 + len(decision.others),
        "profile": {
            "source": decision.profile.source,
            "key": _plain(decision.profile.key),
            "cut_by": decision.profile.cut_by,
        },
        "assumptions": list(explanation.assumptions),
        "stages": list(explanation.stages),
        "timeline": _timeline(chosen),
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    """Predicted figures of a plan."""
    prediction = one.prediction
    idle = {str(lane): share for lane, share in prediction.idle.items()}
    return {
        "predicted": {
            "seconds": prediction.seconds,
            "spread": prediction.spread,
            "staleness": prediction.staleness,
            "idle": idle,
            "idle_mean": sum(idle.values()) / len(idle) if idle else 0.0,
            "terms": dict(prediction.terms),
            "stages": dict(prediction.stages),
            "peak_bytes": {str(lane): size for lane, size in prediction.peak_bytes.items()},
        },
        "measured_seconds": one.measured,
    }


def _runner_up(one: RunnerUp, decision: Decision) -> dict[str, Any]:
    chosen = decision.chosen.prediction.seconds
    seconds = one.candidate.prediction.seconds
    return {
        "mode": one.candidate.plan.mode,
        "title": title(one.candidate.plan),
        **_candidate(one.candidate),
        "ratio": seconds / chosen if chosen else 1.0,
        "changes": list(one.changes),
    }


def _bottleneck(found: Bottleneck) -> dict[str, Any]:
    return {
        "what": found.what,
        "lanes": list(found.lanes),
        "seconds": found.seconds,
        "share": found.share,
        "why": found.why,
        "path": dict(found.path),
    }


def _flip(flip: Flip) -> dict[str, Any]:
    return {
        "input": flip.what,
        "factor": flip.factor,
        "mode": flip.mode,
        "changes": list(flip.changes),
        "chosen_seconds": flip.seconds,
        "other_seconds": flip.instead,
        "how": flip.how,
    }


def _point(one: Candidate, decision: Decision) -> dict[str, Any]:
    seconds = one.prediction.seconds
    return {
        "max_staleness": one.plan.max_staleness,
        "title": title(one.plan),
        "seconds": seconds,
        "items_per_second": decision.num_items / seconds if seconds else None,
    }


def _timeline(one: Candidate) -> dict[str, Any]:
    """The predicted step as rows of pieces, lanes that are alike in one."""
    if not one.prediction.spans:
        return {"seconds": float(one.prediction.seconds), "rows": []}
    seconds = window(one.prediction)
    return {
        "seconds": seconds,
        "rows": [
            {
                "lanes": list(row.lanes),
                "idle": row.idle,
                "pieces": [dataclasses.asdict(piece) for piece in row.pieces(seconds)],
            }
            for row in rows(one.prediction, one.plan, COLUMNS)
        ],
    }


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value
