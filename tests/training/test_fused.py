"""Liger's kernels by a stand-in for the package: where they are taken, what they leave alone."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from m2flow.errors import UserError
from m2flow.training.division import Division
from m2flow.training.fused import check_installed, fuse, reason_against
from tests.generation.small_models import small_model

CUDA = "cuda:0"
small = partial(small_model, dtype=torch.float32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is asked of a stand-in, which replaces names in transformers' module as Liger does."""
    found: list[dict[str, Any]] = []
    package, inner = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    package.__spec__ = ModuleSpec("liger_kernel", None)

    def rotary(query: Tensor, key: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("no tensor is on CUDA here")

    def replace(**arguments: Any) -> None:
        found.append(arguments)
        modeling_qwen2.apply_rotary_pos_emb = rotary
        modeling_qwen2.Qwen2RMSNorm = modeling_qwen2.Qwen2MLP = torch.nn.Identity

    inner.apply_liger_kernel_to_qwen2 = replace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, inner.__name__, inner)
    for name in ("apply_rotary_pos_emb", "Qwen2RMSNorm", "Qwen2MLP"):
        monkeypatch.setattr(modeling_qwen2, name, getattr(modeling_qwen2, name))  # put back
    return found


def test_kernels_but_no_loss_are_asked_for(calls: list[dict[str, Any]]) -> None:
    model = small("qwen2")
    fuse(model, CUDA)
    assert calls == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_other_models_of_the_process_are_left_alone(calls: list[dict[str, Any]]) -> None:
    classes = modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.Qwen2MLP
    rotary, ids = modeling_qwen2.apply_rotary_pos_emb, torch.arange(1, 9)[None]
    expected = small("qwen2")(ids).logits
    for _ in range(2):
        fuse(small("qwen2"), CUDA)
    assert len(calls) == 2
    assert classes == (modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.Qwen2MLP)
    assert modeling_qwen2.apply_rotary_pos_emb.elsewhere is rotary
    assert torch.equal(small("qwen2")(ids).logits, expected)


@pytest.mark.parametrize("wanted", [None, False])
def test_never_on_a_cpu(calls: list[dict[str, Any]], wanted: bool | None) -> None:
    fuse(small("qwen2"), "cpu", wanted=wanted)
    fuse(small("qwen2"), CUDA, wanted=False)
    assert not calls


@pytest.mark.parametrize(
    ("kind", "device", "division", "words"),
    [
        ("qwen2", "cpu", Division(), "they run on CUDA"),
        ("gemma2", CUDA, Division(), "for llama, mistral, qwen2, qwen3, not gemma2"),
        ("qwen3-moe", CUDA, Division(), "not qwen3_moe"),
        ("qwen2", CUDA, Division(tp=2, fsdp=2), r"divided by tp2\.fsdp2"),
    ],
)
def test_what_they_cannot_compute_is_refused_where_they_are_wanted(
    calls: list[dict[str, Any]], kind: str, device: str, division: Division, words: str
) -> None:
    model = small(kind)
    fuse(model, device, division)
    with pytest.raises(UserError, match=f"{words}.*null or false") as caught:
        fuse(model, device, division, wanted=True)
    assert (caught.value.key, caught.value.value) == ("training.fused_kernels", True)
    assert not calls


def test_shards_and_shares_of_tokens_are_no_obstacle(calls: list[dict[str, Any]]) -> None:
    for division in (Division(fsdp=4), Division(cp=2)):
        assert reason_against(small("qwen2"), CUDA, division) is None


def test_precision_and_activation_are_looked_at(calls: list[dict[str, Any]]) -> None:
    assert "float64" in str(reason_against(small_model("qwen2", dtype=torch.float64), CUDA))
    model = small("qwen2")
    model.config.hidden_act = "gelu"
    assert "gelu" in str(reason_against(model, CUDA))


def test_without_the_package_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    fuse(small("qwen2"), CUDA)
    for refused in (check_installed, lambda: fuse(small("qwen2"), CUDA, wanted=True)):
        with pytest.raises(UserError, match=r"pip install 'm2flow\[liger\]'"):
            refused()
