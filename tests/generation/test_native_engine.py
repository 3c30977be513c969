"""The native engine's promises: draws that depend on the item alone, versions, slots, limits."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.errors import M2FlowError, UserError
from m2flow.generation import kernels, kv_cache, prefixes
from m2flow.generation.decoder import Decoder
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Begun, Completion, Request, SamplingParams
from m2flow.generation.running import closed
from tests.generation.small_models import CONTEXT, VOCAB_SIZE, drain, forward_logprobs, small_model

MODEL = small_model()
OTHER = small_model(seed=1)
STOP = 3


def engine_with(model=MODEL, version: int = 0, **limits: int) -> NativeEngine:  # type: ignore[no-untyped-def]
    engine = NativeEngine(model.config, dtype=torch.float64, **limits)  # type: ignore[arg-type]
    engine.install(model.state_dict(), version)
    return engine


def request(
    index: int, prompt: list[int] | None = None, new: int = 6, stop: tuple[int, ...] = ()
) -> Request:
    prompt = [index % VOCAB_SIZE, 5, 9] if prompt is None else prompt
    return Request(index, prompt, 1000 + index, SamplingParams(new, 1.0, stop))


def pool() -> list[Request]:
    """Groups with a common prompt, lengths from 1 to the whole context, a stop token."""
    rng = random.Random(5)
    lengths = (1, 2, 3, 7, 12, 20)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return [
        request(i, prompts[i % 6], new=rng.choice((1, 2, 5, 9, CONTEXT - 20)), stop=(STOP,))
        for i in range(18)
    ]


POOL = pool()
ALONE: dict[int, Completion] = {}


@pytest.fixture(scope="module", autouse=True)
def _each_request_alone() -> None:
    engine = engine_with(max_running=1)
    for one in POOL:
        engine.submit([one])
        ALONE.update(drain(engine))
    reasons = [completion.finish_reason for completion in ALONE.values()]
    assert set(reasons) == {"stop", "length"}


def assert_same(done: Completion, expected: Completion) -> None:
    assert done.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(done.logprobs, expected.logprobs, atol=1e-10, rtol=0)
    assert done.finish_reason == expected.finish_reason


def assert_empty(engine: NativeEngine) -> None:
    assert not engine.busy
    assert (engine.num_running, len(engine._waiting)) == (0, 0)
    assert len(engine._prefixes) == len(engine._live) == 0
    assert not engine._prefixes._kept


@settings(deadline=None, max_examples=40)
@given(
    order=st.permutations(range(len(POOL))),
    max_running=st.integers(1, 20),
    prefill_tokens=st.integers(1, 100),
    feed=st.lists(st.integers(0, 5), min_size=len(POOL), max_size=len(POOL)),
    naps=st.sets(st.integers(0, 30), max_size=2),
    aborted=st.sets(st.integers(0, len(POOL) - 1), max_size=3),
    cells=st.none() | st.integers(CONTEXT, 5 * CONTEXT),
    span=st.integers(1, 20),
)
def test_draws_do_not_depend_on_what_else_runs(
    order: list[int],
    max_running: int,
    prefill_tokens: int,
    feed: list[int],
    naps: set[int],
    aborted: set[int],
    cells: int | None,
    span: int,
) -> None:
    """Any order and pace of submission, any limits of rows and memory, naps: the same tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "MAX_TOKENS", prefill_tokens)
        patch.setattr(kv_cache, "CPU_SPAN", span)
        patch.setattr(kv_cache, "WORTH", 0)
        _draw_all(order, max_running, feed, naps, aborted, cells)


CELL_BYTES = 2 * 2 * 2 * 8 * 8
"""Key and value of a token in 2 layers of 2 heads of 8 channels, float64."""


def _draw_all(
    order: list[int],
    max_running: int,
    feed: list[int],
    naps: set[int],
    aborted: set[int],
    cells: int | None,
) -> None:
    limits = {} if cells is None else {"cache_bytes": cells * CELL_BYTES + 7}
    engine = engine_with(max_running=max_running, **limits)
    queue: Iterator[tuple[int, int]] = iter(zip(order, feed, strict=True))
    done: dict[int, Completion] = {}
    submitted: set[int] = set()
    for step in range(5000):  # prompts are read in pieces of a token at worst
        for index, pause in queue:
            engine.submit([POOL[index]])
            submitted.add(index)
            if pause:
                break
        if step in naps:
            running = engine.num_running
            engine.sleep()
            engine.wake()
            assert engine.num_running == running
        if step == 7:
            for completion in engine.abort(aborted & submitted):
                whole = ALONE[completion.id].token_ids.tolist()
                assert completion.token_ids.tolist() == whole[: len(completion.token_ids)]
                done[completion.id] = completion
        for completion in engine.step():
            assert completion.id not in done
            assert_same(completion, ALONE[completion.id])
            done[completion.id] = completion
        assert engine.num_running <= max_running
        held = sum(tensor.untyped_storage().nbytes() for tensor in engine._cache.tensors()[:1])
        assert cells is None or held <= cells * CELL_BYTES
        if not engine.busy and len(submitted) == len(POOL):
            break
    assert len(done) == len(POOL)
    assert_empty(engine)


