"""`m2flow profile`: a tiny recipe measured, stored and found again; and what its key holds."""

from __future__ import annotations

import errno
import os
from importlib import metadata
from pathlib import Path

import pytest

from m2flow.cli.profile import table
from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.plan.file import read_profile, to_json
from m2flow.plan.lanes import with_memory
from m2flow.plan.profile import (
    KEY_PARTS,
    Piecewise,
    Profile,
    StageCost,
    StageProfile,
    WorkerCost,
    differences,
)
from m2flow.plan.units import Bytes
from m2flow.runtime.profiling.stored import given
from m2flow.workloads.common.planning import lanes_of
from m2flow.workloads.common.profile_key import profile_key
from m2flow.workloads.common.reading import validated
from m2flow.workloads.common.recipe import Recipe
from tests.cli.conftest import TINY, run_command
from tests.runtime.local_cluster import local_cluster

LANES = (LaneSpec(0, cores=(0,)), LaneSpec(1, cores=(1,)))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("M2FLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_profile_that_cannot_be_stored_is_written_all_the_same(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = tmp_path / "tiny.yaml", tmp_path / "profile.json"
    recipe.write_text(TINY)
    (store / "models").mkdir(parents=True)
    (store / "profiles").touch()
    with local_cluster(2):
        done = run_command("profile", recipe, "--budget", 2, "--out", out)
    assert done.code == 0, done.err
    assert "measured, not stored: " in done.out
    assert read_profile(out).stages


def test_a_recipe_is_measured_once(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = tmp_path / "tiny.yaml", tmp_path / "profile.json"
    recipe.write_text(TINY)
    with local_cluster(2):
        done = run_command("profile", recipe, "--budget", 8, "--out", out)
    assert done.code == 0, done.err
    for word in (
        "generator.generate",
        "learner.train",
        "finish",
        "peak",
        "lengths:",
        "measured, stored",
    ):
        assert word in done.out, word
    profile = read_profile(out)
    assert set(profile.key) == set(KEY_PARTS)
    assert profile.stage("generator.generate").lengths
    again = run_command("profile", recipe, "--budget", 0.1, "--out", tmp_path / "again.json")
    assert again.code == 0, again.err
    assert "stored at" in again.out
    before = out.read_bytes()

    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("m2flow.observe.jsonl.os.fsync", no_room)
    full = run_command("profile", recipe, "--budget", 0.1, "--out", out)
    assert full.code == 1
    assert "profile.json could not be written: " in full.err
    assert "--resume" not in full.err, "there is none"
    assert "No space left on device" in full.err
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
    assert (tmp_path / "again.json").read_text() == out.read_text() == to_json(profile)
    assert len(list((store / "models").iterdir())) == 1, "the starting model is kept as well"
    _a_file_of_another_recipe_is_refused(out)


def recipe_of(words: dict[str, object]) -> Recipe:
    return validated({"workload": "reasoning", **words})


def _a_file_of_another_recipe_is_refused(file: Path) -> None:
    recipe = recipe_of({"prompts_per_step": 4, "lanes": "cpu:1"})
    key = profile_key(recipe, lanes_of(recipe))
    with pytest.raises(UserError, match=r"shapes.samples_per_prompt is 8 here and 4 there"):
        given(file, key)
    assert given(file, key, whatever_its_key=True) == read_profile(file)


def test_bad_words_are_refused(tmp_path: Path, store: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY)
    assert "--budget" in run_command("profile", recipe, "--budget", 0).error
    assert "lanes" in run_command("profile", recipe, "--lanes", "cpu").error
    assert "promts_per_step" in run_command("profile", recipe, "promts_per_step=3").error
    assert not store.exists()


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        ({"minibatches": 4}, "shapes.minibatches"),
        ({"generation": {"max_new_tokens": 7}}, "shapes.generation.max_new_tokens"),
        ({"training": {"tokens_per_microbatch": 64}}, "shapes.training.tokens_per_microbatch"),
        ({"model": {"hidden_size": 64}}, "model.made"),
        ({"seed": 3}, "model.made"),
        ({"algorithm": {"kl_coefficient": 0.1}}, "shapes.reference"),
        ({"algorithm": {"overlong_buffer": 2}}, "shapes.overlong_buffer"),
        ({"algorithm": {"entropy_coefficient": 0.01}}, "shapes.entropy_in_loss"),
        ({"algorithm": {"truncated": "drop"}}, "shapes.truncated"),
        ({"algorithm": {"equal_groups": "drop"}}, "shapes.equal_groups"),
    ],
)
def test_what_changes_the_work_changes_the_key(words: dict[str, object], phrase: str) -> None:
    ours, theirs = (profile_key(recipe_of(words_), LANES) for words_ in (words, {}))
    assert [text.split(" is ")[0] for text in differences(ours, theirs)] == [phrase]


