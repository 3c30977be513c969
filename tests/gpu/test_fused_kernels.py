"""Liger's kernels on a GPU: as near to float32 as transformers' own operations are."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

from m2flow.models.critic import critic_of
from m2flow.training.forward import token_logprobs
from m2flow.training.fused import ARCHITECTURES, fuse
from m2flow.training.packing import pack
from m2flow.training.rollouts import TokenPairs
from tests.generation.small_models import small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
pytest.importorskip("liger_kernel", reason='needs the extra: pip install "m2flow[liger]"')

SEEDS = range(6)
"""Of models: rounding differs more from one to the next than from one way to the other."""

PAIRS = TokenPairs.from_rows([[1, 2, 3, 4, 5]] * 3, [[6] * 200, [6] * 90 + [7] * 300, [8]])


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logprobs_and_gradients_are_near_float32(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    (only,) = pack(PAIRS, 10_000)

    def found(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_T = token_logprobs(model, only.to(torch.device("cuda"))).logprobs_T
        gradients = torch.autograd.grad(logprobs_T.sum(), model.parameters())
        flat = torch.cat([gradient.float().flatten() for gradient in gradients])
        return logprobs_T.detach().float(), flat

    gaps, apart = [], []
    for seed in SEEDS:
        model: Any = small_model(kind, seed=seed, dtype=torch.bfloat16).to("cuda")
        model.config.max_position_embeddings = 1024
        plain, plain_gradient = found(model)
        exact, exact_gradient = found(copy.deepcopy(model).float())
        with monkeypatch.context() as patch:
            patch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)  # put back
            fuse(model, "cuda:0", wanted=True)
            assert "Liger" in repr(model)
            fused, fused_gradient = found(model)
        gaps.append([float((one - exact).abs().mean()) for one in (fused, plain)])
        similar = torch.nn.functional.cosine_similarity
        apart.append(
            [1 - float(similar(one, exact_gradient, 0)) for one in (fused_gradient, plain_gradient)]
        )
        assert apart[-1][0] < 0.01
    for found_apart in (gaps, apart):
        of_fused, of_plain = (sum(one) for one in zip(*found_apart, strict=True))
        assert of_fused < 1.25 * of_plain, found_apart


def test_a_critic_is_computed_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    monkeypatch.setattr(module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
    critic: Any = critic_of(small_model("qwen2", dtype=torch.bfloat16)).to("cuda")
    torch.nn.init.normal_(critic.score.weight)
    ids = torch.arange(1, 21, device="cuda")[None]
    plain, exact = critic(ids).logits.float(), copy.deepcopy(critic).float()(ids).logits
    fuse(critic, "cuda:0", wanted=True)
    fused = critic(ids).logits.float()
    assert float((fused - exact).abs().mean()) < 1.5 * float((plain - exact).abs().mean())
