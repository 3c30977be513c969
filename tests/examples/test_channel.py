"""The loop around a channel sees every token once, in batches that are well filled."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path


def test_every_token_is_trained_on_once(run_example: Callable[..., list[str]]) -> None:
    (line,) = run_example("channel", "2", "30")
    numbers = re.fullmatch(r"(\d+) tokens in (\d+) batches of at most 64", line)
    assert numbers is not None
    tokens, batches = int(numbers[1]), int(numbers[2])
    made = 0
    for maker in range(2):
        length_of = random.Random(maker)
        made += sum(length_of.randint(1, 32) for _ in range(30))
    assert tokens == made
    assert tokens / 64 <= batches <= tokens / 32 + 2


def test_the_program_is_short() -> None:
    source = Path(__file__).parents[2] / "examples" / "channel.py"
    assert len(source.read_text().splitlines()) < 50
