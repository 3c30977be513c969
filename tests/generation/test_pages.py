"""Keys and values in pages: the same answers as from slots, and no more memory than tokens need."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from m2flow.generation import captured, paged_attention, shared_prefix
from m2flow.generation.architecture import architecture_of
from m2flow.generation.native import NativeEngine
from m2flow.generation.pages import PagedCache
from m2flow.generation.records import Completion, Request, SamplingParams
from m2flow.generation.running import Drawn
from tests.generation.page_reader import read_pages
from tests.generation.small_models import CONTEXT, VOCAB_SIZE, drain, small_model
from tests.generation.tape import Tape
from tests.generation.test_captured import CELL_BYTES, assert_same, requests

PAGE = 4
FAMILIES = ("qwen2", "qwen2-untied-one-kv-head", "llama", "qwen3", "mistral-window",
            "qwen2-windows", "gemma2", "gemma3", "qwen3-moe")  # fmt: skip
MODEL, OTHER = small_model("qwen2"), small_model(seed=1)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("m2flow.generation.pages.PAGE", PAGE)
    monkeypatch.setattr(captured, "PLAIN_STEPS", 1)
    monkeypatch.setattr(captured, "COLUMN_STEP", 8)
    monkeypatch.setattr("m2flow.generation.running.COLUMN_STEP", 8)
    monkeypatch.setattr(shared_prefix, "BLOCK", 2)
    monkeypatch.setattr(shared_prefix, "WORTH", 1)


def engine_of(model: Any, paged: bool, **limits: Any) -> NativeEngine:
    read = read_pages if paged else None
    engine = NativeEngine(model.config, dtype=torch.float64, read=read, **limits)
    engine.install(model.state_dict(), 0)
    assert isinstance(engine._cache, PagedCache) == paged
    return engine


class NothingWaits(TorchFunctionMode):
    """Refuses two things that would have the host wait for a GPU, and that a CPU can tell.

    A number that is assigned by an index of numbers is copied to the GPU from memory that the
    system may move, and whatever is asked of a value waits for it. `tests/gpu/test_captured.py`
    has torch refuse the others.
    """

    ASKS = ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__:
            _, index, value = args
            parts = index if isinstance(index, tuple) else (index,)
            by_numbers = any(isinstance(part, Tensor) for part in parts)
            assert isinstance(value, Tensor) or not by_numbers, "a number assigned by an index"
        assert getattr(func, "__name__", "") not in self.ASKS, f"{func.__name__} waits"
        return func(*args, **(kwargs or {}))


def test_rows_come_go_and_move_while_the_device_is_at_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens that were drawn are waited for, where they are read, and nothing else."""
    read = Drawn.read

    def reads(self: Drawn) -> list[float]:
        with torch._C.DisableTorchFunction():
            return read(self)

    monkeypatch.setattr(Drawn, "read", reads)
    stops = tuple(range(0, VOCAB_SIZE, 7))
    found = []
    for nothing_waits in (False, True):
        engine = engine_of(MODEL, True, max_running=5, ahead=True)
        engine.submit(requests(17, stop_token_ids=stops))
        with NothingWaits() if nothing_waits else nullcontext():
            found.append(drain(engine))
    assert_same(found[1], found[0])


