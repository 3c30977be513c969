"""Packed attention on a GPU: the fused kernel is taken, and gives what one row at a time gives."""

from __future__ import annotations

import logging

import pytest
import torch

from m2flow.training import varlen
from m2flow.training.forward import token_logprobs
from m2flow.training.packing import pack
from m2flow.training.rollouts import TokenPairs
from tests.generation.small_models import small_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPT = [1, 2, 3, 4, 5]
PAIRS = TokenPairs.from_rows([PROMPT] * 4, [[6] * 300, [6] * 120 + [7] * 500, [8], [9] * 33])


@pytest.mark.parametrize("sharing", ["none", "prompt", "prefix"])
def test_the_kernel_gives_what_the_blocks_give(
    sharing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model().to("cuda", torch.bfloat16)
    model.config.max_position_embeddings = 1024
    (only,) = pack(PAIRS, 10_000, sharing)  # type: ignore[arg-type]

    def found() -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprobs_T = token_logprobs(model, only.to(torch.device("cuda"))).logprobs_T
        return logprobs_T.detach(), list(torch.autograd.grad(logprobs_T.sum(), model.parameters()))

    with caplog.at_level(logging.WARNING):
        fused, gradients = found()
    assert "without the fused kernel" not in caplog.text
    monkeypatch.setattr(varlen, "reason_against", lambda *_: "the test compares")
    with caplog.at_level(logging.WARNING):
        slow, others = found()
    assert "the test compares" in caplog.text
    torch.testing.assert_close(fused, slow, rtol=0, atol=0.05)
    for one, other in zip(gradients, others, strict=True):
        cosine = torch.nn.functional.cosine_similarity(
            one.float().flatten(), other.float().flatten(), 0
        )
        assert float(cosine) > 0.99
