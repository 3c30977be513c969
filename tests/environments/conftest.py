"""Fixtures of the environments' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session", autouse=True)
def toys() -> Iterator[ModuleType]:
    """The environments of the tests, as a module that worker processes can import too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import toy_environments

        yield toy_environments


@pytest.fixture
def walk(toys: ModuleType) -> type:
    return toys.Walk
