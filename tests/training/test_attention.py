"""Packed forward and backward passes against one row at a time by the model's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.training import attention, varlen
from m2flow.training.attention import packed_attention, packed_attention_on
from m2flow.training.forward import token_logprobs
from m2flow.training.packing import Sharing, pack
from m2flow.training.rollouts import TokenPairs, TokenRollouts
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


def slow_varlen(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor,
    most_queries: int, most_keys: int, *, scale: float, window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What torch says of `varlen_attn`, sequence by sequence; the last query sees all keys."""
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    answers = []
    for one in range(len(query_ends) - 1):
        asking = query[query_ends[one] : query_ends[one + 1]]
        answering = slice(int(key_ends[one]), int(key_ends[one + 1]))
        groups = query.shape[1] // key.shape[1]
        keys, values = (x[answering].repeat_interleave(groups, 1) for x in (key, value))
        assert len(asking) <= most_queries
        assert len(keys) <= most_keys
        own = torch.arange(len(asking))[:, None] + len(keys) - len(asking)
        ahead = torch.arange(len(keys)) - own
        seen = ahead <= 0
        if window_size[0] >= 0:
            seen &= ahead >= -window_size[0]
        scores = torch.einsum("qhd,khd->hqk", asking, keys) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        answers.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(answers)


@pytest.fixture(params=["blocks", "large blocks", "one kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which of its ways attention goes."""
    if request.param == "large blocks":
        monkeypatch.setattr(attention, "MAX_MATERIALISED_PAIRS", 0)
    if request.param == "one kernel":
        monkeypatch.setattr(varlen, "_kernel", lambda: slow_varlen)
        monkeypatch.setattr(
            varlen, "reason_against", lambda query, value, softcap: softcap and "capped"
        )
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("budget", [20, 10_000])
def test_agrees_with_one_row_at_a_time(
    make_model: MakeModel,
    make_rollouts: Callable[..., TokenRollouts],
    plain_logprobs: PlainLogprobs,
    sharing: Sharing,
    budget: int,
) -> None:
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", FAMILIES)
def test_windows_and_capped_scores_agree_with_one_row_at_a_time(
    name: str,
    make_rollouts: Callable[..., TokenRollouts],
    plain_logprobs: PlainLogprobs,
) -> None:
    """Windows of 5 to 7 nodes of a path, over prefixes that rows share."""
    model, pairs = small_model(name), make_rollouts().pairs
    # transformers has the softmax of Gemma 2 in float32
    tolerance = 1e-5 if name == "gemma2" else 1e-10
    expected = plain_logprobs(model, pairs)
    for sharing in SHARINGS:
        found = packed_logprobs(model, pairs, 10_000, sharing)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    for one, other in zip(gradients(model, found), gradients(model, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e3 * tolerance, atol=1e2 * tolerance)


@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.1}, {"s_aux": torch.ones(1)}, {"attention_mask": torch.ones(1, 1, 2, 2)}],
)
def test_other_kinds_of_attention_are_refused_and_not_ignored(options: dict[str, Any]) -> None:
    (only,) = pack(TokenPairs.from_rows([[1]], [[2, 3]]), 10)
    heads = torch.zeros(1, 1, 2, 4)
    given = {"attention_mask": None, "pack_layout": only.layout, **options}
    with pytest.raises(UserError, match="a model with causal attention"):
        packed_attention(nn.Module(), heads, heads, heads, **given)


class OnCuda(Tensor):
    is_cuda = True


def test_the_kernel_says_what_it_cannot_do() -> None:
    """On CUDA each of these goes the slow way, and says so once."""
    heads = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
    assert varlen.reason_against(heads, heads) == "it runs on CUDA"

    here = heads.as_subclass(OnCuda)
    assert varlen.reason_against(here, here) is None
    assert "not cap" in str(varlen.reason_against(here, here, 30.0))
    assert "bfloat16" in str(varlen.reason_against(here.float(), here))
    assert "one width" in str(varlen.reason_against(here, here[..., :32]))
    assert "multiple of 8" in str(varlen.reason_against(here[..., :36], here[..., :36]))


def test_attention_on_cuda_without_the_kernel_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (only,) = pack(TokenPairs.from_rows([[1]], [[2, 3]]), 10)
    heads = torch.zeros(1, 2, 3, 4)
    varlen.warn_once.cache_clear()
    packed_attention(nn.Module(), heads, heads, heads, None, pack_layout=only.layout)
    assert not caplog.messages
    here = heads.as_subclass(OnCuda)
    for _ in range(2):
        packed_attention(nn.Module(), here, here, here, None, pack_layout=only.layout)
    (said,) = caplog.messages
    assert "without the fused kernel" in said
    assert "not torch.float32" in said


def test_layers_share_the_masks_of_a_pack() -> None:
    """A row of 4,096 tokens takes 36 of 64 tiles of 512 by 512, which is 9.4 million pairs."""
    (only,) = pack(TokenPairs.from_rows([[1]], [[2] * 4096]), 10_000)
    blocks = only.layout.blocks
    masks = blocks.within(None, torch.bfloat16)
    assert sum(bias.nbytes for bias in blocks.biases) == 36 * 512**2 * 4  # 37.7 MB
    assert sum(bias.nbytes for bias in masks) == 36 * 512**2 * 2  # 18.9 MB
    assert blocks.within(None, torch.bfloat16) is masks
    for one, other in zip(blocks.within(None, torch.float32), blocks.biases, strict=True):
        assert one is other
    in_window = blocks.within(1024, torch.bfloat16)
    assert blocks.within(1024, torch.bfloat16) is in_window
    assert int(sum((bias == 0).sum() for bias in in_window)) == 4096 * 1024 - 1023 * 1024 // 2
