"""Counter-based sampling against an oracle of Python integers and loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2flow.algorithms.sampling import (
    _INCREMENT,
    _finalise_tensor,
    _shift_right,
    _signed,
    derive_seed,
    derive_seeds,
    likeliest,
    sample_tokens,
    uniform,
    uniform_of_few,
)

int64s = st.integers(-(2**63), 2**63 - 1)


def mix(value: int) -> int:
    value %= 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def uniform_oracle(seed: int, position: int) -> float:
    return (mix(seed + (position + 1) * 0x9E3779B97F4A7C15) >> 11) / 2**53


def sample_oracle(logits: list[float], u: float, temperature: float) -> tuple[int, float]:
    if temperature == 0:
        temperature, greedy = 1.0, True
    else:
        greedy = False
    top = max(logits)
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    probs = [weight / math.fsum(weights) for weight in weights]
    if greedy:
        token = logits.index(top)
    else:
        cdf = list(itertools.accumulate(probs))
        token = next((i for i, total in enumerate(cdf) if total > u), cdf.index(cdf[-1]))
    return token, math.log(probs[token])


@given(st.lists(st.tuples(int64s, st.integers(0, 2**31)), min_size=1, max_size=9))
def test_uniform_equals_the_oracle_bit_for_bit(cases: list[tuple[int, int]]) -> None:
    seeds, positions = map(list, zip(*cases, strict=True))
    drawn = uniform(torch.tensor(seeds), torch.tensor(positions))
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == [uniform_oracle(s, t) for s, t in cases]


def test_uniform_is_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 1234567, as published with the generator."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    drawn = uniform(torch.full((3,), 1234567), torch.arange(3))
    assert drawn.tolist() == [(value >> 11) / 2**53 for value in published]


def test_uniform_is_uniform_and_independent() -> None:
    table = uniform(torch.arange(400).unsqueeze(1), torch.arange(500).unsqueeze(0))
    assert table.min() >= 0
    assert table.max() < 1
    histogram = torch.histc(table, bins=20, min=0, max=1) / table.numel()
    assert (histogram - 0.05).abs().max() < 0.002
    centred = table - 0.5
    for neighbour in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert neighbour.mean().abs() < 0.001  # a thousandth of a variance of 1/12


@given(st.lists(st.integers(), max_size=4), st.lists(st.integers(), max_size=4))
def test_derived_seeds_differ_unless_the_parts_are_the_same(a: list[int], b: list[int]) -> None:
    assert 0 <= derive_seed(*a) < 2**63
    assert (derive_seed(*a) == derive_seed(*b)) == (a == b)


def test_derived_seeds_know_order_length_and_sign() -> None:
    cases = [(), (0,), (0, 0), (1, 2), (2, 1), (1, 2, 0), (-1,), (1,), (2**64, 5), (0, -(5 << 64))]
    assert len({derive_seed(*parts) for parts in cases}) == len(cases)


def test_derived_seeds_stay_what_they_are() -> None:
    """Recorded runs are repeated from their seeds, so these numbers may never change."""
    assert derive_seed(0) == 6791897765849424158
    assert derive_seed(7, 3, 12) == 3575773944667692194


logits = st.floats(-30, 30, width=32) | st.just(-math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6).flatmap(
        lambda width: st.lists(
            st.lists(logits, min_size=width, max_size=width).filter(lambda r: max(r) > -math.inf),
            min_size=1,
            max_size=6,
        )
    ),
    st.data(),
)
def test_sample_equals_the_oracle(dtype: torch.dtype, rows: list[list[float]], data) -> None:  # type: ignore[no-untyped-def]
    table = torch.tensor(rows, dtype=dtype)
    count = len(rows)
    seeds = data.draw(st.lists(int64s, min_size=count, max_size=count))
    positions = data.draw(st.lists(st.integers(0, 5000), min_size=count, max_size=count))
    temperature = data.draw(st.sampled_from([0.0, 0.3, 1.0, 1.7]))
    token, logprob = sample_tokens(table, torch.tensor(seeds), torch.tensor(positions), temperature)
    assert token.dtype == torch.int64
    assert logprob.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    for row in range(count):
        args = (torch.tensor(seeds[row : row + 1]), torch.tensor(positions[row : row + 1]))
        alone = sample_tokens(table[row : row + 1], *args, temperature)
        expected_token, expected_logprob = sample_oracle(
            table[row].tolist(), uniform_oracle(seeds[row], positions[row]), temperature
        )
        assert token[row] == alone[0][0] == expected_token
        assert logprob[row] == alone[1][0]
        assert logprob[row].item() == pytest.approx(expected_logprob, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sample_follows_the_distribution(temperature: float) -> None:
    row = torch.tensor([2.0, -1.0, 0.5, -math.inf, 1.0])
    count = 40_000
    token, logprob = sample_tokens(
        row.expand(count, -1), torch.arange(count), torch.zeros(count).long(), temperature
    )
    expected = torch.log_softmax(row.double() / temperature, -1)
    frequency = torch.bincount(token, minlength=5) / count
    assert (frequency - expected.exp()).abs().max() < 0.01
    assert frequency[3] == 0
    torch.testing.assert_close(logprob, expected[token].float())


def test_sample_where_rounding_leaves_the_sum_below_the_draw() -> None:
    """The last token that adds to the sum is taken, never one behind it that is excluded."""
    row = torch.full((1, 1001), 0.0, dtype=torch.float64)
    row[0, 1000] = -math.inf
    seed = next(s for s in itertools.count() if uniform_oracle(s, 0) > 0.9999)
    token, _ = sample_tokens(row, torch.tensor([seed]), torch.tensor([0]), 1.0)
    assert token.item() in (998, 999)
    excluded = torch.tensor([[0.0, -math.inf, -math.inf]], dtype=torch.float64)
    assert sample_tokens(excluded, torch.tensor([seed]), torch.tensor([0]), 1.0)[0].item() == 0


def test_sample_from_nan_gives_a_nan_log_probability_and_an_index_in_range() -> None:
    table = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    token, logprob = sample_tokens(table, torch.tensor([1, 2]), torch.tensor([0, 0]), 1.0)
    assert logprob.isnan().tolist() == [True, False]
    assert (token < 2).all()


def slowly_likeliest(row: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """Each bound after the other, token by token."""

    def above(row: list[float], least: float) -> list[float]:
        kept = [p if p >= least else 0.0 for p in row]
        return [p / math.fsum(kept) for p in kept]

    row = above(row, min_p * max(row))
    if 0 < top_k < len(row):
        row = above(row, sorted(row, reverse=True)[top_k - 1])
    together, least = 0.0, 0.0
    for p in sorted(row, reverse=True):
        if together >= top_p:
            break
        together, least = together + p, p
    return above(row, least) if top_p < 1 else row


@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=9),
    st.integers(0, 10),
    st.floats(0.01, 1.0),
    st.floats(0, 1.0),
)
def test_the_likeliest_tokens_equal_the_oracle(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    prob_BV = torch.tensor([logits, logits[::-1]], dtype=torch.float64).softmax(-1)
    found_BV = likeliest(prob_BV, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, found in zip(prob_BV.tolist(), found_BV.tolist(), strict=True):
        assert found == pytest.approx(slowly_likeliest(row, top_k, top_p, min_p), abs=1e-9)
        assert math.fsum(found) == pytest.approx(1)


def test_what_is_left_out_is_never_drawn_and_the_rest_as_likely_as_it_says() -> None:
    logits_BV = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64).repeat(4000, 1)
    seeds = torch.arange(4000)
    tokens_B, logprobs_B = sample_tokens(logits_BV, seeds, torch.zeros(4000).long(), 1.0, top_k=2)
    assert set(tokens_B.tolist()) == {0, 1}
    share = float((tokens_B == 0).double().mean())
    expected = math.e / (1 + math.e)
    assert share == pytest.approx(expected, abs=0.03)
    first = logprobs_B[tokens_B == 0][0]
    assert float(first) == pytest.approx(math.log(expected))


def test_greedy_draws_ignore_them() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 0.5]])
    found = sample_tokens(logits_BV, torch.zeros(1).long(), torch.zeros(1).long(), 0.0, top_k=1)
    assert int(found[0]) == 1
    assert float(found[1]) == pytest.approx(float(logits_BV.log_softmax(-1)[0, 1]))


@given(st.lists(int64s, min_size=1, max_size=5), st.integers(0, 1 << 40))
def test_uniform_is_the_same_by_torch_alone(seeds: list[int], position: int) -> None:
    """As it is computed on an accelerator; here on the CPU."""
    seed_B = torch.tensor(seeds)
    state = seed_B + (torch.tensor(position) + 1) * _signed(_INCREMENT)
    drawn_B = _shift_right(_finalise_tensor(state), 11).to(torch.float64) * 2.0**-53
    assert torch.equal(drawn_B, uniform(seed_B, torch.tensor(position)))


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**20)), max_size=8))
def test_seeds_derived_at_once_are_those_derived_alone(cases: list[tuple[int, int]]) -> None:
    firsts, lasts = [a for a, _ in cases], [b for _, b in cases]
    assert derive_seeds(firsts, 2, last=lasts) == [derive_seed(a, 2, b) for a, b in cases]


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8), st.integers(1, 5))
def test_a_few_draws_are_those_of_many_bit_for_bit(seeds: list[int], count: int) -> None:
    many = uniform(torch.tensor(seeds)[:, None], torch.arange(count))
    assert uniform_of_few(seeds, count) == many.flatten().tolist()
