"""When a snapshot is worth its time, what all of them have taken, and how one comes."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import cloudpickle
import pytest
import torch

from m2flow.errors import RunFailed
from m2flow.flow.batch import Batch
from m2flow.runtime.driver.recovery import BUSY, SHARE, Recovery
from m2flow.runtime.driver.snapshots import SnapshotOnItsWay
from m2flow.runtime.lane.orders import DropStep, MethodResult, Order, Save, SaveSeconds


def test_snapshots_take_a_bounded_share_of_the_time() -> None:
    now, busy = 0.0, 0.0
    recovery = Recovery(0, [], 10_000_000, 10**9, heals=True, clock=lambda: now)
    for step in range(1000):
        now += 0.25
        recovery.gave(step)
        if recovery.is_due():
            recovery.begin(step + 1)
            now += 0.03
            busy += 0.03
            recovery.keep({}, SaveSeconds(0.03, 0.03))
    assert 0.0075 * now < busy <= 0.015 * now
    assert abs(recovery.snapshot_seconds - busy) < 1e-9


def test_a_snapshot_that_holds_nobody_up_is_taken_more_often() -> None:
    now, kept = 0.0, 0
    recovery = Recovery(0, [], 0, 10**9, heals=True, clock=lambda: now)
    for step in range(1000):
        now += 0.25
        recovery.gave(step)
        if recovery.is_due():
            recovery.begin(step + 1)
            recovery.keep({}, SaveSeconds(0.03, 0.0))
            kept += 1
    assert 0.5 * BUSY * now < 0.03 * kept <= BUSY * now + 0.03
    assert recovery.snapshot_seconds == 0.0


def test_after_so_many_steps_a_snapshot_is_due_whatever_it_costs() -> None:
    now, kept = 0.0, []
    recovery = Recovery(0, [], 0, 10**9, heals=True, every=3, clock=lambda: now)
    for step in range(12):
        now += 1.0
        recovery.gave(step)
        if recovery.is_due():
            recovery.begin(step + 1)
            recovery.keep({}, SaveSeconds(1e6, 1e6))
            kept.append(step)
    assert kept == [0, 3, 6, 9], "the first one is expected to cost nothing"


def test_steps_go_on_while_a_snapshot_comes() -> None:
    now = 0.0
    recovery = Recovery(0, [], 0, 10**9, heals=True, clock=lambda: now)
    batches = [Batch({"x": [step]}) for step in range(5)]

    def steps(*numbers: int) -> None:
        for step in numbers:
            recovery.feed(batches[step])
            recovery.gave(step)

    steps(0, 1)
    assert recovery.is_due()
    recovery.begin(2)
    steps(2, 3)
    assert not recovery.is_due(), "one is on its way"
    assert recovery.back_to(RunFailed("lost")).step == 0
    assert recovery.since_snapshot() == (batches[:4], [])
    recovery.keep({"learner": {}}, SaveSeconds(0.0, 0.0))
    assert recovery.back_to(RunFailed("lost")).step == 2
    assert recovery.since_snapshot() == (batches[2:4], [])
    recovery.begin(4)
    steps(4)
    recovery.give_up()
    assert recovery.back_to(RunFailed("lost")).step == 2
    assert recovery.since_snapshot() == (batches[2:5], [])
    assert recovery.is_due(), "of one that will not come another is taken"


def test_what_a_replica_holds_takes_the_place_of_an_older_snapshot() -> None:
    recovery = Recovery(0, [], 0, 10**9, heals=True, clock=lambda: 0.0)
    assert not recovery.is_behind, "nothing was done since the run has begun"
    batches = [Batch({"x": [step]}) for step in range(4)]
    for batch in batches:
        recovery.feed(batch)
    recovery.gave(0)
    recovery.gave(1)
    assert recovery.is_behind
    recovery.take_over({"learner": {}})
    assert not recovery.is_behind
    assert recovery.back_to(RunFailed("lost")).step == 2
    assert recovery.since_snapshot() == ([], batches[2:])


def test_a_snapshot_counts_once_the_results_before_it_were_given() -> None:
    recovery = Recovery(0, [], 0, 10**9, heals=True, clock=lambda: 1.0)
    assert not recovery.is_due(), "no result was given"
    assert recovery.is_due(1)
    recovery.gave(0)
    recovery.begin(2)
    assert not recovery.can_keep, "step 1 is over, and its result on its way"
    recovery.gave(1)
    assert recovery.can_keep


def test_a_pause_for_a_snapshot_is_counted_as_its_time() -> None:
    now = 0.0
    recovery = Recovery(0, [], 0, 10**9, heals=True, clock=lambda: now)
    recovery.gave(0)
    recovery.pause()
    now = 3.0  # steps that were in flight end, and none follows
    recovery.begin(1)
    recovery.keep({}, SaveSeconds(0.01, 0.0))
    assert recovery.snapshot_seconds == 3.0, "for so long no step was begun"
    recovery.gave(1)
    now += 0.99 * 3.0 / SHARE
    assert not recovery.is_due()
    now += 0.02 * 3.0 / SHARE
    assert recovery.is_due()


class _Pool:
    """Lanes that answer when the test says."""

    def __init__(self, lanes: int) -> None:
        self.lanes = [type("Lane", (), {"id": lane}) for lane in range(lanes)]
        self.exchange = self
        self.asked: list[tuple[int, Save]] = []
        self.sent: list[tuple[int, Order]] = []
        self.answers: list[Future[MethodResult]] = []
        self.fetches: list[Future[Batch]] = []
        self.woken = 0

    def ask_later(self, lane: int, order: Callable[[int], Save]) -> Future[MethodResult]:
        self.asked.append((lane, order(len(self.asked))))
        self.answers.append(Future())
        return self.answers[-1]

    def answer(self, which: int, value: Any, *, raised: bool = False) -> None:
        self.answers[which].set_result(MethodResult(which, cloudpickle.dumps(value), raised))

    def fetch_later(
        self, lane: int, key: Any, seconds: float, *, then: Callable[[Batch], Batch]
    ) -> Future[Batch]:
        self.then = then
        self.fetches.append(Future())
        return self.fetches[-1]

    def send(self, lane: int, order: Order) -> None:
        self.sent.append((lane, order))

    def wake(self) -> None:
        self.woken += 1


def _begun(gangs: dict[str, tuple[int, ...]], seconds: float = 60.0) -> tuple[Any, _Pool]:
    pool = _Pool(2)
    return SnapshotOnItsWay(pool, gangs, lambda *_: None, seconds), pool  # type: ignore[arg-type]


def test_a_snapshot_is_over_once_all_that_lanes_have_saved_is_here() -> None:
    snapshot, pool = _begun({"policy": (0, 1), "critic": (1,)})
    assert [lane for lane, _ in pool.asked] == [0, 1, 1]
    pool.answer(0, SaveSeconds(0.1, 0.0))
    assert not pool.fetches, "the other lane of the gang has not saved"
    pool.answer(1, SaveSeconds(0.3, 0.1))
    assert len(pool.fetches) == 1, "nobody needs to look"
    pool.answer(2, SaveSeconds(0.2, 0.2))
    assert not snapshot.is_over
    for number, fetch in enumerate(pool.fetches):
        fetch.set_result(Batch({"state": [{"part": torch.tensor([number], dtype=torch.uint8)}]}))
    assert snapshot.is_over
    assert pool.woken == 2, "or nobody would look"
    states = snapshot.states()
    assert {name: content["part"].tolist() for name, content in states.items()} == {
        "policy": [0],
        "critic": [1],
    }
    assert snapshot.seconds == SaveSeconds(0.3, 0.2)
    assert [lane for lane, order in pool.sent if isinstance(order, DropStep)] == [0, 1]


def test_a_large_state_is_copied_and_a_small_one_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of shared memory there is less than of other."""
    _, pool = _begun({"policy": (0,)})
    pool.answer(0, SaveSeconds(0.1, 0.0))
    content = torch.arange(100, dtype=torch.uint8)
    batch = Batch({"state": [{"part": content}]})
    assert pool.then(batch)["state"][0]["part"].data_ptr() == content.data_ptr()
    monkeypatch.setattr("m2flow.runtime.driver.snapshots.REUSED_BYTES", 99)
    copied = pool.then(batch)["state"][0]["part"]
    assert copied.data_ptr() != content.data_ptr()
    assert torch.equal(copied, content)


