"""Files with mutated bytes: each is read rightly, or refused by a `UserError`; nothing else.

200 examples of each kind; `make test-fuzz` takes 25,000, new ones each time.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save

from m2flow.engine.plan import LaneSpec, Plan
from m2flow.environments.demonstrations import read_demonstrations
from m2flow.environments.spec import ActionSpec, EnvironmentSpec, ObservationSpec
from m2flow.errors import UserError
from m2flow.flow import Batch
from m2flow.flow.rollouts import Rollouts
from m2flow.observe.jsonl import cut_after_step, read_rows
from m2flow.plan import build_plan
from m2flow.plan.file import from_json, read_json, read_plan, to_json
from m2flow.runtime.lane.frames import frame_bytes, read_frames
from m2flow.training import checkpoint
from m2flow.workloads.common.reading import read_recipe, validated
from m2flow.workloads.reasoning.rows import BadRowError, rows_of
from m2flow.workloads.reasoning.sampler import SamplerState
from tests.fuzz.mutations import fuzzed, fuzzed_long
from tests.plan.small_graphs import TALKING
from tests.workloads.reasoning.test_sampler import WHOLE

PROJECT = Path(__file__).parents[2]

PLAN = to_json(build_plan("collocated", TALKING, [LaneSpec(0), LaneSpec(1)], 16)).encode()
RECIPE = (PROJECT / "recipes" / "quickstart.yaml").read_bytes()
ROWS = b'{"question": "1 + 2?", "answer": "3"}\n{"question": "4?", "answer": "4", "n": [1.5]}\n'
METRICS = b'{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": null}\n'


def outcome(read: Callable[[], Any]) -> tuple[Any, str]:
    """What is read, or None and why it was refused."""
    try:
        return read(), ""
    except (UserError, BadRowError) as error:
        return None, str(error)


def check_plan(folder: Path, data: bytes) -> None:
    file = folder / "plan.json"
    file.write_bytes(data)
    plan, refusal = outcome(lambda: read_plan(file))
    assert "\n" not in refusal
    if plan is not None:
        assert from_json(Plan, to_json(plan), "plan") == plan


def check_demonstrations(folder: Path, data: bytes) -> None:
    file = folder / "shown.npz"
    file.write_bytes(data)
    found, refusal = outcome(lambda: read_demonstrations(str(file), WALK))
    assert "\n" not in refusal
    if found is not None:
        assert {len(column) for column in found.values()} == {len(found["action"])}


def check_recipe(folder: Path, data: bytes) -> None:
    file = folder / "recipe.yaml"
    file.write_bytes(data)
    recipe, refusal = outcome(lambda: read_recipe(file))
    assert "\n" not in refusal
    if recipe is not None:
        assert validated(yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json")))) == recipe


def check_rows(folder: Path, data: bytes) -> None:
    file = folder / "rows.jsonl"
    file.write_bytes(data)
    for row in rows_of(file):
        content, refusal = outcome(row.read)
        assert refusal or isinstance(content, dict)


def check_metrics(folder: Path, data: bytes) -> None:
    file = folder / "metrics.jsonl"
    file.write_bytes(data)
    rows = read_rows(file).rows
    assert all(isinstance(row, dict) for row in rows)
    try:
        cut_after_step(file, 1)
    except UserError:
        assert file.read_bytes() == data
    else:
        assert all(row.get("step", 0) <= 1 for row in read_rows(file).rows)
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def check_manifest(folder: Path, data: bytes) -> None:
    root = folder / "checkpoints"
    if not root.exists():
        for step in (1, 2):
            part = checkpoint.begin(root, step) / "model"
            part.mkdir()
            (part / "weights").write_bytes(WEIGHTS)
            checkpoint.commit(root, step)
    manifest = root / "step_000002" / checkpoint.MANIFEST
    manifest.write_bytes(data)
    found, refusal = outcome(lambda: checkpoint.resume_point(root))
    if found is None:
        assert str(root / "step_000001") in refusal
    else:
        assert found == root / "step_000002"
        assert json.loads(data)["files"] == json.loads(MANIFEST)["files"]


def check_sampler(folder: Path, data: bytes) -> None:
    """State of the data, where a manifest says that it is as it was written."""
    file = folder / "sampler.json"
    file.write_bytes(data)
    state, refusal = outcome(lambda: read_json(SamplerState, file, "state", "sampler.json"))
    assert "\n" not in refusal
    if state is not None:
        assert to_json(state)


def check_journal(folder: Path, data: bytes) -> None:
    """What is left of two frames is one of them, or both; nothing that was not written."""
    file = folder / "step_000001-x.rollouts"
    file.write_bytes(data)
    for frame in read_frames(file):
        assert frame.batch["y"].tolist() == list(frame.batch.ids)


def check_frame(folder: Path, data: bytes) -> None:
    """The text of a frame, with a checksum that is right."""
    crc = zlib.crc32(TENSORS, zlib.crc32(data))
    header = struct.pack("<4sIQI", b"m2j1", len(data), len(TENSORS), crc)
    file = folder / "step_000001-x.rollouts"
    file.write_bytes(header + data + TENSORS + FRAME)
    *_, last = read_frames(file)
    assert last.batch.ids == (4, 5)


FRAME = frame_bytes(Rollouts(1, "a.b", 0, Batch({"y": torch.tensor([4, 5])}, (4, 5))))
JOURNAL = frame_bytes(Rollouts(1, "a.b", 0, Batch({"y": torch.tensor([1, 2])}, (1, 2)))) + FRAME
TENSORS = save({"0": torch.arange(2)})
TEXT = json.dumps(
    {
        "step": 1,
        "stage": "a.b",
        "version": 0,
        "ids": [0, 1],
        "columns": {
            "y": {"tensor": "0"},
            "r": {"ragged": [{"array": "0"}, [1, 1]]},
            "l": [{"tuple": [1, None]}, {"dict": [["a", {"bytes": "QQ=="}]]}],
            "x": {"range": [0, 2, 1]},
            "d": [{"scalar": "0"}, {"data": ["m2flow.engine.messages", "Tick", {"now": 1.0}]}],
        },
    }
).encode()

WEIGHTS = b"any"
WRITTEN = {"bytes": len(WEIGHTS), "sha256": sha256(WEIGHTS).hexdigest()}
MANIFEST = json.dumps({"format": 1, "step": 2, "files": {"model/weights": WRITTEN}}).encode()

STATE = json.dumps(WHOLE).encode()

WALK = EnvironmentSpec(
    "walk", 1, (ObservationSpec("state", (2,)),), ActionSpec(1, (-1.0,), (1.0,)), instructions=()
)


def _shown() -> bytes:
    file, count = BytesIO(), np.arange(4.0)
    words = np.array(["go right"] * 4)
    state = count.reshape(4, 1).repeat(2, 1)
    np.savez(file, state=state, action=state[:, :1] / 4, episode=count // 2, instruction=words)
    return file.getvalue()


SHOWN = _shown()

KINDS = {
    "plan": (PLAN, check_plan),
    "recipe": (RECIPE, check_recipe),
    "rows": (ROWS, check_rows),
    "metrics": (METRICS, check_metrics),
    "manifest": (MANIFEST, check_manifest),
    "sampler": (STATE, check_sampler),
    "journal": (JOURNAL, check_journal),
    "frame": (TEXT, check_frame),
    "demonstrations": (SHOWN, check_demonstrations),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files(kind: str, tmp_path: Path) -> None:
    content, check = KINDS[kind]
    fuzzed(content, partial(check, tmp_path), 200)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_files(kind: str, tmp_path: Path) -> None:
    content, check = KINDS[kind]
    fuzzed_long(kind, content, partial(check, tmp_path))


FOUND = {
    "a number of 5,000 digits": ("plan", b'{"lanes": ' + b"9" * 5000 + b"}"),
    "3,000 brackets in a plan": ("plan", b"[" * 3000),
    "an option that is not finite": ("recipe", RECIPE.replace(b"0.4", b"9" * 400 + b".4")),
    "3,000 brackets in a recipe": ("recipe", b"steps: " + b"[" * 3000),
    "3,000 brackets in a row": ("metrics", b"[" * 3000 + b"\n" + METRICS),
    "a step that is no number": ("metrics", b'{"step": null}\n{"step": "2"}\n' + METRICS),
    "a file without a size": ("manifest", b'{"files": {"model/weights": {"sha256": ""}}}'),
    "a file of which more is said": ("manifest", MANIFEST.replace(b'"bytes"', b'"a": 3, "bytes"')),
    "a size that is no whole number": (
        "manifest",
        MANIFEST.replace(b'"bytes": 3', b'"bytes": 3.5'),
    ),
    "files that are a list": ("manifest", b'{"files": [1]}'),
    "3,000 brackets in a manifest": ("manifest", b"[" * 3000),
    "a name that no file has": ("manifest", MANIFEST.replace(b"weights", b"w" * 5000)),
    "a range that no column has": (
        "frame",
        TEXT.replace(b"[0, 2, 1]", b"[0, 1" + b"0" * 40 + b", 1]"),
    ),
    "3,000 brackets in a frame": ("frame", b"[" * 3000),
    "a name with a null in it": ("manifest", MANIFEST.replace(b"weights", b"w\\u0000")),
}


def test_a_manifest_that_nobody_has_touched_is_taken(tmp_path: Path) -> None:
    check_manifest(tmp_path, MANIFEST)
    root = tmp_path / "checkpoints"
    assert checkpoint.resume_point(root) == root / "step_000002"


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str, tmp_path: Path) -> None:
    kind, data = FOUND[name]
    KINDS[kind][1](tmp_path, data)
