"""`m2flow plan`: how a recipe would be carried out, and why; nothing is started.

With `--cluster` the lanes need not exist: the profile is computed from the recipe, the model's
configuration and public figures of the hardware, and neither torch nor Ray is imported.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from m2flow.engine.plan import Plan
from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph
from m2flow.plan import describe_plan, to_json
from m2flow.runtime.driver.auto import GUESSES
from m2flow.workloads.common import Recipe, read_recipe
from m2flow.workloads.common.planning import flow_of, lanes_of, planned
from m2flow.workloads.common.recipe import AUTO_MODE
from m2flow.workloads.common.start import beginning

if TYPE_CHECKING:
    from m2flow.cli.deciding import Question


def plan(
    recipe: Path, overrides: Sequence[str], asked: Question, *, explain: bool, as_json: bool
) -> None:
    """Print how a recipe would be carried out.

    Args:
        recipe: the YAML file.
        overrides: `key=value`.
        asked: what beside the recipe decides; its own recipe is replaced.
        explain, as_json: how to tell.

    Raises:
        UserError: the input is wrong.
    """
    named = [word.removeprefix("mode=") for word in overrides if word.startswith("mode=")]
    wanted = asked.mode or (named[-1] if named else None)
    words = [*overrides, *([f"mode={asked.mode}"] if asked.mode else [])]
    found = read_recipe(recipe, words)
    if asked.cluster is None:
        _refuse_without_cluster(asked)
    profiled = asked.cluster is not None or asked.profile_file is not None
    planned_by_us = found.mode == AUTO_MODE and asked.plan_file is None
    if planned_by_us and not profiled and wanted is None and not _has_profile(found):
        graph, first, by = beginning(found)
        known, how = ("measured", f"with this plan, {by}") if by else ("known", GUESSES[0])
        print(
            f"nothing is {known} of these lanes yet: a run begins {how}, learns what its "
            "stages take, and tries the plans that look best",
            file=sys.stderr,
        )
        _print_plan(found, graph, first, explain, as_json)
    elif profiled or planned_by_us:
        _print_decision(dataclasses.replace(asked, recipe=found, mode=wanted), explain, as_json)
    else:
        _print_plan(found, *planned(found, asked.plan_file), explain, as_json)


def _has_profile(recipe: Recipe) -> bool:
    """Whether the stages of a recipe have been measured on its lanes."""
    from m2flow.runtime.profiling.stored import cached  # NumPy comes along
    from m2flow.workloads.common.profile_key import profile_key

    return cached(profile_key(recipe, lanes_of(recipe)), flow_of(recipe).trace()) is not None


def _refuse_without_cluster(asked: Question) -> None:
    for option, value in (
        ("--model", asked.assumed.model),
        ("--prompt-tokens", asked.assumed.prompt_tokens),
        ("--answer-tokens", asked.assumed.answer_tokens),
    ):
        if value is not None:
            raise UserError(
                "says what is computed for lanes that are not here",
                key=option,
                value=value,
                hint="add --cluster SPEC, such as --cluster 1x8xH100",
            )


def _print_plan(
    recipe: Recipe, graph: FlowGraph, chosen: Plan, explain: bool, as_json: bool
) -> None:
    """The plan of a fixed mode, of a file, or that a run begins with, without its seconds."""
    if as_json or not explain:
        print(to_json(chosen), end="")
    if explain:
        lines = ["flow:", *(f"  {line}" for line in graph.describe())]
        out = sys.stderr if as_json else sys.stdout
        print("\n".join(lines + describe_plan(chosen, graph, recipe.items_per_step)), file=out)


def _print_decision(asked: Question, explain: bool, as_json: bool) -> None:
    from m2flow.cli.deciding import Planning
    from m2flow.plan.account import in_lines
    from m2flow.plan.explain import explained
    from m2flow.plan.explain.flips import flips
    from m2flow.plan.explain.words import in_words, summary

    planning = Planning(asked)
    decision = planning.decision()
    found = None
    if explain or as_json:
        found = flips(decision, planning.graph)
    why = explained(decision, planning.graph, flips=found)
    if as_json:
        print(to_json({**dataclasses.asdict(decision.chosen.plan), "decision": why}), end="")
    if explain or not as_json:
        out = sys.stderr if as_json else sys.stdout
        width = shutil.get_terminal_size((100, 24)).columns
        lines = in_words(why, width) if explain else summary(why)
        lines += ["", *in_lines(planning.account(decision))] if explain else []
        print("\n".join(lines), file=out)
