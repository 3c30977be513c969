"""Profiles: curves, files, keys; and quantities that a type checker keeps apart."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.plan import units
from m2flow.plan.file import from_json, read_profile, to_json
from m2flow.plan.profile import (
    ByReplicas,
    Piecewise,
    Profile,
    PublishCost,
    Quantiles,
    differences,
)
from m2flow.plan.units import Seconds
from tests.plan.random_cases import draw


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=5),
    st.floats(0, 400),
    st.floats(0, 400),
)
def test_curves_do_not_fall(steps: list[tuple[int, int]], a: float, b: float) -> None:
    points, x, y = [], 0, 0
    for dx, dy in steps:
        x, y = x + dx, y + dy
        points.append((float(x), float(y)))
    line = Piecewise(tuple(points))
    assert all(line.at(px) == py for px, py in points)
    assert line.at(min(a, b)) <= line.at(max(a, b)) + 1e-9


@pytest.mark.parametrize("points", [(), ((1, 2), (2, 1)), ((2, 1), (1, 2)), ((1, -1),)])
def test_impossible_curves_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(UserError, match="curve"):
        Piecewise(points)


@given(st.floats(0, 9), st.floats(0.01, 9), st.floats(1, 64))
def test_what_replicas_share_is_a_fixed_part_and_a_share(
    fixed: float, own: float, n: float
) -> None:
    curve = ByReplicas(tuple((x, fixed + own / x) for x in (2.0, 3.0, 16.0)))
    assert curve.at(n) == pytest.approx(fixed + own / n)


@given(st.floats(1, 64), st.floats(1, 64))
def test_what_falls_faster_than_replicas_are_added_does_not_go_on_so(a: float, b: float) -> None:
    curve = ByReplicas(((4.0, 9.0), (8.0, 0.1), (16.0, 0.01)))
    low, high = sorted((a, b))
    assert 0 < curve.at(high) <= curve.at(low) <= 36 / low


@given(st.floats(0, 64))
def test_what_does_not_fall_by_replicas_is_any_other_curve(n: float) -> None:
    for points in (((2.0, 3.0),), ((1.0, 1.0), (4.0, 1.0)), ((1.0, 1.0), (4.0, 2.0))):
        assert ByReplicas(points).at(n) == Piecewise(points).at(n)


def test_quantiles_keep_mean_and_tail() -> None:
    lengths = Quantiles.of([float(n) for n in range(101)])
    assert lengths.mean == pytest.approx(50)
    assert lengths.at(0.95) == pytest.approx(95)
    assert lengths.largest == 100


def test_publishing_between_layouts_that_were_not_measured_is_not_free() -> None:
    def price(place: str, seconds: float, *lanes: int) -> PublishCost:
        return PublishCost("a", "b", place, Seconds(seconds), *lanes)

    known = draw(0).profile
    near = (price("same", 1.0, 1, 1), price("same", 2.0, 2, 1), price("same", 3.0, 1, 2))
    profile = replace(known, publish=(*near, price("node", 7.0, 1, 1)))

    def asked(place: str, *lanes: int) -> float:
        return profile.publish_seconds("a", "b", place, *lanes)

    assert [asked("same", 1, 1), asked("same", 2, 1), asked("same", 1, 2)] == [1.0, 2.0, 3.0]
    assert asked("same", 2, 2) == 3.0, "the dearer of those that share an end with it"
    assert asked("same", 4, 4) == 3.0, "the dearest on such lanes"
    assert asked("node", 1, 2) == 7.0, "not what it is on common lanes"
    assert asked("cluster", 1, 2) == 3.0, "nothing is known of places that far: these lanes, nearer"
    assert profile.publish_seconds("b", "a", "same", 1, 1) == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_files_give_back_what_was_written(seed: int) -> None:
    profile = draw(seed).profile
    assert from_json(Profile, to_json(profile), "profile") == profile


CURVE = '{"stages": {"a": {"costs": [{"lanes": %s, "seconds": {"points": %s}}]}}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"stage": {}}', "did you mean 'stages'"),
        ('{"stages": {"a": {}}}', r"stages\.a\.costs: is missing"),
        (CURVE % ('"1"', "[[1, 2]]"), "wrong type"),
        (CURVE % (1, "[[1, 2], [2, 1]]"), r"stages\.a\.costs\[0\]\.seconds: .*not fall"),
        ('{"stages": {}, "key": {"colour": {}}}', "no part of a key"),
        ('{"stages": {}, "dispatch": -1.0}', "dispatch: must be finite"),
        ('{"stages": {}, "event_overhead": NaN}', "event_overhead: must be finite"),
    ],
)
def test_bad_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_json(Profile, text, "profile")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such profile"):
        read_profile(tmp_path / "none.json")


def test_keys_say_what_differs() -> None:
    ours = {"model": {"layers": 2}, "hardware": {"lane": "cpu"}}
    theirs = {"model": {"layers": 4}, "versions": {"torch": "2.6"}}
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == [
        "model.layers is 2 here and 4 there",
        "hardware.lane is cpu here and absent there",
        "versions.torch is absent here and 2.6 there",
    ]


def test_places_are_checked() -> None:
    with pytest.raises(UserError, match="is no place"):
        PublishCost("a", "b", "moon", Seconds(1.0))


def test_seconds_do_not_pass_for_items(tmp_path: Path) -> None:
    """The mistake that prices a stage of 4.66 s at 0.13 s: one quantity in another's place."""
    pytest.importorskip("mypy")
    (tmp_path / "units.py").write_text(Path(units.__file__).read_text())
    script = tmp_path / "mixed.py"
    script.write_text(
        "from units import Bytes, BytesPerSecond, Items, Seconds\n"
        "good: Seconds = Seconds(1.0 + 3 * Seconds(2.0))\n"
        "one: Seconds = Items(3)\n"
        "two: Seconds = 4.66 / 36\n"
        "three: Items = Bytes(3)\n"
        "four: BytesPerSecond = Bytes(4) / Seconds(2.0)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    wrong = {int(line.split(":")[1]) for line in answer.stdout.splitlines() if ": error:" in line}
    assert wrong == {3, 4, 5, 6}, answer.stdout
