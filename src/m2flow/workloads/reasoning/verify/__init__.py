"""Rule-based reward for a final answer: `verify(gold, completion)` is 1.0 or 0.0.

The answer is what the completion says last: the last `\\boxed{}`, else what stands after the last
`####`, else the last number. Two plain numbers are compared exactly and at once; everything else
goes to math-verify, which is imported on first use. Promises: it never raises, whatever the
completion says; it works in any thread; the work per item is bounded by counts and not by a
clock, so a busy machine cannot change a reward.
"""

from __future__ import annotations

from collections.abc import Sequence

from m2flow.workloads.reasoning.verify.extract import extract_answer
from m2flow.workloads.reasoning.verify.number import read_number, same_number
from m2flow.workloads.reasoning.verify.symbolic import same_expression

__all__ = ["extract_answer", "score_many", "verify"]


def verify(gold: str, completion: str) -> float:
    """Does the completion end in the right answer?

    Args:
        gold: the right answer alone: a number in any usual spelling, an expression or a word.
        completion: the text to judge, of any length.

    Returns:
        1.0 where the final answer equals `gold`, else 0.0; 0.0 too where there is no answer.
    """
    gold_number = read_number(gold)
    answer = extract_answer(completion, numeric=gold_number is not None)
    if answer is None:
        return 0.0
    if gold_number is not None:
        number = read_number(answer)
        if number is not None:
            return float(same_number(gold_number, number))
    return float(same_expression(gold, answer))


def score_many(golds: Sequence[str], completions: Sequence[str]) -> list[float]:
    """`verify` for each pair, in order; the two sequences are of one length."""
    return [verify(gold, text) for gold, text in zip(golds, completions, strict=True)]
