"""What a recipe says of numbers and text is what it is, and stays so in `config.yaml`."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from m2flow.observe.run_directory import RunDirectory, read_document
from m2flow.observe.yaml_text import NumberLoader, plain, to_yaml

LIKE_NUMBERS = st.from_regex(r"[-+]?[0-9._:]{1,6}([eExXob][-+]?[0-9a-f_:]{0,4})?", fullmatch=True)
ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=200)


def read(text: str) -> Any:
    return yaml.load(text, NumberLoader)  # noqa: S506


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("010", 10),
        ("-007", -7),
        ("08", 8),
        ("1_000", 1000),
        ("0x1F", 31),
        ("-0b11", -3),
        ("1e-4", 1e-4),
        ("12e5", 12e5),
        ("-.5", -0.5),
        (".5e1", 5.0),
        ("1.", 1.0),
        ("1e400", math.inf),
        ("-.inf", -math.inf),
    ],
)
def test_numbers(written: str, number: float) -> None:
    found = read(written)
    assert (found, type(plain(found))) == (number, type(number))
    assert str(found) == written
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (other, str(other)) == (number, written)


@pytest.mark.parametrize(
    "text", ["12:30:00", "1:30", "1:30.5", "0x", "0b_", "1e", "--1", "e5", "._"]
)
def test_no_numbers(text: str) -> None:
    assert read(text) == text


@given(LIKE_NUMBERS | ANY_TEXT)
def test_text_stays_itself(text: str) -> None:
    """Also for a reader of YAML 1.1, as `read_document` is."""
    written = to_yaml({"key": text, "list": [text]})
    for found in (read(written), yaml.safe_load(written)):
        assert found == {"key": text, "list": [text]}


@given(st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none())
def test_what_is_no_text_stays_itself(value: object) -> None:
    written = to_yaml({"key": value})
    for found in (read(written), yaml.safe_load(written)):
        assert plain(found) == {"key": value}
        assert type(plain(found)["key"]) is type(value)


def test_what_a_run_keeps_is_what_it_was_given(tmp_path: Path) -> None:
    """The quotes of a text were lost where it looks like a number of YAML 1.2 alone."""
    directory = RunDirectory(tmp_path)
    directory.write_config({"system_prompt": "1e-4"})
    assert read(directory.config.read_text()) == {"system_prompt": "1e-4"}
    assert read_document(directory.config) == {"system_prompt": "1e-4"}
