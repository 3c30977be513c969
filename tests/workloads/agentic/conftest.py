"""Tiny models that write calls of tools, made once for all tests of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.tokenizer import byte_tokenizer
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.reasoning.workers import ModelSource

TINY: dict[str, Any] = {
    "workload": "agentic",
    "steps": 2,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "tools": "calculator",
    "model": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
    },
    "data": {"options": {"min_digits": 1, "max_digits": 1, "tool_share": 0.7}},
    "warmup": {"steps": 80, "samples_per_step": 32, "learning_rate": 1e-2},
    "optimizer": {"learning_rate": 3e-3},
    "generation": {"max_new_tokens": 10},
    "episode": {"max_turns": 3, "max_tokens": 80, "max_result_tokens": 24},
    "evaluation": {"problems": 5},
}

CHAT = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>"
    "{% endif %}{% for turn in messages %}"
    "{% if turn.role == 'tool' %}(answer){{ turn.content }}(end)"
    "{% else %}({{ turn.role }}){{ turn.content or '' }}"
    "{% for call in turn.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}{% if turn.role == 'assistant' %}<eos>{% else %}(end){% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}(assistant){% endif %}"
)
"""A chat template with turns of tools, of the form that Qwen's have."""

MakeRecipe = Callable[..., AgenticRecipe]


def made(**changes: Any) -> AgenticRecipe:
    data = dict(TINY)
    for key, value in changes.items():
        merged = isinstance(value, dict) and isinstance(data.get(key), dict)
        data[key] = {**data[key], **value} if merged else value
    return AgenticRecipe.model_validate(data)


@pytest.fixture(scope="session")
def tiny_recipe() -> MakeRecipe:
    """Makes the tiny recipe, with some of its sections or values replaced."""
    return made


@pytest.fixture(scope="session")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A model that has seen products of two digits, most of them asked of a calculator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return AgenticExperiment(made()).prepare(tmp_path_factory.mktemp("warmed"))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose tokenizer has a chat template with turns of tools."""
    return save_chat_model(tmp_path_factory.mktemp("chat"), 2048)


def save_chat_model(path: Path, context: int) -> Path:
    """Save such a model, whose context has so many tokens."""
    spec = TinySpec(
        hidden_size=32, num_hidden_layers=1, intermediate_size=64, max_position_embeddings=context
    )
    build_tiny(spec, vocab_size=258, eos_token_id=256, pad_token_id=257, seed=0).save_pretrained(
        path
    )
    chat_tokenizer().save_pretrained(path)
    return path


def chat_tokenizer() -> Any:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What runs in one process leaves the number of threads as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
