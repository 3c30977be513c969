"""Packed attention on a GPU: the fused kernel is taken, and gives what one row at a time gives."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from m2flow.training import varlen
from m2flow.training.forward import token_logprobs
from m2flow.training.packing import pack
from m2flow.training.rollouts import TokenPairs
from tests.generation.small_models import small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROMPT = [1, 2, 3, 4, 5]
PAIRS = TokenPairs.from_rows([PROMPT] * 4, [[6] * 300, [6] * 120 + [7] * 500, [8], [9] * 33])


@pytest.mark.parametrize("sharing", ["none", "prompt", "prefix"])
def test_the_kernel_gives_what_the_blocks_give(
    sharing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model().to("cuda", torch.bfloat16)
    model.config.max_position_embeddings = 1024
    (only,) = pack(PAIRS, 10_000, sharing)  # type: ignore[arg-type]

    def found(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprobs_T = token_logprobs(model, only.to(torch.device("cuda"))).logprobs_T
        gradients = torch.autograd.grad(logprobs_T.sum(), model.parameters())
        return logprobs_T.detach().float(), [one.float().flatten() for one in gradients]

    varlen.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        fused, fused_gradients = found(model)
    assert "without the fused kernel" not in caplog.text
    monkeypatch.setattr(varlen, "reason_against", lambda *_: "the test compares")
    with caplog.at_level(logging.WARNING):
        slow, slow_gradients = found(model)
    assert "the test compares" in caplog.text
    exact, exact_gradients = found(copy.deepcopy(model).float())
    assert float((fused - exact).abs().mean()) < 1.25 * float((slow - exact).abs().mean())
    similar = torch.nn.functional.cosine_similarity
    for one, other in zip(fused_gradients, slow_gradients, strict=True):
        assert float(similar(one, other, 0)) > 0.99
    expected = torch.cat(exact_gradients)
    apart = [
        1 - float(similar(torch.cat(some), expected, 0))
        for some in (fused_gradients, slow_gradients)
    ]
    assert apart[0] < 1.5 * apart[1] + 1e-5
    assert apart[0] < 0.01
