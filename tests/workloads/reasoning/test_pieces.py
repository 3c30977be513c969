"""What a step draws of answers that go on: against many steps, one after the other."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from m2flow.models.lengths import fit_lengths
from m2flow.workloads.reasoning.pieces import WAITING_TOKENS, Pieces


@pytest.mark.parametrize(("most", "group"), [(4096, 16), (1000, 4), (20_000, 1)])
def test_pieces_are_those_of_many_steps(most: int, group: int) -> None:
    """Slots of a step, each with a group until its last answer has ended, then with a new one."""
    lengths = fit_lengths(2700, 10_000)
    random_ = random.Random(0)
    pool = lengths.stratified(4000)
    drawn: list[float] = []
    there: list[float] = []
    attended, ages = 0.0, []
    for _ in range(3000):
        answers = random_.choices(pool, k=group)
        age = 0
        while age * most < max(answers):
            before = [age * most if length > age * most else 0 for length in answers]
            drawn += [min(most, max(0.0, length - age * most)) for length in answers]
            there += before
            attended += sum(tokens * tokens / 2 for tokens in before)
            age += 1
        ages.append(age)
    pieces = Pieces.of(lengths, most, group)
    assert pieces.steps == pytest.approx(fmean(ages), rel=0.03)
    assert fmean(pieces.drawn) == pytest.approx(fmean(drawn), rel=0.03)
    assert pieces.there == pytest.approx(fmean(there), rel=0.06, abs=1)
    if sum(there):
        assert pieces.context == pytest.approx(attended / sum(there), rel=0.06)
    waiting = sum(tokens == WAITING_TOKENS for tokens in pieces.drawn) / len(pieces.drawn)
    assert waiting == pytest.approx(sum(tokens == 0 for tokens in drawn) / len(drawn), abs=0.02)
    full = sum(tokens == most for tokens in pieces.drawn) / len(pieces.drawn)
    assert full == pytest.approx(sum(tokens == most for tokens in drawn) / len(drawn), abs=0.02)
