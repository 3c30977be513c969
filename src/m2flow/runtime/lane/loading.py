"""Bringing a lane's workers up, from one run or plan to the next, and closing them."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

import torch

from m2flow.flow.batch import Batch
from m2flow.flow.worker import Worker
from m2flow.runtime.lane.context import LaneContext
from m2flow.runtime.lane.exchange import Exchange, ItemsKey
from m2flow.runtime.lane.exhausted import name_residents
from m2flow.runtime.lane.host import LaneHost
from m2flow.runtime.lane.orders import REUSED_BYTES, STATES, Load, Placed, Save
from m2flow.runtime.lane.state_copy import StateCopy


class Loader:
    """Brings workers up on one lane.

    Args:
        context: tells workers where they are, and with whom.
        exchange: brings their states here.
        begin: called with the name of each worker that is about to be brought up.

    Attributes:
        limited: whether the lane has a memory limit, under which everybody is away at the start.
    """

    def __init__(
        self, context: LaneContext, exchange: Exchange, begin: Callable[[int, str], None]
    ) -> None:
        self._context, self._exchange, self._begin = context, exchange, begin
        self.limited = False

    def load(self, order: Load, old: LaneHost, state_bytes: dict[str, int]) -> LaneHost:
        """Bring up the workers; under a memory limit one at a time, each put away again.

        Workers that the order keeps stay as they are, and so do the payloads here.

        Args:
            order: what is to be there.
            old: what was there; all but what the order keeps was closed.
            state_bytes: learns what the state of each worker that is brought up takes.
        """
        keep = order.keep is not None
        workers = dict(old.workers) if keep else {}
        limited, self.limited = self.limited, order.memory_bytes is not None
        if limited != self.limited:
            for worker in workers.values():
                (worker.offload if self.limited else worker.onload)()
        self._context.meet(order)
        host = LaneHost(
            self._context.lane,
            pickle.loads(order.graphs),
            workers,
            store=old.store if keep else None,
            agree=self._context.agreements(order.placed),
        )
        if limited == self.limited:
            host.away = old.away & set(workers)
        elif self.limited:
            host.away = set(workers)
        self._exchange.serve(host.store)
        kept = frozenset(workers)
        try:
            for name, placed in order.placed.items():
                if name not in kept:
                    self._begin(order.number, name)
                    workers[name] = self._loaded(name, placed, order, host)
                    state_bytes[name] = workers[name].state_bytes()
                    if self.limited:
                        workers[name].offload()
                        host.away.add(name)
        except BaseException:
            with suppress(Exception):  # what counts is why they were not loaded
                close_workers(host, kept)
            raise
        host.versions = dict.fromkeys(workers, order.version)
        return host

    def _loaded(self, name: str, placed: Placed, order: Load, host: LaneHost) -> Worker:
        worker: Worker = pickle.loads(placed.worker)
        place = self._context.place(placed, order.version)
        worker.place = replace(place, memory_bytes=order.memory_bytes)
        try:
            worker.load(worker.place)
        except BaseException as error:
            name_residents(error, place.lane, f"{name}.load", host.workers, host.away)
            raise
        if (state := placed.state) is not None:
            if state.lane == self._context.lane:
                saved = host.store.gather("", STATES, [(state.producer, (0,))])
            else:
                key = ItemsKey("", STATES, state.producer, (0,))
                saved = self._exchange.ask(state.lane, key, order.deadline_seconds)
            worker.restore(saved["state"][0])
        elif placed.saved is not None:
            worker.restore(self._exchange.unwrap(placed.saved)["state"][0])
        return worker


def save(order: Save, host: LaneHost, exchange: Exchange) -> None:
    """Keep a copy of what a worker saves; its other lanes may have to take part.

    A small one is written over an earlier copy that nobody reads any more: memory that is new to a
    process takes five times as long to fill. Whoever keeps the last one on this machine reads it
    where it lies, so that there are two.
    """
    saved = dict(host.workers[order.worker].save())
    kept = [one for one in host.copies.pop(order.worker, []) if one.fits(saved)]
    copy = next((one for one in kept if not exchange.is_read(one.memory)), None)
    if copy is None:
        copy = StateCopy.empty(saved, exchange.room)
        kept = [*kept[-1:], copy]
    if len(copy.memory) <= REUSED_BYTES:
        host.copies[order.worker] = kept
    for name, there in copy.tensors.items():
        there.copy_(saved.pop(name).detach())  # what was gathered need not stay beside its copy
    host.store.put("", STATES, order.producer, Batch({"state": [copy.tensors]}))


def close_workers(host: LaneHost, keep: Collection[str] = ()) -> LaneHost:
    """Close the workers of a host, but for some; a host of these.

    Raises:
        Exception: the first that a worker raised; all have been closed by then.
    """
    kept = {name: one for name, one in host.workers.items() if name in keep}
    others = [one for name, one in host.workers.items() if name not in keep]
    host.workers = kept
    errors: list[BaseException] = []
    for worker in others:
        try:
            worker.close()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        raise errors[0]
    made = LaneHost(host.lane, {}, kept, store=host.store)
    made.away = host.away & kept.keys()
    return made


def reclaim_memory() -> None:
    """Free what closed workers hold by reference cycles, and what torch keeps of a GPU's memory.

    Takes some tenths of a second: all objects of all libraries are looked at.
    """
    gc.collect()
    torch.cuda.empty_cache()  # does nothing in a process that has not used a GPU