def test_requests_wait_where_keys_and_values_have_no_room() -> None:
    """Eight answers of 30 tokens, where three have room: what is put off draws what it would."""
    requests = [request(i, [i, 5], new=30) for i in range(8)]
    free = engine_with()
    free.submit(requests)
    expected = drain(free)
    assert free.preemptions == 0
    tight = engine_with(cache_bytes=3 * 32 * CELL_BYTES)
    tight.submit(requests)
    found: dict[int, Completion] = {}
    most = 0
    while tight.busy:
        found |= {done.id: done for done in tight.step()}
        most = max(most, tight.num_running)
    assert tight.preemptions > 0
    assert most > 3, "answers that are short yet share what three long ones take"
    for done in found.values():
        assert_same(done, expected[done.id])
    assert_empty(tight)


def test_a_budget_is_given_back_with_the_last_request() -> None:
    """Plans count it for the calls of the generator alone: a learner works in the same memory."""
    engine = engine_with(cache_bytes=200 * CELL_BYTES)
    empty = engine.state_bytes()
    for last in ("drawn", "aborted"):
        engine.submit([request(i, new=9) for i in range(3)])
        engine.step()
        assert engine.state_bytes() >= empty + 200 * CELL_BYTES
        drain(engine) if last == "drawn" else engine.abort([0, 1, 2])
        assert engine.state_bytes() == empty
    engine.submit([POOL[4]])
    assert_same(drain(engine)[4], ALONE[4])


def test_those_that_came_last_are_put_off() -> None:
    engine = engine_with(cache_bytes=2 * 40 * CELL_BYTES)
    engine.submit([request(i, [i, 5], new=38) for i in range(4)])
    order = list(drain(engine))
    assert order[:2] == [0, 1]
    assert engine.preemptions >= 2


def test_a_request_that_the_cache_could_never_hold_is_refused() -> None:
    engine = engine_with(cache_bytes=20 * CELL_BYTES)
    with pytest.raises(UserError, match=r"do not fit the memory .* which holds 20;.*cache_gb"):
        engine.submit([request(0, [1, 2, 3], new=18)])
    assert_empty(engine)


def test_a_prompt_is_prefilled_once_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(max_running=3)
    prefilled: list[tuple[int, ...]] = []
    prefill = engine._decoder.prefill
    monkeypatch.setattr(
        engine._decoder, "prefill", lambda prompts: prefilled.extend(prompts) or prefill(prompts)
    )
    group = [request(i, [7, 7, 2], new=3 + i) for i in range(8)]
    engine.submit(group[:5])
    engine.step()
    engine.submit(group[5:])
    drain(engine)
    assert prefilled == [(7, 7, 2)]
    assert_empty(engine)
    engine.submit([request(9, [7, 7, 2])])
    drain(engine)
    assert len(prefilled) == 2


def test_a_freed_slot_is_taken_in_the_same_step() -> None:
    engine = engine_with(max_running=1)
    engine.submit([request(i, new=4) for i in range(3)])
    assert [len(engine.step()) for _ in range(10)] == [0, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert_empty(engine)


@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=40),
    gone=st.sets(st.integers(0, 39)),
    span=st.integers(1, 20),
)
def test_gaps_close_and_no_row_moves_up(lengths: list[int], gone: set[int], span: int) -> None:
    rows = [row for row in range(len(lengths)) if row in gone]
    order = closed(lengths, rows, span)
    assert sorted(order) == [row for row in range(len(lengths)) if row not in gone]
    assert all(row >= place for place, row in enumerate(order))


def test_rows_attend_by_themselves_where_that_is_worth_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_cache, "CPU_SPAN", 4)
    monkeypatch.setattr(kv_cache, "WORTH", 16 * 100)  # 100 cells of 2 heads of 8 channels
    cache = engine_with()._cache
    long, near, short = [200, 180, 190, 170], [171, 150, 176, 160], [20, 30, 10]
    assert cache.spans(long + near) == [(8, 150, 200)], "24 columns of 4 rows are no 100 cells"
    assert cache.spans(long + short) == [(4, 170, 200), (3, 10, 30)]
    assert cache.spans(long + near + short) == [(8, 150, 200), (3, 10, 30)]


