"""Rollouts on disk: what is read is what was written, whole, for the right step; or nothing."""

from __future__ import annotations

import errno
import math
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow import Batch, Flow, Ragged, Stream, Worker, stage
from m2flow.engine.spans import Span
from m2flow.flow.rollouts import Rollouts
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.lane import frames
from m2flow.runtime.lane import journal as writing
from m2flow.runtime.lane.frames import Unwritable, frame_bytes, read_frames
from m2flow.runtime.lane.journal import JournalPlace, JournalWriter

PLENTY = 10**9


class Policy(Worker):
    @stage(streaming=True, expands=2)
    def sample(self, batch: Batch) -> Batch:
        return batch


class Learner(Worker):
    @stage(accumulates=True)
    def train(self, batch: Batch) -> Batch:
        return batch


class Training(Flow):
    policy: Policy
    learner: Learner

    def step(self, x: Stream) -> Stream:
        return self.learner.train(self.policy.sample(x))

    def sync(self) -> None:
        self.learner.publish(self.policy)


GRAPH = Training(policy=Policy(), learner=Learner()).trace()


def frame(*ids: int, step: int = 3, version: int = 3, stage: str = "policy.sample") -> Rollouts:
    return Rollouts(step, stage, version, Batch({"y": torch.tensor(ids) * 10}, ids))


def written(folder: Path, *frames: Rollouts, max_bytes: int = PLENTY) -> JournalWriter:
    writer = JournalWriter(JournalPlace("step", str(folder), max_bytes))
    for one in frames:
        writer.add(one)
    assert writer.flush(10)
    return writer


def of_step(folder: Path, step: int = 3, max_staleness: int = 0) -> dict[int, list[int]]:
    """By version the items that a step may use."""
    kept = Journal(folder, PLENTY).of_step(step, GRAPH, 4, max_staleness)
    for one in kept:
        assert one.batch["y"].tolist() == [item * 10 for item in one.batch.ids]
    return {one.version: sorted(one.batch.ids) for one in kept}


# --- frames -------------------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_plain_values_come_back_as_they_were(tmp_path_factory: Any, values: list[Any]) -> None:
    file = tmp_path_factory.mktemp("frames") / "file"
    file.write_bytes(frame_bytes(Rollouts(1, "a.b", 0, Batch({"x": values}))))
    (found,) = read_frames(file)
    assert found.batch["x"] == values
    assert repr(found.batch["x"]) == repr(values), "types too"


def test_tensors_and_data_classes_come_back_as_they_were(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(3, 4)
    span = Span(1, "call", "call", 0.0, 1.0, {"items": 2})
    columns = {
        "whole": table,
        "view": table.t()[:3],  # shares memory with the other, and is not contiguous
        "half": torch.tensor([1.5, math.nan, math.inf], dtype=torch.bfloat16),
        "truth": torch.tensor([True, False, True]),
        "empty": torch.empty(3, 0),
        "ragged": Ragged(torch.arange(5), [2, 0, 3]),
        "numpy": np.arange(3, dtype=np.uint8),
        "scalars": [np.float32(0.1), np.int64(3), np.bool_(True)],
        "tensors": [torch.ones(2), torch.zeros(()), None],
        "spans": [span, (span,), []],
        "range": range(3),
    }
    file = tmp_path / "file"
    file.write_bytes(frame_bytes(Rollouts(1, "a.b", 0, Batch(columns, (7, 5, 9)))))
    (found,) = read_frames(file)
    assert found.batch.ids == (7, 5, 9)
    for name in ("whole", "view", "half", "truth", "empty"):
        ours, theirs = found.batch[name], columns[name]
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert found.batch["ragged"].lengths == (2, 0, 3)
    assert found.batch["ragged"].values.tolist() == list(range(5))
    assert found.batch["numpy"].dtype == np.uint8
    assert [type(one) for one in found.batch["scalars"]] == [np.float32, np.int64, np.bool_]
    assert found.batch["scalars"] == columns["scalars"]
    assert found.batch["tensors"][0].tolist() == [1.0, 1.0]
    assert found.batch["tensors"][1].shape == ()
    assert found.batch["spans"] == columns["spans"]
    assert found.batch["range"] == range(3)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, torch.ones(2).to_sparse(), np.array(["a"]), 1j, Path()]
)
def test_what_a_frame_cannot_hold_is_said(value: Any) -> None:
    with pytest.raises(Unwritable):
        frame_bytes(Rollouts(1, "a.b", 0, Batch({"x": [value]})))


def test_no_class_of_others_is_made_from_a_file(tmp_path: Path) -> None:
    text = b'{"step":1,"stage":"a.b","version":0,"ids":[0],"columns":{"x":[%s]}}'
    tensors = safetensors.torch.save({})
    for name in (b'["subprocess","Popen",{"args":["true"]}]', b'["m2flow.errors","re",{}]'):
        one = text % (b'{"data":%s}' % name)
        crc = zlib.crc32(tensors, zlib.crc32(one))
        header = struct.pack("<4sIQI", b"m2j1", len(one), len(tensors), crc)
        file = tmp_path / "file"
        file.write_bytes(header + one + tensors)
        assert list(read_frames(file)) == []


def test_a_torn_end_is_left_out_wherever_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    first, second = frame_bytes(frame(1)), frame_bytes(frame(2))
    for cut in range(len(second)):
        file.write_bytes(first + second[:cut])
        assert [one.batch.ids for one in read_frames(file)] == [(1,)]
    file.write_bytes(first + second)
    assert [one.batch.ids for one in read_frames(file)] == [(1,), (2,)]


