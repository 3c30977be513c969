"""Back ends that cannot be asked are told as such, and end nothing."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import Any

import pytest

from m2flow.environments import rendering


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EFAULT, os.strerror(errno.EFAULT)), "no process could ask it: Bad address"),
        (subprocess.TimeoutExpired("python", 1.0), "did not answer in"),
    ],
)
def test_one_that_cannot_be_asked_does_not_work(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def refused(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(rendering.subprocess, "run", refused)
    found = rendering.probe.__wrapped__("egl")
    assert not found.works
    assert said in found.detail