def test_rows_of_like_length_stay_side_by_side() -> None:
    """Every span computes over the columns of its longest row, and new rows come last."""
    rng = random.Random(7)
    lengths: list[int] = []
    wanted: list[int] = []
    computed = needed = moves = ended = 0
    for _ in range(2000):
        gone = [
            row for row, (now, end) in enumerate(zip(lengths, wanted, strict=True)) if now >= end
        ]
        order = closed(lengths, gone, 16)
        moves += sum(row != place for place, row in enumerate(order))
        ended += len(gone)
        new = 64 - len(order)
        lengths = [lengths[row] for row in order] + [32] * new
        wanted = [wanted[row] for row in order]
        wanted += [32 + min(512, round(rng.lognormvariate(4.5, 1.0))) for _ in range(new)]
        spans = [lengths[start : start + 16] for start in range(0, 64, 16)]
        computed += sum(16 * max(span) for span in spans)
        needed += sum(lengths)
        lengths = [length + 1 for length in lengths]
    assert computed < 1.4 * needed, "64 times the longest is more than 3 times what is needed"
    assert moves <= 4 * ended


def test_memory_does_not_grow_from_one_round_to_the_next() -> None:
    engine = engine_with(max_running=6)
    sizes = []
    for _ in range(4):
        engine.submit(POOL)
        drain(engine)
        sizes.append(engine.state_bytes())
    assert sizes[1:] == sizes[:-1]


def test_stop_and_length() -> None:
    """The stop token belongs to the completion; at the limit it still is the reason."""
    engine = engine_with()
    free = request(0, new=12)
    engine.submit([free])
    tokens = drain(engine)[0].token_ids.tolist()
    first = {token: tokens.index(token) + 1 for token in tokens}
    for token, length in first.items():
        for new, reason in ((12, "stop"), (length, "stop"), (length - 1, "length")):
            if new:
                engine.submit([request(0, new=new, stop=(token, VOCAB_SIZE + 5))])
                done = drain(engine)[0]
                assert done.finish_reason == reason
                assert done.token_ids.tolist() == tokens[: min(new, length)]
                assert done.logprobs.shape == done.token_ids.shape


def test_prompts_may_be_tensors() -> None:
    engine = engine_with()
    engine.submit([Request(0, torch.tensor([1, 2, 3]), 4, SamplingParams(5))])
    from_tensor = drain(engine)[0]
    engine.submit([Request(0, (1, 2, 3), 4, SamplingParams(5))])
    assert_same(drain(engine)[0], from_tensor)


def test_completions_are_ordinary_tensors() -> None:
    """Tensors of inference mode cannot be saved for backward, and a loss does that."""
    engine = engine_with()
    engine.submit([request(0), request(1)])
    done = drain(engine)[0], *engine.abort([1])
    weight = torch.ones((), requires_grad=True)
    for completion in done:
        assert not completion.token_ids.is_inference()
        (weight * completion.logprobs).sum().backward()


def test_abort_hands_back_what_was_drawn() -> None:
    engine = engine_with(max_running=2)
    engine.submit([request(i, new=9) for i in range(4)])
    for _ in range(3):
        engine.step()
    aborted = {c.id: c for c in engine.abort([1, 3, 77, 1])}
    assert {i: len(c.token_ids) for i, c in aborted.items()} == {1: 3, 3: 0}
    assert all(c.finish_reason == "abort" for c in aborted.values())
    assert [c.versions for c in aborted.values()] == [(0, 0), (0, 0)]
    rest = drain(engine)
    assert sorted(rest) == [0, 2]
    assert engine.abort([0, 1]) == []
    assert_empty(engine)


def test_versions_span_from_the_first_token_to_the_last() -> None:
    engine = engine_with(max_running=3, version=4)
    engine.submit([request(0, new=2), request(1, new=5), request(2, new=9), request(3, new=3)])
    done = [*engine.step(), *engine.step()]
    engine.install(MODEL.state_dict(), 5)
    done += engine.step()
    engine.install(MODEL.state_dict(), 6)
    engine.install(MODEL.state_dict(), 7)
    early = engine.abort([2])[0]
    done += drain(engine).values()
    assert {c.id: c.versions for c in done} == {0: (4, 4), 1: (4, 7), 3: (4, 7)}
    # Aborted before the new weights drew anything for it.
    assert early.versions == (4, 5)
    assert early.token_versions.tolist() == [4, 4, 5]
    by_id = {c.id: c.token_versions.tolist() for c in done}
    assert (by_id[0], by_id[1]) == ([4, 4], [4, 4, 5, 7, 7])


