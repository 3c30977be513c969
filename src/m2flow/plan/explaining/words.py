"""An explanation as lines for a terminal: what was chosen, what bounds it, what would change it."""

from __future__ import annotations

from collections.abc import Iterator

from m2flow.plan.explaining.differences import title, where
from m2flow.plan.explaining.explanation import TERMS, Explanation
from m2flow.plan.explaining.other_lanes import Flip
from m2flow.plan.explaining.picture import picture
from m2flow.plan.explaining.rows import lane_names
from m2flow.plan.explaining.seconds import brief, slower
from m2flow.plan.prediction import Candidate
from m2flow.plan.sizes import bytes_text

SHOWN = 4
"""Phrases of a difference, and flips, that are printed."""


def in_words(explanation: Explanation, width: int = 100, ascii_only: bool = False) -> list[str]:
    """Everything, with the picture.

    Args:
        explanation: what is told.
        width: of the picture, in characters.
        ascii_only: where the terminal can show nothing else.
    """
    chosen = explanation.chosen
    lines = [*summary(explanation), "", *(f"  {line}" for line in where(chosen.plan)), ""]
    drawn = picture(chosen.prediction, chosen.plan, explanation.stages, width, ascii_only)
    lines += [*drawn, ""] if drawn else []
    lines += costs(explanation)
    if explanation.flips is not None:
        lines += ["", "what would change the choice:", *_flips(explanation)]
    return lines


def summary(explanation: Explanation) -> list[str]:
    """The choice in a few lines."""
    decision, chosen = explanation.decision, explanation.chosen
    lines = [f"plan: {title(chosen.plan)}, {len(chosen.plan.lanes)} lanes, {_pace(explanation)}"]
    profile = decision.profile
    cut = "" if profile.cut_by is None else f" (cut short by a budget of {profile.cut_by:.0f} s)"
    lines.append(
        f"  of {1 + len(decision.others)} plans simulated with a profile that is "
        f"{profile.source}{cut}, in {brief(decision.seconds_to_decide)}"
    )
    if chosen.measured is not None:
        lines.append(f"  measured in a trial: {brief(chosen.measured)} a step")
    lines += _bounds(explanation)
    lines += _memory(explanation)
    lines += _runners_up(explanation)
    lines += _frontier(explanation)
    if explanation.assumptions:
        lines.append("assumed, as nothing was measured:")
        lines += [f"  {line}" for line in explanation.assumptions]
    return lines


def _pace(explanation: Explanation) -> str:
    """Seconds of a step, and items a second."""
    prediction = explanation.chosen.prediction
    told = prediction.spread > 1e-3 * prediction.seconds
    spread = f" +- {brief(prediction.spread)}" if told else ""
    rate = explanation.decision.num_items / prediction.seconds if prediction.seconds else 0.0
    return f"{brief(prediction.seconds)}{spread} a step, {rate:.3g} items/s"


def _bounds(explanation: Explanation) -> Iterator[str]:
    found, prediction = explanation.bottleneck, explanation.chosen.prediction
    if found is not None:
        place = f" on {lane_names(found.lanes)}" if 0 < len(found.lanes) <= SHOWN else ""
        of_it = f"{brief(found.seconds)} of the step ({found.share:.0%})"
        yield f"bottleneck: {found.what}{place}, {of_it}"
        if found.why:
            yield f"  {found.why}"
    if prediction.idle:
        shares = prediction.idle.values()
        yield (
            f"idle: {sum(shares) / len(shares):.0%} of all lanes' time "
            f"(from {min(shares):.0%} to {max(shares):.0%})"
        )


def _memory(explanation: Explanation) -> Iterator[str]:
    """What the fullest lane holds at most, and how much of it are states."""
    plan, profile = explanation.chosen.plan, explanation.decision.profile
    peaks = explanation.chosen.prediction.peak_bytes
    if not peaks:
        return
    fullest = max(plan.lanes, key=lambda lane: peaks.get(lane.id, 0))
    states = 0
    for worker, spot in plan.placements.items():
        if fullest.id in spot.lanes:
            known = profile.worker(worker, len(spot.replicas[0]), fullest.kind)
            states += spot.state_bytes or (known.state_bytes if known else 0)
    limit = fullest.memory_bytes
    most = bytes_text(peaks[fullest.id]) + ("" if limit is None else f" of {bytes_text(limit)}")
    yield f"memory: at most {most} on a lane, whose states are {bytes_text(states)}"


