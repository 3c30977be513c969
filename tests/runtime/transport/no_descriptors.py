"""Stands for an interpreter, a kernel or a sandbox without descriptors of processes."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

DescriptorsFail = Callable[[int | None], None]


@pytest.fixture
def descriptors_fail(monkeypatch: pytest.MonkeyPatch) -> DescriptorsFail:
    """Have descriptors of processes refused with this error; None: Python knows of none."""

    def fail(number: int | None) -> None:
        def refused(process: int) -> int:
            assert number is not None
            raise OSError(number, os.strerror(number))

        if number is None:
            monkeypatch.delattr(os, "pidfd_open")
        else:
            monkeypatch.setattr(os, "pidfd_open", refused)

    return fail
