"""`m2flow plan --replay RUN_DIR`: what a run's recorded steps would have taken under a plan."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m2flow.cli.planning import AUTO_MODE, planned
from m2flow.engine.plan import Plan
from m2flow.engine.spans import Span
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.observe.run_directory import RunDirectory
from m2flow.observe.trace import StepSpans, read_trace
from m2flow.plan import read_plan
from m2flow.plan.measured import Observed
from m2flow.plan.prediction import Prediction
from m2flow.plan.replay import replay_steps
from m2flow.workloads.reasoning.config import ReasoningRecipe


def replayed(
    run_dir: Path,
    recipe: ReasoningRecipe,
    plan_file: Path | None = None,
    *,
    as_json: bool = False,
) -> list[str]:
    """The recorded steps of a run, as they were, replayed, and replayed under another plan.

    Args:
        run_dir: of the run.
        recipe: the run's; its mode says which plan, if no file does.
        plan_file: a plan; the run's own, where neither this nor a fixed mode says another one.
        as_json: one JSON object instead of a table.

    Raises:
        UserError: the directory holds no timeline of whole steps, or the plan does not fit.
    """
    observed, numbers = recorded_run(run_dir, recipe.prompts_per_step)
    own_wanted = plan_file is None and recipe.mode == AUTO_MODE
    if own_wanted:
        graph, plan = planned(recipe, RunDirectory(run_dir).plan)
    else:
        graph, plan = planned(recipe, plan_file)
    measured = [seconds for _, seconds in observed.steps]
    _, own = replay_steps(graph, observed, observed.plan)
    prediction, other = replay_steps(graph, observed, plan)
    if as_json:
        return [_document(observed.plan, plan, numbers, measured, own, other, prediction)]
    return _table(run_dir, graph, observed.plan, plan, numbers, measured, own, other, prediction)


def recorded_run(run_dir: Path, num_items: int) -> tuple[Observed, list[int]]:
    """The whole steps in a run's timeline, and their numbers; the first of a run warms it up.

    Raises:
        UserError: there are none.
    """
    directory = RunDirectory(run_dir)
    for path in (directory.timeline, directory.plan):
        if not path.exists():
            raise UserError(
                "holds no recorded run", key="--replay", value=str(run_dir), expected=path.name
            )
    plan = read_plan(directory.plan)
    steps = [step for step in read_trace(directory.timeline).steps if not step.dropped]
    if len(steps) > 1 and steps[0].step == 1:
        steps = steps[1:]
    if plan.max_staleness:  # steps go on beside each other, so that none may be missing
        steps = _last_in_a_row(steps)
    if not steps:
        raise UserError(
            "its timeline holds no whole step", key="--replay", value=str(directory.timeline)
        )
    spans = tuple(
        span for step in steps for span in map(_span, step.spans) if isinstance(span.lane, int)
    )
    windows = tuple((step.start, step.end - step.start) for step in steps)
    observed = Observed(plan, num_items, spans, windows, warm=True)
    return observed, [step.step for step in steps]


def _last_in_a_row(steps: Sequence[StepSpans]) -> list[StepSpans]:
    row = list(steps[-1:])
    for step in reversed(steps[:-1]):
        if step.step != row[0].step - 1:
            break
        row.insert(0, step)
    return row


def _span(span: Any) -> Span:
    """A span as the planner knows it."""
    return Span(span.lane, span.name, span.kind, span.start, span.end, span.args)


def _table(
    run_dir: Path,
    graph: FlowGraph,
    recorded: Plan,
    plan: Plan,
    numbers: Sequence[int],
    measured: Sequence[float],
    own: Sequence[float],
    other: Sequence[float],
    prediction: Prediction,
) -> list[str]:
    lines = [
        f"{run_dir}: {len(numbers)} steps recorded under {recorded.mode}, seconds of each",
        f"{'step':>6}{'recorded':>12}{'replayed':>12}{'under ' + plan.mode:>22}",
    ]
    rows = zip(numbers, measured, own, other, strict=True)
    lines += [f"{n:>6}{a:>12.3f}{b:>12.3f}{c:>22.3f}" for n, a, b, c in rows]
    middle = [statistics.median(some) for some in (measured, own, other)]
    lines.append(f"{'median':>6}{middle[0]:>12.3f}{middle[1]:>12.3f}{middle[2]:>22.3f}")
    lines.append(
        f"replayed under its own plan a step takes {middle[1] / middle[0]:.3f} of what it took, "
        f"under {plan.mode} {middle[2] / middle[1]:.3f} of that"
    )
    idle = ", ".join(f"lane {lane} {share:.0%}" for lane, share in prediction.idle.items())
    lines.append(f"idle under {plan.mode}: {idle}")
    names = [node.name for node in graph.nodes if node.name in prediction.stages]
    spent = ", ".join(f"{name} {prediction.stages[name]:.3f}" for name in names)
    lines.append(f"seconds of lanes a step: {spent}")
    return lines


def _document(
    recorded: Plan,
    plan: Plan,
    numbers: Sequence[int],
    measured: Sequence[float],
    own: Sequence[float],
    other: Sequence[float],
    prediction: Prediction,
) -> str:
    return json.dumps(
        {
            "steps": list(numbers),
            "recorded_under": recorded.mode,
            "replayed_under": plan.mode,
            "recorded_seconds": list(measured),
            "replayed_seconds": list(own),
            "predicted_seconds": list(other),
            "idle": {str(lane): share for lane, share in prediction.idle.items()},
            "terms": dict(prediction.terms),
            "stages": dict(prediction.stages),
        }
    )
