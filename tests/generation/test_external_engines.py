"""Engines of other packages in their processes, behind the native engine's calls.

The same tests run against the real vLLM where it is installed (`make test-vllm`), and else against
a stand-in that computes by transformers. SGLang is built for GPUs alone: where it is not installed,
its stand-in follows the calls and the traps that its code has.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from transformers import GPT2Config, GPT2LMHeadModel

from m2flow.errors import CannotWrite, ProcessEnded, RunFailed, UserError
from m2flow.generation import external_engine
from m2flow.generation.external_engine import (
    MOST_POSITIONS,
    ExternalEngine,
    Started,
    with_single_experts,
)
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion, Request, SamplingParams
from m2flow.generation.sglang_engine import SGLangEngine
from m2flow.generation.supported import check_experts, limit_of
from m2flow.generation.vllm_engine import BATCHED_TOKENS, VLLMEngine
from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.tokenizer import character_tokenizer
from m2flow.workloads.reasoning.encoding import context_of
from tests.clock import Clock

KINDS: dict[str, type[ExternalEngine]] = {"vllm": VLLMEngine, "sglang": SGLangEngine}
REAL = {name for name in KINDS if importlib.util.find_spec(name) is not None}
SOON = 100.0
"""Seconds within which what has to happen has happened, on however busy a machine."""

TOLERANCE = 1e-5
"""Of log-probabilities in float32; found: 4e-6."""
TOKENIZER = character_tokenizer("0123456789+=#abc")
LONG = [1 + i % 11 for i in range(300)]
"""A prompt of more than one block of keys and values, which vLLM keeps for the next who asks."""


def model_of(seed: int) -> Any:
    spec = TinySpec(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    return build_tiny(spec, vocab_size=18, eos_token_id=3, pad_token_id=0, seed=seed).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model_of(0).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


def install_stand_in(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts find the package, if it is not installed."""
    if kind not in REAL:
        fake = str(Path(__file__).with_name(f"fake_{kind}"))
        monkeypatch.syspath_prepend(fake)
        paths = [fake, *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def started(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> ExternalEngine:
    install_stand_in(kind, monkeypatch)
    return KINDS[kind](
        str(folder), version=0, cache_bytes=1 << 27, start_seconds=250, stop_strings=True, **how
    )


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared(kind: str, folder: Path) -> Iterator[ExternalEngine]:
    """One engine for all tests that leave it as it was: with the weights of seed 0."""
    with pytest.MonkeyPatch.context() as patch:
        engine = started(kind, folder, patch)
        try:
            yield engine
        finally:
            engine.close()


@pytest.fixture
def engine(shared: ExternalEngine) -> Iterator[ExternalEngine]:
    assert not shared.busy
    shared.install(model_of(0).state_dict(), 0)
    yield shared
    shared.abort(list(shared._numbers))


def requests(count: int = 12, new: int = 12, first: int = 0, **how: Any) -> list[Request]:
    params = SamplingParams(new, **{"temperature": 1.0, "stop_token_ids": (3,), **how})
    return [Request(first + i, [1 + i % 7, 5, 2], i - 6, params) for i in range(count)]


def drained(engine: ExternalEngine | NativeEngine, asked: list[Request]) -> dict[int, Completion]:
    engine.submit(asked)
    found: dict[int, Completion] = {}
    deadline = time.monotonic() + SOON
    while engine.busy:
        assert time.monotonic() < deadline
        found |= {done.id: done for done in engine.step()}
    return found


def tokens(found: dict[int, Completion]) -> dict[int, list[int]]:
    return {number: done.token_ids.tolist() for number, done in found.items()}


def gap(model: Any, asked: list[Request], found: dict[int, Completion]) -> float:
    """The largest difference to the log-probabilities of a forward pass; without top-k and such."""
    worst = 0.0
    for one in asked:
        done, prompt = found[one.id], list(one.prompt_ids)
        with torch.inference_mode():
            logits_TV = (
                model(torch.tensor([[*prompt, *done.token_ids.tolist()]])).logits[0].double()
            )
        scaled_TV = (logits_TV / (one.params.temperature or 1.0)).log_softmax(-1)
        expected_T = scaled_TV[len(prompt) - 1 : -1].gather(1, done.token_ids[:, None])[:, 0]
        worst = max(worst, float((expected_T - done.logprobs).abs().max()))
    return worst


def text_of(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))


def native() -> NativeEngine:
    model = model_of(0)
    engine = NativeEngine(model.config, text_of=text_of)
    engine.install(model.state_dict(), 0)
    return engine


def test_greedy_tokens_are_those_of_the_native_engine(engine: ExternalEngine) -> None:
    found, expected = (drained(one, requests(temperature=0.0)) for one in (engine, native()))
    assert tokens(found) == tokens(expected)
    for number, done in found.items():
        torch.testing.assert_close(
            done.logprobs, expected[number].logprobs, atol=TOLERANCE, rtol=0.0
        )
        assert done.finish_reason == expected[number].finish_reason
        assert done.versions == (0, 0)


def test_stop_strings_end_at_the_token_where_the_native_engine_ends(engine: ExternalEngine) -> None:
    """Strings of two tokens and of one, taken from what is drawn without them."""
    free = drained(engine, requests(temperature=0.0, stop_token_ids=()))
    text = text_of(free[0].token_ids.tolist())
    asked = requests(temperature=0.0, stop_token_ids=(), stop_strings=(text[3:5], text[8]))
    found, expected = (drained(one, asked) for one in (engine, native()))
    assert tokens(found) == tokens(expected)
    assert len(found[0].token_ids) < 12
    assert {done.finish_reason for done in found.values()} >= {"stop"}
    for number, done in found.items():
        assert done.finish_reason == expected[number].finish_reason
        assert len(done.logprobs) == len(done.token_versions) == len(done.token_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_a_forward_pass(
    engine: ExternalEngine, temperature: float
) -> None:
    asked = requests(temperature=temperature)
    assert gap(model_of(0), asked, drained(engine, asked)) < TOLERANCE


def test_the_same_seed_draws_the_same_tokens_and_another_others(engine: ExternalEngine) -> None:
    asked = requests(24, first=100)
    assert {one.seed for one in asked} >= {-1, -2, 0}, "vLLM takes -1 for no seed"
    first = tokens(drained(engine, asked))
    assert first == tokens(drained(engine, asked))
    assert first == tokens(drained(engine, asked[:12])) | tokens(drained(engine, asked[12:]))
    params = SamplingParams(12, 1.0)
    of_one_prompt = [Request(i, [1, 2], i, params) for i in range(16)]
    assert len({tuple(ids) for ids in tokens(drained(engine, of_one_prompt)).values()}) > 8


def test_answers_end_at_stop_tokens_and_at_their_length(engine: ExternalEngine) -> None:
    ended = drained(engine, requests(24, new=40, stop_token_ids=(3, 7)))
    assert {done.finish_reason for done in ended.values()} == {"stop", "length"} or all(
        done.finish_reason == "stop" for done in ended.values()
    )
    for done in ended.values():
        ids = done.token_ids.tolist()
        assert (ids[-1] in (3, 7)) == (done.finish_reason == "stop"), "it is part of the answer"
        assert not {3, 7} & set(ids[:-1])
    for done in drained(engine, requests(4, new=9, stop_token_ids=())).values():
        assert (len(done.token_ids), done.finish_reason) == (9, "length")


def test_top_k_top_p_and_min_p_leave_the_likeliest(engine: ExternalEngine) -> None:
    """SGLang draws from them too, but records what the log-probabilities were before."""
    exact = isinstance(engine, VLLMEngine)
    greedy, asked = drained(engine, requests(temperature=0.0)), requests(top_k=1)
    found = drained(engine, asked)
    assert tokens(found) == tokens(greedy)
    assert exact == all(done.logprobs.abs().max() == 0 for done in found.values())
    assert exact or gap(model_of(0), asked, found) < TOLERANCE
    for how in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}):
        asked = requests(stop_token_ids=(), new=1, count=24, **how)
        expected = drained(native(), asked)
        of_native = {(one.prompt_ids[0], int(expected[one.id].token_ids)): one.id for one in asked}
        found = drained(engine, asked)
        assert exact or gap(model_of(0), asked, found) < TOLERANCE
        for one in asked if exact else ():  # of tokens that both have drawn
            done = found[one.id]
            if other := of_native.get((one.prompt_ids[0], int(done.token_ids))):
                torch.testing.assert_close(
                    done.logprobs, expected[other].logprobs, atol=TOLERANCE, rtol=0.0
                )