def test_what_has_come_is_let_go_of_at_once() -> None:
    """A state is as large as the model and its optimizer."""
    snapshot, pool = _begun({"policy": (0,)})
    pool.answer(0, SaveSeconds(0.1, 0.0))
    content = torch.zeros(1, dtype=torch.uint8)
    pool.fetches.pop().set_result(Batch({"state": [{"part": content}]}))
    known = weakref.ref(content)
    del content
    gc.disable()
    try:
        states = snapshot.states()
        assert states["policy"]["part"].tolist() == [0]
        states.clear()
        assert known() is None, "without a search for circles"
    finally:
        gc.enable()


@pytest.mark.parametrize("why", ["raised", "lost", "late"])
def test_a_snapshot_that_does_not_come_says_why(why: str) -> None:
    snapshot, pool = _begun({"policy": (0,)}, seconds=-1.0 if why == "late" else 60.0)
    if why == "raised":
        pool.answer(0, OSError("no space left"), raised=True)
    elif why == "lost":
        pool.answers[0].set_exception(RunFailed("lane 0 was lost"))
    assert snapshot.is_over
    kind = {"raised": OSError, "lost": RunFailed, "late": TimeoutError}[why]
    with pytest.raises(kind):
        snapshot.states()
    assert pool.sent, "lanes let go of it all the same"


