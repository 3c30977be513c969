"""`obtain`: the profile of a flow, from a file, from the store, or from the lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from m2flow.engine.plan import LaneSpec
from m2flow.flow.batch import Batch
from m2flow.flow.flow import Flow
from m2flow.plan.profile import Profile
from m2flow.plan.units import Seconds
from m2flow.runtime.profiling import stored
from m2flow.runtime.profiling.measuring import BUDGET_SECONDS, measure_flow
from m2flow.runtime.profiling.stored import Key

if TYPE_CHECKING:
    from m2flow.runtime.driver.pool import LanePool

    Lanes: TypeAlias = str | Sequence[LaneSpec] | LanePool | Callable[[], LanePool]
    """Where to measure; a function is called when nothing else gives a profile."""
else:
    Lanes = object

Batches: TypeAlias = Sequence[Batch] | Callable[[], Sequence[Batch]]
"""Source items of the first steps; a function is called when nothing else gives a profile."""


def obtain(
    make_flow: Callable[[], Flow],
    batches: Batches,
    lanes: Lanes,
    key: Key,
    budget: float = BUDGET_SECONDS,
    cache: bool = True,
    reuse: Path | None = None,
    *,
    given: Path | None = None,
    asked: float | None = None,
    note: Callable[[str], None] | None = None,
) -> tuple[Profile, str]:
    """The profile of a flow, and in a few words where it comes from.

    Args:
        make_flow: makes the flow with workers that may be thrown away.
        batches: source items of the first steps.
        lanes: as `launch` takes them, or a function that gives a pool.
        key: what the profile depends on.
        budget: seconds that a measurement may take.
        cache: whether a stored profile will do, unless a smaller budget has cut it short; what is
            measured is stored in any case.
        reuse: a profile file to take whatever it was made for.
        given: a profile file to take if it was made for this.
        asked: the budget that what is measured is stored with, where a part of it is gone that will
            not be needed the next time.
        note: told what is going on.

    Raises:
        UserError: a file is no profile, or `given` was made for something else.
    """
    for path in filter(None, (reuse, given)):
        known = stored.given(path, key, whatever_its_key=path is reuse)
        return known, f"read from {path}{stored.lack(known)}"
    if cache and (found := stored.cached(key, budget)) is not None:
        return found, f"stored at {stored.stored_at(key)}{stored.lack(found)}"
    start = time.monotonic()
    measured = measure_flow(
        make_flow,
        batches() if callable(batches) else batches,
        lanes=lanes() if callable(lanes) else lanes,
        budget_seconds=budget,
        key=key,
        note=note,
    )
    profile = measured.profile
    if profile.cut_by is not None and asked is not None:
        profile = replace(profile, cut_by=Seconds(asked))
    path = stored.keep(profile)
    took = time.monotonic() - start
    how = f"measured in {took:.0f} s to {measured.error:.1%}, stored at {path}"
    return profile, how + stored.lack(profile)