def test_running_requests_go_on_with_installed_weights_over_the_old_cache() -> None:
    one = request(0, [2, 7, 1], new=8)
    engine = engine_with()
    engine.submit([one])
    for _ in range(3):
        engine.step()
    engine.install(OTHER.state_dict(), 1)
    done = drain(engine)[0]
    tokens = done.token_ids
    with torch.no_grad():
        # The third token was drawn before the install and is fed by the new weights.
        past = MODEL(torch.tensor([[2, 7, 1, *tokens[:2]]]), use_cache=True).past_key_values
        logits = OTHER(tokens[2:-1].unsqueeze(0), past_key_values=past).logits[0]
    expected = torch.log_softmax(logits, -1).gather(1, tokens[3:].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(done.logprobs[3:], expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        done.logprobs[:3], forward_logprobs(MODEL, one, done)[:3], atol=1e-10, rtol=0
    )


def test_weights_laid_out_for_products_are_the_installed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an install, too; asleep an engine does without them, and its bytes tell of them."""
    plain = NativeEngine(OTHER.config)
    bytes_alone = plain.state_bytes()
    plain.install(OTHER.state_dict(), 1)
    plain.submit(POOL)
    expected = drain(plain)
    monkeypatch.setattr(kernels, "_MIN_PREPACKED", 0)
    engine = NativeEngine(OTHER.config)
    matrices = [
        parameter.numel() * torch.float32.itemsize
        for parameter in OTHER.parameters()
        if parameter.dim() == 2
    ]
    assert engine.state_bytes() == bytes_alone + sum(matrices)
    for model, version in ((MODEL, 0), (OTHER, 1)):
        engine.install(model.state_dict(), version)
        engine.submit(POOL)
        found = drain(engine)
        assert isinstance(engine._decoder, Decoder)
        copy = weakref.ref(engine._decoder.weights.prepacked.layers[0].qkv)
        engine.sleep()
        assert copy() is None, "it takes no memory"
        assert engine.state_bytes() == bytes_alone + sum(matrices)
        engine.wake()
    for index, completion in found.items():
        assert completion.token_ids.tolist() == expected[index].token_ids.tolist()
        torch.testing.assert_close(completion.logprobs, expected[index].logprobs)


def test_a_new_request_does_not_start_from_a_prompt_of_older_weights() -> None:
    engine = engine_with()
    engine.submit([request(0, [2, 7, 1], new=20)])
    engine.step()
    engine.install(OTHER.state_dict(), 1)
    late = request(1, [2, 7, 1])
    engine.submit([late])
    done = drain(engine)[1]
    assert done.versions == (1, 1)
    expected = forward_logprobs(OTHER, late, done)
    torch.testing.assert_close(done.logprobs, expected, atol=1e-10, rtol=0)


def test_sleep_keeps_what_runs_and_nothing_is_computed_again() -> None:
    engine = engine_with(max_running=4)
    engine.submit(POOL)
    done = [c for _ in range(4) for c in engine.step()]
    running, num_bytes = engine.num_running, engine.state_bytes()
    prefills = 0
    prefill = engine._decoder.prefill

    def counted(prompts: Any) -> Any:
        nonlocal prefills
        prefills += len(prompts)
        return prefill(prompts)

    engine._decoder.prefill = counted  # type: ignore[method-assign]
    for _ in range(2):
        engine.sleep()
        assert engine.state_bytes() == num_bytes
        tensors = [t for t in engine._tensors() if t.numel()]
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        for forbidden in (
            engine.step,
            lambda: engine.abort([0]),
            lambda: engine.install({}, 1),
        ):
            with pytest.raises(AssertionError, match="sleeps"):
                forbidden()
        engine.wake()
        assert (engine.num_running, prefills) == (running, 0)
    done += drain(engine).values()
    assert len(done) == len(POOL)
    for completion in done:
        assert_same(completion, ALONE[completion.id])


def test_sleep_frees_the_slots_when_nothing_runs() -> None:
    engine = engine_with(max_running=4)
    empty = engine.state_bytes()
    engine.submit(POOL)
    drain(engine)
    assert engine.state_bytes() > empty
    engine.sleep()
    assert engine.state_bytes() == empty
    engine.wake()
    engine.submit([POOL[4]])
    assert_same(drain(engine)[4], ALONE[4])


def test_requests_that_come_during_sleep_wait() -> None:
    engine = engine_with()
    engine.sleep()
    engine.submit(POOL)
    assert (engine.num_running, len(engine._waiting)) == (0, len(POOL))
    engine.wake()
    for completion in drain(engine).values():
        assert_same(completion, ALONE[completion.id])


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_an_install_that_does_not_fit_changes_nothing(change: str) -> None:
    weights = dict(OTHER.state_dict())
    name = "model.layers.1.self_attn.k_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "unknown":
        weights["model.layers.2.self_attn.k_proj.weight"] = weights[name]
    else:
        weights[name] = weights[name][:-1]
    engine = engine_with(version=3)
    with pytest.raises(ValueError, match="k_proj"):
        engine.install(weights, 4)
    assert engine.version == 3
    engine.submit([POOL[4]])
    assert_same(drain(engine)[4], ALONE[4])


def test_weights_of_another_dtype_are_converted() -> None:
    engine = NativeEngine(MODEL.config, dtype=torch.float32)
    engine.install({name: t.double() for name, t in MODEL.state_dict().items()}, 0)
    one = request(0)
    engine.submit([one])
    done = drain(engine)[0]
    expected = forward_logprobs(MODEL, one, done).float()
    torch.testing.assert_close(done.logprobs, expected, atol=1e-4, rtol=0)


def test_training_on_does_not_change_what_was_installed() -> None:
    model = small_model()
    engine = engine_with(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    engine.submit([POOL[4]])
    assert_same(drain(engine)[4], ALONE[4])


def test_weights_that_are_not_finite_are_named() -> None:
    engine = engine_with(max_running=4)
    engine.submit(POOL)
    engine.step()
    weights = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
    weights["model.layers.0.self_attn.v_proj.weight"][0] = torch.nan
    engine.install(weights, 8)
    with pytest.raises(M2FlowError, match="version 8"):
        drain(engine)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(1, list(range(9)), new=CONTEXT), rf"9 tokens and {CONTEXT} new.*of {CONTEXT}"),
        (request(1, []), "prompt is empty"),
        (request(1, [1, VOCAB_SIZE]), f"{VOCAB_SIZE}.*ids from 0 to {VOCAB_SIZE - 1}"),
        (request(1, [-1, 2]), "-1"),
    ],
)
def test_a_wrong_request_is_refused_and_none_of_its_company_taken(
    bad: Request, message: str
) -> None:
    engine = engine_with()
    with pytest.raises(UserError, match=message):
        engine.submit([request(0), bad])
    assert_empty(engine)


def test_long_tails_change_nothing() -> None:
    """With slots refilled all the time, rows move a lot."""
    engine = engine_with(max_running=5)
    engine.submit(POOL)
    for completion in drain(engine).values():
        assert_same(completion, ALONE[completion.id])


@pytest.mark.parametrize("cells", [None, 3 * 32], ids=["room for all", "little room"])
def test_a_completion_that_has_begun_goes_on_as_it_would_have(cells: int | None) -> None:
    """Whatever of it was there: the rest is drawn as before, and what was there stays as it is."""
    limits: dict[str, Any] = {} if cells is None else {"cache_bytes": cells * CELL_BYTES}
    engine = engine_with(version=7, **limits)
    begun = {one.id: len(ALONE[one.id].token_ids) * (one.id % 4) // 4 for one in POOL}

    def of(one: Request) -> Begun:
        there, count = ALONE[one.id], begun[one.id]
        logprobs = there.logprobs[:count].tolist()
        return Begun(there.token_ids[:count].tolist(), logprobs, [3] * count)

    engine.submit([Request(one.id, one.prompt_ids, one.seed, one.params, of(one)) for one in POOL])
    for id_, completion in drain(engine).items():
        count, there = begun[id_], ALONE[id_]
        assert completion.token_ids.equal(there.token_ids)
        assert completion.logprobs[:count].equal(there.logprobs[:count])
        assert completion.logprobs.allclose(there.logprobs, atol=1e-9)
        assert completion.finish_reason == there.finish_reason
        assert completion.token_versions[:count].eq(3).all()
        assert completion.token_versions[count:].eq(7).all()


def test_prompts_of_running_requests_are_held_once() -> None:
    """In the cache, within its budget: what their prefill made goes when nobody waits for it."""
    engine = engine_with(cache_bytes=100 * CELL_BYTES)
    empty = engine.state_bytes()
    engine.submit([request(i, [i] * 20, new=4) for i in range(2)])
    engine.submit([request(2 + i, [3] * 20, new=4) for i in range(2)])
    engine.step()
    assert engine.num_running == 4
    assert not engine._prefixes._kept
    assert engine.state_bytes() - empty < 110 * CELL_BYTES
