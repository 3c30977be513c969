"""When a snapshot is worth its time, and what all of them have taken."""

from __future__ import annotations

from m2flow.runtime.driver.recovery import Recovery


def test_snapshots_take_at_most_one_percent_of_the_time() -> None:
    now, stood = 0.0, 0.0
    recovery = Recovery(0, [], 10_000_000, 10**9, heals=True, clock=lambda: now)
    for step in range(1000):
        now += 0.25
        recovery.gave(step)
        if recovery.is_due:
            now += 0.03
            stood += 0.03
            recovery.keep({}, 0.03)
    assert 0.005 * now < stood <= 0.01 * now
    assert abs(recovery.snapshot_seconds - stood) < 1e-9
