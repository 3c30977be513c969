"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.results import add_result

if not Path("/dev/nvidiactl").exists():
    # Kernels in Triton run in its interpreter; it looks when it is imported, which torch may do.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the repository; skips where there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the data sets in {folder}")
    return folder


NOTHING_IS_ABSENT = any(
    os.environ.get(name) for name in ("M2FLOW_NEEDS_SIMULATORS", "M2FLOW_CHAOS_RESULT")
)
"""Where everything is to be there for the tests, one that is skipped has failed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What becomes of each slow test, for the file that a variable names."""
    report = yield
    if NOTHING_IS_ABSENT and report.skipped:
        report.outcome = "failed"
    tells_itself = "told" in getattr(item, "fixturenames", ())  # a seeded run
    if call.when == "call" and item.get_closest_marker("slow") and not tells_itself:
        name = item.nodeid.removeprefix("tests/")
        told = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        add_result("M2FLOW_CHAOS_RESULT", "chaos", name.removeprefix("chaos/"), told)
        add_result("M2FLOW_SLOW_RESULT", "slow", name, told)
    return report


if NOTHING_IS_ABSENT:

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        report.outcome = "failed" if report.skipped else report.outcome
        return report


# The same examples every time: a suite that passed on a commit passes on it again. New examples are
# looked for with HYPOTHESIS_PROFILE=default.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of the tests neither read nor leave profiles in the cache of whoever runs them."""
    os.environ["M2FLOW_CACHE"] = str(tmp_path_factory.mktemp("cache"))
