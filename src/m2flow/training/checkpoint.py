"""Checkpoints that are either whole or not there, however the writer dies.

`root/step_NNNNNN/` holds `model/` (Hugging Face layout), `trainer/` (`trainer_state.py` beside this
file) and, written last, `MANIFEST.json` with size and SHA-256 of every file. All of it is written
and fsynced in a hidden sibling folder, then renamed; then the link `latest` is replaced. A folder
without a manifest, or whose files do not match it, is never resumed from.

Several writers may fill the folder that `begin` gives, each a part of it, before one of them calls
`commit`. One run writes to a root at a time; before the first part of a checkpoint is begun,
`sweep` is called once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from m2flow.errors import UserError
from m2flow.flow.progress import goes_on

MANIFEST = "MANIFEST.json"
LATEST = "latest"
MODEL, TRAINER = "model", "trainer"
THREADS = 4
"""That read files for their checksums side by side: one takes a second for about 1.4 GB."""

SECONDS_UNTIL_SEEN = 60.0
"""How long a shared file system may take to show one machine what another one has written."""

_STEP = re.compile(r"step_(\d{6,})")


def clear_part(folder: Path) -> None:
    """Make room for a part of a checkpoint: what a writer that was lost has left of it goes.

    That of a further model lies in a folder of its own within the one that `begin` gave.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MODEL, TRAINER):
        _remove(folder / name)


def write_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model, as `model/`, into the folder of a part.

    Args:
        folder: where to.
        model, tokenizer: as transformers has them, with `save_pretrained`; or no tokenizer.
    """
    model.save_pretrained(str(folder / MODEL))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder / MODEL))


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies, or will lie."""
    return root / f"step_{step:06d}"


def sweep(root: Path) -> None:
    """Delete what writers that died have left. No part of a checkpoint may be begun just then."""
    for leftover in root.glob(".*.partial"):
        _remove(leftover)


def begin(root: Path, step: int) -> Path:
    """The hidden folder for the checkpoint of a step, made by whichever part asks first."""
    partial = _partial(root, step)
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def commit(root: Path, step: int, *, keep: int | None = None, in_use: Path | None = None) -> Path:
    """Make the folder that `begin` gave a checkpoint, point `latest` at it, delete old ones.

    Where `latest` already names a whole checkpoint of this very step, that one stays. A checkpoint
    of the same step that `latest` does not name belongs to an abandoned future and is replaced.

    Args:
        root, step: as for `begin`.
        keep: how many checkpoints to keep, this one included; None for all.
        in_use: one that is kept beside them, because workers load from it when they move.

    Returns:
        The checkpoint's folder.
    """
    assert keep is None or keep >= 1, keep
    partial, final = _partial(root, step), folder_of(root, step)
    if _target(root) == final and broken_file(final) is None:
        _remove(partial)
    else:
        _write_manifest(partial, step)
        if final.exists():
            _discard(final)
        os.replace(partial, final)
        _sync(root.parent)  # which has the root's own name
        _sync(root)
        _move_latest(root, final)
    if keep is not None:
        for path in [path for path in _steps(root) if step_of(path) <= step][:-keep]:
            if in_use is None or path.resolve() != in_use.resolve():
                _discard(path)
    return final


def wait_until_seen(root: Path, step: int) -> None:
    """Wait until this process sees the checkpoint of a step, which another machine may have made.

    Raises:
        UserError: it does not, as the machines do not share the folder.
    """
    folder = folder_of(root, step)
    wait_for(
        lambda: "" if folder.is_dir() else "the checkpoint that was written", folder, "the launcher"
    )


def wait_for(missing: Callable[[], str], folder: Path, who: str) -> None:
    """Wait until a process sees in a folder what others have written there.

    Args:
        missing: names something that it does not see; empty where it sees all.
        folder: where it looks.
        who: it is, in words.

    Raises:
        UserError: it does not within `SECONDS_UNTIL_SEEN`, as the machines do not share the folder.
    """
    deadline = time.monotonic() + SECONDS_UNTIL_SEEN
    while what := missing():
        if time.monotonic() > deadline:
            raise UserError(
                f"{who} does not see {what}",
                key=str(folder),
                expected="a folder that all machines share",
                hint="name one by --run-dir",
            )
        time.sleep(0.5)


def resume_point(root: Path) -> Path | None:
    """The checkpoint to resume from: the one `latest` names; None where nothing was ever saved.

    Where the writer died before it made the first link, the newest whole checkpoint. Every checksum
    is compared.

    Raises:
        UserError: `latest` names a checkpoint that is not whole, or nothing and none is whole. The
            message says which file is wrong and which whole checkpoint there is instead.
    """
    target = _target(root)
    if target is not None and _STEP.fullmatch(target.name) is None:
        raise UserError(
            "names no checkpoint of a step",
            key=str(root / LATEST),
            value=target.name,
            expected="step_NNNNNN, whose number is that of the steps that were taken",
        )
    if target is not None and (broken := broken_file(target)) is None:
        return target
    steps = list(reversed(_steps(root)))
    other = next((path for path in steps if broken_file(path) is None), None)
    if target is None:
        if other is not None or not steps:
            return other
        target, broken = steps[0], broken_file(steps[0])
    raise UserError(
        f"the checkpoint is not whole: {broken}",
        key=str(target),
        hint=f"resume from {other} instead: point {root / LATEST} at it"
        if other
        else "no whole checkpoint is left; start a new run",
    )


