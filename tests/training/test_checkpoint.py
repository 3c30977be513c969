"""Checkpoints: a writer may die at any moment, and nothing that was saved is lost."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from m2flow.errors import UserError
from m2flow.training import checkpoint
from m2flow.training.checkpoint import broken_file, resume_point, trainer_folder
from tests.training.parts import state_in, write_part

STATE = "shard-00001-model-00001-of-00001.safetensors"
"""The file of a lone lane."""


class Weights:
    """A model of one number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def save_pretrained(self, save_directory: str) -> None:
        folder = Path(save_directory)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text(str(self.value))


def save(
    root: Path,
    step: int,
    model: Any,
    tokenizer: Any,
    trainer_state: dict[str, torch.Tensor],
    keep: int | None = None,
) -> Path:
    """A checkpoint of one part, as a run writes it."""
    checkpoint.sweep(root)
    folder = checkpoint.begin(root, step)
    write_part(folder, model, tokenizer, trainer_state)
    return checkpoint.commit(root, step, keep=keep)


def put(root: Path, step: int, value: float | None = None, keep: int | None = None) -> Path:
    value = float(step) if value is None else value
    state = {"exp_avg/w": torch.full((3,), value), "num_steps": torch.tensor(step)}
    return save(root, step, Weights(value), None, state, keep)


def test_a_part_that_a_lost_writer_has_begun_is_written_anew(tmp_path: Path) -> None:
    """It ended in FileExistsError where a lane was killed while it saved."""
    folder = checkpoint.begin(tmp_path, 3)
    state = {"exp_avg/w": torch.zeros(3), "num_steps": torch.tensor(3)}
    write_part(folder, Weights(1.0), None, {**state, "exp_avg/w": torch.ones(3)})
    (folder / "model" / "half of a shard").touch()
    write_part(folder, Weights(3.0), None, state)
    final = checkpoint.commit(tmp_path, 3)
    assert (final / "model" / "weights").read_text() == "3.0"
    assert not (final / "model" / "half of a shard").exists()
    assert not state_in(final)["exp_avg/w"].any()


def value_at(path: Path) -> float:
    """The value saved, the same in every part."""
    values = {
        float((path / "model" / "weights").read_text()),
        float(state_in(path)["exp_avg/w"][0]),
    }
    assert len(values) == 1
    return values.pop()


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = put(tmp_path, 3)
    assert path == tmp_path / "step_000003" == resume_point(tmp_path)
    assert (tmp_path / "latest").readlink() == Path("step_000003")
    assert checkpoint.step_of(path) == 3
    assert value_at(path) == 3.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000003"]


def test_nothing_saved_nothing_to_resume(tmp_path: Path) -> None:
    assert resume_point(tmp_path) is None
    assert resume_point(tmp_path / "absent") is None


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, no clean-up runs."""


class Killer:
    """Kills at the n-th change of the file system, as Python's audit hooks report them."""

    events = ("open", "os.rename", "os.mkdir", "os.symlink", "os.remove", "os.rmdir")

    def __init__(self) -> None:
        self.left: int | None = None
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left is not None and event in self.events:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    killer = Killer()
    yield killer
    killer.left = None  # a hook cannot be taken away, but it can rest


def killed_at(killer: Killer, moment: int, root: Path, step: int, **options: Any) -> bool:
    killer.left = moment
    try:
        put(root, step, **options)
    except Killed:
        return True
    finally:
        killer.left = None
    return False


@pytest.mark.parametrize("keep", [None, 1])
def test_writer_killed_at_any_moment_loses_nothing(
    tmp_path: Path, killer: Killer, keep: int | None
) -> None:
    moment, steps_found = 0, set()
    while True:
        root = tmp_path / str(moment)
        put(root, 1)
        died = killed_at(killer, moment, root, 2, keep=keep)
        found = resume_point(root)
        assert found is not None
        steps_found.add(value_at(found))
        put(root, 2, keep=keep)
        assert value_at(root / "step_000002") == 2.0
        left = {path.name for path in root.iterdir()}
        assert left - {"step_000001"} == {"latest", "step_000002"}
        assert ("step_000001" in left) == (keep is None)
        if not died:
            break
        moment += 1
    assert moment > 20
    assert steps_found == {1.0, 2.0}


def test_first_writer_killed_at_any_moment(tmp_path: Path, killer: Killer) -> None:
    """Before the link there is either nothing to resume or one whole checkpoint."""
    moment = 0
    while killed_at(killer, moment, root := tmp_path / str(moment), 1):
        found = resume_point(root)
        assert found is None or value_at(found) == 1.0
        moment += 1
    assert moment > 10