def test_new_weights_are_installed_under_requests_that_go_on(engine: ExternalEngine) -> None:
    pid, new = engine._process.pid, model_of(1)
    asked = [Request(50, LONG, 0, SamplingParams(3, 1.0))]
    before = drained(engine, asked)
    assert gap(model_of(0), asked, before) < TOLERANCE
    engine.submit([Request(1, [1, 2], 0, SamplingParams(1000, 1.0))])
    engine.submit([Request(2, [1, 2, 4], 0, SamplingParams(3, 1.0))])
    while engine.num_running > 1:
        engine.step()
    engine.install(new.state_dict(), 7)
    assert not list(engine._folders[-1].iterdir()), "the file of the weights is gone"
    after = drained(engine, asked)
    assert engine._process.pid == pid
    assert engine._process.poll() is None
    # Neither a head that was left behind, nor keys and values of the old weights.
    assert gap(new, asked, after) < TOLERANCE
    assert after[50].versions == (7, 7)
    assert after[1].versions == (0, 7)
    assert len(after[1].token_ids) == 1000
    last = Request(1, [1, 2, *after[1].token_ids[:-1].tolist()], 0, SamplingParams(1, 1.0))
    versions = after[1].token_versions.tolist()
    assert versions == sorted(versions)
    end = replace(after[1], token_ids=after[1].token_ids[-1:], logprobs=after[1].logprobs[-1:])
    assert gap(new, [last], {1: end}) < TOLERANCE, "its own old keys and values are gone too"


