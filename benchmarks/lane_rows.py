"""What the links benchmark measures on lanes that are up: dispatch, and publishing weights."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from ray import cloudpickle

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.messages import CallFinished, RunCall
from m2flow.engine.plan import LaneSpec, Placement, Plan, StagePlan
from m2flow.plan import parse_lanes
from m2flow.runtime.driver.pool import LanePool

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file

PUBLISHED_BYTES = 200 << 20


class Idle(Worker):
    """Does nothing, as fast as it can."""

    @stage
    def look(self, batch: Batch) -> Batch:
        return batch


class Dispatching(Flow):
    """One stage, which hands its items on."""

    idle: Idle

    def step(self, items: Stream) -> Stream:
        return self.idle.look(items)


class Holder(Worker):
    """Parameters of a model, in pieces as large as layers have them."""

    def load(self, place: m2flow.Place) -> None:
        super().load(place)
        piece = 4 << 20
        self.parameters = {
            f"layer{n}": torch.rand(piece // 4) for n in range(PUBLISHED_BYTES // piece)
        }

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.parameters

    def install(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.parameters = dict(weights)  # they stay where they are: a swap, and no copy

    @stage(accumulates=True)
    def train(self, batch: Batch) -> None:
        """A stage, so that there are steps."""

    @stage
    def use(self, batch: Batch) -> Batch:
        return batch

    def copy_seconds(self, repeats: int) -> float:
        """Seconds of a plain copy of all the parameters into memory that is there already."""
        target = {name: torch.empty_like(tensor) for name, tensor in self.parameters.items()}
        seconds = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            for name, tensor in self.parameters.items():
                target[name].copy_(tensor)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[1:])

    def total(self) -> float:
        return float(sum(tensor.double().sum() for tensor in self.parameters.values()))


class Publishing(Flow):
    """Nothing but a weight edge, and what it takes for there to be steps."""

    source: Holder
    target: Holder

    def step(self, items: Stream) -> Stream:
        return self.source.train(self.target.use(items))

    def sync(self) -> None:
        self.source.publish(self.target)


def dispatch_row(pool: LanePool, calls: int) -> dict[str, float]:
    """Milliseconds from sending a call to a lane to knowing that it has ended, one at a time."""
    plan = Plan(
        "custom",
        pool.lanes,
        {"idle": Placement(((0,),))},
        {"idle.look": StagePlan(chunk=1)},
    )
    flow = Dispatching(idle=Idle())
    with m2flow.launch(flow, items_per_step=calls, plan=plan, lanes=pool) as run:
        carrier = run._carrier
        sent: dict[int, float] = {}
        spent: list[float] = []
        carry_out, wait = carrier.carry_out, carrier.wait

        def timed_carry_out(name: str, command: Any) -> None:
            if isinstance(command, RunCall):
                sent[command.call] = time.perf_counter()
            carry_out(name, command)

        def timed_wait(seconds: float) -> Any:
            reports = wait(seconds)
            now = time.perf_counter()
            events = [report.event for report in reports]
            spent.extend(now - sent[e.call] for e in events if isinstance(e, CallFinished))
            return reports

        carrier.carry_out, carrier.wait = timed_carry_out, timed_wait
        for _ in range(3):
            spent.clear()
            run.step(Batch({"x": torch.zeros(calls)}))
    quantiles = statistics.quantiles(spent, n=20)
    return {
        "calls": len(spent),
        "p50_ms": 1e3 * statistics.median(spent),
        "p95_ms": 1e3 * quantiles[-1],
    }


def publish_row(pool: LanePool, repeats: int) -> dict[str, float]:
    """Publishing between two lanes, against a plain copy in one of them, in turn."""
    first, second = (lane.id for lane in pool.lanes[:2])
    plan = Plan(
        "custom",
        pool.lanes,
        {"source": Placement(((first,),)), "target": Placement(((second,),))},
    )
    flow = Publishing(source=Holder(), target=Holder())
    publish, copy = [], []
    with m2flow.launch(flow, items_per_step=1, plan=plan, lanes=pool) as run:
        for number in range(repeats + 3):
            result = run.step(Batch({"x": torch.zeros(1)}))
            spans = [span for span in result.spans if span.kind == "publish"]
            spent = max(span.end for span in spans) - min(span.start for span in spans)
            if number >= 3:  # the first ones touch fresh pages
                publish.append(spent)
                copy.append(run.worker_call("source", "copy_seconds", 1))
        same = run.worker_call("source", "total") == run.worker_call("target", "total")
    assert same, "the target has other weights than the source"
    gigabytes = PUBLISHED_BYTES / 1e9
    return {
        "publish_gb_per_s": gigabytes / statistics.median(publish),
        "copy_gb_per_s": gigabytes / statistics.median(copy),
        "share_of_copy_rate": statistics.median(c / p for c, p in zip(copy, publish, strict=True)),
    }


def lane_rows(quick: bool, lanes: tuple[LaneSpec, ...] | None = None) -> dict[str, Any]:
    """Both, on two lanes of one core each."""
    with LanePool(lanes or parse_lanes("cpu:2")) as pool:
        return {
            "dispatch": dispatch_row(pool, 200 if quick else 1000),
            "publish": publish_row(pool, 3 if quick else 15),
        }


if __name__ == "__main__":
    print(lane_rows(quick=True))