def test_writer_killed_while_it_replaces_an_abandoned_future(
    tmp_path: Path, killer: Killer
) -> None:
    """The run went on from step 1 although step 2 had been saved, and comes to step 2 again."""
    moment, died = 0, True
    while died:
        root = tmp_path / str(moment)
        put(root, 1)
        put(root, 2, value=-2.0)
        (root / "latest").unlink()
        (root / "latest").symlink_to("step_000001")
        died = killed_at(killer, moment, root, 2)
        found = resume_point(root)
        assert found is not None
        assert value_at(found) == (1.0 if found.name == "step_000001" else 2.0)
        moment += 1
    assert resume_point(root) == root / "step_000002"


def test_a_copy_that_has_followed_the_link_goes_on(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "latest").unlink()
    shutil.copytree(tmp_path / "step_000001", tmp_path / "latest")
    assert checkpoint.resume_point(tmp_path) == tmp_path / "step_000001"
    put(tmp_path, 2)
    assert (tmp_path / "latest").readlink() == Path("step_000002")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step_000001",
        "step_000002",
    ]


def test_step_that_latest_names_already_stays(tmp_path: Path) -> None:
    put(tmp_path, 1)
    put(tmp_path, 1, value=-1.0)
    assert value_at(tmp_path / "step_000001") == 1.0


@pytest.mark.parametrize(
    ("file", "damage", "found"),
    [
        ("model/weights", "truncate", "0 bytes, 3 were written"),
        (f"trainer/{STATE}", "delete", f"{STATE} is missing"),
        ("MANIFEST.json", "delete", "MANIFEST.json is missing"),
        ("MANIFEST.json", "truncate", "MANIFEST.json cannot be read"),
    ],
)
def test_broken_checkpoint_is_named_and_a_whole_one_offered(
    tmp_path: Path, file: str, damage: str, found: str
) -> None:
    put(tmp_path, 1)
    broken = put(tmp_path, 2)
    if damage == "truncate":
        (broken / file).write_text("")
    else:
        (broken / file).unlink()
    with pytest.raises(UserError) as caught:
        resume_point(tmp_path)
    assert found in str(caught.value)
    assert f"resume from {tmp_path / 'step_000001'} instead" in str(caught.value)


def test_altered_file_of_the_same_size_is_found_when_a_run_goes_on(tmp_path: Path) -> None:
    """Once: each lane of a gang once read the whole checkpoint for it."""
    path = put(tmp_path, 1)
    (path / "model" / "weights").write_text("9.0")
    assert "weights is not what was written" in str(broken_file(path))
    with pytest.raises(UserError, match="weights is not what was written"):
        resume_point(tmp_path)
    assert trainer_folder(path) == path / "trainer"


