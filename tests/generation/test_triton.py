"""The Triton kernels of decoding, by Triton's interpreter: what torch's own operations give.

The interpreter runs the kernels' own code on the CPU, in NumPy; its products of bfloat16 are wrong,
so dtypes here are float32 and float16. That they compile, and how fast they are, a GPU tells.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from m2flow.algorithms import sampling
from m2flow.generation import kernels, shared_prefix
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion
from m2flow.generation.shared_prefix import SharedPrefixes
from tests.generation.page_reader import read_pages
from tests.generation.small_models import drain, small_model
from tests.generation.test_captured import requests

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here: tests/gpu has them", allow_module_level=True)

from m2flow.generation import triton_attention, triton_sampling, triton_steps


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("heads", "width", "cap"), [((12, 2), 64, None), ((4, 4), 8, 5.0)])
def test_attention_over_pages(
    heads: tuple[int, int],
    width: int,
    cap: float | None,
    window: int | None,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of heads, windows, capped scores, sequences that are read in parts."""
    monkeypatch.setattr(triton_attention, "parts_of", lambda *_: parts)
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    lengths = torch.tensor([1, 255, 256, 257, 1000]).int()
    key, value = torch.randn(24, 256, kv_heads, 2 * width).chunk(2, dim=-1)
    table = torch.randperm(20).view(5, 4).int() + 1
    query = torch.randn(5, query_heads, width).unflatten(1, (kv_heads, -1))
    found = []
    for read in (triton_attention.attend, read_pages):
        found.append(torch.full_like(query, torch.nan))
        read(
            query, key, value, table, lengths,
            longest=1024, scale=width**-0.5, window=window, cap=cap, out_BKGD=found[-1],
        )  # fmt: skip
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=0)


