"""An explanation as lines for a terminal: what was chosen, what bounds it, what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from m2flow.plan.explain import Explanation
from m2flow.plan.explain.picture import picture
from m2flow.plan.gantt import lane_names
from m2flow.plan.prediction import AS_GOOD
from m2flow.plan.sizes import brief
from m2flow.simulation.time_account import TERMS

SHOWN = 4
"""Phrases of a difference, flips, and plans that were ruled out, that are printed."""


def in_words(explanation: Explanation, width: int = 100) -> list[str]:
    """The whole explanation, with the picture of the predicted step.

    Args:
        explanation: of a plan.
        width: of the picture, in characters.
    """
    lines = [*summary(explanation), "", *(f"  {line}" for line in explanation.stands), ""]
    drawn = picture(explanation.timeline, explanation.stages, width)
    if drawn and explanation.predicted.staleness:
        steps = round(explanation.timeline.seconds / explanation.seconds)
        lines.append(f"{steps} steps, which overlap:")
    lines += [*drawn, ""] if drawn else []
    lines += costs(explanation)
    if explanation.ruled_out:
        rows = [f"  {plan}: {why}" for plan, why in explanation.ruled_out.items()]
        lines += ["", "ruled out:", *_some(rows)]
    if explanation.flips is not None:
        lines += ["", "what would change the choice:", *_flips(explanation)]
    return lines


def summary(explanation: Explanation) -> list[str]:
    """The choice in a few lines."""
    seconds, spread = explanation.seconds, float(explanation.predicted.spread)
    told = f" +- {brief(spread)}" if spread > 1e-3 * seconds else ""
    rate = explanation.items_per_step / seconds if seconds else 0.0
    pace = f"{brief(seconds)}{told} a step, {rate:.3g} items/s"
    simulated = f"{explanation.considered} plans simulated with a profile that is"
    lanes = f"{explanation.num_lanes} lane{'' if explanation.num_lanes == 1 else 's'}"
    lines = [
        f"plan: {explanation.title}, {lanes}, {pace}",
        f"  of {simulated} {explanation.source}, in {brief(explanation.seconds_to_decide)}",
        *_race(explanation),
        *_bounds(explanation),
        *_runners_up(explanation),
        *_frontier(explanation),
    ]
    if explanation.assumptions:
        lines.append("assumed, as nothing was measured:")
        lines += [f"  {line}" for line in explanation.assumptions]
    return lines


def _race(explanation: Explanation) -> Iterator[str]:
    """The plans that were tried in real steps."""
    if explanation.race:
        yield "tried in real steps:"
    for row in explanation.race:
        count = f"{len(row.measured)} step{'' if len(row.measured) == 1 else 's'}"
        taken = f"{brief(median(row.measured))} a step in {count}" if row.measured else "no step"
        told = "" if row.predicted is None else f", {brief(row.predicted)} predicted"
        yield f"  {row.plan}: {taken}{told}; {row.verdict or 'racing'}"


def _bounds(explanation: Explanation) -> Iterator[str]:
    found, idle = explanation.bottleneck, explanation.predicted.idle.values()
    place = f" on {lane_names(found.lanes)}" if len(found.lanes) <= SHOWN else ""
    of_it = f"{brief(found.seconds)} of the step ({found.share:.0%})"
    yield f"bottleneck: {found.what}{place}, {of_it}"
    if found.why:
        yield f"  {found.why}"
    share = f"{sum(idle) / len(idle):.0%} of all lanes' time"
    yield f"idle: {share} (from {min(idle):.0%} to {max(idle):.0%})"
    if explanation.memory:
        yield f"memory: {explanation.memory}"


def _runners_up(explanation: Explanation) -> Iterator[str]:
    for number, other in enumerate(explanation.runners_up):
        word = "runner-up" if number == 0 else "then"
        word = "better" if other.seconds * (1 + AS_GOOD) < explanation.seconds else word
        yield f"{word}: {other.title}, {brief(other.seconds)} a step"
        if number == 0:
            yield from _some([f"  {change}" for change in other.changes])


def _frontier(explanation: Explanation) -> Iterator[str]:
    """Throughput against staleness, where some was allowed and pays."""
    if not explanation.frontier:
        return
    if len(explanation.frontier) == 1:
        yield "throughput by staleness: running ahead gains nothing"
        return
    yield "throughput by staleness:"
    for point in explanation.frontier:
        yield (
            f"  staleness {point.max_staleness}: {point.items_per_second:.3g} items/s, "
            f"{brief(point.seconds)} a step ({point.title})"
        )


def costs(explanation: Explanation) -> list[str]:
    """A table of where the time of all lanes goes."""
    prediction, count = explanation.predicted, max(1, explanation.num_lanes)
    stages = [name for name in explanation.stages if name in prediction.stages]
    total = sum(prediction.terms.get(term, 0.0) for term in TERMS)
    width = max(len(name) for name in (*(f"  {name}" for name in stages), *TERMS))
    lines = [f"{'':<{width}}  {'a lane':>9}  {'share':>5}"]

    def row(name: str, seconds: float) -> str:
        share = seconds / total if total else 0.0
        return f"{name:<{width}}  {brief(seconds / count):>9}  {share:>5.0%}"

    for term in TERMS:
        lines.append(row(term, prediction.terms.get(term, 0.0)))
        if term == "compute":
            lines += [row(f"  {name}", prediction.stages[name]) for name in stages]
    return lines


def _flips(explanation: Explanation) -> Iterator[str]:
    flips = explanation.flips or ()
    first = explanation.runners_up[:1]
    if any(one.seconds * (1 + AS_GOOD) < explanation.seconds for one in first):
        yield "  nothing: another plan is faster as it is"
    elif not flips and not explanation.not_flipped:
        yield "  no input alone, up to 4 times more or less of it"
    for flip in flips[:SHOWN]:
        faster = " (faster)" if flip.factor < 1 else ""
        seconds = f"{brief(flip.other_seconds)} a step instead of {brief(flip.chosen_seconds)}"
        yield f"  {flip.input} x {flip.factor:.2f}{faster}: {flip.mode} is best, {seconds}"
        yield from _some([f"    {change}" for change in flip.changes], most=2)
    if len(flips) > SHOWN:
        yield f"  and {len(flips) - SHOWN} more, by larger changes"
    if explanation.not_flipped:
        yield f"  not tried, as it takes long to simulate: {', '.join(explanation.not_flipped)}"


def _some(lines: Sequence[str], most: int = SHOWN) -> Iterator[str]:
    """The first few lines, and how many are left out."""
    yield from lines[:most]
    if len(lines) > most:
        indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
        yield f"{indent}and {len(lines) - most} more"
