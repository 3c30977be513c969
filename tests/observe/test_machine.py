"""The machine in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from m2flow.observe.machine import describe_machine
from m2flow.plan import machine


def test_gpus_are_named_as_the_driver_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run once said that there was no accelerator."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_machine().endswith("no accelerator")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    driver.chmod(0o755)
    assert describe_machine().endswith(" · 2 x NVIDIA H200")
    machine._asked.cache_clear()
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert describe_machine().endswith("no accelerator")


def test_a_driver_that_never_answers_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setattr(machine, "DRIVER_SECONDS", 0.2)
    assert machine._asked(str(tool), "name") == ()