@pytest.mark.parametrize("shared_parts", [1, 4])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("heads", "width", "cap"), [((12, 2), 64, None), ((4, 4), 8, 5.0)])
def test_teams_read_what_they_have_in_common_once(
    heads: tuple[int, int],
    width: int,
    cap: float | None,
    parts: int,
    shared_parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Teams of two and three, a row in no team, a team that is none; the common tokens of all but
    the first row of a team are not there to be read."""
    monkeypatch.setattr(triton_attention, "parts_of", lambda *_: parts)
    monkeypatch.setattr(triton_attention, "shared_parts_of", lambda *_: shared_parts)
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    lengths = torch.tensor([321, 500, 65, 700, 333, 320 + 64]).int()
    teams = torch.full((4, 1 + shared_prefix.TEAM), -1).int()
    teams[0, :4] = torch.tensor([320, 4, 0, 5])
    teams[1, :3] = torch.tensor([448, 3, 1])
    teams[2:, 0] = 0
    shared = SharedPrefixes(teams, torch.tensor([320, 448, 0, 448, 320, 320]).int())
    key, value = torch.randn(24, 256, kv_heads, 2 * width).chunk(2, dim=-1)
    table = torch.randperm(18).view(6, 3).int() + 1
    query = torch.randn(6, query_heads, width).unflatten(1, (kv_heads, -1))
    for row, tokens in ((0, 320), (5, 320), (1, 448)):
        for first in range(0, tokens, 256):
            key[table[row, first // 256], : min(256, tokens - first)] = torch.nan
    found = []
    for read in (triton_attention.attend, read_pages):
        found.append(torch.full_like(query, torch.nan))
        read(
            query, key, value, table, lengths, longest=768, scale=width**-0.5, window=None,
            cap=cap, shared=shared, out_BKGD=found[-1],
        )  # fmt: skip
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=0)


@pytest.mark.parametrize("programs", [1, 32, 64, 512])
def test_parts_of_what_is_shared(programs: int) -> None:
    parts = triton_attention.shared_parts_of(programs, 132)
    assert parts in (1, 2, 4, 8, 16)
    assert parts == 1 or programs * parts <= 132


@pytest.mark.parametrize("programs", [1, 64, 512, 5000])
@pytest.mark.parametrize("longest", [64, 512, 4096])
def test_parts(programs: int, longest: int) -> None:
    parts = triton_attention.parts_of(programs, longest, 132)
    assert 1 <= parts <= max(1, longest // 256)
    assert parts == 1 or programs * parts < 3 * 132 + programs


@pytest.mark.parametrize("vocabulary", [2, 18, 5000, 40_000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws(vocabulary: int, temperature: float) -> None:
    """Token for token, also where all but one token are excluded, or many."""
    torch.manual_seed(0)
    logits = torch.randn(40, vocabulary) * 3
    logits[3] = -torch.inf
    logits[3, vocabulary // 2] = 0.0
    logits[4, : vocabulary // 2] = -torch.inf
    logits[5] = 0.0
    seeds, positions = torch.randint(2**63 - 1, (40,)), torch.randint(5000, (40,))
    tokens, logprobs = triton_sampling.draw(logits, seeds, positions, temperature)
    expected = sampling.sample_tokens(logits, seeds, positions, temperature)
    assert tokens.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprobs, expected[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_no_distribution_are_told(wrong: float) -> None:
    logits = torch.zeros(3, 5000)
    logits[1, 4321] = wrong
    one = torch.ones(3, dtype=torch.int64)
    tokens, logprobs = triton_sampling.draw(logits, one, one, 1.0)
    assert bool(((tokens >= 0) & (tokens < 5000)).all())
    assert logprobs.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize(
    "name",
    [
        "qwen2",
        pytest.param("qwen3", marks=pytest.mark.slow),
        "gemma2",
        pytest.param("mistral-window", marks=pytest.mark.slow),
    ],
)
def test_an_engine_draws_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them at once; rows come and go."""
    model = small_model(name).float()

    def drawn(**options: Any) -> dict[int, Completion]:
        engine = NativeEngine(model.config, dtype=torch.float32, max_running=3, **options)
        engine.install(model.state_dict(), 0)
        engine.submit(requests(4, longest=14))
        return drain(engine)

    expected = drawn()
    monkeypatch.setattr(kernels, "fused", interpreted)
    found = drawn(read=triton_attention.attend)
    for number, one in found.items():
        assert one.token_ids.tolist() == expected[number].token_ids.tolist()
        torch.testing.assert_close(one.logprobs, expected[number].logprobs, atol=2e-5, rtol=0)


def interpreted(_: Any, name: str = "triton_steps") -> Any:
    return {"triton_steps": triton_steps, "triton_sampling": triton_sampling}[name]


def test_half_precision_rounds_as_torch_does() -> None:
    """What stands between products, in float16: to the bit but for sums of squares."""
    torch.manual_seed(0)
    hidden, made = torch.randn(2, 7, 96).half()
    weight = torch.randn(96).half()
    mine = hidden.clone()
    normed = triton_steps.add_norm(mine, made, weight, 1e-6)
    assert torch.equal(mine, hidden + made)
    torch.testing.assert_close(
        normed, kernels.rms_norm(hidden + made, weight, 1e-6), atol=2e-3, rtol=2e-3
    )
    gate_up = torch.randn(5, 2 * 1500).half()
    torch.testing.assert_close(
        triton_steps.silu_gate(gate_up), kernels.silu_gate(gate_up), atol=2e-3, rtol=2e-3
    )
    qkv = torch.randn(6, 5, 24).half()
    angle = torch.rand(50, 12) * 6
    table, position = torch.polar(torch.ones(50, 12), angle), torch.tensor([0, 7, 49])
    turned = qkv.clone()
    triton_steps.rotate(turned, table, position)
    kernels.Rotation(table, position, 2).turn(qkv)
    torch.testing.assert_close(turned, qkv, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("rows", [3, 2])
def test_keys_and_values_are_kept_as_they_are_rotated(rows: int) -> None:
    """Of the first rows, in the cells that they are given; no other cell changes."""
    torch.manual_seed(0)
    angle = torch.rand(50, 12) * 6
    table, position = torch.polar(torch.ones(50, 12), angle), torch.tensor([0, 7, 49])
    qkv, token = torch.randn(6, 5, 24).half(), torch.tensor([9, 2, 5])[:rows]
    found = []
    for way in ("plain", "fused"):
        mine, cells = qkv.clone(), torch.zeros(11, 2, 48).half()
        if way == "plain":
            kernels.Rotation(table, position, 2).turn_and_keep(mine, cells, token)
        else:
            triton_steps.rotate(mine, table, position, cells, token)
        found.append((mine, cells))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
    assert found[0][1].flatten(1).any(1).nonzero()[:, 0].tolist() == sorted(token.tolist())
    assert torch.equal(found[0][1][..., 24:], found[1][1][..., 24:])
