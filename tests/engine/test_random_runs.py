"""Random flows under random plans, with random costs and orders of completion, audited."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.engine.audit import audit
from tests.engine.random_cases import Case, cases

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@given(cases())
@settings(max_examples=200, deadline=None, suppress_health_check=QUIET, report_multiple_bugs=False)
def test_a_random_run_keeps_every_promise(case: Case) -> None:
    audit(case)