def trainer_folder(path: Path | str, part: str = "") -> Path:
    """Where the trainer's state of one part of a checkpoint lies.

    All lanes of a trainer ask, so checksums are left to `resume_point`, which is asked once a run.

    Args:
        path: the checkpoint.
        part: folder within it of a further model, such as a critic.

    Raises:
        UserError: a file is missing or has another size, or there is no such part.
    """
    path = Path(path)
    broken = broken_file(path, checksums=False)
    if broken is not None:
        raise UserError(f"the checkpoint is not whole: {broken}", key=str(path))
    folder = path / part / TRAINER
    if not folder.is_dir():
        of_another = "it is of a run with another algorithm"
        raise UserError(
            f"the checkpoint has no {part or TRAINER}",
            key=str(path),
            expected=str(folder),
            hint=of_another if part else "an earlier version wrote it: go on with that one",
        )
    return folder


def broken_file(path: Path, *, checksums: bool = True) -> str | None:
    """What keeps a folder `.../step_NNNNNN` from being a whole checkpoint; None if it is one.

    Without `checksums` files are not read: their sizes are compared.
    """
    manifest = path / MANIFEST
    if not manifest.is_file():
        return f"{manifest} is missing"
    try:
        files = json.loads(manifest.read_text())["files"]
        written = {name: _size_and_sum(one) for name, one in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{manifest} cannot be read"
    whole: list[str] = []
    broken = None
    for name, (num_bytes, _) in written.items():
        if (broken := _wrong_size(path / name, num_bytes)) is not None:
            break
        whole.append(name)
    with ThreadPoolExecutor(THREADS) as threads:
        sums = threads.map(_sha256, [path / name for name in whole] if checksums else ())
        for name, found in zip(whole, sums, strict=False):
            if found != written[name][1]:
                threads.shutdown(wait=False, cancel_futures=True)
                return f"{path / name} is not what was written"
    if broken is not None:
        return broken
    if checksums:  # beside whole files others do no harm to who loads them
        there = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        if unknown := sorted(there - written.keys() - {MANIFEST}):
            return f"{path / unknown[0]} is not in {manifest}: move it away if you put it there"
    return None


def _wrong_size(file: Path, num_bytes: int) -> str | None:
    """Why a file is not there as large as it was written, if it is not."""
    try:
        size = file.stat().st_size if file.is_file() else None
    except (OSError, ValueError):  # no name that a file can have
        size = None
    if size is None:
        return f"{file} is missing"
    return f"{file} has {size} bytes, {num_bytes} were written" if size != num_bytes else None


def _size_and_sum(entry: Any) -> tuple[int, str]:
    """Bytes and SHA-256 of a file in a manifest, which says nothing else of it.

    Raises:
        KeyError, TypeError, ValueError: a key is missing, unknown or of another type.
    """
    size, sha256 = entry["bytes"], entry["sha256"]
    if len(entry) != 2 or type(size) is not int or type(sha256) is not str:
        raise ValueError("no entry of a manifest")
    return size, sha256


def _write_manifest(folder: Path, step: int) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(THREADS) as threads:
        written = []
        for one in threads.map(_synced, paths):
            written.append(one)
            goes_on()
    names = [path.relative_to(folder).as_posix() for path in paths]
    files = dict(zip(names, written, strict=True))
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "step": step, "files": files}, indent=1))
    _sync(manifest)
    for directory in [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
        _sync(directory)


def _move_latest(root: Path, final: Path) -> None:
    link, latest = root / f".{LATEST}.partial", root / LATEST
    link.symlink_to(final.name)
    if latest.is_dir() and not latest.is_symlink():  # a copy of the run that has followed the link
        _discard(latest)
    os.replace(link, latest)
    _sync(root)


def _discard(path: Path) -> None:
    """Delete a checkpoint; its name goes first, so that no half of it is left under that name."""
    doomed = path.with_name(f".{path.name}.doomed.partial")
    _remove(doomed)
    os.replace(path, doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _target(root: Path) -> Path | None:
    link = root / LATEST
    return root / link.readlink() if link.is_symlink() else None


def _steps(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _STEP.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """Training steps that a checkpoint's weights have taken."""
    return int(path.name.removeprefix("step_"))


def _partial(root: Path, step: int) -> Path:
    return root / f".{folder_of(root, step).name}.partial"


def _synced(file: Path) -> dict[str, object]:
    """What a manifest says of a file that is on the disk by then."""
    _sync(file)
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
