"""A float64 model computes its norms in float64; every other model is left as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from m2flow.models.norms import widen_norms


@pytest.mark.parametrize("kind", [Qwen2RMSNorm, LlamaRMSNorm])
def test_a_norm_in_float64_is_not_rounded_to_float32(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    norm = kind(16, eps=1e-6).double()
    norm.weight.data.normal_()
    hidden = torch.randn(5, 16, dtype=torch.float64)
    expected = norm.weight * hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert not torch.allclose(norm(hidden), expected, rtol=1e-12, atol=0)
    widen_norms(torch.nn.Sequential(norm))
    torch.testing.assert_close(norm(hidden), expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(copy.deepcopy(norm)(hidden), expected, rtol=1e-14, atol=0)
    assert isinstance(norm, kind)


def test_a_norm_that_scales_by_one_more_than_its_weight() -> None:
    norm = Gemma3RMSNorm(16, eps=1e-6).double()
    norm.weight.data.normal_()
    hidden = torch.randn(5, 16, dtype=torch.float64)
    expected = (1 + norm.weight) * hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert not torch.allclose(norm(hidden), expected, rtol=1e-12, atol=0)
    widen_norms(torch.nn.Sequential(norm))
    torch.testing.assert_close(norm(hidden), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    norm = Qwen2RMSNorm(16).to(dtype)
    widen_norms(norm)
    assert type(norm) is Qwen2RMSNorm
