"""The worker that answers calls by tools, on lanes of cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.flow import Place
from m2flow.tools import Toolbox, ToolCall, ToolResult, make_tools
from m2flow.workloads.agentic.config import EpisodeSection, ToolPart
from m2flow.workloads.agentic.workers.caller import Caller
from m2flow.workloads.reasoning.workers import ModelSource


def toolbox_of(parts: Sequence[ToolPart], episode: EpisodeSection) -> Toolbox:
    """The tools of a recipe.

    Args:
        parts: their names and options.
        episode: deadline, and how many calls are carried out at a time.

    Raises:
        UserError: a tool does not exist or cannot work here.
    """
    named = [(part.tool, part.options) for part in parts]
    return Toolbox(
        make_tools(named),
        episode.tool_deadline_seconds,
        episode.tool_concurrency,
    )


class ToolUser(Caller):
    """Answers calls by tools, each within its deadline.

    Args:
        model, episode, tools, chat_options: as for `Caller`.
        parts: the tools.
    """

    def __init__(
        self,
        model: ModelSource,
        episode: EpisodeSection,
        tools: Sequence[str],
        parts: Sequence[ToolPart],
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, episode, tools, chat_options)
        self.parts = tuple(parts)

    def load(self, place: Place) -> None:
        super().load(place)
        self._box = toolbox_of(self.parts, self.episode)
        self._box.prepare()

    def answers(self, calls: Sequence[ToolCall], seeds: Sequence[int]) -> list[ToolResult]:
        return self._box.carry_out(calls, self.place.goes_on)

    def close(self) -> None:
        if hasattr(self, "_box"):
            self._box.close()