def test_what_is_on_its_way_to_other_machines_must_fit_into_memory_too() -> None:
    """Each of their lanes is sent a state of its own, and the launcher was killed for it."""
    there = Recovery(0, [], 10**8, 10**9, heals=True, sent_bytes=8 * 10**8)
    assert "(no snapshot of its 0.1 GB fits into host memory)" in (there.warning or "")
    assert Recovery(0, [], 10**8, 10**9, heals=True, sent_bytes=7 * 10**8).warning is None


@pytest.mark.parametrize(
    ("unsaved", "num_bytes", "heals", "words"),
    [
        (["critic"], 0, True, r"\(critic does not say how its state is saved"),
        ([], 9 << 30, True, r"\(no snapshot of its 9\.66 GB fits into host memory\)"),
        ([], 9 << 30, False, None),
        ([], 1 << 10, True, None),
    ],
)
def test_a_run_that_could_heal_and_takes_no_snapshots_says_so(
    unsaved: list[str], num_bytes: int, heals: bool, words: str | None
) -> None:
    books = Recovery(0, unsaved, num_bytes, 10**9, heals)
    assert books.warning is None if words is None else re.search(words, books.warning or "")
    books.give_up()
    books.give_up("the last one has failed: no space left")
    assert (books.warning is not None) is heals


def test_what_else_is_done_in_a_pause_is_not_the_snapshots_time() -> None:
    """After a race's change of plans no snapshot was taken for half an hour."""
    now = 0.0
    recovery = Recovery(0, [], 0, 10**9, heals=True, clock=lambda: now)
    recovery.gave(0)
    recovery.pause()
    now = 30.0  # the pilot has gone over to another plan
    recovery.pause_is_over()
    recovery.begin(1)
    recovery.keep({}, SaveSeconds(0.01, 0.0))
    recovery.gave(1)
    now += 2.0
    assert recovery.is_due()
