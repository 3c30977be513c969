"""The recipe of an agentic run: that of a reasoning run, with tools and turns.

Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from m2flow.errors import UserError
from m2flow.tools.registry import check_name
from m2flow.workloads.common.recipe import (
    Count,
    Deadline,
    Options,
    Section,
    refuse_keys_of_others,
)
from m2flow.workloads.reasoning import config as reasoning
from m2flow.workloads.reasoning.algorithm_section import OF_GROUPS
from m2flow.workloads.reasoning.data_section import DataSection
from m2flow.workloads.reasoning.reward_sections import Rewards


class ToolPart(Section):
    """A tool by its name, or the path `module:function` of a function, and its own options."""

    tool: str
    options: Options = Field(default_factory=dict)

    def __str__(self) -> str:
        return self.tool

    @model_validator(mode="after")
    def _known(self) -> ToolPart:
        check_name(self.tool)
        return self


def _listed(value: object) -> object:
    """Tools that are named alone as a list of parts."""
    parts = value if isinstance(value, list | tuple) else [value]
    return [{"tool": part} if isinstance(part, str) else part for part in parts]


Tools = Annotated[tuple[ToolPart, ...], BeforeValidator(_listed), Field(min_length=1)]

Brackets = tuple[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]]


class AgentPart(Section):
    """An agent of yours, by the dotted path of a function, which asks the policy over HTTP.

    A call that takes longer than its deadline costs its trajectory alone; so many run at a time as
    `concurrency` says.
    """

    function: str
    deadline_seconds: Deadline = 300.0
    concurrency: Count = 64


def _named(value: object) -> object:
    return {"function": value} if isinstance(value, str) else value


Agent = Annotated[AgentPart | None, BeforeValidator(_named)]


SMALL_TASKS = ("arithmetic", "lookup")
"""Tasks that come with m2flow, for tiny models."""


KEYS_OF_DIALECTS = {"call": ("tags",), "result": ("tags",)}
"""Keys of `episode` to the dialects that read them."""


class EpisodeSection(Section):
    """A trajectory: turns of the model, and between them what tools answered.

    `max_tokens` is all that stands behind the prompt, tools' answers included; one turn has at most
    `generation.max_new_tokens`. A tool's answer is cut at `max_result_tokens`, and marked.

    In the dialect `chat` a call is JSON in `<tool_call>` tags, and answers are turns of the chat
    template of the model's tokenizer. In `tags` a call stands between the two texts of `call`, and
    its answer between those of `result`, within one text. `auto` is `chat` where the tokenizer has
    a template and `data.chat` is not false.

    With `credit: turn` a turn is credited with what follows it, instead of the whole trajectory.
    """

    max_turns: Count = 4
    max_tokens: Count = 1024
    max_result_tokens: Count = 256
    tool_deadline_seconds: Deadline = 10.0
    tool_concurrency: Count = 8
    dialect: Literal["auto", "chat", "tags"] = "auto"
    call: Brackets = ("[", "]")
    result: Brackets = ("{", "}")
    credit: Literal["trajectory", "turn"] = "trajectory"

    @model_validator(mode="after")
    def _keys_are_read(self) -> EpisodeSection:
        if self.dialect != "auto":  # which the tokenizer decides
            refuse_keys_of_others(self, "episode.dialect", KEYS_OF_DIALECTS)
        return self


class AgenticDataSection(DataSection):
    """The problems: those of a file or of reasoning-gym as in a reasoning recipe, or a small task.

    `arithmetic` asks for products of two numbers, `lookup` for facts that a search finds.
    """

    task: Literal["arithmetic", "lookup", "jsonl", "gym"] = "arithmetic"  # type: ignore[assignment]


PRETRAINED: dict[str, dict[str, Any]] = {
    **reasoning.PRETRAINED,
    "generation": {"max_new_tokens": 1024},
    "episode": {"max_tokens": 8192, "max_result_tokens": 1024},
}
"""What is not said of a run that starts from a model's folder."""