def test_prompts_that_are_long_together(engine: ExternalEngine) -> None:
    """vLLM 0.32 cuts one of them, and on a CPU fails at its seed, unless it is told not to."""
    params = SamplingParams(2, 1.0)
    asked = [Request(i, [i % 18, *LONG], i, params) for i in range(12)]
    assert sum(len(one.prompt_ids) for one in asked) > BATCHED_TOKENS
    assert gap(model_of(0), asked, drained(engine, asked)) < TOLERANCE


def test_what_is_dropped_does_not_come_back(engine: ExternalEngine) -> None:
    engine.submit(requests(3, new=200, stop_token_ids=()))
    engine.abort([0, 2, 77])
    assert engine.num_running == 1
    again = drained(engine, requests(1, new=4, stop_token_ids=()))
    assert again.keys() == {0, 1}
    engine.submit(requests(30, new=6, stop_token_ids=()))
    engine.abort(range(5))
    assert drained(engine, []).keys() == set(range(5, 30)), "whatever they are called there"
    assert len(again[0].token_ids) == 4, "of the request that was made last under this number"


def test_a_request_that_cannot_be_answered_is_refused_before_the_engine_sees_it(
    engine: ExternalEngine,
) -> None:
    good = Request(0, [1], 0, SamplingParams(2))
    for prompt, new, words in (
        ([], 2, "the prompt is empty"),
        ([1, 18], 2, "a token that the model does not have"),
        ([1], 2048, "do not fit the context of 2048"),
    ):
        with pytest.raises(UserError, match=words):
            engine.submit([good, Request(1, prompt, 0, SamplingParams(new))])
    assert drained(engine, [good]).keys() == {0}


def test_it_listens_to_nobody_on_the_network(engine: ExternalEngine) -> None:
    """Only to this machine; of vLLM itself in `make test-vllm`."""
    process = psutil.Process(engine._process.pid)
    sockets = [
        one
        for each in (process, *process.children(recursive=True))
        for one in each.net_connections("inet")
    ]
    listening = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
    assert all(ip_address(address).is_loopback for address in listening), listening


