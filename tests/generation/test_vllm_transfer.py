"""vLLM on an accelerator: weights come by its weight transfer, whole or not at all; it sleeps.

Against the stand-in, whose calls are those that vLLM documents and whose GPU memory is a file that
both processes map. Not run on a GPU.
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m2flow.errors import RunFailed
from m2flow.generation import vllm_transfer
from m2flow.generation.records import Request, SamplingParams
from m2flow.generation.vllm_engine import VLLMEngine
from m2flow.generation.vllm_transfer import Handle
from tests.generation.test_external_engines import (
    LONG,
    TOKENIZER,
    TOLERANCE,
    drained,
    gap,
    install_stand_in,
    model_of,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="needs the stand-in"
)

BUFFER = 100_000
"""Bytes: the embedding takes 4,608, a matrix of the feed-forward block more than most."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMEngine]:
    """One that takes itself to be on an accelerator."""

    def export(num_bytes: int, device: str) -> tuple[Tensor, Handle]:
        assert device == "cuda:0"
        path = str(tmp_path / "memory")
        buffer = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        return buffer, {"GPU-0": (path, num_bytes)}

    model_of(0).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(vllm_transfer, "export", export)
    monkeypatch.setattr(vllm_transfer, "BUFFER_BYTES", BUFFER)
    install_stand_in("vllm", monkeypatch)
    made = VLLMEngine(
        str(tmp_path / "model"),
        version=0,
        device="cuda:0",
        cache_bytes=1 << 27,
        start_seconds=250,
        stop_strings=True,
    )
    try:
        yield made
    finally:
        made.close()


def calls(engine: VLLMEngine) -> list[str]:
    """What was called in vLLM's process, in order."""
    lines = engine._log.read_text().splitlines()
    return [line.removeprefix("called ") for line in lines if line.startswith("called ")]


def test_an_update_is_started_sent_in_pieces_and_finished_before_its_version_counts(
    engine: VLLMEngine,
) -> None:
    """With requests running: they go on with the new weights, and nothing is drawn in between."""
    new = model_of(1)
    asked = [Request(50, LONG, 0, SamplingParams(3, 1.0))]
    assert gap(model_of(0), asked, drained(engine, asked)) < TOLERANCE
    engine.submit([Request(1, [1, 2], 0, SamplingParams(400, 1.0))])
    engine.submit([Request(2, [1, 2, 4], 0, SamplingParams(3, 1.0))])
    while engine.num_running > 1:
        engine.step()
    engine.install(new.state_dict(), 7)
    after = drained(engine, asked)
    assert gap(new, asked, after) < TOLERANCE, "head, and keys and values of before, are new too"
    assert after[50].versions == (7, 7)
    assert after[1].versions == (0, 7)
    first, init, start, *updates, finish, version = calls(engine)
    assert (first, version) == ("set_weight_version 0", "set_weight_version 7")
    assert (init, start) == ("init_weight_transfer_engine", "start_weight_update")
    assert finish == "finish_weight_update"
    assert set(updates) == {"update_weights"}
    assert len(updates) > 2
    engine.install(model_of(0).state_dict(), 8)
    assert gap(model_of(0), asked, drained(engine, asked)) < TOLERANCE
    assert calls(engine).count("init_weight_transfer_engine") == 1


def test_it_sleeps_and_wakes_with_its_weights(engine: VLLMEngine) -> None:
    """And takes new ones afterwards; a step while it sleeps ends it."""
    asked = [Request(1, [1, 2], 0, SamplingParams(8, 1.0))]
    before = drained(engine, asked)[1].token_ids.tolist()
    engine.sleep()
    engine.wake()
    assert calls(engine)[-2:] == ["sleep 1", "wake_up"]
    assert drained(engine, asked)[1].token_ids.tolist() == before
    engine.install(model_of(1).state_dict(), 3)
    assert gap(model_of(1), asked, drained(engine, asked)) < TOLERANCE
    engine.sleep()
    with pytest.raises(RunFailed, match="a step while it sleeps"):
        drained(engine, asked)


def test_an_update_that_vllm_refuses_poisons_it(engine: VLLMEngine) -> None:
    weights = model_of(1).state_dict()
    weights["model.norm.weight"] = torch.ones(5)
    with pytest.raises(RunFailed, match="has ended"):
        engine.install(weights, 1)
    assert_poisoned(engine, "RuntimeError")


def test_an_update_that_its_owner_does_not_finish_poisons_it(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as memory that runs out between two pieces."""
    whole = vllm_transfer.updates

    def cut(weights: Mapping[str, Tensor], *others: Any) -> Iterator[dict[str, Any]]:
        yield next(whole(weights, *others))
        raise torch.OutOfMemoryError("of the device")

    monkeypatch.setattr(vllm_transfer, "updates", cut)
    with pytest.raises(torch.OutOfMemoryError):
        engine.install(model_of(1).state_dict(), 1)
    assert_poisoned(engine, "was left with a part of an update")


def assert_poisoned(engine: VLLMEngine, why: str) -> None:
    """Nothing is drawn with it any more, and no later update mends it."""
    assert engine.version == 0
    with pytest.raises(RunFailed, match=why):
        drained(engine, [Request(0, [1], 0, SamplingParams(2))])
    with pytest.raises(RunFailed, match=why):
        engine.install(model_of(0).state_dict(), 2)


def test_pieces_hold_each_tensor_once_and_none_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of different widths too, each where they may lie; a tensor may exceed the buffer."""
    buffers: list[Tensor] = []

    def export(num_bytes: int, device: str) -> tuple[Tensor, Handle]:
        buffers.append(torch.empty(num_bytes, dtype=torch.uint8))
        return buffers[-1], {device: (num_bytes,)}

    monkeypatch.setattr(vllm_transfer, "export", export)
    monkeypatch.setattr(vllm_transfer, "BUFFER_BYTES", 64)
    generator = torch.Generator().manual_seed(0)
    weights = {
        "odd": torch.randn(3, generator=generator).bfloat16(),
        "wide": torch.randn(5, 2, generator=generator),
        "turned": torch.randn(3, 4, generator=generator).T,
        "large": torch.randn(30, generator=generator),
        "last": torch.randn(7, generator=generator).bfloat16(),
    }
    found: dict[str, Tensor] = {}
    for update in vllm_transfer.updates(weights, "somewhere"):
        (buffer,) = buffers
        parts = buffer[: sum(update["tensor_sizes"])].split(update["tensor_sizes"])
        for name, dtype, shape, part in zip(
            update["names"], update["dtype_names"], update["shapes"], parts, strict=True
        ):
            assert name not in found
            found[name] = part.view(getattr(torch, dtype)).view(shape).clone()
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name


class Made(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for; knows how many of them live at most."""

    def __init__(self) -> None:
        self.alive = self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        made = torch.full((4, 4), float(name))
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(made, self._gone)
        return made

    def _gone(self) -> None:
        self.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return map(str, range(20))

    def __len__(self) -> int:
        return 20


def test_tensors_that_are_made_when_asked_for_are_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as sums of a model and its adapters, all of which would be a second model there."""
    monkeypatch.setattr(vllm_transfer, "export", lambda size, _: (torch.empty(size).byte(), {}))
    monkeypatch.setattr(vllm_transfer, "BUFFER_BYTES", 200)
    given = Made()
    pieces = [name for one in vllm_transfer.updates(given, "cuda:0") for name in one["names"]]
    assert sorted(pieces, key=int) == list(given)
    assert given.most <= 2
