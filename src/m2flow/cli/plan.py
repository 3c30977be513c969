"""`m2flow plan`: how a recipe would be carried out, and why; nothing is started.

With `--cluster` the lanes need not exist: the profile is computed from the recipe, the model's
configuration and public figures of the hardware, and neither torch nor Ray is imported.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from m2flow.cli.planning import AUTO_MODE, planned
from m2flow.cli.recipe import read_recipe
from m2flow.errors import UserError
from m2flow.plan import describe_plan, to_json
from m2flow.workloads.reasoning.config import ReasoningRecipe

if TYPE_CHECKING:
    from m2flow.cli.deciding import Planning


@dataclass(frozen=True)
class Asked:
    """What was asked of `m2flow plan`.

    Attributes:
        recipe, overrides: a YAML file, and `key=value`.
        mode: "auto", a fixed mode, or None for what the recipe or the other options imply.
        plan_file: a plan to judge, or to print.
        cluster: lanes that need not exist.
        model: a `config.json`, a folder or a known name, in place of the recipe's model.
        max_staleness: a budget, in place of the recipe's.
        profile_file: a stored profile; `reuse` it even if it is of something else.
        prompt_tokens, answer_tokens: means, in place of assumptions.
        explain, as_json: how to tell.
    """

    recipe: Path
    overrides: Sequence[str] = ()
    mode: str | None = None
    plan_file: Path | None = None
    cluster: str | None = None
    model: str | None = None
    max_staleness: int | None = None
    profile_file: Path | None = None
    reuse: bool = False
    prompt_tokens: float | None = None
    answer_tokens: float | None = None
    explain: bool = False
    as_json: bool = False


def plan(asked: Asked) -> None:
    """Print how a recipe would be carried out.

    Raises:
        UserError: the input is wrong.
    """
    named = [word.removeprefix("mode=") for word in asked.overrides if word.startswith("mode=")]
    wanted = asked.mode or (named[-1] if named else None)
    words = [*asked.overrides, *([f"mode={asked.mode}"] if asked.mode else [])]
    if asked.max_staleness is not None:
        words.append(f"max_staleness={asked.max_staleness}")
    recipe = read_recipe(asked.recipe, words)
    if asked.cluster is None:
        _refuse_without_cluster(asked)
    profiled = asked.cluster is not None or asked.profile_file is not None
    planned_by_us = recipe.mode == AUTO_MODE and asked.plan_file is None
    if profiled or planned_by_us:
        from m2flow.cli.deciding import Planning

        _print_decision(Planning(recipe, asked, wanted), asked)
    else:
        _print_fixed(recipe, asked)


def _refuse_without_cluster(asked: Asked) -> None:
    for option, value in (
        ("--model", asked.model),
        ("--prompt-tokens", asked.prompt_tokens),
        ("--answer-tokens", asked.answer_tokens),
    ):
        if value is not None:
            raise UserError(
                "says what is computed for lanes that are not here",
                key=option,
                value=value,
                hint="add --cluster SPEC, such as --cluster 1x8xH100",
            )


def _print_fixed(recipe: ReasoningRecipe, asked: Asked) -> None:
    """The plan of a fixed mode, or of a file: nothing is known of seconds."""
    graph, chosen = planned(recipe, asked.plan_file)
    if asked.as_json or not asked.explain:
        print(to_json(chosen), end="")
    if asked.explain:
        lines = ["flow:", *(f"  {line}" for line in graph.describe())]
        out = sys.stderr if asked.as_json else sys.stdout
        print("\n".join(lines + describe_plan(chosen, graph, recipe.prompts_per_step)), file=out)


def _print_decision(planning: Planning, asked: Asked) -> None:
    from m2flow.plan.explain import explained, flips, in_words, summary

    decision = planning.decision()
    found = None
    if asked.explain or asked.as_json:
        found = flips(decision, planning.graph, planning.decided)
    why = explained(decision, planning.graph, flips=found, assumptions=decision.profile.assumptions)
    if asked.as_json:
        print(to_json({**dataclasses.asdict(decision.chosen.plan), "decision": why}), end="")
    if asked.explain or not asked.as_json:
        out = sys.stderr if asked.as_json else sys.stdout
        plain = not out.isatty() or "utf" not in (out.encoding or "").lower()
        width = shutil.get_terminal_size((100, 24)).columns
        lines = in_words(why, width, plain) if asked.explain else summary(why)
        print("\n".join(lines), file=out)
