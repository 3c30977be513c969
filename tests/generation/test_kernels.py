"""The fast matrix product is the plain one, and padding keeps the number of shapes small."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from m2flow.generation import kernels
from m2flow.generation.kernels import linear, padded_rows, prepacked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 15, 16, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smallest", [0, kernels._MIN_PREPACKED])
def test_linear_is_the_plain_product(
    dtype: torch.dtype, rows: int, bias: bool, smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_MIN_PREPACKED", smallest)
    generator = torch.Generator().manual_seed(rows)
    x, weight, shift = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((rows, 24), (40, 24), (40,))
    )
    with torch.inference_mode():
        laid_out = prepacked(weight)
        out = linear(x, laid_out, shift if bias else None)
    assert laid_out.is_mkldnn == (smallest == 0 and dtype is torch.float32)
    assert out.dtype == dtype
    torch.testing.assert_close(out, F.linear(x, weight, shift if bias else None))


def test_padding_wastes_little_and_makes_few_shapes() -> None:
    padded = [padded_rows(n) for n in range(1, 1025)]
    assert all(n <= p for n, p in enumerate(padded, start=1))
    assert all(p - n < max(8, n / 4) for n, p in enumerate(padded, start=1))
    assert padded == sorted(padded)
    assert all(padded_rows(p) == p for p in padded)
    assert len(set(padded)) < 64
