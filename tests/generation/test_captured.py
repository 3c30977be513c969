"""Recorded decode steps: the same answers as plain ones, whatever happens in between.

A `Tape` stands in for CUDA graphs; `tests/gpu/test_captured.py` holds the graphs themselves.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m2flow.errors import M2FlowError
from m2flow.generation import captured
from m2flow.generation.captured import (
    CapturedSteps,
    CudaCapture,
    Size,
    Step,
    padded_columns,
    padded_count,
    padded_to_pages,
)
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion, Request, SamplingParams
from m2flow.generation.tensor_parallel import TensorParallel
from tests.generation.small_models import CONTEXT, VOCAB_SIZE, drain, small_model
from tests.generation.tape import Tape

FAMILIES = (
    "qwen2", "qwen2-untied-one-kv-head", "llama-biases-scaled-rope", "qwen3", "mistral-window",
    "qwen2-windows", "gemma2", "gemma3",
)  # fmt: skip
MODELS = {name: small_model(name) for name in FAMILIES}
MODEL, OTHER = MODELS["qwen2"], small_model(seed=1)
CELL_BYTES = 2 * 2 * 2 * 8 * 8
"""Key and value of a token in 2 layers of 2 heads of 8 channels, float64."""


@pytest.fixture(autouse=True)
def _recorded_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers here are short: sizes are recorded at their second step, and columns come closer."""
    monkeypatch.setattr(captured, "PLAIN_STEPS", 1)
    monkeypatch.setattr(captured, "COLUMN_STEP", 8)
    monkeypatch.setattr("m2flow.generation.running.COLUMN_STEP", 8)


def engine_of(model: Any, capture: Tape | None, **limits: Any) -> NativeEngine:
    engine = NativeEngine(model.config, dtype=torch.float64, capture=capture, **limits)
    engine.install(model.state_dict(), 0)
    return engine


def requests(count: int, longest: int = CONTEXT - 10, **drawn: Any) -> list[Request]:
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 9)))] for _ in range(4)]
    params = [SamplingParams(rng.choice((3, 9, longest)), **drawn) for _ in range(count)]
    return [Request(i, prompts[i % 4], 70 + i, one) for i, one in enumerate(params)]


