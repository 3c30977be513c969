"""What looks like a secret is refused before anything is written, and its value is never told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from m2flow.errors import UserError
from m2flow.workloads.common import reading
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.registry import OWN, workload_named
from m2flow.workloads.common.secret_keys import is_secret

EMBODIED: dict[str, Any] = {"workload": "embodied", "environment": {"name": "table:reach"}}
VALUE = "hunter2"


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ({"workload": "reasoning"}, "data.options.api_key"),
        ({"workload": "reasoning"}, "data.chat_options.hub.token"),
        ({"workload": "reasoning", "judge": {"path": "judge"}}, "judge.chat_options.WANDB_API_KEY"),
        (EMBODIED, "environment.options.password"),
        (EMBODIED, "environment.options.clientSecret"),
        (EMBODIED, "tiny"),
    ],
)
def test_a_secret_in_a_free_table_is_refused(recipe: dict[str, Any], key: str) -> None:
    said: Any = {"environment.options.hf_token": VALUE} if key == "tiny" else VALUE
    with pytest.raises(UserError, match=r"looks like a secret.*environment variable") as refused:
        read_recipe(recipe, {key: said})
    assert str(refused.value).startswith(key)
    assert VALUE not in str(refused.value)


def test_a_secret_in_a_list_is_refused() -> None:
    tools = [{"tool": "calculator", "options": {"credentials": VALUE}}]
    with pytest.raises(UserError, match=r"^tools\.0\.options\.credentials: ") as refused:
        read_recipe({"workload": "agentic", "tools": tools})
    assert VALUE not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"command": ["server", "--stdio"], "env": {"OPENAI_KEY": VALUE}}, "env.OPENAI_KEY"),
        ({"command": ["server", "--api-key", VALUE]}, "command.2"),
        ({"command": ["server", f"--token={VALUE}"]}, "command.1"),
        ({"command": ["server"], "env": {"STORE": f"postgres://me:{VALUE}@host/x"}}, "env.STORE"),
    ],
)
def test_a_secret_of_a_tools_server_is_refused(options: dict[str, Any], key: str) -> None:
    recipe = {"workload": "agentic", "tools": [{"tool": "mcp", "options": options}]}
    with pytest.raises(UserError, match="looks like a secret") as refused:
        read_recipe(recipe)
    assert str(refused.value).startswith(f"tools.0.options.{key}")
    assert VALUE not in str(refused.value)


def test_what_a_tools_server_is_told_beside_is_kept() -> None:
    options = {
        "command": ["server", "--token-file", "here", "--pad-token", "x", "--verbose", "-k=v"],
        "env": {"OPENAI_KEY": None, "HOST": "http://host:80/me@here", "KEY": "a"},
    }
    recipe = {"workload": "agentic", "tools": [{"tool": "mcp", "options": options}]}
    assert read_recipe(recipe).model_dump()["tools"][0]["options"] == options


def test_a_run_that_holds_a_secret_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    from m2flow.workloads.common.start import train

    with pytest.raises(UserError, match="looks like a secret"):
        train(EMBODIED, {"environment.options.token": VALUE}, run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "key",
    [
        "max_tokens", "tokens_per_step", "pad_token", "eos_token", "stop_token", "token_level",
        "max_prompt_tokens", "reward_per_token", "password_file", "api_key_variable", "key",
        "question_key", "secret_length", "tokenizer", "monkey", "keys",
    ],
)  # fmt: skip
def test_a_key_that_only_sounds_like_one_is_none(key: str) -> None:
    assert not is_secret(key)
    found = read_recipe({"workload": "reasoning"}, {f"data.options.{key}": 7})
    assert found.model_dump()["data"]["options"] == {key: 7}


@pytest.mark.parametrize(
    "key",
    ["token", "apiKey", "API_KEY", "HFToken", "hf-token", "auth_token", "aws_secret_access_key",
     "MLFLOW_TRACKING_PASSWORD", "db.password", "token2"],
)  # fmt: skip
def test_a_key_of_a_secret_is_one(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize("name", [entry.name for entry in OWN])
def test_no_key_of_a_recipe_looks_like_a_secret(name: str) -> None:
    keys = list(reading._keys(workload_named(name).recipe))
    assert len(keys) > 50
    assert [key for key in keys if is_secret(key)] == []