def test_files_are_read_side_by_side_and_the_first_broken_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread had read terabytes one file after the other, at 1.4 GB a second."""
    path, readers = put(tmp_path, 1), set()
    read = checkpoint._sha256

    def noted(file: Path) -> str:
        readers.add(threading.current_thread().name)
        return read(file)

    monkeypatch.setattr(checkpoint, "_sha256", noted)
    assert broken_file(path) is None
    assert readers
    assert threading.current_thread().name not in readers
    files = sorted(json.loads((path / checkpoint.MANIFEST).read_text())["files"])
    (path / files[-1]).unlink()
    assert str(broken_file(path)).endswith("is missing")
    content = (path / files[0]).read_bytes()
    (path / files[0]).write_bytes(bytes(reversed(content[:-1])) + b"?")
    assert broken_file(path) == f"{path / files[0]} is not what was written"


def test_a_manifest_that_leaves_files_out_is_refused(tmp_path: Path) -> None:
    """One without any file had called whatever lay there whole."""
    path = put(tmp_path, 1)
    manifest = path / checkpoint.MANIFEST
    content = json.loads(manifest.read_text())
    del content["files"]["model/weights"]
    manifest.write_text(json.dumps(content))
    assert "model/weights is not in " in str(broken_file(path))
    manifest.write_text('{"files": {}}')
    assert broken_file(path) is not None
    with pytest.raises(UserError, match="is not whole"):
        resume_point(tmp_path)


def test_a_lane_looks_for_a_file_that_is_cut_or_gone(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    (path / "model" / "weights").write_text("9")
    with pytest.raises(UserError, match=r"not whole: .*weights has 1 bytes, 3 were written"):
        trainer_folder(path)


def test_a_checkpoint_of_an_earlier_version_is_said_to_be_one(tmp_path: Path) -> None:
    (checkpoint.begin(tmp_path, 1) / "trainer.safetensors").write_text("1")
    path = checkpoint.commit(tmp_path, 1)
    with pytest.raises(UserError, match=r"has no trainer.*an earlier version wrote it"):
        trainer_folder(path)


def test_latest_that_names_nothing_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    put(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_000007")
    with pytest.raises(UserError, match=r"step_000007.*step_000001 instead"):
        resume_point(tmp_path)


def test_no_whole_checkpoint_left_is_said_plainly(tmp_path: Path) -> None:
    (put(tmp_path, 1) / "MANIFEST.json").unlink()
    with pytest.raises(UserError, match="no whole checkpoint is left"):
        resume_point(tmp_path)


def test_retention_keeps_the_newest_and_what_latest_names(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        put(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000003", "step_000004"]
    with pytest.raises(AssertionError):
        put(tmp_path, 5, keep=0)


def test_retention_spares_the_checkpoint_that_workers_load_from(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write_part(checkpoint.begin(tmp_path, step), Weights(1.0), None, {})
        checkpoint.commit(tmp_path, step, keep=1, in_use=tmp_path / "step_000002")
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000002", "step_000004"]


def test_retention_does_not_count_an_abandoned_future(tmp_path: Path) -> None:
    for step in (1, 5, 6, 2):
        put(tmp_path, step, keep=None if step > 2 else 1)
    assert resume_point(tmp_path) == tmp_path / "step_000002"
    assert not (tmp_path / "step_000001").exists()


def test_several_writers_may_fill_one_checkpoint(tmp_path: Path) -> None:
    partial = checkpoint.begin(tmp_path, 4)
    assert resume_point(tmp_path) is None
    for shard in range(2):
        (partial / f"shard_{shard}").write_text("...")
    path = checkpoint.commit(tmp_path, 4)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    assert set(manifest["files"]) == {"shard_0", "shard_1"}


def test_model_folder_is_one_that_transformers_reads(tmp_path: Path, make_model: Any) -> None:
    model = make_model(torch.float32)
    vocabulary = {str(token): token for token in range(7)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="0"))
    )
    path = save(tmp_path, 1, model, tokenizer, {"num_steps": torch.tensor(1)})
    again = AutoModelForCausalLM.from_pretrained(path / "model")
    for (name, one), (_, other) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    again = PreTrainedTokenizerFast.from_pretrained(path / "model")
    assert again.get_vocab() == vocabulary


def test_a_part_that_begins_later_leaves_what_another_part_has_written(tmp_path: Path) -> None:
    """`begin` once swept up every folder that was being written, those of other parts included."""
    state = {"num_steps": torch.tensor(4)}
    write_part(checkpoint.begin(tmp_path, 4) / "critic", Weights(1.0), None, state)
    write_part(checkpoint.begin(tmp_path, 4), Weights(2.0), None, state)
    path = checkpoint.commit(tmp_path, 4)
    assert (path / "critic" / "model" / "weights").read_text() == "1.0"
    assert (path / "model" / "weights").read_text() == "2.0"


def test_each_part_has_a_state_of_its_own(tmp_path: Path) -> None:
    """It was once the last of two states that were read."""
    for part, value in (("critic", 1.0), ("", 2.0)):
        folder = checkpoint.begin(tmp_path, 4) / part
        write_part(folder, Weights(value), None, {"x": torch.tensor(value)})
    path = checkpoint.commit(tmp_path, 4)
    assert float(state_in(path, "critic")["x"]) == 1.0
    assert float(state_in(path)["x"]) == 2.0
    with pytest.raises(UserError, match="has no reward"):
        trainer_folder(path, "reward")


def test_a_broken_checkpoint_that_no_link_names_is_not_passed_over(tmp_path: Path) -> None:
    """A copy without links began again, and the rows of its figures were removed."""
    (put(tmp_path, 1) / "model" / "weights").write_text("")
    (tmp_path / "latest").unlink()
    with pytest.raises(UserError, match=r"step_000001.*no whole checkpoint is left"):
        resume_point(tmp_path)


def test_latest_that_names_no_step_is_an_error(tmp_path: Path) -> None:
    """It was a traceback: nothing says how many steps its weights have taken."""
    shutil.copytree(put(tmp_path, 1), tmp_path / "best")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("best")
    with pytest.raises(UserError, match=r"latest: names no checkpoint.*'best'.*step_NNNNNN"):
        resume_point(tmp_path)
