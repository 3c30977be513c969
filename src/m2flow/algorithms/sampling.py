"""Sampling that belongs to the item: what an item draws depends on its seed and nothing else.

The random number for token t of an item is a hash of (seed, t), so no generator state exists,
and batch composition, order, restarts and placement cannot change a draw. Knows nothing of
models or engines.

Legend: B batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA
# 2014): the increment, and the two multipliers of its finaliser (variant 13 of David Stafford).
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1
_MASK_63 = (1 << 63) - 1


def derive_seed(*parts: int) -> int:
    """Mixes integers of any size and sign into one seed in [0, 2**63).

    Order and number of the parts matter: (1, 2), (2, 1) and (1, 2, 0) give unrelated seeds.
    """
    return _mixed(_mixed_first(len(parts), parts[:-1]), parts[-1:]) & _MASK_63


def derive_seeds(first: Iterable[int], *rest: int, last: Iterable[int]) -> list[int]:
    """`derive_seed(one, *rest, its last)` for each of many, such as the turn of each rollout."""
    count, given = 2 + len(rest), zip(first, last, strict=True)
    return [_mixed(_mixed_first(count, (a, *rest)), (b,)) & _MASK_63 for a, b in given]


@lru_cache(maxsize=1 << 14)
def _mixed_first(count: int, parts: tuple[int, ...]) -> int:
    """The state of `derive_seed` before its last part, in which the draws of an item differ."""
    return _mixed(_finalise_int(count + _INCREMENT), parts)


def _mixed(state: int, parts: tuple[int, ...]) -> int:
    for part in parts:
        # The head tells sign and length, so that no two lists of parts mix the same words.
        words: Sequence[int] = (2, part)
        if not 0 < part <= _MASK_64:
            magnitude = abs(part)
            limbs = [magnitude >> at & _MASK_64 for at in range(0, magnitude.bit_length(), 64)]
            words = (2 * len(limbs) + (part < 0), *limbs)
        for word in words:  # `_finalise_int` written out: a batch of items has no time for calls
            state = (state ^ word) + _INCREMENT & _MASK_64
            state = (state ^ (state >> 30)) * _MULTIPLIER_1 & _MASK_64
            state = (state ^ (state >> 27)) * _MULTIPLIER_2 & _MASK_64
            state ^= state >> 31
    return state


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """The uniform number in [0, 1) with which an item draws its token at a completion position.

    SplitMix64's finaliser of `seed + (position + 1) * 0x9E3779B97F4A7C15` modulo 2**64; its top
    53 bits over 2**53, which is exact in float64.

    Args:
        seed_B: int64, any shape.
        position_B: int64, broadcastable to `seed_B`; 0 is the first token of the completion.

    Returns:
        float64, the broadcast shape.
    """
    # int64 arithmetic wraps modulo 2**64, so signed tensors carry unsigned bits unharmed.
    state = seed_B + (position_B + 1) * _signed(_INCREMENT)
    if state.device.type == "cpu":
        return _uniform_on_cpu(state)
    return _shift_right(_finalise_tensor(state), 11).to(torch.float64) * 2.0**-53


def _uniform_on_cpu(state: Tensor) -> Tensor:
    """`uniform` of the state, in place, by NumPy's unsigned shifts: half as many operations."""
    bits = state.view(torch.uint64).numpy()
    bits ^= bits >> 30
    bits *= _MULTIPLIER_1
    bits ^= bits >> 27
    bits *= _MULTIPLIER_2
    bits ^= bits >> 31
    found: Tensor = torch.from_numpy(((bits >> 11) * 2.0**-53).reshape(state.shape))
    return found


def uniform_of_few(seeds: Sequence[int], count: int) -> list[float]:
    """What `uniform` gives for positions 0 .. count - 1 of each seed, one seed after the other.

    By Python's own whole numbers: for a dozen draws a sixth of the time.
    """
    found = []
    for seed in seeds:
        for position in range(1, count + 1):  # `_finalise_int` written out, as in `_mixed`
            state = seed + position * _INCREMENT & _MASK_64
            state = (state ^ (state >> 30)) * _MULTIPLIER_1 & _MASK_64
            state = (state ^ (state >> 27)) * _MULTIPLIER_2 & _MASK_64
            found.append(((state ^ (state >> 31)) >> 11) * 2.0**-53)
    return found


