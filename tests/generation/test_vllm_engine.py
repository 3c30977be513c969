"""vLLM's process behind the native engine's calls, with a stand-in that draws by rule."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from m2flow.errors import RunFailed, UserError
from m2flow.generation.records import Completion, Request, SamplingParams
from m2flow.generation.vllm_engine import SHARED_MEMORY, VLLMEngine
from m2flow.models.causal_lm import TinySpec, build_tiny

FAKE = Path(__file__).with_name("fake_vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    spec = TinySpec(hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    build_tiny(spec, vocab_size=9, eos_token_id=6, pad_token_id=8, seed=0).save_pretrained(path)
    return path


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMEngine]:
    monkeypatch.syspath_prepend(str(FAKE))
    paths = [str(FAKE), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    made = VLLMEngine(str(folder), version=3, start_seconds=60)
    try:
        yield made
    finally:
        made.close()


def request(number: int, seed: int, new: int = 5, stop: tuple[int, ...] = ()) -> Request:
    return Request(number, [1, 2], seed, SamplingParams(new, 1.0, stop))


def drained(engine: VLLMEngine) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    deadline = time.monotonic() + 30
    while engine.busy:
        assert time.monotonic() < deadline
        found |= {done.id: done for done in engine.step()}
    return found


def test_requests_come_back_as_the_native_engine_gives_them(engine: VLLMEngine) -> None:
    engine.submit([request(4, 0), request(9, 2, new=20, stop=(6,))])
    assert engine.num_running == 2
    found = drained(engine)
    assert found[4].token_ids.tolist() == [0, 1, 2, 3, 4]
    assert found[4].logprobs.tolist() == [0.0, -0.5, -1.0, -1.5, -2.0]
    assert found[4].finish_reason == "length"
    assert found[9].token_ids.tolist() == [2, 3, 4, 5, 6], "the stop token is part of it"
    assert found[9].finish_reason == "stop"
    assert found[4].versions == (3, 3)
    assert engine.num_running == 0


def test_weights_are_installed_under_requests_that_go_on(engine: VLLMEngine) -> None:
    weights = {"model.embed_tokens.weight": torch.tensor([2.0]), "other": torch.zeros(3)}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    engine.submit([request(1, 0, new=2000)])
    before = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
    engine.install(weights, 4)
    assert not [path for path in set(SHARED_MEMORY.iterdir()) - before if "vllm" in path.name]
    engine.submit([request(2, 0, new=3)])
    found = drained(engine)
    assert found[1].versions == (3, 4)
    assert found[2].versions == (4, 4)
    assert found[2].token_ids.tolist() == [2, 3, 4]
    assert found[1].token_ids.tolist()[-1] == (1999 + 2) % 7


def test_what_is_dropped_does_not_come_back(engine: VLLMEngine) -> None:
    engine.submit([request(number, number, new=50) for number in range(3)])
    engine.abort([0, 2, 77])
    assert drained(engine).keys() == {1}


def test_sleeping_on_a_cpu_changes_nothing(engine: VLLMEngine) -> None:
    engine.sleep()
    engine.wake()
    engine.submit([request(0, 0)])
    assert drained(engine).keys() == {0}
    assert engine.state_bytes() > 4e9


def test_its_end_is_an_error_within_seconds(engine: VLLMEngine) -> None:
    engine.submit([request(0, 0, new=10**6)])
    engine.step()
    os.kill(engine._process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"vLLM's process has ended \(exit code -9\)"):
        drained(engine)
    assert time.monotonic() - start < 10
    with pytest.raises(RunFailed):
        engine.install({}, 5)


def test_what_it_refuses_is_told_with_its_log(engine: VLLMEngine) -> None:
    engine.submit([Request(0, [666], 0, SamplingParams(2))])
    with pytest.raises(
        RunFailed, match=r"ValueError: a prompt that vLLM refuses\n(.|\n)*Traceback"
    ):
        drained(engine)


def test_without_vllm_it_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        UserError, match=r"generation\.engine: vLLM is not installed.*m2flow\[vllm\]"
    ):
        VLLMEngine(str(folder), version=0)


def test_it_ends_with_its_owner(engine: VLLMEngine) -> None:
    engine._connection.close()
    assert engine._process.wait(10) == 0
    assert "vllm" not in sys.modules, "the owner's process never imports it"
