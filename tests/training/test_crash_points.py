"""A save that is stopped at any of its file-system calls, as its process or the machine ends.

`Disk` counts the calls of a save and stops it at one of them. The end of a process leaves what it
has written. The end of a machine takes with it what was not synced: contents of files (all of them,
or the second half), or names, newest first.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from m2flow.training import checkpoint
from m2flow.training.checkpoint import broken_file, resume_point
from tests.training.parts import state_in, write_part

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Ended(BaseException):
    """Nothing catches it, no clean-up runs."""


@dataclass
class Disk:
    """The calls of a save: counted, and what of them is not synced yet.

    Attributes:
        left: calls until the end; None while nothing is counted.
        unsynced: files whose contents are not on the disk.
        names: renamings and new names that are not on the disk, oldest first: (new, old or None).
    """

    left: int | None = None
    calls: int = 0
    unsynced: set[Path] = field(default_factory=set)
    names: list[tuple[Path, Path | None]] = field(default_factory=list)

    def begin(self, moment: int) -> None:
        self.left, self.calls, self.unsynced, self.names = moment, 0, set(), []

    def call(self) -> None:
        assert self.left is not None
        self.calls += 1
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise Ended

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left is None:
            return
        match event:
            case "open" if isinstance(arguments[0], str | Path) and arguments[2] & WRITES:
                self.call()
                path = Path(arguments[0])
                self.unsynced.add(path)
                if not path.exists():
                    self.names.append((path, None))
            case "os.mkdir" | "os.symlink":
                self.call()
                self.names.append((Path(arguments[0 if event == "os.mkdir" else 1]), None))
            case "os.rename":
                self.call()
                old, new = Path(arguments[0]), Path(arguments[1])
                self.names.append((new, old))
                self.unsynced = {moved(path, old, new) for path in self.unsynced}
            case "os.remove" | "os.rmdir":
                self.call()

    def fsync(self, descriptor: int) -> None:
        if self.left is not None:
            self.call()
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.unsynced.discard(path)
            self.names = [(new, old) for new, old in self.names if new.parent != path]

    def lose_contents(self, share: float) -> None:
        for path in self.unsynced:
            if path.is_file():
                os.truncate(path, int(path.stat().st_size * share))

    def lose_names(self) -> None:
        for new, old in reversed(self.names):
            if old is not None and os.path.lexists(new) and not os.path.lexists(old):
                new.rename(old)
            elif old is None and new.is_dir() and not new.is_symlink():
                shutil.rmtree(new)
            elif old is None and os.path.lexists(new):
                new.unlink()


def moved(path: Path, old: Path, new: Path) -> Path:
    return new / path.relative_to(old) if path.is_relative_to(old) else path


@pytest.fixture(scope="module")
def disk() -> Iterator[Disk]:
    """The disk beneath this process, with a writer of safetensors that may end half-way."""
    patch = pytest.MonkeyPatch()
    disable_progress_bar()
    made, fsync, save_file = Disk(), os.fsync, safetensors.torch.save_file

    def sync(descriptor: int) -> None:
        made.fsync(descriptor)
        fsync(descriptor)

    def save(tensors: dict[str, torch.Tensor], filename: Path, *rest: Any, **more: Any) -> None:
        path = Path(filename)
        if made.left is not None:
            made.hook("open", (str(path), "wb", WRITES))
        save_file(tensors, path, *rest, **more)
        if made.left is not None:
            whole = path.read_bytes() if made.left == 0 else b""
            if whole:
                os.truncate(path, len(whole) // 2)
            made.call()

    patch.setattr(os, "fsync", sync)
    patch.setattr(safetensors.torch, "save_file", save)
    patch.setattr("transformers.modeling_utils.safe_save_file", save)
    sys.addaudithook(made.hook)  # it cannot be taken away; it rests while `left` is None
    yield made
    made.left = None
    patch.undo()


def model(value: float) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=8,
        vocab_size=8,
    )
    made = LlamaForCausalLM(config)
    for parameter in made.parameters():
        parameter.data.fill_(value)
    return made


MODELS = {step: model(step) for step in (1, 2, 3)}


def save(root: Path, step: int, keep: int) -> None:
    """A checkpoint of a policy and a critic, as a run writes it."""
    checkpoint.sweep(root)
    folder = checkpoint.begin(root, step)
    for part in (folder / "critic", folder):
        state = {"exp_avg/w": torch.full((3,), float(step))}
        write_part(part, MODELS[step], None, state)
    checkpoint.commit(root, step, keep=keep)


def step_at(path: Path) -> int:
    """The step whose weights and state lie there, the same in every part; and it is whole."""
    assert broken_file(path) is None
    step = checkpoint.step_of(path)
    for part in (path, path / "critic"):
        weights = safetensors.torch.load_file(part / "model" / "model.safetensors")
        assert all(bool((tensor == step).all()) for tensor in weights.values())
        name = "" if part == path else "critic"
        assert bool((state_in(path, name)["exp_avg/w"] == step).all())
    return step


LOSSES: dict[str, Callable[[Disk], None]] = {
    "the process ends": lambda _: None,
    "contents are lost": lambda disk: disk.lose_contents(0.0),
    "half of each file is lost": lambda disk: disk.lose_contents(0.5),
    "names are lost": lambda disk: disk.lose_names(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_save_that_ends_at_any_call_leaves_the_newest_whole_one(
    disk: Disk, tmp_path: Path, loss: str
) -> None:
    """Over two earlier ones, of which it deletes one; and the run goes on from what is found."""
    before = tmp_path / "before"
    save(before, 1, 2)
    save(before, 2, 2)
    moment, found_steps, finished = 0, [], False
    while not finished:
        root = tmp_path / str(moment) / "checkpoints"
        shutil.copytree(before, root, symlinks=True)
        disk.begin(moment)
        try:
            save(root, 3, 2)
            finished = True
        except Ended:
            pass
        disk.left = None
        LOSSES[loss](disk)
        found = resume_point(root)
        assert found is not None
        found_steps.append(step_at(found))
        save(root, 3, 2)
        assert resume_point(root) == root / "step_000003"
        assert step_at(root / "step_000003") == 3
        assert sorted(path.name for path in root.iterdir()) == [
            "latest",
            "step_000002",
            "step_000003",
        ]
        shutil.rmtree(root)
        moment += 1
    assert moment > 60, "every call was a moment"
    assert found_steps[-1] == 3, "what has been saved is on the disk"
    assert found_steps == sorted(found_steps), "nothing is taken back"
    assert set(found_steps) == {2, 3}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_save_of_a_run(disk: Disk, tmp_path: Path, loss: str) -> None:
    """Even the folder of checkpoints is new."""
    moment, finished = 0, False
    while not finished:
        run = tmp_path / str(moment)
        run.mkdir()
        disk.begin(moment)
        try:
            save(run / "checkpoints", 1, 2)
            finished = True
        except Ended:
            pass
        disk.left = None
        LOSSES[loss](disk)
        found = resume_point(run / "checkpoints")
        assert found is None or step_at(found) == 1
        moment += 1
    assert moment > 40
    assert found is not None, "what has been saved is on the disk"
