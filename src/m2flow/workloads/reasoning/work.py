"""What the stages of a reasoning recipe do, in words that analytic profiles understand.

Sizes come from the recipe, the model's shape from its configuration; neither weights nor data are
read. What only a run would show (how long prompts and answers are, what a reward costs) is assumed,
and each assumption is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.plan.analytic_work import Answers, Fixed, Forward, Generate, Train, Work
from m2flow.plan.lognormal import fit_lengths
from m2flow.plan.models import ModelShape, read_model
from m2flow.workloads.reasoning.config import ReasoningRecipe

PROMPT_TOKENS = 150
"""Of a question in words, with its template."""

ANSWER_SHARE = 0.27
"""Mean length of an answer over the longest that is allowed: 7,504 of 27,648 tokens in the run to
which the attained fractions of the hardware are fitted (RLinf, arXiv 2509.15965, GRPO on 7B)."""

ADDITION_SHARE = 0.55
"""The same of the addition task, whose answers take most of the room they are given."""

SHARE_AT_LIMIT = 0.02
"""Of the answers that are cut off."""

BYTES_PER_TOKEN = 4
"""Of text in words: a model that reads bytes sees so many times as many tokens."""

SCORE_SECONDS, ADDITION_SCORE_SECONDS = 1e-3, 20e-6
"""To score one answer by a rule; to compare two sums."""

GROUP_SECONDS = 2e-6
"""Of an advantage, for each sample."""

RUNNING = (64, 128)
"""Limits on running requests that are offered beside the recipe's own, where they are lower."""

BYTE_VOCABULARY = 384
"""Rows of the embedding of a tiny model that reads bytes."""


@dataclass(frozen=True)
class RecipeWork:
    """A recipe's work.

    Attributes:
        stages: by stage name.
        model: what is trained.
        assumptions: what was taken for granted, a line each.
    """

    stages: Mapping[str, Work]
    model: ModelShape
    assumptions: tuple[str, ...]


def work_of(
    recipe: ReasoningRecipe,
    graph: FlowGraph,
    model: str | Path | None = None,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
) -> RecipeWork:
    """The work of each stage of a recipe's flow.

    Args:
        recipe: every size.
        graph: its flow.
        model: a folder, a `config.json` or a known name; None: the recipe's own model.
        prompt_tokens, answer_tokens: means, where they are known.

    Raises:
        UserError: the model's shape is not known, or no such lengths can be.
    """
    shape = shape_of(recipe) if model is None else read_model(model)
    answers, assumed = _answers(recipe, model, prompt_tokens, answer_tokens)
    own = recipe.generation.max_running
    running = tuple(sorted({own, *(limit for limit in RUNNING if limit < own)}))
    stages = {node.name: _stage(node, recipe, shape, answers, running) for node in graph.nodes}
    assumed += (f"{_score_seconds(recipe) * 1e3:g} ms to score an answer, on one lane",)
    return RecipeWork(stages, shape, assumed)


def shape_of(recipe: ReasoningRecipe) -> ModelShape:
    """The shape of the recipe's model: that of its folder, or of the tiny one it builds.

    Raises:
        UserError: the folder has no `config.json`, and no known model has its name.
    """
    model = recipe.model
    if model.path is not None:
        try:
            return read_model(model.path)
        except UserError as error:
            if error.key != "model":
                raise
            raise UserError(
                "neither a folder with a config.json nor a model whose shape is known",
                key="model.path",
                value=model.path,
                hint="--model CONFIG.json or a known name says what shape it has",
            ) from None
    return ModelShape(
        "the recipe's tiny model",
        model.num_hidden_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.num_key_value_heads,
        model.hidden_size // model.num_attention_heads,
        model.intermediate_size,
        BYTE_VOCABULARY,
        tied=True,
        qkv_bias=True,
    )


def _answers(
    recipe: ReasoningRecipe,
    model: str | Path | None,
    prompt_tokens: float | None,
    answer_tokens: float | None,
) -> tuple[Answers, tuple[str, ...]]:
    """Lengths, and what was assumed of them."""
    longest = recipe.generation.max_new_tokens
    addition = recipe.data.task == "addition"
    bytes_read = model is None and recipe.model.path is None and not addition
    assumed: list[str] = []
    if prompt_tokens is None:
        prompt_tokens = PROMPT_TOKENS * (BYTES_PER_TOKEN if bytes_read else 1)
        if addition:
            prompt_tokens = 2 * recipe.data.options.get("max_digits", 4) + 2
        assumed.append(f"prompts of {prompt_tokens:g} tokens")
    if answer_tokens is None:
        answer_tokens = (ADDITION_SHARE if addition else ANSWER_SHARE) * longest
        assumed.append(f"answers of {answer_tokens:.0f} tokens in the mean, of {longest} at most")
    assumed.append(f"lengths are log-normal, {SHARE_AT_LIMIT:.0%} of the answers reach the limit")
    try:
        lengths = fit_lengths(answer_tokens, longest, SHARE_AT_LIMIT)
    except UserError as error:
        raise UserError(
            "no answers are so long in the mean under this limit",
            key="--answer-tokens",
            value=answer_tokens,
            expected=error.expected,
        ) from None
    return Answers(prompt_tokens, lengths), tuple(assumed)


def _score_seconds(recipe: ReasoningRecipe) -> float:
    return ADDITION_SCORE_SECONDS if recipe.data.task == "addition" else SCORE_SECONDS


def _stage(
    node: StageNode,
    recipe: ReasoningRecipe,
    model: ModelShape,
    answers: Answers,
    running: tuple[int, ...],
) -> Work:
    """The work of one stage, by what its method is called."""
    match node.method:
        case "generate":
            return Generate(model, answers, running)
        case "logprobs" | "values":
            return Forward(model, answers)
        case "train":
            return Train(model, answers, sharded=True)
        case "score":
            return Fixed(seconds_per_item=_score_seconds(recipe))
    return Fixed(seconds_per_item=GROUP_SECONDS)
