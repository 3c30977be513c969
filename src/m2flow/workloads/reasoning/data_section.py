"""The section of a reasoning recipe on problems: `data`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from m2flow.errors import UserError
from m2flow.workloads.common import recipe as common
from m2flow.workloads.common.recipe import Count, Flag, Options, Section, Share

KEYS_OF_TASKS = {
    "path": ("jsonl",),
    "eval_path": ("jsonl",),
    "on_bad_row": ("jsonl",),
    "question_column": ("jsonl",),
    "answer_column": ("jsonl",),
    "max_prompt_tokens": ("jsonl",),
    "template": ("jsonl", "gym"),
    "dataset": ("gym",),
    "curriculum": ("jsonl",),
}
"""Keys of `data` to the tasks that read them; `options` are the task's or data set's own."""


class CurriculumPart(Section):
    """A preference for problems that the policy solves now and then.

    A problem's rate of success is what functions say of its answers, and runs along, the last
    measurement with half of the weight. Rates within `band`, and problems never asked, weigh 1 in
    the choice; others weigh `outside`.
    """

    band: tuple[Share, Share] = (0.2, 0.8)
    outside: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.1

    @model_validator(mode="after")
    def _is_a_band(self) -> CurriculumPart:
        if self.band[0] > self.band[1]:
            raise UserError(
                "begins above its end",
                key="data.curriculum.band",
                value=list(self.band),
                expected="two rates of success, such as [0.2, 0.8]",
            )
        return self


def _name_or_shares(value: object) -> object:
    if isinstance(value, dict):
        for name, share in value.items():
            if not isinstance(share, int) or isinstance(share, bool) or share < 1:
                raise UserError(
                    "is no share of the problems",
                    key=f"data.dataset.{name}",
                    value=share,
                    expected="a whole number of at least 1",
                )
    elif not isinstance(value, str | None):
        raise UserError(
            "is wrong",
            key="data.dataset",
            value=value,
            expected="a data set of reasoning-gym, or a table of names with their shares",
        )
    return value


class DataSection(Section):
    """The problems. `task` is addition, jsonl or gym.

    With `chat` a problem is the user's turn of a conversation, in the chat template of the model's
    tokenizer; null: where the tokenizer has one. `chat_options` are the template's own variables,
    such as `enable_thinking`. `dataset` is a name of reasoning-gym, or names with their shares of
    the problems: `options` then has those of each by name. Rows whose prompt is longer than
    `max_prompt_tokens` are left out, held-out ones too. Other keys belong to some tasks.
    """

    task: Literal["addition", "jsonl", "gym"] = "addition"
    path: str | None = None
    eval_path: str | None = None
    on_bad_row: Literal["fail", "skip"] = "fail"
    question_column: str | None = None
    answer_column: str | None = None
    template: str | None = None
    dataset: Annotated[str | dict[str, Count] | None, BeforeValidator(_name_or_shares)] = None
    max_prompt_tokens: Count | None = None
    chat: Flag | None = None
    system_prompt: str | None = None
    chat_options: Options = Field(default_factory=dict)
    options: Options = Field(default_factory=dict)
    curriculum: CurriculumPart | None = None

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """Variables of the chat template; None where prompts are no turns of one."""
        return None if self.chat is False else self.chat_options

    @model_validator(mode="after")
    def _keys_belong_to_the_task(self) -> DataSection:
        common.refuse_keys_of_others(self, "data.task", KEYS_OF_TASKS)
        for key, hint in (("path", None), ("eval_path", "take it out to hold out rows of path")):
            if getattr(self, key) == "":
                expected = "a file or folder of rows"
                raise UserError("is empty", key=f"data.{key}", expected=expected, hint=hint)
        return self