def assert_same(found: dict[int, Completion], expected: dict[int, Completion]) -> None:
    assert found.keys() == expected.keys()
    for number, done in found.items():
        assert done.token_ids.tolist() == expected[number].token_ids.tolist()
        assert done.token_versions.tolist() == expected[number].token_versions.tolist()
        torch.testing.assert_close(done.logprobs, expected[number].logprobs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_steps_draw_what_plain_ones_draw(name: str) -> None:
    """Rows and columns are padded, layers with windows leave columns out, scores are capped."""
    found = []
    for capture in (None, Tape()):
        engine = engine_of(MODELS[name], capture, max_running=23)
        engine.submit(requests(27, top_p=0.9))
        found.append(drain(engine))
    assert_same(found[1], found[0])
    assert engine.captured is not None
    assert engine.captured.replayed >= 20
    assert engine.captured.recorded < engine.captured.replayed


@settings(deadline=None, max_examples=12)
@given(
    events=st.dictionaries(st.integers(1, 40), st.sampled_from(("nap", "weights", "abort"))),
    max_running=st.integers(1, 24),
)
def test_whatever_happens_between_steps(events: dict[int, str], max_running: int) -> None:
    """Naps that move all memory, weights of another version, aborted requests."""
    plain, replayed = (
        carried_out(engine_of(MODEL, capture, max_running=max_running), events)
        for capture in (None, Tape())
    )
    assert_same(replayed, plain)


@settings(deadline=None, max_examples=10)
@given(naps=st.sets(st.integers(1, 40), max_size=3), cells=st.integers(CONTEXT, 6 * CONTEXT))
def test_slots_of_the_padding_count_where_room_is_short(naps: set[int], cells: int) -> None:
    plain, replayed = (
        carried_out(
            engine_of(MODEL, capture, cache_bytes=cells * CELL_BYTES), dict.fromkeys(naps, "nap")
        )
        for capture in (None, Tape())
    )
    assert_same(replayed, plain)


@settings(deadline=None, max_examples=30)
@given(
    events=st.dictionaries(st.integers(1, 40), st.sampled_from(("nap", "weights", "abort"))),
    max_running=st.integers(1, 24),
    cells=st.none() | st.integers(CONTEXT, 6 * CONTEXT),
)
def test_a_step_begun_before_the_last_tokens_are_read(
    events: dict[int, str], max_running: int, cells: int | None
) -> None:
    """Requests end by stop tokens, which are not known when the next step begins."""
    limits = {"cache_bytes": cells and cells * CELL_BYTES, "max_running": max_running}
    again = dict.fromkeys((step for step, event in events.items() if event == "nap"), "nap")
    stops = tuple(range(0, VOCAB_SIZE, 7))
    plain = carried_out(engine_of(MODEL, None, **limits), again, stops)
    ahead = engine_of(MODEL, Tape(), ahead=True, **limits)
    assert_same(carried_out(ahead, again, stops), plain)
    assert any(one.finish_reason == "stop" for one in plain.values())

    disturbed = carried_out(engine_of(MODEL, Tape(), ahead=True, **limits), events, stops)
    assert disturbed.keys() == plain.keys()
    for number, done in disturbed.items():
        versions = done.token_versions.tolist()
        assert versions == sorted(versions)
        old = versions.count(0)  # drawn by the weights that `plain` has
        assert done.token_ids[:old].tolist() == plain[number].token_ids[:old].tolist()
        if set(versions) <= {0} and done.finish_reason != "abort":
            assert done.token_ids.tolist() == plain[number].token_ids.tolist()


def test_a_request_that_ends_in_flight_is_given_to_who_aborts_it() -> None:
    """Or it would come up among the requests of who steps the engine next."""
    engine = engine_of(MODEL, Tape(), ahead=True)
    engine.submit([Request(0, [1, 2, 3], 5, SamplingParams(9))])
    (expected,) = drain(engine).values()
    stop = SamplingParams(9, stop_token_ids=(int(expected.token_ids[3]),))
    engine.submit([Request(0, [1, 2, 3], 5, stop)])
    for _ in range(4):
        assert not engine.step()
    (found,) = engine.abort([0])
    assert found.finish_reason == "stop"
    assert found.token_ids.tolist() == expected.token_ids.tolist()[:4]
    assert not engine.busy


def begun_ahead(*limits: int, max_running: int = 4) -> tuple[NativeEngine, list[Request]]:
    """An engine that works ahead, after the step that has admitted requests of such lengths."""
    engine = engine_of(MODEL, Tape(), ahead=True, max_running=max_running)
    asked = [
        Request(n, [1 + n, 2, 3], 5 + n, SamplingParams(most)) for n, most in enumerate(limits)
    ]
    engine.submit(asked)
    assert not engine.step()
    return engine, asked


def alone(one: Request) -> Completion:
    engine = engine_of(MODEL, None)
    engine.submit([one])
    return drain(engine)[one.id]


def test_weights_that_come_while_a_first_token_is_in_flight_have_not_drawn_it() -> None:
    engine, asked = begun_ahead(4, 6)
    engine.install(OTHER.state_dict(), 1)
    done = drain(engine)
    for one in asked:
        found, most = done[one.id], one.params.max_new_tokens
        assert found.token_versions.tolist() == [0] + [1] * (most - 1)
        assert found.token_ids[0] == alone(one).token_ids[0]


def test_who_is_aborted_while_its_first_token_is_in_flight_has_it() -> None:
    engine, asked = begun_ahead(4, 6)
    (found,) = engine.abort([1])
    assert found.finish_reason == "abort"
    assert found.token_ids.tolist() == alone(asked[1]).token_ids[:1].tolist()
    assert_same(drain(engine), {0: alone(asked[0])})


def test_a_nap_while_a_first_token_is_in_flight() -> None:
    engine, asked = begun_ahead(4, 2, 6)
    engine.sleep()
    engine.wake()
    assert_same(drain(engine), {one.id: alone(one) for one in asked})


def test_a_prefill_that_is_not_finite_is_named_by_the_weights_that_made_it() -> None:
    weights = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
    weights["model.layers.0.self_attn.v_proj.weight"][0] = torch.nan
    engine = engine_of(MODEL, Tape(), ahead=True)
    engine.install(weights, 3)
    engine.submit([Request(0, [1, 2, 3], 5, SamplingParams(9))])
    assert not engine.step()
    with pytest.raises(M2FlowError, match="version 3"):
        engine.install(MODEL.state_dict(), 4)


def test_requests_of_one_token_do_not_keep_a_long_one_from_its_next() -> None:
    """They end with what a prefill draws: a step of theirs would leave nothing to begin beside."""
    engine, _ = begun_ahead(30, max_running=2)
    lengths = []
    for number in range(1, 12):
        engine.submit([Request(number, [1, 2, number], 5, SamplingParams(1))])
        engine.step()
        lengths.append(len(engine._running.sequences[0].tokens))
    assert all(before < after for before, after in pairwise(lengths))


def carried_out(
    engine: NativeEngine, events: dict[int, str], stops: tuple[int, ...] = ()
) -> dict[int, Completion]:
    """What 21 requests draw while this happens before steps; the budget is kept."""
    engine.submit(requests(21, stop_token_ids=stops))
    done: dict[int, Completion] = {}
    for step in range(2000):
        match events.get(step):
            case "nap":
                engine.sleep()
                engine.wake()
            case "weights":
                engine.install((OTHER if engine.version == 0 else MODEL).state_dict(), step)
            case "abort":
                done |= {one.id: one for one in engine.abort([step % 21])}
        done |= {one.id: one for one in engine.step()}
        held, cells = engine._cache.tensors()[0].untyped_storage().nbytes(), engine._cache.max_cells
        assert cells is None or held <= cells * CELL_BYTES
        if not engine.busy:
            return done
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_after_a_nap_what_was_recorded_stands_where_memory_is_where_it_was(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape()
    engine = engine_of(MODEL, tape)
    held = []
    engine.submit([Request(0, [1, 2, 3], 5, SamplingParams(40))])
    for _ in range(6):
        engine.step()
    assert engine.captured is not None
    before, forgotten = engine.captured.recorded, tape.forgotten
    assert before == 1
    lay = engine._places()
    engine.sleep()
    if elsewhere:  # somebody has taken what was given back
        held = [torch.empty(size) for size in range(1, 3000) for _ in range(4)]
    engine.wake()
    del held
    moved = engine._places() != lay
    assert moved or not elsewhere
    for _ in range(4):
        engine.step()
    assert engine.captured.recorded == before + moved
    assert tape.forgotten == forgotten + moved


def test_rows_are_padded_into_slots_that_nobody_has() -> None:
    engine = engine_of(MODEL, Tape())
    engine.submit([Request(i, [1, 2, 3], 5, SamplingParams(40)) for i in range(19)])
    for _ in range(6):
        engine.step()
    assert engine.captured is not None
    assert [size.rows for size in engine.captured._kept] == [20]
    assert engine._cache.rows == 20


def test_padding_does_not_write_where_rows_before_it_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ended far along lie behind rows in a cache of few columns."""
    monkeypatch.setattr("m2flow.generation.kv_cache._ROUND_COLUMNS", 8)
    found = []
    for capture in (None, Tape()):
        engine = engine_of(MODEL, capture)
        engine.submit([Request(i, [1, 2, 3], i, SamplingParams(40)) for i in range(20)])
        drain(engine)
        engine.sleep()  # nothing runs, so the slots are given back
        engine.wake()
        engine.submit([Request(i, [4, 5], i, SamplingParams(5)) for i in range(17)])
        found.append(drain(engine))
    assert_same(found[1], found[0])


def test_new_weights_need_no_new_recording() -> None:
    engine = engine_of(MODEL, Tape())
    engine.submit([Request(0, [1, 2, 3], 5, SamplingParams(12))])
    for _ in range(5):
        engine.step()
    assert engine.captured is not None
    recorded = engine.captured.recorded
    engine.install(OTHER.state_dict(), 1)
    plain = engine_of(MODEL, None)
    plain.submit([Request(0, [1, 2, 3], 5, SamplingParams(12))])
    for _ in range(5):
        plain.step()
    plain.install(OTHER.state_dict(), 1)
    assert_same(drain(engine), drain(plain))
    assert engine.captured.recorded <= recorded + 1, "a further one for further columns"


@pytest.mark.parametrize("name", ["qwen3-moe", "gangs"])
def test_what_cannot_be_recorded_runs_plainly(name: str) -> None:
    gang = TensorParallel(0, 2) if name == "gangs" else TensorParallel()
    model = MODEL if name == "gangs" else small_model(name)
    engine = NativeEngine(model.config, dtype=torch.float64, parallel=gang, capture=Tape())
    assert engine.captured is None


def test_a_step_that_waits_for_the_device_is_refused() -> None:
    """The tape is as strict as a graph: a size that the host reads would be frozen."""
    value = torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Tape().record(lambda: value * int(value.sum()))


class PlayedGraph:
    """In place of `torch.cuda.graph`; to end the recording of a failed step may fail, too."""

    ends_well = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pool = lambda: (0, 0)

    def __enter__(self) -> None:
        """Steps run plainly."""

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and not self.ends_well:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("ends_well", [True, False])
@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (torch.OutOfMemoryError("Tried 2 GiB"), torch.OutOfMemoryError, "^Tried 2 GiB$"),
        (RuntimeError("CUDA error: out of memory"), RuntimeError, "^CUDA error: out of memory$"),
        (RuntimeError("a sync"), M2FlowError, "cannot be recorded .*captured_decode=false"),
    ],
)
def test_a_recording_that_runs_out_of_memory_says_so(
    error: Exception,
    raised: type[Exception],
    words: str,
    ends_well: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It said that the step cannot be recorded, and no plan was tried that needs less."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(PlayedGraph, "ends_well", ends_well)
    for name in ("CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, PlayedGraph)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: stream)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)

    def step() -> Tensor:
        raise error

    with pytest.raises(raised, match=words):
        CudaCapture(torch.device("cuda")).record(step, again=True)


# --- sizes, and what is kept ----------------------------------------------------------------------


def test_padding_is_an_eighth_at_most() -> None:
    sizes = [padded_count(count) for count in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert all(count <= size < 1.125 * count + 1 for count, size in enumerate(sizes, start=1))
    assert all(padded_count(size) == size for size in sizes)
    assert len(set(sizes[:256])) == 48
    assert padded_columns(1) == captured.COLUMN_STEP == 8
    assert padded_columns(8 * 17) == 8 * 18


def test_over_pages_few_sizes_are_small() -> None:
    sizes = [padded_to_pages(count) for count in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert sizes[:3] == [1, 2, 4]
    assert sorted(set(sizes[:64])) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert sizes[64:] == [padded_count(count) for count in range(65, 5000)]
    assert all(count <= size for count, size in enumerate(sizes, start=1))


class Counting:
    """Records by keeping; a step gives its size."""

    def __init__(self) -> None:
        self.recorded = self.again = 0

    def record(self, step: Step, *, again: bool = False) -> Step:
        self.recorded += 1
        self.again += again
        return step

    def forget(self) -> None:
        """Nothing is kept here."""


def ran(steps: CapturedSteps, rows: int, layout: int = 0) -> int:
    def step() -> Tensor:
        return torch.tensor(rows)

    return int(steps.run(Size(rows, 64), layout, step))


def test_a_size_is_recorded_when_it_has_run_plainly_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "PLAIN_STEPS", 3)
    counting, places = Counting(), [1, 2]
    steps = CapturedSteps(counting, lambda: tuple(places))
    for _ in range(3):
        assert ran(steps, 4) == 4
        assert ran(steps, 5) == 5
    assert (steps.recorded, steps.replayed) == (0, 0)
    for _ in range(5):
        ran(steps, 4)
    assert (steps.recorded, steps.replayed) == (1, 5)
    ran(steps, 4, layout=1)
    assert (steps.recorded, steps.replayed) == (1, 6), "another layout at the same addresses"
    places[1] = 3
    ran(steps, 4, layout=1)
    assert steps.recorded == 1, "addresses are looked at when the layout changes"
    steps.moves()
    ran(steps, 5, layout=1)
    assert (steps.recorded, steps.replayed) == (1, 7), "other addresses: from the beginning"
    assert counting.again == 0
    ran(steps, 4, layout=1)
    assert (steps.recorded, steps.replayed) == (2, 8), "but for what was recorded before"
    assert counting.again == 1


def test_the_size_that_was_used_longest_ago_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_RECORDED", 2)
    steps = CapturedSteps(Counting(), tuple)
    for rows in (1, 1, 2, 2, 1, 3, 3, 1):
        ran(steps, rows)
    assert steps.recorded == 3
    assert ran(steps, 2) == 2
    assert steps.recorded == 3, "it was dropped, and runs plainly again"
