"""`m2flow profile`: how long the stages of a recipe take here, as a table and as a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from m2flow.errors import UserError
from m2flow.flow.worker import ONE_LANE
from m2flow.observe.formatting import number, percent, seconds
from m2flow.observe.jsonl import write_atomically
from m2flow.observe.progress import TrainProgress
from m2flow.plan.file import to_json
from m2flow.plan.profile import Profile, Quantiles, StageCost, WorkerCost
from m2flow.plan.sizes import bytes_text
from m2flow.workloads.common import read_recipe
from m2flow.workloads.common.profiling import profile_of

SHOWN_SIZES = 4


def profile(
    recipe_path: Path,
    overrides: Sequence[str] = (),
    *,
    budget: float | None = None,
    out: Path | None = None,
    again: bool = False,
) -> None:
    """Print a recipe's profile, and write it to a file.

    Args:
        recipe_path: the YAML file.
        overrides: `key=value`.
        budget: seconds that all of it may take; by default the recipe's `profiling_seconds`.
        out: the file; by default only the store has it.
        again: measure even if a profile is stored.

    Raises:
        UserError: the input is wrong.
        RunFailed: a step failed.
    """
    if budget is not None and not budget > 0:
        raise UserError("must be positive", key="--budget", value=budget)
    recipe = read_recipe(recipe_path, overrides)
    if out is not None:
        _check_writable(out)
    console = Console(highlight=False)
    with TrainProgress(console) as progress:
        progress.start(f"m2flow: profile of {recipe.name}")
        found, origin = profile_of(recipe, progress, budget=budget, again=again)
    console.print(table(found))
    for line in beside(found):
        console.print(line, soft_wrap=True)
    console.print(origin, soft_wrap=True)
    if out is not None:
        text = to_json(found)
        if out.is_file() or not out.exists():
            write_atomically(out, text.encode())
        else:  # such as /dev/stdout
            out.write_text(text, encoding="utf-8")
        console.print(f"written to {out}", soft_wrap=True)


def _check_writable(file: Path) -> None:
    """Refuse a file that could not be written when all is measured."""
    refusal = UserError("cannot be written", key="--out", value=str(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise refusal
    except OSError as error:
        raise refusal from error


def table(found: Profile) -> Table:
    """Stages with the seconds and the memory of a call at a few sizes."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    drawn.add_column("stage")
    drawn.add_column("lanes")
    for column in ("items", "seconds", "error", "resident", "peak"):
        drawn.add_column(column, justify="right")
    for name, stage in found.stages.items():
        label = name
        for layout in stage.costs:
            kind = _lanes_of(layout)
            for items, took in _shown(layout):
                error = f"± {percent(layout.error)}"
                memory = _memory(found, name, layout, items)
                drawn.add_row(label, kind, number(items), seconds(took), error, *memory)
                label = ""
            for replicas, took in layout.finish.points if layout.finish else ():
                drawn.add_row(label, f"{number(replicas)} x {kind}", "finish", seconds(took), "")
    return drawn


def _lanes_of(cost: StageCost | WorkerCost) -> str:
    """How many lanes of which kind, and their layout where it is not one lane's."""
    layout = "" if cost.layout == ONE_LANE.name else f" ({cost.layout})"
    return f"{cost.lanes} {cost.kind}{layout}"


def _memory(found: Profile, stage: str, layout: StageCost, items: float) -> tuple[str, str]:
    """Bytes of the state of a stage's worker on a lane, and with what a call takes beside it."""
    known = found.worker(stage.partition(".")[0], layout.lanes, layout.kind, layout.layout)
    state = known.state_bytes if known else 0
    if layout.working is None:
        return bytes_text(state), ""
    return bytes_text(state), bytes_text(state + layout.working.at(items))


def _shown(layout: StageCost) -> list[tuple[float, float]]:
    """A few points of the curve, the smallest and the largest among them."""
    points = layout.seconds.points
    shown = min(SHOWN_SIZES, len(points))
    picked = {round((len(points) - 1) * n / max(1, shown - 1)) for n in range(shown)}
    return [points[index] for index in sorted(picked)]


def _lengths(lengths: Quantiles) -> str:
    middle, most = lengths.at(0.5), lengths.largest
    return f"mean {number(lengths.mean)}, median {number(middle)}, most {number(most)}"


def beside(found: Profile) -> Iterator[str]:
    """What there is beside the seconds of calls, a line each."""
    for name, stage in found.stages.items():
        facts = [f"{stage.output_bytes:,} bytes an item"] if stage.output_bytes else []
        facts += [f"lengths: {_lengths(stage.lengths)}"] if stage.lengths else []
        facts += [f"turns: {_lengths(stage.turns)}"] if stage.turns else []
        if facts:
            yield f"{name}: {'; '.join(facts)}"
    for worker, layouts in found.workers.items():
        for layout in layouts:
            if layout.state_bytes:
                yield (
                    f"{worker} on {_lanes_of(layout)}: {layout.state_bytes:,} bytes, "
                    f"away in {seconds(layout.offload)}, back in {seconds(layout.onload)}"
                )
    for cost in found.publish:
        ends = ("from", cost.source_lanes), ("to", cost.target_lanes)
        gangs = [f"{word} {lanes} lanes" for word, lanes in ends if (lanes or 1) > 1]
        where = ", ".join([cost.place, *gangs])
        yield f"{cost.source} => {cost.target} ({where}): {seconds(cost.seconds)}"
    for place, link in found.links.items():
        yield f"link ({place}): {seconds(link.latency)} and {number(link.rate)} bytes/s"
    yield f"from a report to the next call: {seconds(found.dispatch)}"
