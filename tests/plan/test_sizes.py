"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest

from m2flow.errors import UserError
from m2flow.plan import parse_bytes
from m2flow.plan.sizes import brief, bytes_text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("200MB", 200_000_000),
        ("200 mb", 200_000_000),
        (" 2KiB ", 2048),
        ("1.5GiB", 3 * 2**29),
        ("0.5kb", 500),
        ("1TB", 10**12),
        ("9007199254740993", 9007199254740993),  # more digits than a float holds
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "0", "0.4B", "12XB", "1e9", "1.MB", "1 2MB"])
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"lane_memory: is not a size.*KiB.*such as 200MB") as error:
        parse_bytes(text, "lane_memory")
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (850, "850 B"),
        (1000, "1 KB"),
        (12_345_678, "12.3 MB"),
        (270_000_000, "270 MB"),
        (80e9, "80 GB"),
    ],
)
def test_sizes_in_words(size: float, text: str) -> None:
    assert bytes_text(size) == text


def test_durations_have_three_digits() -> None:
    assert [brief(x) for x in (0, 8.5e-4, 0.0123, 4.56, 99.96, 1234.4)] == [
        "0 s", "850 us", "12.3 ms", "4.56 s", "100 s", "1234 s",
    ]  # fmt: skip
