"""What an agentic recipe means: that of a reasoning recipe, with tools and turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from m2flow.errors import UserError
from m2flow.flow import Batch
from m2flow.runtime.driver.runner import StepResult
from m2flow.tools import ToolCall
from m2flow.training.rollouts import TokenPairs
from m2flow.user_code import user_function
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.agentic.dialect import ChatDialect, Dialect, TagDialect, dialect_of
from m2flow.workloads.agentic.flow import Agent, HostedAgent, episode_of, recipe_flow
from m2flow.workloads.agentic.tasks import TASKS, TaskWithTurns
from m2flow.workloads.agentic.workers.tool_user import toolbox_of
from m2flow.workloads.common.workload import RunProgress
from m2flow.workloads.reasoning.encoding import Names, prompt_rows
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.named import loaded
from m2flow.workloads.reasoning.tasks import Problem
from m2flow.workloads.reasoning.workers import ModelSource

GIVEN_UP = ("tool", "agent")
"""Reasons why a trajectory ended in which somebody failed who is not the policy."""

LIMITED = ("length", "turns")
"""Reasons why a trajectory was cut off: its tokens, or its turns, were used up."""

SHOWN_TURNS = ("text", "tools", "result")
"""What samples.jsonl has of a turn."""


class AgenticExperiment(ReasoningExperiment):
    """A recipe made concrete; see `m2flow.workloads.common.Experiment`.

    The tools are made here too, and let go of: what of them is wrong is refused before a run.

    Args:
        recipe: the validated recipe.
        model: the starting model, where it is made already.

    Raises:
        UserError: as for `ReasoningExperiment`, or a tool is wrong.
    """

    tasks = TASKS
    names = Names(max_new_tokens="episode.max_tokens")
    cut = (
        "at episode.max_tokens = {recipe.episode.max_tokens}, after episode.max_turns = "
        "{recipe.episode.max_turns}, or in a turn at generation.max_new_tokens = "
        "{recipe.generation.max_new_tokens}: raise them"
    )
    recipe: AgenticRecipe

    def __init__(self, recipe: AgenticRecipe, model: ModelSource | None = None) -> None:
        self._schemas: list[dict[str, Any]] = []
        self.tools: tuple[str, ...] = ()
        if recipe.agent is None:
            box = toolbox_of(recipe.tools, recipe.episode)
            self._schemas, self.tools = box.schemas(), tuple(box.tools)
            box.close()
        else:
            user_function(recipe.agent.function, "agent.function")
        self.turn_rewards = loaded(recipe.turn_reward or (), "turn_reward")
        super().__init__(recipe, model)
        dialect = self._dialect_of(self._starting_tokenizer())  # refuses what it cannot write
        if isinstance(dialect, TagDialect):
            self._refuse_several_arguments()

    def _refuse_several_arguments(self) -> None:
        """Refuse tools that no text between tags can call."""
        for schema in self._schemas:
            required = schema["function"]["parameters"].get("required") or ()
            if len(required) > 1:
                raise UserError(
                    f"a call between tags is one text, and this tool needs {', '.join(required)}",
                    key="tools",
                    value=schema["function"]["name"],
                    expected="tools that need one argument at most",
                    hint="set episode.dialect to chat, or give parameters a default",
                )

    def _dialect_of(self, tokenizer: Any) -> Dialect:
        recipe, options = self.recipe, self.recipe.data.template_variables
        episode = episode_of(recipe)
        if recipe.agent is not None:
            return ChatDialect(tokenizer, episode.max_tokens, options)
        return dialect_of(tokenizer, episode, self.tools, options)

    @property
    def _told_tools(self) -> Sequence[Mapping[str, Any]]:
        return () if self.recipe.episode.dialect == "tags" else self._schemas

    @property
    def _max_new(self) -> int:
        return self.recipe.episode.max_tokens

    def _warm_up(self, model: Any, tokenizer: Any, progress: RunProgress | None) -> None:
        """Train on the task's turns; what the tools answer is asked of them, and not learned."""
        warmup = self.recipe.warmup
        if progress is not None:
            progress.phase("warm-up", warmup.steps)
        assert isinstance(self.task, TaskWithTurns)
        shown = [self.task.demonstration(n) for n in range(warmup.steps * warmup.samples_per_step)]
        prompts = prompt_rows(tokenizer, [Problem(prompt, "") for prompt, _ in shown], self._chat)
        dialect = self._dialect_of(tokenizer)
        box = toolbox_of(self.recipe.tools, self.recipe.episode)
        calls = [turn for _, turns in shown for turn in turns if isinstance(turn, ToolCall)]
        results = box.carry_out(calls)
        box.close()
        for call, result in zip(calls, results, strict=True):
            if result.error or result.failure:
                raise UserError(
                    f"a demonstration's call of {call.tool!r} has no answer: "
                    f"{result.failure or result.text}",
                    key="tools",
                    value=list(self.tools),
                    hint="name the tools that the task shows, or set warmup.steps to 0",
                )
        answers = iter(results)
        rows, masks = [], []
        for _, turns in shown:
            row: list[int] = []
            mask: list[bool] = []
            for turn in turns:
                drawn = dialect.turn_ids(turn)
                read = dialect.result_ids([next(answers)])[0] if isinstance(turn, ToolCall) else []
                row += drawn + read
                mask += [True] * len(drawn) + [False] * len(read)
            rows.append(row)
            masks.append(mask)
        self._show(model, TokenPairs.from_rows(prompts, rows, masks), progress)

    # --- the data ---------------------------------------------------------------------------------

    def flow(self, checkpoint: Path | None = None) -> Agent | HostedAgent:  # type: ignore[override]
        """The flow on the starting model, or on a checkpoint of it."""
        self.resume_data(checkpoint)
        return recipe_flow(
            self.recipe, self.model, self.rewards, self.turn_rewards, self.tools, checkpoint
        )

    # --- the figures ------------------------------------------------------------------------------

    def metrics(self, result: StepResult) -> dict[str, float]:
        reasons = result.output["finish_reason"]
        truncated = sum(why in LIMITED for why in reasons) / len(reasons)
        figures = super().metrics(result) | turn_figures(result.output)
        return figures | {"length/truncated_share": truncated}

    def evaluation(self, result: StepResult) -> dict[str, float]:
        figures = turn_figures(result.output)
        names = ("turns/mean", "tools/calls")
        found = super().evaluation(result)
        return found and found | {f"eval/{name}": figures[name] for name in names}

    def samples(self, result: StepResult, count: int) -> list[dict[str, Any]]:
        rows = super().samples(result, count)
        turns_of = dict(zip(result.output.ids, result.output["turns"], strict=True))
        for row in rows:
            turns = turns_of[row["item"]]
            row["turns"] = [{name: turn[name] for name in SHOWN_TURNS} for turn in turns]
        return rows


def turn_figures(output: Batch) -> dict[str, float]:
    """Figures of turns and calls, as means over trajectories; shares are of all that was asked.

    The seconds are of a call that was carried out: a malformed one takes none.
    """
    trajectories: list[list[dict[str, Any]]] = output["turns"]
    turns = [turn for some in trajectories for turn in some]
    count, calls = len(trajectories), sum(len(turn["tools"]) for turn in turns)
    asked = calls + sum(turn["malformed"] for turn in turns)

    def share(name: str) -> float:
        return sum(turn[name] for turn in turns) / max(1, asked)

    return {
        "turns/mean": len(turns) / count,
        "tools/calls": calls / count,
        "tools/error_share": share("errors"),
        "tools/cut_share": share("cut"),
        "tools/failed_share": sum(why in GIVEN_UP for why in output["finish_reason"]) / count,
        "tools/seconds": sum(turn["seconds"] for turn in turns) / max(1, calls),
        "tokens/tools": float(sum(turn["result_tokens"] for turn in turns)),
    }
