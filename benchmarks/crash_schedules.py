"""Ten thousand crash schedules, each from a seed: what is done twice, lost, or stuck, and how soon.

Random flows run under random plans (`tests/engine/random_cases.py`). Each is played once under the
virtual clock without a fault, with drawn delays and ties, and audited: every item once, versions,
staleness, memory of each lane, back-pressure (`tests/engine/audit.py`). Then it is run again and
again as `launch` runs it, with supervision, snapshots and journal, on lanes under a virtual clock
(`tests/runtime/crash_schedules.py`), under a seed that draws how long everything takes and what
goes wrong: events that come twice, late and out of order, lanes and whole machines that are lost,
lines that are half open, slow lanes, a slow disk, lanes that do not come up, and a launcher that is
lost. A run goes on until its steps are done, or ends with a reason that is true.

Each core plays a share, from a seed of its own. A schedule that breaks a promise ends its share:
Hypothesis shrinks the flow and the plan, what goes wrong is then cut to the fewest kinds and
losses, and the shortest case that still breaks it is printed.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from harness import ROOT, Target, arguments, conclude, table
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT))

from tests.engine.audit import audit
from tests.engine.random_cases import Case, cases
from tests.runtime.crash_schedules import SCHEDULES, CrashSchedule, shortest

SCHEDULES_IN_ALL, QUICK_SCHEDULES = 10_000, 1_000
EACH = 20
"""Schedules of one flow under one plan, that without a fault included."""

LIMIT_SECONDS = 180.0


class Broken(Exception):
    """A schedule that breaks a promise: its case, its faults and its seed."""


class Played:
    """What was played so far."""

    def __init__(self) -> None:
        self.schedules, self.steps = 0, 0
        self.events: Counter[str] = Counter()

    def play(self, case: Case, first: int) -> None:
        """All schedules of a case; raises where one breaks a promise."""
        audit(case)
        self.schedules += 1
        self.steps += case.num_steps
        for number in range(1, EACH):
            faults = SCHEDULES[number % len(SCHEDULES)]
            schedule = CrashSchedule(case, faults, first + number)
            try:
                reason = schedule.run()
            except Exception as error:
                raise Broken(case, faults, first + number) from error
            self.schedules += 1
            self.steps += schedule.steps
            self.events += schedule.world.events
            if reason is not None:
                self.events[f"ended: {reason}"] += 1


def play_share(first_seed: int, wanted: int) -> tuple[Played, str]:
    """What one process plays, and what has broken: the shortest case that still does."""
    played = Played()

    @seed(first_seed)
    @settings(
        max_examples=wanted // EACH,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=tuple(HealthCheck),
        report_multiple_bugs=False,
        print_blob=True,
    )
    @given(cases(), st.integers(0, 2**32))
    def play(case: Case, first: int) -> None:
        played.play(case, first)

    try:
        play()
    except Exception as error:  # noqa: BLE001 - whatever breaks is told
        said = list(getattr(error, "__notes__", []))
        cause: BaseException | None = error  # of the audit, without a fault
        if isinstance(error, Broken):
            faults, at = shortest(*error.args)
            said.append(f"{faults}, seed {at}")
            cause = error.__cause__
        return played, "\n".join([*said, f"{type(cause).__name__}: {cause}"])
    return played, ""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    options = parser.parse_args()
    wanted = QUICK_SCHEDULES if options.quick else SCHEDULES_IN_ALL
    cores = len(os.sched_getaffinity(0))
    share = EACH * -(-wanted // (EACH * cores))
    seeds = [options.seed * cores + core for core in range(cores)]
    start = time.perf_counter()
    with ProcessPoolExecutor(cores, get_context("spawn")) as processes:
        shares = list(processes.map(play_share, seeds, [share] * cores))
    seconds = time.perf_counter() - start
    broken = [said for _, said in shares if said]
    for said in broken:
        print(said)
    played = Played()
    for one, _ in shares:
        played.schedules += one.schedules
        played.steps += one.steps
        played.events += one.events
    each = seconds / max(1, played.schedules)
    rows = [["schedules", played.schedules], ["steps", played.steps], ["seconds", seconds]]
    table(["", "in all"], [*rows, *map(list, sorted(played.events.items()))])
    conclude(
        "crash_schedules",
        {
            "schedules": played.schedules,
            "steps": played.steps,
            "seconds": seconds,
            "seed": options.seed,
            "processes": cores,
            **played.events,
        },
        [
            Target("schedules that break a promise", len(broken), 0, at_most=True),
            Target("schedules played", played.schedules, wanted),
            Target(
                "seconds for ten thousand", each * SCHEDULES_IN_ALL, LIMIT_SECONDS, at_most=True
            ),
        ],
        options,
    )


if __name__ == "__main__":
    main()