def test_what_was_damaged_is_left_out_wherever_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    first, second = frame_bytes(frame(1)), frame_bytes(frame(2))
    for place in range(len(first)):
        damaged = bytearray(first + second)
        damaged[place] ^= 0x41
        file.write_bytes(damaged)
        found = [one.batch.ids for one in read_frames(file)]
        assert found in ([], [(2,)])
        if place >= 20:  # the header is whole, so the next frame is found
            assert found == [(2,)]


# --- a step's rollouts --------------------------------------------------------------------------


def test_each_item_is_taken_once_and_for_its_own_step(tmp_path: Path) -> None:
    written(tmp_path, frame(0, 5), frame(5, 6), frame(2, step=4, version=4)).close()
    written(tmp_path, frame(6, 7)).close()
    assert of_step(tmp_path) == {3: [0, 5, 6, 7]}
    assert of_step(tmp_path, 4) == {4: [2]}
    assert of_step(tmp_path, 5) == {}
    assert Journal(tmp_path, PLENTY).steps() == [3, 4]


def test_another_version_is_left_out_unless_the_run_is_stale(tmp_path: Path) -> None:
    written(tmp_path, *(frame(x + 1, version=x) for x in (1, 2, 3, 4))).close()
    assert of_step(tmp_path) == {3: [4]}
    assert of_step(tmp_path, max_staleness=1) == {2: [3], 3: [4]}


def test_items_and_stages_that_the_flow_does_not_have_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, frame(7, 8, -1), frame(1, stage="other.sample")).close()
    assert of_step(tmp_path) == {3: [7]}


def test_files_of_steps_before_a_checkpoint_are_deleted(tmp_path: Path) -> None:
    written(tmp_path, *(frame(1, step=step, version=step) for step in (2, 3, 4))).close()
    (tmp_path / "mine").touch()
    journal = Journal(tmp_path, PLENTY)
    journal.forget_before(4)
    assert journal.steps() == [4]
    journal.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "mine").unlink()
    journal.remove()
    assert not tmp_path.exists()
    journal.remove()


# --- disks --------------------------------------------------------------------------------------


def refusing(after: int, number: int) -> Any:
    """`os.write` on a disk that takes so many bytes more, and then refuses."""
    write = os.write

    def patched(descriptor: int, content: Any) -> int:
        nonlocal after
        some = content[:after]
        if not some:
            raise OSError(number, os.strerror(number))
        after -= len(some)
        return write(descriptor, some)

    return patched


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_ends_the_journal_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder = tmp_path / "journal"
    monkeypatch.setattr(writing.os, "write", refusing(len(frame_bytes(frame(1))) + 30, number))
    writer = written(folder, frame(1), frame(2), frame(3))
    monkeypatch.undo()
    said = writer.take_trouble()
    assert said.startswith("rollouts are no longer kept for --resume: ")
    assert os.strerror(number) in said
    assert str(folder) in said
    assert writer.take_trouble() == ""
    writer.add(frame(1, step=4))
    writer.close()
    assert list(folder.iterdir()) == [], "what it took is given back"


def test_a_folder_that_cannot_be_made_ends_the_journal(tmp_path: Path) -> None:
    writer = written(tmp_path / "nowhere" / "journal", frame(1), frame(2))
    assert "No such file or directory" in writer.take_trouble()
    assert writer.take_trouble() == ""


def test_a_full_journal_waits_for_the_next_checkpoint(tmp_path: Path) -> None:
    size = len(frame_bytes(frame(1)))
    writer = written(tmp_path, frame(1), frame(2), frame(5), max_bytes=2 * size + 5)
    assert "the journal is full (`journal_gb`)" in writer.take_trouble()
    assert of_step(tmp_path) == {3: [1, 2]}
    writer.add(frame(1, step=4, version=4))
    assert writer.flush(10)
    assert writer.take_trouble() == "", "said once"
    assert of_step(tmp_path, 4) == {}
    Journal(tmp_path, PLENTY).forget_before(5)
    writer.add(frame(1, step=5, version=5))
    assert writer.flush(10)
    assert of_step(tmp_path, 5) == {5: [1]}
    writer.close()


def test_a_full_journal_packs_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def noted(one: Rollouts) -> bytes:
        packed.extend(one.batch.ids)
        return frame_bytes(one)

    monkeypatch.setattr(frames, "frame_bytes", noted)
    size = len(frame_bytes(frame(1)))
    writer = written(tmp_path, *map(frame, range(10)), max_bytes=2 * size + 5)
    assert packed == [0, 1, 2]
    assert of_step(tmp_path) == {3: [0, 1]}
    writer.close()


def test_a_thread_that_is_behind_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it cannot take is not kept, and nothing waits."""
    go_on = threading.Event()

    def slowly(one: Rollouts) -> bytes:
        assert go_on.wait(60)
        return frame_bytes(one)

    monkeypatch.setattr(frames, "frame_bytes", slowly)
    writer = JournalWriter(JournalPlace("step", str(tmp_path), PLENTY), waiting_bytes=20)
    for item in range(5):
        writer.add(frame(item))  # 8 bytes
    go_on.set()
    assert writer.flush(10)
    assert of_step(tmp_path) == {3: [0, 1]}
    writer.add(frame(6))
    writer.close()
    assert of_step(tmp_path) == {3: [0, 1, 6]}


def test_rollouts_that_cannot_be_written_are_named_once(tmp_path: Path) -> None:
    odd = Rollouts(3, "policy.sample", 3, Batch({"y": [object()]}))
    writer = written(tmp_path, odd, odd, frame(1, stage="other.sample"))
    assert writer.take_trouble() == (
        "rollouts of policy.sample are not kept for --resume: they hold builtins.object"
    )
    writer.close()
    assert len(list(tmp_path.iterdir())) == 1