def test_a_kl_in_the_reward_is_a_stage_more() -> None:
    """The profile of a KL in the loss was taken, and then refused: it knows no such stage."""
    in_loss: dict[str, object] = {"algorithm": {"kl_coefficient": 0.1}}
    in_reward: dict[str, object] = {"algorithm": {"kl_coefficient": 0.1, "kl_in": "reward"}}
    keys = [profile_key(recipe_of(words), LANES) for words in (in_reward, in_loss)]
    assert [text.split(" is ")[0] for text in differences(*keys)] == ["shapes.kl_in_reward"]


@pytest.mark.parametrize(
    "words",
    [
        {"steps": 3},
        {"name": "other"},
        {"mode": "hybrid"},
        {"layouts": {"learner": "fsdp2"}},
        {"optimizer": {"learning_rate": 1e-3}},
        {"algorithm": {"clip_low": 0.1}},
        {"evaluation": {"every": 3}},
    ],
)
def test_what_does_not_change_the_work_leaves_the_key(words: dict[str, object]) -> None:
    ours, theirs = (profile_key(recipe_of(words_), LANES) for words_ in (words, {}))
    assert not differences(ours, theirs)


def test_other_lanes_are_other_hardware() -> None:
    recipe = recipe_of({})
    fewer = differences(profile_key(recipe, LANES), profile_key(recipe, LANES[:1]))
    assert [text.split(" is ")[0] for text in fewer] == ["hardware.lanes"]


def test_another_version_of_an_engine_is_another_price(monkeypatch: pytest.MonkeyPatch) -> None:
    known, versions = metadata.version, {"vllm": "0.31.0"}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or known(name))
    recipe = recipe_of({})
    before = profile_key(recipe, LANES)
    versions["vllm"] = "0.32.0"
    (told,) = differences(before, profile_key(recipe, LANES))
    assert told.startswith("versions.vllm is ")


def test_a_limit_of_memory_is_another_price_on_accelerators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The profile of another limit was taken, and no plan kept this one."""
    monkeypatch.setattr("m2flow.workloads.common.profile_key.gpu_names", lambda: ("NVIDIA H100",))
    recipe, gpus = recipe_of({}), (LaneSpec(0, "gpu", (0,), 0, 72 * 10**9),)
    (told,) = differences(
        profile_key(recipe, gpus), profile_key(recipe, with_memory(gpus, 40 * 10**9))
    )
    assert told == "hardware.memory is 72 GB here and 40 GB there"
    assert not differences(
        profile_key(recipe, LANES), profile_key(recipe, with_memory(LANES, 10**9))
    )


def test_layouts_of_one_size_have_their_own_rows_and_bytes() -> None:
    """A shard's row told the bytes of a whole copy, and all layouts of a size were one name."""
    curve = Piecewise(((1.0, 1.0),))
    costs = tuple(StageCost(2, curve, kind="gpu", layout=name) for name in ("cp2", "fsdp2"))
    states = tuple(
        WorkerCost(2, Bytes(size), kind="gpu", layout=name)
        for size, name in ((200, "cp2"), (100, "fsdp2"))
    )
    drawn = table(Profile({"learner.train": StageProfile(costs)}, {"learner": states}))
    columns = {str(one.header): list(one.cells) for one in drawn.columns}
    assert columns["lanes"] == ["2 gpu (cp2)", "2 gpu (fsdp2)"]
    assert columns["resident"] == ["200 B", "100 B"]
