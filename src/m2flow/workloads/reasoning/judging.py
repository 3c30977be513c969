"""What can be refused of models that judge before a run begins; their weights are not read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from m2flow.errors import UserError
from m2flow.models.causal_lm import load_tokenizer
from m2flow.models.classifier import Conversations, check_head, label_index
from m2flow.models.folder import checked_folder
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.encoding import context_of
from m2flow.workloads.reasoning.workers.judge_model import judge_chat


def check_judging_models(recipe: ReasoningRecipe) -> None:
    """Refuse a model that judges and is not there, or cannot do what is asked of it.

    Raises:
        UserError: names the key.
    """
    reward_model, judge = recipe.reward_model, recipe.judge
    if reward_model.path is not None:
        with _named("reward_model.path"):
            checked_folder(reward_model.path)
            Conversations.of(reward_model.path)
        check_head(reward_model.path)
        label_index(reward_model.path, reward_model.label)
    if judge.path is not None:
        with _named("judge.path"):
            checked_folder(judge.path)
            tokenizer = load_tokenizer(judge.path)
        judge_chat(tokenizer, judge)
        context = context_of(judge.path)
        if context is not None and judge.max_new_tokens >= context:
            raise UserError(
                "leaves no room for a question in the judge's context",
                key="judge.max_new_tokens",
                value=judge.max_new_tokens,
                expected=f"less than max_position_embeddings = {context} of its config.json",
            )


@contextmanager
def _named(key: str) -> Iterator[None]:
    """What is refused within names the key that it stands under."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error), key=key) from error