def test_code_in_the_model_s_folder_is_not_trusted(engine: ExternalEngine, folder: Path) -> None:
    """In so many words, whatever the package would do by itself."""
    config = model_of(0).config
    settings = engine._settings(Started(str(folder), config, 4, "float32", "cpu", 1 << 27, True))
    assert settings["trust_remote_code"] is False


def test_sleeping_on_a_cpu_changes_nothing(engine: ExternalEngine) -> None:
    engine.sleep()
    engine.wake()
    assert drained(engine, requests(1)).keys() == {0}
    assert engine.state_bytes() > 1 << 27


def test_a_head_may_be_an_embedding_of_any_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner hands the tied tensor over under both names."""
    shape = {"vocab_size": 18, "n_embd": 64, "n_layer": 1, "n_head": 1, "n_positions": 64}
    first, new = (GPT2LMHeadModel(GPT2Config(**shape, initializer_range=x)) for x in (0.02, 0.5))
    first.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert context_of(str(tmp_path)) == 64
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    engine = started(kind, tmp_path, monkeypatch, max_running=4096)
    try:
        engine.install(new.eval().state_dict(), 1)
        asked = requests(2)
        assert gap(new, asked, drained(engine, asked)) < TOLERANCE
    finally:
        engine.close()


def test_a_model_s_positions_are_those_before_factors_for_long_texts() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    for given, positions in (
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear"}}, 64),
        ({"max_position_embeddings": 131072, "rope_parameters": rope}, 4096),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "su"},  # as published before it was called longrope
            },
            4096,
        ),
        ({"n_positions": 1024}, 1024),
        ({}, MOST_POSITIONS),  # such as a model that keeps a state
    ):
        assert (limit_of(given)[1] or MOST_POSITIONS) == positions


def test_its_end_is_an_error_of_one_line_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for one that says nothing, which would be waited for."""
    monkeypatch.setattr(external_engine, "SILENT_SECONDS", 3600.0)
    engine = started("vllm", folder, monkeypatch)
    try:
        engine.submit(requests(4, new=1000, stop_token_ids=()))
        engine.step()
        os.kill(engine._process.pid, signal.SIGKILL)
        with pytest.raises(ProcessEnded, match=r"^\w+'s process was ended by SIGKILL[^\n]*$"):
            drained(engine, [])
        engine.abort([0])  # as a call does whose engine has failed: its error shall stay the first
        with pytest.raises(RunFailed):
            engine.install({}, 5)
    finally:
        engine.close()
    assert not [left for left in engine._folders if left.exists()]


