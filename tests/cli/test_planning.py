"""Lanes, memory and gangs from a recipe to its plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m2flow.models.shape import PUBLISHED
from m2flow.workloads.reasoning import supported

M2flow = Callable[..., Any]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.plan.lanes.available_cores", lambda: (0, 1))


def test_the_plan_has_what_the_recipe_asks_for(tiny: Path, m2flow: M2flow) -> None:
    outcome = m2flow(
        "plan", tiny, "--json", "--mode", "collocated",
        "lanes=2xcpu:2", "lane_memory=1.5MiB",
        "layouts={learner: fsdp2, generator: tp4}", "model.num_key_value_heads=4",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, "")
    plan = outcome.plan
    assert [lane.node for lane in plan.lanes] == [0, 0, 1, 1]
    assert {lane.memory_bytes for lane in plan.lanes} == {3 * 2**19}
    assert plan.placements["learner"].replicas == ((0, 1), (2, 3))
    assert plan.placements["generator"].replicas == ((0, 1, 2, 3),)
    assert plan.placements["verifier"].replicas == ((0,), (1,), (2,), (3,))


def test_a_size_without_a_unit_counts_bytes(tiny: Path, m2flow: M2flow) -> None:
    plan = m2flow("plan", tiny, "--json", "lane_memory=4096").plan
    assert plan.lanes[0].memory_bytes == 4096


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["lane_memory=20 parsecs"],
            (
                "lane_memory: is not a size (got '20 parsecs'); expected a number and one of B, "
                "KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as 200MB"
            ),
        ),
        (
            ["--mode", "collocated", "lanes=2xcpu:2", "layouts.learner=tp4"],
            (
                "layouts.learner: 2 key-value heads cannot be divided by 4 (got 'tp4'); "
                "expected one of fsdp4, tp2.fsdp2, cp4"
            ),
        ),
        (
            ["--mode", "collocated", "lanes=cpu:2", "layouts.learner=fsdp3"],
            (
                "layouts.learner: learner has no such layout on 2 lanes (got 'fsdp3'); "
                "expected one of one, fsdp2, tp2, cp2"
            ),
        ),
        (
            ["--mode", "collocated", "lanes=2xcpu:2", "layouts.learner=fsdp3"],
            (
                "layouts.learner: learner's 4 lanes do not divide into replicas of 3 "
                "(got 'fsdp3'); expected one of one, fsdp2, fsdp4, tp2, tp2.fsdp2, cp2, cp4"
            ),
        ),
        (
            ["--mode", "disaggregated", "lanes=2xcpu:2", "layouts.learner=fsdp3"],
            (
                "layouts.learner: the worker's 2 lanes cannot be divided into replicas of 3 lanes "
                "(got 'fsdp3'); expected a layout of 1 or 2 lanes"
            ),
        ),
        (
            ["--mode", "hybrid", "lanes=cpu:1"],
            "mode: hybrid needs two lanes (got '1 lanes'); use --mode collocated",
        ),
        (
            ["--mode", "hybird"],
            (
                "mode: is wrong (got 'hybird'); expected 'auto', 'eager', 'collocated', "
                "'disaggregated' or 'hybrid'; did you mean 'hybrid'?"
            ),
        ),
        (
            ["--mode", "collocated", "lanes=2xcpu:2", "layouts.generator=tp4"],
            (
                "layouts.generator: 2 key-value heads cannot be divided by 4 (got 'tp4'); "
                "expected one of one, tp2"
            ),
        ),
        (
            ["layouts.learner=fsdp3", "--cluster", "8xH100"],
            (
                "layouts.learner: has no price on these lanes (got 'fsdp3'); expected cp2 or cp4 "
                "or cp8 or fsdp2 or fsdp4 or fsdp8 or one or tp2 or tp2.fsdp2 or tp2.fsdp4"
            ),
        ),
        (["layouts.lerner=fsdp2"], "layouts.lerner: is no worker; did you mean 'learner'?"),
    ],
)
def test_refusals(tiny: Path, m2flow: M2flow, words: list[str], error: str) -> None:
    assert m2flow("plan", tiny, *words).error == error


COMMANDS = [["train", "--dry-run"], ["plan"], ["plan", "--cluster", "1x8xH100"]]


def model_folder(**config: Any) -> Path:
    folder = Path("model")
    folder.mkdir()
    sizes = {"num_key_value_heads": 4, "num_attention_heads": 8, "vocab_size": 100}
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes, **config}))
    return folder


@pytest.mark.parametrize(
    "command", [["train", "--dry-run"], ["plan"], ["plan", "--cluster", "1x8xH100"]]
)
@pytest.mark.parametrize("mode", ["auto", "collocated"])
def test_heads_that_do_not_divide_are_refused_before_anything_runs(
    tiny: Path, m2flow: M2flow, command: list[str], mode: str
) -> None:
    """`train --dry-run` and `plan` once accepted what the generator refuses when it loads."""
    folder = model_folder()
    words = [f"model.path={folder}", f"mode={mode}", "lanes=2xcpu:2", "layouts.generator=tp3"]
    outcome = m2flow(*command, tiny, *words)
    assert outcome.code == 2
    assert outcome.error.startswith(
        "layouts.generator: 4 key-value heads cannot be divided by 3 (got 'tp3'); "
        "expected one of one, tp2, tp4"
    )


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "phi3"},
        {"model_type": "olmo2"},
        {"model_type": "cohere", "use_qk_norm": True},
    ],
    ids=["phi3", "olmo2", "norms of all heads"],
)
def test_layers_that_no_trainer_divides_by_heads_are_not_offered_so(
    tiny: Path, m2flow: M2flow, command: list[str], config: dict[str, Any]
) -> None:
    """Lanes refuse them when they load the model."""
    folder = model_folder(**config, pad_token_id=0)
    for worker in ("learner", "critic"):
        given = [f"model.path={folder}", "lanes=4xcpu:1", f"layouts.{worker}=tp2"]
        outcome = m2flow(*command, tiny, *given, "algorithm.name=ppo", "mode=collocated")
        assert outcome.code == 2
        assert outcome.error.startswith(f"layouts.{worker}: {worker} has no such layout on")
        assert "fsdp2" in outcome.error
        assert "tp2" not in outcome.error.split("expected")[1]


def test_layouts_of_one_that_is_divided_by_heads_by_the_plan_of_transformers(
    tiny: Path, m2flow: M2flow
) -> None:
    folder = model_folder(model_type="cohere", pad_token_id=0)
    words = [f"model.path={folder}", "lanes=2xcpu:1", "layouts.learner=tp2", "mode=collocated"]
    assert m2flow("plan", tiny, *words).code == 0


@pytest.mark.parametrize(
    "command", [["train", "--dry-run"], ["plan"], ["plan", "--cluster", "1x8xH100"]]
)
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba"}, "model_type: layers keep a state"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder: an encoder reads"),
        ({"model_type": "stablelm"}, "model_type: its attention cannot be replaced"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type: rotary frequencies that change"),
    ],
)
def test_an_architecture_that_generation_refuses(
    tiny: Path, m2flow: M2flow, command: list[str], config: dict[str, Any], reason: str
) -> None:
    folder = model_folder(**config)
    outcome = m2flow(*command, tiny, f"model.path={folder}", "mode=collocated", "lanes=cpu:2")
    assert outcome.code == 2
    assert outcome.error.startswith(f"model.path: {reason}")
    assert "(got 'model')" in outcome.error


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["plan"]])
@pytest.mark.parametrize(
    ("config", "notice"),
    [
        ({"model_type": "gemma2"}, False),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, False),
        ({"hidden_act": "gelu"}, True),
        ({"model_type": "olmo2"}, True),
    ],
)
def test_other_architectures_are_accepted_and_slower_ones_say_so_once(
    tiny: Path,
    m2flow: M2flow,
    caplog: pytest.LogCaptureFixture,
    command: list[str],
    config: dict[str, Any],
    notice: bool,
) -> None:
    supported._say.cache_clear()
    folder = model_folder(**config)
    (folder / "tokenizer_config.json").write_text("{}")
    outcome = m2flow(*command, tiny, f"model.path={folder}", "mode=collocated", "lanes=cpu:2")
    assert outcome.code == 0, outcome.err
    said = [one for one in caplog.messages if "transformers' own forward pass" in one]
    assert len(said) == notice


def test_a_model_that_generation_refuses(tiny: Path, m2flow: M2flow, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**PUBLISHED["Llama-2-7B"], "model_type": "rwkv"}))
    outcome = m2flow("plan", tiny, "--cluster", "1x8xH100", "--model", config)
    assert outcome.code == 2
    assert "--model: " in outcome.error
    assert "layers keep a state" in outcome.error
