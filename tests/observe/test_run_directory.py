"""The run directory: fresh and resumed runs, rows that survive crashes, no step told twice."""

from __future__ import annotations

import errno
import json
import math
import re
import tracemalloc
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from m2flow.errors import CannotWrite, UserError
from m2flow.observe import run_directory
from m2flow.observe.films import Film
from m2flow.observe.jsonl import append_rows, cut_after_step, encode, json_safe, read_rows
from m2flow.observe.record import MAX_ROLLOUTS, read_run
from m2flow.observe.run_directory import RunDirectory, first_and_last, held, read_metrics


def test_default_name_is_recipe_and_time_and_never_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = RunDirectory.create(None, "recipes/grpo addition.yaml", now=1_790_000_000.0)
    second = RunDirectory.create(None, "recipes/grpo addition.yaml", now=1_790_000_000.0)
    assert re.fullmatch(r"runs/grpo-addition-\d{8}-\d{6}", str(first.path))
    assert str(second.path) == f"{first.path}-2"


def test_a_fresh_run_refuses_a_directory_that_holds_one(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    run.append_metrics(1, {"reward/mean": 0.5})
    with pytest.raises(UserError, match=r"holds a run already \(metrics.jsonl\).*--resume"):
        RunDirectory.create(tmp_path / "run", "r")
    assert RunDirectory.create(tmp_path / "run", "r", resume=True).path == tmp_path / "run"


def test_a_directory_with_other_files_is_free(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert RunDirectory.create(tmp_path, "r").path == tmp_path


@pytest.mark.parametrize(("path", "words"), [(None, "--run-dir DIR"), ("nothing", "leave out")])
def test_resume_needs_a_run(path: str | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        RunDirectory.create(tmp_path / path if path else None, "r", resume=True)
    assert not (tmp_path / "nothing").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """It was a traceback. The system refuses to read a folder as it refuses another user's file."""
    for name in ("run.json", "metrics.jsonl", "samples.jsonl", "timeline.json", "config.yaml"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(UserError, match=f"{name}/{name}: cannot be read: Is a directory"):
            read_run(tmp_path / name)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunDirectory.create(tmp_path / "run", "r")


def test_documents_are_whole_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    run.write_config({"seed": 1, "learning_rate": 1e-4, "name": "Müller"})
    run.write_json(run.plan, '{"mode": "eager"}')
    run.write_json(run.profile, '{"seconds": [1.0]}')
    run.write_run(recipe="r", seed=1)
    run.write_run(finished=12.5)
    config = yaml.safe_load(run.config.read_text())
    assert list(config) == ["seed", "learning_rate", "name"]
    assert config["learning_rate"] == 1e-4
    assert json.loads(run.plan.read_text()) == {"mode": "eager"}
    assert json.loads(run.profile.read_text()) == {"seconds": [1.0]}
    assert json.loads(run.run.read_text()) == {"recipe": "r", "seed": 1, "finished": 12.5}
    names = {path.name for path in run.path.iterdir()}
    assert names == {"config.yaml", "plan.json", "profile.json", "run.json"}


def test_why_a_run_has_ended_is_said_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor took a run that ended for want of room for one that was killed."""

    def no_room(path: Path, content: bytes) -> None:
        raise CannotWrite("no room")

    run = RunDirectory.create(tmp_path / "run", "r")
    run.write_run(recipe="r", publishing=["a long line"] * 9, ended=None)
    monkeypatch.setattr(run_directory, "write_atomically", no_room)
    run.note_end(ended=5.0, why="samples.jsonl could not be written")
    run.note_end(publishing=[])  # shorter: nothing of what was there is left behind
    found = json.loads(run.run.read_text())
    assert found["why"] == "samples.jsonl could not be written"
    before = run.run.read_bytes()
    with pytest.raises(CannotWrite):
        run.note_end(why="x" * 100_000)
    assert run.run.read_bytes() == before


def test_a_document_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    run.write_run(mode="eager")
    with pytest.raises(TypeError, match="no JSON form"):
        run.write_run(mode=object())
    assert json.loads(run.run.read_text()) == {"mode": "eager"}


def test_rows_are_flushed_and_not_finite_becomes_null(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    run.append_metrics(3, {"loss/policy": math.nan, "reward/mean": math.inf, "samples": 256})
    line = run.metrics.read_text()
    assert line.endswith("\n")
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row["step"] == 3
    assert row["loss/policy"] is row["reward/mean"] is None
    assert row["time"] > 1e9


def test_resume_cuts_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    for step in range(6):
        run.append_metrics(step, {"reward/mean": step / 10})
        run.append_samples(step, [{"item": 0}, {"item": 1}])
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 6, "rewa')
    run = RunDirectory.create(run.path, "r", resume=True)
    assert run.cut_after(3) == 2 + 1 + 4
    run.append_metrics(4, {"reward/mean": 0.9})
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3, 4]
    assert read_metrics(run.path)[4]["reward/mean"] == 0.9
    assert [row["step"] for row in read_rows(run.samples).rows] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_lines_of_one_step_are_merged_in_order(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    run.append_metrics(2, {"time": 1.0, "reward/mean": 0.5})
    run.append_metrics(1, {"time": 0.0})
    run.append_metrics(2, {"time": 2.0, "eval/accuracy": 0.7})
    merged = {"step": 2, "time": 2.0, "reward/mean": 0.5, "eval/accuracy": 0.7}
    assert read_metrics(run.path) == [{"step": 1, "time": 0.0}, merged]


def test_a_noisy_figure_ends_with_the_mean_of_its_last_steps() -> None:
    """A project that had learned from 0.43 to 0.55 said `0.43 -> 0.46`, the luck of one step."""
    noisy = [0.4 + 0.002 * step + (0.1 if step % 2 else -0.1) for step in range(60)]
    rows = [{"step": step, "reward/mean": value} for step, value in enumerate(noisy)]
    first, last = first_and_last(rows, {"reward/mean"})
    assert (first["reward/mean"], last["reward/mean"]) == pytest.approx((0.405, 0.513))
    assert (first["step"], last["step"]) == (0, 59)
    assert first_and_last(rows)[1]["reward/mean"] == noisy[-1]
    assert first_and_last(rows[:19], {"reward/mean"})[1]["reward/mean"] == noisy[18]


def test_first_and_last_look_at_each_figure_alone() -> None:
    rows = [
        {"step": 0, "eval": 0.4},
        {"step": 1, "reward": 0.5, "bad": None},
        {"step": 2, "eval": 1},
    ]
    first, last = first_and_last(rows)
    assert first == {"step": 0, "eval": 0.4, "reward": 0.5}
    assert last == {"step": 2, "eval": 1, "reward": 0.5}


def test_reading_a_missing_run_gives_nothing(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none") == []


def test_a_spoiled_line_is_counted_and_a_torn_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\n[1]\n{"step": 2}\n{"st')
    assert read_rows(path).rows == [{"step": 1}, {"step": 2}]
    assert read_rows(path).unreadable == (2, 3)


@dataclass(frozen=True)
class Inner:
    value: float


class Scalar:
    """Stands for a number of an array library."""

    def tolist(self) -> float:
        return math.nan


def test_json_safe_knows_what_a_run_records() -> None:
    value = {1: (True, 2, -0.5), "data": Inner(math.inf), "array": [Scalar()]}
    expected = {"1": [True, 2, -0.5], "data": {"value": None}, "array": [None]}
    assert json_safe(value) == expected
    with pytest.raises(TypeError, match="bytes has no JSON form"):
        json_safe(b"bytes")


def test_any_text_of_a_model_survives() -> None:
    text = "\ud800 \x00 \u2028 \r\n </script> é"
    line = encode({"completion": text})
    assert b"\n" not in line
    assert json.loads(line.decode())["completion"] == text


rows_of_steps = st.lists(st.integers(0, 9), max_size=8)


@given(steps=rows_of_steps, torn=st.integers(0, 40), cut=st.integers(-1, 9))
def test_whatever_a_crash_tears_off_only_the_last_row_is_lost(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], torn: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    append_rows(path, ({"step": step, "number": n, "text": "é\n"} for n, step in enumerate(steps)))
    content = path.read_bytes()
    last_line = len(content) - (content.rfind(b"\n", 0, -1) + 1) if content else 0
    torn = min(torn, last_line)
    path.write_bytes(content[: len(content) - torn])
    whole = steps if torn <= 1 else steps[:-1]  # one byte is the line's end, no content
    assert [row["step"] for row in read_rows(path).rows] == whole
    kept = [step for step in whole if step <= cut]
    cut_after_step(path, cut)
    append_rows(path, [{"step": 0, "number": -1}])
    assert [row["step"] for row in read_rows(path).rows] == [*kept, 0]
    assert read_rows(path).unreadable == ()


def test_cutting_removes_a_torn_line_that_is_longer_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = encode({"step": 1, "text": "x" * 200_000}) + b"\n"
    path.write_bytes(first + encode({"step": 2, "text": "y" * 200_000})[:-5])
    assert cut_after_step(path, 2) == 1
    assert path.read_bytes() == first


def test_samples_need_not_fit_into_memory(tmp_path: Path) -> None:
    """A long run has gigabytes of them; resume, report and dashboard each held them all."""
    run = RunDirectory.create(tmp_path / "run", "r")
    for step in range(1, 2501):
        run.append_samples(step, [{"item": n, "completion": "x" * 5000} for n in range(4)])
    assert run.samples.stat().st_size > 50_000_000
    tracemalloc.start()
    record = read_run(run.path)
    assert run.cut_after(2400) == 400
    assert tracemalloc.get_traced_memory()[1] < 15_000_000
    tracemalloc.stop()
    assert len(record.samples) == MAX_ROLLOUTS
    assert [row["step"] for row in record.samples_of_ends] == [1] * 4 + [2500] * 4
    assert [row["item"] for row in record.samples_of_ends] == [0, 1, 2, 3] * 2
    (*_, last) = read_run(run.path).samples_of_ends
    assert (last["step"], last["item"]) == (2400, 3)


def test_steps_that_were_left_out_do_not_fill_the_disk(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    steps = range(999_900, 1_000_020)
    for step in steps:
        file = run.write_skipped(step, [{"item": 0}])
        assert file.exists()
    names = {f"step_{step}.jsonl" for step in (*steps[:50], *steps[-50:])}
    assert {path.name for path in run.skipped.iterdir()} == names
    again = run.write_skipped(999_960, [{"item": 0}])
    assert again.exists(), "the one that was written is there, of a run that went back too"


def test_one_process_alone_writes_a_run(tmp_path: Path) -> None:
    refused = pytest.raises(UserError, match="another process trains there")
    with held(tmp_path), refused, held(tmp_path, 0.0):
        pass
    with held(tmp_path, 0.0):
        pass


def test_who_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    """What a killed launcher has begun may have the lock a little longer."""
    first = ExitStack()
    first.enter_context(held(tmp_path))
    ending = Timer(0.3, first.close)
    ending.start()
    with held(tmp_path):
        ending.join()


def test_a_file_system_without_locks_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "as NFS says of a folder")

    monkeypatch.setattr(run_directory.fcntl, "flock", refuse)
    with held(tmp_path, 0.0), held(tmp_path, 0.0):
        pass


def test_what_was_left_out_of_an_abandoned_future_goes(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "r")
    for step in (2, 3):
        run.write_skipped(step, [{"reward": None}])
        run.write_films(step, [Film(b"moves", b"strip", "solved")])
    run.cut_after(2)
    assert [path.name for path in run.skipped.iterdir()] == ["step_000002.jsonl"]
    assert {path.stem.split("_")[1] for path in run.films.iterdir()} == {"000002"}