def _runners_up(explanation: Explanation) -> Iterator[str]:
    chosen = explanation.chosen
    for number, other in enumerate(explanation.runners_up):
        word = "runner-up" if number == 0 else "then"
        word = "better" if _seconds(other.candidate) < 0.99 * _seconds(chosen) else word
        yield (
            f"{word}: {title(other.candidate.plan)}, {brief(_seconds(other.candidate))} a step, "
            f"{slower(_seconds(other.candidate), _seconds(chosen))}"
        )
        if number == 0:
            yield from _some(other.changes)


def _seconds(one: Candidate) -> float:
    return float(one.measured if one.measured is not None else one.prediction.seconds)


def _frontier(explanation: Explanation) -> Iterator[str]:
    """Throughput against staleness, where some was allowed and pays."""
    decision = explanation.decision
    frontier, items = decision.frontier, decision.num_items
    every = (decision.chosen, *decision.others)
    if not any(one.plan.max_staleness for one in every):
        return
    if len(frontier) < 2:
        yield "throughput by staleness: running ahead gains nothing"
        return
    yield "throughput by staleness:"
    for one in frontier:
        seconds = float(one.prediction.seconds)
        yield (
            f"  staleness {one.plan.max_staleness}: {items / seconds:.3g} items/s, "
            f"{brief(seconds)} a step ({one.plan.mode})"
        )


def costs(explanation: Explanation) -> list[str]:
    """A table of where the time of all lanes goes, and of the chain that bounds the step."""
    prediction = explanation.chosen.prediction
    count = max(1, len(explanation.chosen.plan.lanes))
    path = dict(explanation.bottleneck.path) if explanation.bottleneck else {}
    stages = [name for name in explanation.stages if name in prediction.stages]
    total = sum(prediction.terms.get(term, 0.0) for term in TERMS)
    width = max(len(name) for name in ("compute", *(f"  {name}" for name in stages), *TERMS))
    lines = [f"{'':<{width}}  {'a lane':>9}  {'share':>5}  {'of the chain':>12}"]

    def row(name: str, lane_seconds: float, on_path: float) -> str:
        share = lane_seconds / total if total else 0.0
        chain = brief(on_path) if on_path else "-"
        return f"{name:<{width}}  {brief(lane_seconds / count):>9}  {share:>5.0%}  {chain:>12}"

    for term in TERMS:
        on_path = path.get(term, 0.0)
        if term == "compute":
            on_path = sum(path.get(name, 0.0) for name in explanation.stages)
        lines.append(row(term, prediction.terms.get(term, 0.0), on_path))
        if term == "compute":
            lines += [
                row(f"  {name}", prediction.stages[name], path.get(name, 0.0)) for name in stages
            ]
    return lines


def _flips(explanation: Explanation) -> Iterator[str]:
    assert explanation.flips is not None
    if not explanation.flips:
        yield "  no input alone, up to 8 times more or less of it"
    for flip in explanation.flips[:SHOWN]:
        yield (
            f"  {flip.what} {_times(flip)}: {flip.mode} is best, {brief(flip.instead)} a step"
            + (f" instead of {brief(flip.seconds)}" if flip.seconds is not None else "")
            + f" ({flip.how})"
        )
        yield from _some(flip.changes, indent=4, most=2)
    if len(explanation.flips) > SHOWN:
        yield f"  and {len(explanation.flips) - SHOWN} more, by larger changes"


def _times(flip: Flip) -> str:
    if flip.factor > 1:
        return f"x {flip.factor:.2f}"
    return f"x {flip.factor:.2f} (less)" if flip.what in ("memory", "lanes") else (
        f"x {flip.factor:.2f} (faster)"
    )  # fmt: skip


def _some(changes: tuple[str, ...], indent: int = 2, most: int = SHOWN) -> Iterator[str]:
    space = " " * indent
    for change in changes[:most]:
        yield f"{space}{change}"
    if len(changes) > most:
        yield f"{space}and {len(changes) - most} more differences"