class AgenticRecipe(reasoning.ReasoningRecipe):
    """A whole run.

    `reward` judges what the model wrote last; the functions of `turn_reward` judge each turn. With
    `agent` a function of yours makes the trajectories, with tools of its own.
    """

    pretrained: ClassVar[dict[str, dict[str, Any]]] = PRETRAINED

    workload: Literal["agentic"] = "agentic"  # type: ignore[assignment]
    name: str = "agentic"
    tools: Tools = (ToolPart(tool="calculator"),)
    turn_reward: Rewards = None
    agent: Agent = None
    data: AgenticDataSection = AgenticDataSection()
    episode: EpisodeSection = EpisodeSection()

    @property
    def further_draws(self) -> int:
        """Groups of trajectories are drawn once."""
        return 0

    @property
    def longest_answer(self) -> int:
        return self.episode.max_tokens

    @property
    def step_size(self) -> str:
        return f"{self.prompts_per_step} x {self.samples_per_prompt} trajectories"

    @model_validator(mode="after")
    def _turns_fit(self) -> AgenticRecipe:
        episode = self.episode
        if self.generation.max_new_tokens > episode.max_tokens:
            raise UserError(
                "a turn may be longer than its trajectory",
                key="generation.max_new_tokens",
                value=self.generation.max_new_tokens,
                expected=f"at most episode.max_tokens = {episode.max_tokens}",
            )
        if self.algorithm.name not in OF_GROUPS:
            raise UserError(
                "trajectories are compared within groups",
                key="algorithm.name",
                value=self.algorithm.name,
                expected=f"one of {', '.join(OF_GROUPS)}",
            )
        self._refuse_keys_of_one_turn()
        if self.agent is not None:
            self._refuse_keys_of_own_tools()
        if episode.credit == "turn" and self.turn_reward is None:
            raise UserError(
                "without rewards of turns each turn's credit is the trajectory's",
                key="episode.credit",
                value="turn",
                hint="give turn_reward, or take it out",
            )
        return self

    def _refuse_keys_of_own_tools(self) -> None:
        """Refuse what an agent of the user's decides itself."""
        turns = "an agent's calls and answers are turns of a chat template"
        for key, value, expected, why in (
            (
                "warmup.steps", self.warmup.steps or None, "0 where there is an agent",
                "demonstrations are of m2flow's own tools, and an agent has others",
            ),
            (
                "episode.dialect", "tags" if self.episode.dialect == "tags" else None,
                "chat where there is an agent", turns,
            ),
            *(
                (f"episode.{name}", value, "the default where there is an agent", turns)
                for name in KEYS_OF_DIALECTS
                if (value := getattr(self.episode, name)) != getattr(EpisodeSection(), name)
            ),
            (
                "data.system_prompt", self.data.system_prompt, "none where there is an agent",
                "an agent writes its own messages",
            ),
        ):  # fmt: skip
            if value is not None:
                raise UserError(why, key=key, value=value, expected=expected)

    def _refuse_keys_of_one_turn(self) -> None:
        ask = "ask the model in a function of yours that reward names"
        algorithm, curriculum = self.algorithm, self.data.curriculum
        for key, value, expected, hint in (
            ("reward_model.path", self.reward_model.path, None, ask),
            ("judge.path", self.judge.path, None, ask),
            ("algorithm.further_draws", algorithm.further_draws or None, "0", None),
            ("generation.tokens_per_step", self.generation.tokens_per_step, None, "take it out"),
            ("data.curriculum", curriculum and curriculum.model_dump(), None, "take it out"),
            (
                "algorithm.overlong_buffer",
                algorithm.overlong_buffer or None,
                None,
                "take it out, and bound episode.max_tokens",
            ),
            ("algorithm.kl_in", "reward" if algorithm.kl_in_reward else None, "loss", None),
        ):
            if value is not None:
                raise UserError(
                    "is for answers of one turn", key=key, value=value, expected=expected, hint=hint
                )

    def derived(self) -> dict[str, Any]:
        return {
            **super().derived(),
            "turns_per_step": self.samples_per_step * self.episode.max_turns,
        }
