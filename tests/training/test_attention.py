"""Packed forward and backward passes against one row at a time by the model's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.training import attention
from m2flow.training.attention import packed_attention, packed_attention_on
from m2flow.training.forward import token_logprobs
from m2flow.training.packing import Sharing, pack
from m2flow.training.rollouts import Rollouts, TokenPairs
from tests.generation.small_models import FAMILIES, small_model

MakeModel = Callable[..., nn.Module]
PlainLogprobs = Callable[[nn.Module, TokenPairs], Tensor]
SHARINGS: tuple[Sharing, ...] = ("none", "prompt", "prefix")
LONG = TokenPairs.from_rows([[1, 2]] * 3, [[3] * 90, [3] * 60 + [4] * 100, [5]])


def packed_logprobs(model: nn.Module, pairs: TokenPairs, budget: int, sharing: Sharing) -> Tensor:
    parts = [(p.token_index_T, token_logprobs(model, p)) for p in pack(pairs, budget, sharing)]
    index, logprobs = torch.cat([i for i, _ in parts]), [f.logprobs_T for _, f in parts]
    return torch.cat(logprobs)[index.argsort()]


def gradients(model: nn.Module, logprobs_T: Tensor) -> list[Tensor]:
    weights_T = torch.linspace(-1, 2, logprobs_T.numel(), dtype=torch.float64)
    return list(torch.autograd.grad((logprobs_T * weights_T).sum(), list(model.parameters())))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("budget", [20, 10_000])
def test_agrees_with_one_row_at_a_time(
    make_model: MakeModel,
    make_rollouts: Callable[..., Rollouts],
    plain_logprobs: PlainLogprobs,
    monkeypatch: pytest.MonkeyPatch,
    sharing: Sharing,
    budget: int,
    fused: bool,
) -> None:
    if fused:
        monkeypatch.setattr(attention, "MAX_MATERIALISED_PAIRS", 0)
    model = make_model()
    for pairs in (make_rollouts().pairs, LONG):
        expected = plain_logprobs(model, pairs)
        found = packed_logprobs(model, pairs, budget, sharing)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        for one, other in zip(gradients(model, found), gradients(model, expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_temperature_and_entropy(make_model: MakeModel, plain_logprobs: PlainLogprobs) -> None:
    model, pairs = make_model(), TokenPairs.from_rows([[1, 2]], [[3]])
    (only,) = pack(pairs, 100)
    logits = model(input_ids=torch.tensor([[1, 2]])).logits[0, -1] / 0.5
    figures = token_logprobs(model, only, temperature=0.5, with_entropy=True)
    torch.testing.assert_close(figures.logprobs_T[0], logits.log_softmax(-1)[3])
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert figures.entropy_T is not None
    torch.testing.assert_close(figures.entropy_T[0], entropy)
    greedy = token_logprobs(model, only, temperature=0.0).logprobs_T
    torch.testing.assert_close(greedy, plain_logprobs(model, pairs))


def test_model_attends_as_before_outside_and_after_an_error(make_model: MakeModel) -> None:
    model: Any = make_model()
    ids = torch.tensor([[1, 2, 3]])
    before = model(input_ids=ids).logits
    with pytest.raises(RuntimeError, match="inside"), packed_attention_on(model):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_and_capped_scores_agree_with_one_row_at_a_time(
    name: str,
    make_rollouts: Callable[..., Rollouts],
    plain_logprobs: PlainLogprobs,
    monkeypatch: pytest.MonkeyPatch,
    fused: bool,
) -> None:
    """Windows of 5 to 7 nodes of a path, over prefixes that rows share."""
    if fused:
        monkeypatch.setattr(attention, "MAX_MATERIALISED_PAIRS", 0)
    model, pairs = small_model(name), make_rollouts().pairs
    # transformers has the softmax of Gemma 2 in float32
    tolerance = 1e-5 if name == "gemma2" else 1e-10
    expected = plain_logprobs(model, pairs)
    for sharing in SHARINGS:
        found = packed_logprobs(model, pairs, 10_000, sharing)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    for one, other in zip(gradients(model, found), gradients(model, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e3 * tolerance, atol=1e2 * tolerance)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"s_aux": torch.ones(1)}])
def test_other_kinds_of_attention_are_refused_and_not_ignored(options: dict[str, Any]) -> None:
    (only,) = pack(TokenPairs.from_rows([[1]], [[2, 3]]), 10)
    heads = torch.zeros(1, 1, 2, 4)
    with pytest.raises(UserError, match="a model with causal attention"):
        packed_attention(nn.Module(), heads, heads, heads, None, pack_layout=only.layout, **options)