def sample_tokens(
    logits_BV: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    temperature: float,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Draws one token per row by inverting the cumulative distribution at `uniform(seed, t)`.

    The distribution is softmax(logits / temperature) in float64, of which `top_k`, `top_p` and
    `min_p` keep the likeliest tokens (`likeliest`). The token is the first whose
    cumulative probability exceeds the uniform number; where rounding leaves the whole sum below
    it, the last token that adds to the sum. Temperature 0 is greedy.

    Args:
        logits_BV: float, finite or -inf (an excluded token).
        seed_B: int64.
        position_B: int64, position in the completion, from 0.
        temperature: not negative.
        top_k, top_p, min_p: see `likeliest`.

    Returns:
        token_B: int64.
        logprob_B: float32, or float64 for such logits, computed in float64: log-probability of the
            drawn token in that distribution, under temperature 1 and with all tokens where it is
            greedy. NaN where the logits are not a distribution.
    """
    logits64_BV = logits_BV.to(torch.float64)
    if temperature == 0:
        prob_BV = torch.softmax(logits64_BV, dim=-1)
        token_B = logits_BV.argmax(dim=-1)
    else:
        scaled_BV = logits64_BV if temperature == 1 else logits64_BV * (1.0 / temperature)
        prob_BV = torch.softmax(scaled_BV, dim=-1)
        if top_k or top_p < 1 or min_p:
            prob_BV = likeliest(prob_BV, top_k=top_k, top_p=top_p, min_p=min_p)
        token_B = _invert_cdf(prob_BV, uniform(seed_B, position_B))
    logprob_B = prob_BV.gather(1, token_B.unsqueeze(1)).squeeze(1).log_()
    return token_B, logprob_B.to(torch.promote_types(logits_BV.dtype, torch.float32))


def likeliest(prob_BV: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """A distribution over the likeliest tokens alone, with sum 1 again; ties at a bound stay.

    Applied one after another, each to what the one before has left:
      * min_p: tokens at least so many times as likely as the likeliest (arXiv 2407.01082);
      * top_k: the k likeliest; 0 for all;
      * top_p: the fewest that together have at least this probability (nucleus sampling,
        arXiv 1904.09751).
    """
    if min_p:
        prob_BV = _above(prob_BV, min_p * prob_BV.amax(dim=-1, keepdim=True))
    if 0 < top_k < prob_BV.shape[1]:
        prob_BV = _above(prob_BV, prob_BV.topk(top_k, dim=-1).values[:, -1:])
    if top_p < 1:
        sorted_BV = prob_BV.sort(dim=-1, descending=True).values
        before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
        kept_BV = before_BV < top_p
        least_B1 = sorted_BV.masked_fill(~kept_BV, torch.inf).amin(dim=-1, keepdim=True)
        prob_BV = _above(prob_BV, least_B1)
    return prob_BV


def _above(prob_BV: Tensor, least_B1: Tensor) -> Tensor:
    """The probabilities that are at least so large, with sum 1 again."""
    kept_BV = torch.where(prob_BV >= least_B1, prob_BV, 0.0)
    return kept_BV / kept_BV.sum(dim=-1, keepdim=True)


def _invert_cdf(prob_BV: Tensor, uniform_B: Tensor) -> Tensor:
    cdf_BV = prob_BV.cumsum(dim=-1)
    first_above_B1 = torch.searchsorted(cdf_BV, uniform_B.unsqueeze(1), right=True)
    last_B1 = torch.searchsorted(cdf_BV, cdf_BV[:, -1:].contiguous())
    # The clamp matters for NaN only: the index stays in range and the log-probability tells.
    token_B1 = torch.minimum(first_above_B1, last_B1).clamp_(max=prob_BV.shape[1] - 1)
    return token_B1.squeeze(1)


def _finalise_int(value: int) -> int:
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK_64
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK_64
    return value ^ (value >> 31)


def _finalise_tensor(value: Tensor) -> Tensor:
    """`_finalise_int` on int64, in place."""
    value.bitwise_xor_(_shift_right(value, 30)).mul_(_signed(_MULTIPLIER_1))
    value.bitwise_xor_(_shift_right(value, 27)).mul_(_signed(_MULTIPLIER_2))
    return value.bitwise_xor_(_shift_right(value, 31))


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's shift of int64 is arithmetic, so the sign bits are masked away."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value
