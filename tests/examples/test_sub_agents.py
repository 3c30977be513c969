"""A policy answers the calls of another one, on the weights that the learner publishes to both."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType


def test_one_policy_answers_the_other(example: Callable[[str], ModuleType]) -> None:
    rewards, texts = example("sub_agents").train(steps=3)
    assert len(rewards) == 3
    asked = [match for text in texts if (match := re.match(r"\[([^\]]*)\]\{([^}]*)\}", text))]
    assert asked, "the caller has asked"
    answers = {match[1].strip(): match[2] for match in asked}
    assert all(answers[match[1].strip()] == match[2] for match in asked), (
        "greedy: one to a question"
    )
