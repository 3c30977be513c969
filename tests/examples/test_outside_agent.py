"""An agent of a public framework learns to use its tool, through the endpoint."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from tests.examples.test_results import reached


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_agent_learns_to_use_its_tool(seed: int, example: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("agents", reason="needs the extra agents")
    reached(example("outside_agent"), seed)