def tokens_held(engine: NativeEngine) -> int:
    """The tokens that the running sequences have, each rounded up to whole pages."""
    return sum(-(-length // PAGE) * PAGE for length in engine._running.lengths)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("copied", [1, 1 << 26])
def test_pages_draw_what_slots_draw(
    name: str, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of heads, windows, experts; more requests than rows, so that rows move."""
    monkeypatch.setattr("m2flow.generation.pages.COPIED_BYTES", copied)
    model = small_model(name)
    found = []
    for paged in (False, True):
        engine = engine_of(model, paged, max_running=5)
        engine.submit(requests(17, top_p=0.9))
        found.append(drain(engine))
    assert_same(found[1], found[0])


@settings(deadline=None, max_examples=20)
@given(
    events=st.dictionaries(st.integers(1, 40), st.sampled_from(("nap", "weights", "abort"))),
    max_running=st.integers(1, 12),
    pages=st.none() | st.integers(CONTEXT // PAGE + 1, 5 * CONTEXT // PAGE),
    recorded=st.booleans(),
    ahead=st.booleans(),
)
def test_whatever_happens_between_steps(
    events: dict[int, str], max_running: int, pages: int | None, recorded: bool, ahead: bool
) -> None:
    """Naps, other weights, aborted requests, a budget that is too small, recorded steps."""
    budget = None if pages is None else pages * PAGE * CELL_BYTES
    found = []
    for paged in (False, True):
        engine = engine_of(
            MODEL,
            paged,
            max_running=max_running,
            cache_bytes=budget if paged else None,
            capture=Tape() if recorded and paged else None,
            ahead=ahead and paged,
        )
        found.append(carried_out(engine, events))
    for number, done in found[1].items():
        # A request that was put off draws the same later, when there are other weights.
        if "weights" not in events.values() and "abort" not in events.values():
            assert done.token_ids.tolist() == found[0][number].token_ids.tolist()
            torch.testing.assert_close(done.logprobs, found[0][number].logprobs, atol=1e-10, rtol=0)
    assert found[1].keys() == found[0].keys()


def carried_out(engine: NativeEngine, events: dict[int, str]) -> dict[int, Completion]:
    """What 13 requests draw; before each step, pages are counted."""
    engine.submit(requests(13))
    done: dict[int, Completion] = {}
    for step in range(2000):
        match events.get(step):
            case "nap":
                engine.sleep()
                engine.wake()
            case "weights":
                engine.install((OTHER if engine.version == 0 else MODEL).state_dict(), step)
            case "abort":
                done |= {one.id: one for one in engine.abort([step % 13])}
        done |= {one.id: one for one in engine.step()}
        if isinstance(engine._cache, PagedCache):
            check(engine._cache, engine)
        if not engine.busy:
            return done
    raise AssertionError("the engine does not come to an end")


def check(cache: PagedCache, engine: NativeEngine) -> None:
    """Each page is one row's, or free, or nobody's; the table says the same; a budget is kept."""
    own = [page for pages in cache._pages_of for page in pages]
    assert sorted([*own, *cache._free]) == list(range(1, cache._kv_LPSKW.shape[1] or 1))
    table = cache._table_RM.tolist()
    for row, pages in enumerate(cache._pages_of):
        assert table[row] == pages + [0] * (len(table[row]) - len(pages))
    assert not any(map(any, table[len(cache._pages_of) :]))
    assert len(own) * PAGE <= tokens_held(engine) + PAGE * len(engine._running)
    if cache.max_cells is not None:
        assert len(own) * PAGE <= cache.max_cells
    check_teams(cache, engine)


def check_teams(cache: PagedCache, engine: NativeEngine) -> None:
    """Whoever reads together has the same prompt, and the same keys and values for it."""
    if not engine._running._teams_stand:
        return  # rows came or went; the next step looks at them
    teams = [team for team in cache._table_TA[: cache.teams].tolist() if team[0]]
    of_rows = {row: tokens for tokens, *rows in teams for row in rows if row >= 0}
    for row, tokens in enumerate(cache._shared_R.tolist()):
        assert tokens == of_rows.get(row, 0)
    for tokens, *rows in teams:
        first, *others = [engine._running.sequences[row] for row in rows if row >= 0]
        assert others
        assert 0 < tokens <= len(first.prompt) + len(first.tokens)
        content = held(cache, rows[0], tokens)
        for row, other in zip(rows[1:], others, strict=False):
            assert other.context[:tokens] == first.context[:tokens]
            assert torch.equal(held(cache, row, tokens), content)


def held(cache: PagedCache, row: int, tokens: int) -> Tensor:
    """Keys and values of a row's first tokens."""
    return cache._kv_LPSKW[:, cache._pages_of[row]].flatten(1, 2)[:, :tokens]


def test_teams() -> None:
    """Of rows that began from one prefill, sixteen at most, in whole blocks."""
    teams = shared_prefix.teams_of
    assert teams([(7, 5), (3, 9), (7, 5), (3, 9), (3, 9), (8, 9)]) == [([0, 2], 4), ([1, 3, 4], 8)]
    assert teams([(1, 1), (1, 1), (-1, 0), (-1, 0)]) == []
    many = teams([(0, 2)] * 33)
    assert [len(team.rows) for team in many] == [16, 16], "one row alone is no team"


def test_teams_must_spare_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "WORTH", 9)
    assert shared_prefix.teams_of([(0, 4)] * 3) == []
    assert len(shared_prefix.teams_of([(0, 4)] * 4)) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_groups_read_their_prompts_together(recorded: bool) -> None:
    """Steps are recorded for the number of teams, which grows less as answers end."""
    asked = [
        Request(n, [n // 8 + 1] * 9, n, SamplingParams(2 + n % 8 * (1 + n // 8))) for n in range(32)
    ]
    found, seen = [], set()
    for paged in (False, True):
        engine = engine_of(MODEL, paged, capture=Tape() if recorded and paged else None)
        engine.submit(asked)
        done: dict[int, Completion] = {}
        while engine.busy:
            done |= {one.id: one for one in engine.step()}
            if isinstance(engine._cache, PagedCache):
                seen.add(engine._cache.teams)
                check_teams(engine._cache, engine)
        found.append(done)
    assert_same(found[1], found[0])
    assert seen >= {4, 1, 0}


def test_other_weights_make_another_prefix() -> None:
    """Rows from before and after have the same prompt, and other keys and values."""
    engine = engine_of(MODEL, True)
    engine.submit([Request(n, [1, 2, 3, 4], n, SamplingParams(20)) for n in range(3)])
    engine.step()
    engine.install(OTHER.state_dict(), 1)
    engine.submit([Request(n, [1, 2, 3, 4], n, SamplingParams(20)) for n in range(3, 6)])
    engine.step()
    engine.step()
    cache = engine._cache
    assert isinstance(cache, PagedCache)
    assert [team[1:4] for team in cache._table_TA[: cache.teams].tolist()] == [[0, 1, 2], [3, 4, 5]]
    check_teams(cache, engine)


def test_a_long_answer_takes_no_memory_from_short_ones() -> None:
    """Where slots of its length would hold six sequences, all seventeen run at once."""
    cells = 4 * CONTEXT
    asked = [Request(0, [1, 2, 3], 0, SamplingParams(CONTEXT - 3))]
    asked += [Request(n, [1, 2, 3], n, SamplingParams(4)) for n in range(1, 17)]
    most = {}
    for paged in (False, True):
        budget = (cells + (PAGE if paged else 0)) * CELL_BYTES
        engine = engine_of(MODEL, paged, cache_bytes=budget)
        engine.submit(asked[:1])
        for _ in range(CONTEXT // 2):
            engine.step()
        engine.submit(asked[1:])
        engine.step()
        most[paged] = engine.num_running
        drain(engine)
    assert most == {False: 6, True: 17}


def test_a_request_that_cannot_fit_is_refused() -> None:
    engine = engine_of(MODEL, True, cache_bytes=3 * PAGE * CELL_BYTES)
    with pytest.raises(ValueError, match="which holds 8"):
        engine.submit([Request(0, [1, 2, 3], 0, SamplingParams(6))])


def test_the_last_request_gives_a_budget_back() -> None:
    engine = engine_of(MODEL, True, cache_bytes=64 * PAGE * CELL_BYTES)
    engine.submit(requests(3))
    drain(engine)
    assert engine._cache.tensors()[0].numel() == 0


@pytest.mark.parametrize("paged", [True, False])
def test_a_budget_goes_back_to_the_device(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slots too: torch kept their memory, cut it up for others, and had no room for the next."""
    engine, held = engine_of(MODEL, paged, cache_bytes=64 * PAGE * CELL_BYTES), list[int]()
    engine.device = torch.device("cuda")  # that the engine is asked about; tensors are on the CPU
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: held.append(engine._cache.tensors()[0].nbytes)
    )
    for _ in range(2):
        engine.submit(requests(3))
        drain(engine)
    assert held == [0, 0]


# --- what torch's kernel is asked -----------------------------------------------------------------


def test_the_kernel_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attend` speaks the kernel's language: held against the reader of the tests."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, starts: Tensor, ends: Any, most: int,
        longest: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
        seqused_k: Tensor, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        assert starts.dtype is seqused_k.dtype is block_table.dtype is torch.int32
        assert starts.tolist() == list(range(len(query) + 1))
        assert (ends, most) == (None, 1)
        assert enable_gqa == (query.shape[1] != key.shape[2])
        assert key.stride(-1) == value.stride(-1) == 1
        window = None if window_size == (-1, -1) else window_size[0] + 1
        assert window_size[1] == (-1 if window is None else 0)
        out_BHD = torch.empty_like(query)
        groups = (key.shape[2], -1)
        read_pages(
            query.unflatten(1, groups), key, value, block_table, seqused_k, longest=longest,
            scale=scale, window=window, cap=None, out_BKGD=out_BHD.unflatten(1, groups),
        )  # fmt: skip
        return out_BHD

    monkeypatch.setattr(paged_attention, "_kernel", lambda: kernel)
    for name in ("qwen2", "mistral-window"):
        model = small_model(name)
        found = []
        for read in (None, paged_attention.attend):
            engine = NativeEngine(model.config, dtype=torch.float64, read=read)
            engine.install(model.state_dict(), 0)
            engine.submit(requests(6))
            found.append(drain(engine))
        assert_same(found[1], found[0])


@pytest.mark.parametrize(
    ("device", "dtype", "width", "reason"),
    [
        ("cpu", torch.bfloat16, 8, "runs on CUDA"),
        ("cuda", torch.float32, 8, "bfloat16 or float16, not torch.float32"),
        ("cuda", torch.bfloat16, 512, "at most 256 channels"),
        ("cuda", torch.bfloat16, 8, None),
    ],
)
def test_where_pages_are_kept(
    device: str,
    dtype: torch.dtype,
    width: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_attention, "reader_of", lambda _: read_pages)
    a = replace(architecture_of(MODEL.config), head_dim=width)
    said = paged_attention.reason_against(a, dtype, torch.device(device))
    assert (said is None) == (reason is None)
    assert reason is None or reason in str(said)


def test_who_reads_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernel where there is one for such heads, else Triton's, else nobody."""
    a = architecture_of(MODEL.config)
    for kernel, cap, width, triton, expected in (
        (True, None, 8, True, "torch"), (False, None, 8, True, "triton"),
        (True, 30.0, 8, True, "triton"), (True, None, 12, True, "triton"),
        (False, None, 8, False, None), (True, 30.0, 8, False, None),
        (True, None, 8, False, "torch"),
    ):  # fmt: skip
        monkeypatch.setattr(paged_attention, "_kernel", lambda kernel=kernel: kernel or None)
        in_triton = SimpleNamespace(attend=read_pages) if triton else None
        monkeypatch.setitem(sys.modules, "m2flow.generation.triton_attention", in_triton)
        found = paged_attention.reader_of(replace(a, score_cap=cap, head_dim=width))
        assert (
            found is {"torch": paged_attention.attend, "triton": read_pages, None: None}[expected]
        )


def test_slots_on_a_gpu_are_said(caplog: pytest.LogCaptureFixture) -> None:
    from m2flow.generation.native import _page_reader

    a = architecture_of(MODEL.config)
    assert _page_reader(a, torch.float32, torch.device("cpu")) is None
    assert not caplog.messages
    assert _page_reader(a, torch.float32, torch.device("cuda")) is None
    (said,) = caplog.messages
    assert "in slots" in said
    assert "not torch.float32" in said


def test_a_page_is_what_the_kernel_wants() -> None:
    assert paged_attention.PAGE % 256 == 0
