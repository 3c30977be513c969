"""The answer of a mathematical problem, compared with the right one: 1.0 or 0.0.

The answer is what the completion says last: the last `\\boxed{}`, else what stands after the last
`####`, else the last number; the latter two within the last `<answer>` tags, where there are any.
Two plain numbers are compared exactly and at once; everything else goes to math-verify, in
processes that are started on first use and whose time and memory are limited (`symbolic`). Whatever
the completion says, nothing is raised, and any thread may compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from m2flow.rewards.final_answer import chosen_letter, extract_answer, right_letter
from m2flow.rewards.number import read_number, rounds, same_number, sides, without_symbols
from m2flow.rewards.reward import threaded
from m2flow.rewards.symbolic import same_expression


@threaded
def math_reward(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """1.0 if the completion ends in `row["answer"]`, else 0.0; see `verify`."""
    return verify(row["answer"], completion)


def verify(gold: str, completion: str) -> float:
    """Compare the completion's last answer with the right one.

    Args:
        gold: the right answer alone: a number in any usual spelling, an expression, a word, or the
            capital letter of a choice, which an answer may name with its text (`B) 4.5 eV`).
        completion: the text to judge, of any length.

    Returns:
        1.0 where the final answer equals `gold`, else 0.0; 0.0 too where there is no answer. Of an
        equation each side must; after one that is exactly `gold` the last may be rounded
        (`1/3 = 0.33`).
    """
    gold, completion = without_symbols(gold), without_symbols(completion)
    gold_number, right = read_number(gold), right_letter(gold)
    answer = extract_answer(completion, numeric=gold_number is not None, choice=right is not None)
    if answer is None:
        return 0.0
    if gold_number is not None:
        before = [one for side in sides(answer)[:-1] if (one := read_number(side)) is not None]
        if not all(same_number(gold_number, one) for one in before):
            return 0.0  # such as `1 = 7`
        number = read_number(answer)
        if number is not None:
            exact = any(one.value == gold_number.value for one in before)
            rounded = exact and rounds(number, gold_number)
            return float(rounded or same_number(gold_number, number))
    elif right and (chosen := chosen_letter(answer)):
        return float(chosen == right)
    return float(same_expression(gold, answer))
