"""What becomes of each slow test of chaos, for the file that M2FLOW_CHAOS_RESULT names."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from tests.results import add_result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    tells_itself = "told" in getattr(item, "fixturenames", ())  # a seeded run
    if call.when == "call" and item.get_closest_marker("slow") and not tells_itself:
        name = item.nodeid.rpartition("/")[2]
        told = {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        add_result("M2FLOW_CHAOS_RESULT", "chaos", name, told)
    return report
