"""Mini-batches of the items that arrive next: none waits for one that takes long."""

from __future__ import annotations

from collections.abc import Generator

import torch

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.directory import ANYWHERE, Homes
from m2flow.engine.ledger import StageLedger
from m2flow.engine.plan import LaneSpec
from m2flow.plan import build_plan
from m2flow.plan.describe import describe_plan

ITEMS = 6


class Sampler(Worker):
    """The first item takes longest: it comes last."""

    @stage(streaming=True)
    def draw(self, prompts: Batch) -> Generator[Batch, Batch | None, None]:
        for row in reversed(range(len(prompts))):
            yield prompts.select([row])


class Learner(Worker):
    minibatches = 3

    def __init__(self, by_arrival: bool) -> None:
        self.by_arrival = by_arrival
        self.seen: list[list[int]] = [[]]

    @stage(accumulates=True, minibatches="minibatches", by_arrival="by_arrival")
    def train(self, samples: Batch) -> Batch:
        self.seen[-1] += samples.ids
        return samples

    @train.finish
    def train_finish(self) -> dict[str, float]:
        self.seen.append([])
        return {"size": float(len(self.seen[-2]))}


class Training(Flow):
    sampler: Sampler
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        return self.learner.train(self.sampler.draw(prompts))


def flow_of(by_arrival: bool) -> Training:
    return Training(sampler=Sampler(), learner=Learner(by_arrival))


def seen(by_arrival: bool) -> list[list[int]]:
    flow = flow_of(by_arrival)
    with m2flow.launch(flow, items_per_step=ITEMS, mode="eager") as run:
        result = run.step(Batch({"x": torch.arange(ITEMS)}))
    assert result.metrics == {"size": ITEMS / Learner.minibatches}
    return [sorted(some) for some in flow.learner.seen if some]


def test_whoever_is_first_is_in_the_first_minibatch() -> None:
    assert seen(by_arrival=False) == [[0, 1], [2, 3], [4, 5]]
    assert seen(by_arrival=True) == [[4, 5], [2, 3], [0, 1]]


def test_the_plan_says_so() -> None:
    lanes = (LaneSpec(0), LaneSpec(1))
    for by_arrival in (False, True):
        graph = flow_of(by_arrival).trace()
        told = "\n".join(describe_plan(build_plan("collocated", graph, lanes, ITEMS), graph, ITEMS))
        assert ("3 mini-batches, filled as items arrive" in told) is by_arrival
        assert ("by_arrival" in "\n".join(graph.describe())) is by_arrival


def ledger() -> StageLedger:
    node = flow_of(by_arrival=True).trace().node("learner.train")
    return StageLedger(node, ITEMS, lambda _: ANYWHERE, Homes({}, [1]))


def done(some: StageLedger, units: list[int], replica: int = 0) -> None:
    assert some.lease(0, len(units), ITEMS) == units
    some.note_doers(units, replica)
    some.finish(units)


def test_an_item_stays_in_its_minibatch_whatever_is_lost() -> None:
    """It was the first to come; what came after it does not take its place when it is gone."""
    some = ledger()
    (stream,) = some.node.inputs
    assert some.arrive(stream, [5])
    some.depart(stream, [5])
    assert some.arrive(stream, [3])
    assert some.arrive(stream, [0, 1])
    assert some.ready() == 1, "the two that came last are of the next mini-batch"
    assert not some.nothing_more_comes
    done(some, [3])
    assert some.lease(0, 9, ITEMS) == []
    assert some.arrive(stream, [5])
    assert some.nothing_more_comes
    done(some, [5], replica=1)
    assert some.window_complete
    assert (some.folded_by(0), some.folded_by(1)) == ([3], [5])
    some.next_window()
    assert some.folded_by(0) == []
    done(some, [0, 1])
    some.reopen(1)
    assert some.folded_by(0) == [0]
    assert some.ready() == 1


def test_the_last_minibatch_is_reopened_by_those_that_are_in_it() -> None:
    some = ledger()
    (stream,) = some.node.inputs
    for items in ([4, 5], [0, 1], [2, 3]):
        some.arrive(stream, items)
        done(some, items)
        some.next_window()
    assert some.complete
    assert some.reopen(3)
    assert some.window == 2
    done(some, [3])
    assert some.window_complete
