"""Keys and values in pages on a GPU: torch's kernel gives what a gathered row gives."""

from __future__ import annotations

import pytest
import torch

from m2flow.generation import paged_attention
from m2flow.generation.captured import CudaCapture
from m2flow.generation.kv_cache import KVCache
from m2flow.generation.native import NativeEngine
from m2flow.generation.pages import PagedCache
from m2flow.generation.records import Request, SamplingParams
from m2flow.generation.shared_prefix import TEAM, SharedPrefixes
from tests.generation.small_models import drain, small_model

triton_attention = pytest.importorskip("m2flow.generation.triton_attention")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("reader", ["torch", "triton"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", [(12, 2), (8, 8)])
def test_the_kernel_reads_pages(heads: tuple[int, int], window: int | None, reader: str) -> None:
    """Keys and values lie side by side, as in the cache: strides are not those of one tensor."""
    if reader == "torch" and paged_attention._kernel() is None:
        pytest.skip("needs torch 2.13")
    read = paged_attention.attend if reader == "torch" else triton_attention.attend
    query_heads, kv_heads = heads
    torch.manual_seed(0)
    page, most, lengths = paged_attention.PAGE, 4, [1, 255, 256, 257, 1000, 700]
    kv = torch.randn(32, page, kv_heads, 256, device="cuda").bfloat16()
    key, value = kv.chunk(2, dim=-1)
    table = torch.randperm(31, device="cuda")[: len(lengths) * most].view(-1, most).int() + 1
    query = torch.randn(len(lengths), query_heads, 128, device="cuda").bfloat16()
    found, groups = torch.empty_like(query), (kv_heads, -1)
    read(
        query.unflatten(1, groups), key, value, table, torch.tensor(lengths, device="cuda").int(),
        longest=most * page, scale=128**-0.5, window=window, cap=None,
        out_BKGD=found.unflatten(1, groups),
    )  # fmt: skip
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        keys, values = (
            pages[table[row].long()].flatten(0, 1)[first:length].float() for pages in (key, value)
        )
        for head in range(query_heads):
            of = head // (query_heads // kv_heads)
            score = keys[:, of] @ query[row, head].float() * 128**-0.5
            expected = score.softmax(0) @ values[:, of]
            torch.testing.assert_close(found[row, head].float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("heads", [(12, 2), (28, 4), (8, 8)])
@pytest.mark.parametrize("rows", [6, 80])
def test_teams_read_what_they_have_in_common_once(rows: int, heads: tuple[int, int]) -> None:
    """What is common is in the pages of a team's first row alone; the others have noise there."""
    query_heads, kv_heads = heads
    torch.manual_seed(0)
    page, most, common = paged_attention.PAGE, 3, 320
    kv = torch.randn(3 * rows + 1, page, kv_heads, 256, device="cuda").bfloat16()
    key, value = kv.chunk(2, dim=-1)
    table = torch.randperm(3 * rows, device="cuda").view(rows, most).int() + 1
    lengths = torch.randint(common + 1, most * page, (rows,), device="cuda").int()
    query = torch.randn(rows, query_heads, 128, device="cuda").bfloat16()
    teams = torch.full((8, 1 + TEAM), -1).int()
    for team, first in enumerate(range(0, rows, TEAM)):
        members = torch.arange(first, min(first + TEAM, rows)).int()
        teams[team, : 1 + len(members)] = torch.cat([torch.tensor([common]).int(), members])
    teams[-(-rows // TEAM) :, 0] = 0
    shared = SharedPrefixes(teams.cuda(), torch.full((rows,), common).int().cuda())
    found, groups = torch.empty_like(query), (kv_heads, -1)
    triton_attention.attend(
        query.unflatten(1, groups), key, value, table, lengths, longest=most * page,
        scale=128**-0.5, window=None, cap=None, shared=shared,
        out_BKGD=found.unflatten(1, groups),
    )  # fmt: skip
    for row in range(rows):
        keys, values = (
            torch.cat([pages[table[one].long()].flatten(0, 1)[part] for one, part in parts]).float()
            for pages in (key, value)
            for parts in [
                ((row // TEAM * TEAM, slice(common)), (row, slice(common, int(lengths[row]))))
            ]
        )
        for head in range(query_heads):
            of = head // (query_heads // kv_heads)
            score = keys[:, of] @ query[row, head].float() * 128**-0.5
            expected = score.softmax(0) @ values[:, of]
            torch.testing.assert_close(found[row, head].float(), expected, atol=0.02, rtol=0.02)


def test_log_probabilities_are_the_same_together_and_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups with long prompts, for as long as both draw the same; rounding parts them then."""
    model = small_model("qwen2").to(torch.bfloat16)
    model.config.max_position_embeddings = 1024
    device, gaps, teams, found = torch.device("cuda:0"), [], [], []
    for worth in (1, 1 << 40):
        monkeypatch.setattr("m2flow.generation.shared_prefix.WORTH", worth)
        engine = NativeEngine(
            model.config, dtype=torch.bfloat16, device=device, capture=CudaCapture(device)
        )
        engine.install(model.state_dict(), 0)
        engine.submit([Request(n, [n // 8 + 1] * 200, n, SamplingParams(60)) for n in range(32)])
        engine.step()
        engine.step()
        assert isinstance(engine._cache, PagedCache)
        teams.append(engine._cache.teams)
        found.append(drain(engine))
    assert teams == [4, 0]
    for number, one in found[0].items():
        other = found[1][number]
        alike = int((one.token_ids == other.token_ids).cumprod(0).sum())
        gaps.append((one.logprobs - other.logprobs)[:alike].abs())
    gap = torch.cat(gaps)
    assert len(gap) > 32 * 20
    assert gap.max() < 0.1


def test_an_engine_keeps_pages_and_records_its_steps() -> None:
    model = small_model("qwen2").to(torch.bfloat16)
    model.config.max_position_embeddings = 1024
    device = torch.device("cuda:0")
    found = []
    for capture in (None, CudaCapture(device)):
        engine = NativeEngine(model.config, dtype=torch.bfloat16, device=device, capture=capture)
        assert isinstance(engine._cache, PagedCache)
        engine.install(model.state_dict(), 0)
        engine.submit([Request(n, [1, 2, 3], n, SamplingParams(40 * n + 300)) for n in range(8)])
        found.append(drain(engine))
    for number, one in found[0].items():
        assert (one.token_ids[:20] == found[1][number].token_ids[:20]).float().mean() > 0.9


@pytest.mark.parametrize(
    ("dtype", "cache"), [(torch.bfloat16, PagedCache), (torch.float32, KVCache)]
)
def test_a_budget_is_there_again_after_others_took_memory(dtype: torch.dtype, cache: type) -> None:
    """Else what torch keeps of it is cut up by whoever comes next, such as a learner's state."""
    model = small_model("qwen2").to(dtype)
    budget = int(0.4 * torch.cuda.mem_get_info()[0])
    device = torch.device("cuda:0")
    engine = NativeEngine(model.config, dtype=dtype, device=device, cache_bytes=budget)
    assert isinstance(engine._cache, cache)
    engine.install(model.state_dict(), 0)
    others = []
    for _ in range(3):
        engine.submit([Request(0, [1, 2, 3], 0, SamplingParams(4))])
        drain(engine)
        others.append(torch.empty(1 << 28, dtype=torch.uint8, device=device))
    assert len(others) == 3