def test_one_that_hangs_is_given_up(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane said all the time that its call goes on: nobody would ever have noticed."""
    clock, silent = Clock(), external_engine.SILENT_SECONDS
    monkeypatch.setattr(external_engine, "time", clock)
    engine = started(kind, folder, monkeypatch)

    def wait_in_vain() -> None:
        while engine.busy:  # what it has said before is still taken in
            clock.now += 1.1 * silent
            engine.step()

    try:
        drained(engine, requests(1, first=2, new=2))
        engine.submit(requests(1, new=1000, stop_token_ids=()))
        for _ in range(3):  # it works, and says so
            clock.now += 0.9 * silent
            while engine.busy and engine._heard < clock.now:
                engine.step()
        assert engine._process.poll() is None
        engine.submit(requests(1, first=1, new=1000, stop_token_ids=()))
        os.kill(engine._process.pid, signal.SIGSTOP)
        with pytest.raises(ProcessEnded, match="has said nothing for 300 s while it was to draw"):
            wait_in_vain()
    finally:
        engine._process.kill()
        engine.close()


def test_its_files_lie_where_its_owner_has_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray kills engine and lane together: somebody else must be able to find them."""
    (tmp_path / "m2flow-of-this-test").mkdir()
    engine = started("vllm", folder, monkeypatch, scratch=tmp_path / "m2flow-of-this-test")
    try:
        here, *shared = engine._folders
        assert here.parent == tmp_path / "m2flow-of-this-test"
        assert all(path.name.startswith("m2flow-of-this-test-vllm-") for path in shared)
    finally:
        engine.close()
    assert not [left for left in engine._folders if left.exists()]


def test_an_update_that_fails_ends_it_and_says_why(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(kind, folder, monkeypatch)
    weights = model_of(0).state_dict()
    weights["model.norm.weight"] = torch.ones(5)
    try:
        with pytest.raises(RunFailed, match=r"has ended \(exit code 1\)\. \w+: .*\n(.|\n)*5\b"):
            engine.install(weights, 1)
    finally:
        engine.close()


def test_asleep_on_an_accelerator_it_keeps_its_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in computes on a CPU whatever it is told, and forgets what SGLang would."""
    if "sglang" in REAL:
        pytest.skip("needs the stand-in")
    engine = started("sglang", folder, monkeypatch, device="cuda:0")
    try:
        before = tokens(drained(engine, requests(3)))
        engine.sleep()
        engine.wake()
        assert tokens(drained(engine, requests(3))) == before
    finally:
        engine.close()


OWNER = """
import sys, time
from m2flow.generation.vllm_engine import VLLMEngine
from m2flow.generation.records import Request, SamplingParams
engine = VLLMEngine(sys.argv[1], version=0, cache_bytes=1 << 27)
engine.submit([Request(0, [1], 0, SamplingParams(2000))])
print(engine._process.pid, "vllm" in sys.modules, *engine._folders, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in("vllm", monkeypatch)
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        try:
            pid, imported, *folders = owner.stdout.readline().split()
            assert imported == "False", "the owner's process never imports it"
        finally:
            owner.kill()
        deadline = time.monotonic() + SOON
        while is_running(int(pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert folders
    assert not [left for left in folders if Path(left).exists()]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("name", KINDS)
def test_without_the_package_it_says_how_to_get_it(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    words = rf"generation\.engine: {KINDS[name].label} is not installed.*m2flow\[{name}\]"
    with pytest.raises(UserError, match=words):
        KINDS[name](str(folder), version=0)


def test_experts_are_handed_over_one_by_one() -> None:
    """By the names of published checkpoints, which other engines know."""
    gate_up, down = torch.arange(48.0).view(2, 6, 4), torch.arange(24.0).view(2, 4, 3)
    block = "model.layers.0.mlp.experts"
    plain = {"model.embed_tokens.weight": torch.zeros(2, 2)}
    given = {**plain, f"{block}.gate_up_proj": gate_up, f"{block}.down_proj": down}
    found = with_single_experts(given)
    wanted = {
        f"{block}.{e}.{part}.weight": tensor
        for e in range(2)
        for part, tensor in (
            ("gate_proj", gate_up[e, :3]), ("up_proj", gate_up[e, 3:]), ("down_proj", down[e]),
        )
    }  # fmt: skip
    assert found.keys() == {*plain, *wanted}
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())


def test_experts_of_other_names_are_refused() -> None:
    check_experts({"model_type": "qwen3_moe", "num_experts": 8})
    check_experts({"model_type": "qwen3"})
    with pytest.raises(UserError, match=r"qwen3_moe, or generation\.engine: native"):
        check_experts({"model_type": "mixtral", "num_local_experts": 8})


def test_where_shared_memory_is_full_weights_go_by_the_disk(
    engine: ExternalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, tried = safetensors.torch.save_file, list[Path]()
    full = {engine._folders[-1]}

    def save_file(tensors: Any, file: Path) -> None:
        tried.append(file.parent)
        if file.parent in full:
            file.write_bytes(b"a part")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(tensors, file)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    engine.install(model_of(1).state_dict(), 1)
    assert tried == [engine._folders[-1], engine._folders[0]]
    assert engine.version == 1
    full.add(engine._folders[0])
    with pytest.raises(CannotWrite, match="make room there"):
        engine.install(model_of(0).state_dict(), 2)
    assert not [one for folder in engine._folders for one in folder.glob("*.safetensors")]
