"""`SnapshotOnItsWay`: workers' states that lanes save, and the launcher fetches, beside the steps.

A lane saves when its turn comes among its orders: after all that it was told before, and before
all that it is told later. So the states are those between two steps, and nobody waits for them but
the lane that saves.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from m2flow.flow.batch import Batch
from m2flow.runtime.driver.pool import LanePool
from m2flow.runtime.driver.recovery import State
from m2flow.runtime.lane.exchange import ItemsKey
from m2flow.runtime.lane.orders import (
    REUSED_BYTES,
    STATES,
    DropStep,
    MethodResult,
    Save,
    SaveSeconds,
)


class SnapshotOnItsWay:
    """One snapshot.

    Args:
        pool: the lanes.
        gangs: whose states: worker to the lanes of one of its replicas. All of them take part in
            saving, and the first one keeps what is saved until it is fetched.
        bring: has workers resident on lanes; called with the workers, for what, and the lanes.
        seconds: longest that all of it may take.
    """

    def __init__(
        self,
        pool: LanePool,
        gangs: Mapping[str, tuple[int, ...]],
        bring: Callable[[Sequence[str], str, Sequence[int]], None],
        seconds: float,
    ) -> None:
        self._pool, self._gangs, self._deadline = pool, gangs, time.monotonic() + seconds
        self._numbers = {worker: number for number, worker in enumerate(gangs)}
        self._saving: dict[str, list[Future[MethodResult]]] = {}
        self._fetching: dict[str, Future[Batch]] = {}
        self.seconds = SaveSeconds(0.0, 0.0)
        """The longest for a worker's state of a lane; known once `is_over` says yes."""
        for worker, gang in gangs.items():
            bring((worker,), "save", gang)
            self._saving[worker] = [self._save(worker, lane) for lane in gang]
        for worker, lanes in self._saving.items():
            for lane in lanes:
                lane.add_done_callback(partial(self._fetch_if_saved, worker))

    def _save(self, worker: str, lane: int) -> Future[MethodResult]:
        return self._pool.ask_later(lane, lambda asked: Save(asked, worker, self._numbers[worker]))

    @property
    def is_over(self) -> bool:
        """Whether `states` need not wait."""
        under_way = len(self._fetching) < len(self._gangs) or not all(
            one.done() for one in self._fetching.values()
        )
        return not under_way or time.monotonic() > self._deadline

    def _fetch_if_saved(self, worker: str, _: Future[MethodResult]) -> None:
        lanes = self._saving.get(worker, [])
        if lanes and worker not in self._fetching and all(one.done() for one in lanes):
            self._fetching[worker] = self._fetched(worker, lanes)

    def _fetched(self, worker: str, lanes: Sequence[Future[MethodResult]]) -> Future[Batch]:
        """What brings a worker's state here, now that it is saved, or could not be."""
        try:
            answers = [lane.result() for lane in lanes]
            for answer in answers:
                if answer.raised:
                    raise pickle.loads(answer.value)
            said: list[SaveSeconds] = [pickle.loads(one.value) for one in answers]
            self.seconds = SaveSeconds(
                max(self.seconds.busy, *(one.busy for one in said)),
                max(self.seconds.held_up, *(one.held_up for one in said)),
            )
            key = ItemsKey("", STATES, self._numbers[worker], (0,))
            left = max(0.0, self._deadline - time.monotonic())
            fetch = self._pool.exchange.fetch_later
            state = fetch(self._gangs[worker][0], key, left, then=_without_large)
        except Exception as error:  # noqa: BLE001 - raised by the future
            state = Future()
            state.set_exception(error)
        state.add_done_callback(lambda _: self._pool.wake())
        return state

    def states(self) -> dict[str, State]:
        """What each worker has saved; the lanes let go of it.

        Of a lane on this machine it is the lane's own copy, which stays as it is, whatever becomes
        of the lane; a large one is copied, so that no shared memory is held.

        Raises:
            TimeoutError: it is not here, and its time is up.
            RunFailed, PeerLost: a lane is gone.
            Exception: what a worker has raised.
        """
        try:
            if not self._gangs.keys() <= self._fetching.keys():
                raise TimeoutError("lanes have not saved in time")
            batches = {name: state.result(timeout=0) for name, state in self._fetching.items()}
            return {name: batch["state"][0] for name, batch in batches.items()}
        finally:
            self.drop()

    def drop(self) -> None:
        """Let go of what has come, and have the lanes let go of what they keep for it.

        Futures know whom to tell and are known here: without this, a state would stay in memory
        until somebody looks for such circles.
        """
        self._saving.clear()
        self._fetching.clear()
        for lane in self._pool.lanes:
            self._pool.send(lane.id, DropStep("", STATES))


def _without_large(batch: Batch) -> Batch:
    """A state as it has come, or a copy of a large one, so that no shared memory is held."""
    state: State = batch["state"][0]
    if sum(x.nbytes for x in state.values()) <= REUSED_BYTES:
        return batch
    return Batch({"state": [{name: x.clone() for name, x in state.items()}]})
