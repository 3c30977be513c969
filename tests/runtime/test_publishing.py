"""Publishing on lanes: the same weights whatever the way, and a way that fits the distance.

Each version is a function of its number, written out once more for the test, so a stale, torn or
misplaced install is seen at once, by the very next call of the worker that took it over.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import m2flow
from m2flow import Batch, Flow, Stream, Worker, stage
from m2flow.engine.messages import InstallWeights
from m2flow.engine.plan import LaneSpec, Placement, Plan
from m2flow.errors import RunFailed
from m2flow.runtime.driver.runner import StepResult
from m2flow.runtime.transport.shared_memory import SharedPool
from m2flow.runtime.weights import Box, ManifestError, Shard
from m2flow.runtime.weights.exports import Export, WeightsKey
from m2flow.runtime.weights.manifest import describe
from m2flow.runtime.weights.publisher import Publisher
from m2flow.runtime.weights.relay import Relay, RelayKey
from m2flow.runtime.weights.source import WeightsOut
from m2flow.runtime.weights.target import WeightsIn
from m2flow.runtime.weights.transfers import transfers as plan_transfers

ray = pytest.importorskip("ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this module

STEPS, ROWS = 4, 96


def weights_of(version: int) -> dict[str, Tensor]:
    """Version v of the model: from one to the next little changes, and only in some tensors."""
    matrix = torch.arange(ROWS * 40, dtype=torch.float32).view(ROWS, 40)
    matrix[:, version % 40] = -version
    half = torch.linspace(-1, 1, 300).to(torch.bfloat16)
    half[version::7] = float(version)
    return {
        "matrix": matrix,
        "half": half,
        "count": torch.tensor(version),
        "none": torch.empty(0, 5),
        "fixed": torch.ones(17, dtype=torch.bool),
        "tied": matrix,
    }


def mark(weights: Mapping[str, Tensor]) -> list[int]:
    return [bits_of(weights[name]) for name in sorted(weights)]


def bits_of(tensor: Tensor) -> int:
    """A number that stands for a tensor's bits."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=7).digest(), "little")


class Source(Worker):
    """Holds version v whole; on a gang each lane has some rows of everything that has rows."""

    def load(self, place: m2flow.Place) -> None:
        super().load(place)
        self.version = place.version

    def weights(self) -> Mapping[str, Any]:
        whole, gang = weights_of(self.version), self.place.gang
        if gang.size == 1:
            return whole
        cut: dict[str, Any] = {}
        for name, tensor in whole.items():
            if name == "tied":
                cut[name] = cut["matrix"]
            elif tensor.dim() == 0:
                cut[name] = tensor
            else:
                part = tensor.chunk(gang.size)[gang.rank] if len(tensor) else tensor
                above = len(tensor.chunk(gang.size)[0]) * gang.rank if len(tensor) else 0
                box = Box((above, *[0] * (tensor.dim() - 1)), tuple(part.shape))
                cut[name] = Shard(part, box, tuple(tensor.shape))
        return cut

    @stage(accumulates=True)
    def train(self, batch: Batch) -> None:
        """One step makes the next version."""

    @train.finish
    def train_finish(self) -> dict[str, float]:
        self.version += 1
        return {}


class Target(Worker):
    """Runs on what it has taken over, and says with each item what that is."""

    fail = False

    def load(self, place: m2flow.Place) -> None:
        super().load(place)
        self.taken: dict[str, Tensor] = weights_of(place.version)
        self.version = place.version

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self.fail:
            raise ArithmeticError("no room for these weights")
        self.taken, self.version = dict(weights), version
        assert weights["tied"].data_ptr() == weights["matrix"].data_ptr(), "tied no more"

    @stage
    def use(self, batch: Batch) -> Batch:
        count = len(batch)
        marks = torch.tensor([mark(self.taken)] * count)
        return batch.with_columns(mark=marks, version=torch.full((count,), self.version))

    def refuse(self) -> None:
        self.fail = True


class Publishing(Flow):
    source: Source
    target: Target

    def step(self, items: Stream) -> Stream:
        return self.source.train(self.target.use(items))

    def sync(self) -> None:
        self.source.publish(self.target)


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    from m2flow.runtime.driver.pool import LanePool

    with LanePool([LaneSpec(number) for number in range(3)]) as lanes:
        yield lanes


@pytest.fixture(scope="module")
def copying_pool(pool: Any) -> Iterator[Any]:
    """Lanes on which weights travel as copies, as all payloads take one link."""
    from m2flow.runtime.driver.pool import LanePool

    with LanePool(pool.lanes, link="stream") as lanes:
        yield lanes


def run_on(
    pool: Any, source: Sequence[tuple[int, ...]], steps: int = STEPS, **more: Any
) -> tuple[list[StepResult], list[str]]:
    with launched(pool, source, **more) as run:
        results = list(run.steps(items() for _ in range(steps)))
        return results, [f"{way}: {why}" for way, why in run.explain_publishing().items()]


def launched(pool: Any, source: Sequence[tuple[int, ...]], **more: Any) -> Any:
    placements = {"source": Placement(tuple(source)), "target": Placement(((1,), (2,)))}
    plan = Plan("custom", pool.lanes, placements, deadline_seconds=30)
    flow = Publishing(source=Source(), target=Target())
    return m2flow.launch(flow, items_per_step=4, plan=plan, lanes=pool, **more)


def items() -> Batch:
    return Batch({"x": torch.zeros(4)})


def check(results: Sequence[StepResult]) -> None:
    """Each step ran on the version before it, bit by bit and on all lanes."""
    for result in results:
        assert result.output["version"].tolist() == [result.step] * 4
        assert result.output["mark"].tolist() == [mark(weights_of(result.step))] * 4


# --- on lanes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [((0,),), ((0, 1),)], ids=["single", "gang"])
@pytest.mark.parametrize("way", ["shared", "copy"])
def test_the_same_weights_whatever_the_way(
    request: pytest.FixtureRequest, way: str, source: Sequence[tuple[int, ...]]
) -> None:
    lanes = request.getfixturevalue("pool" if way == "shared" else "copying_pool")
    results, lines = run_on(lanes, source)
    check(results)
    (line,) = lines
    assert f"source publishes to target on 2 lanes of its node by {way}" in line
    for result in results:
        assert result.published["source"].num_bytes > 0
        assert result.published["source"].seconds > 0


class Pair(Flow):
    first: Source
    second: Source
    one: Target
    other: Target

    def step(self, items: Stream) -> Stream:
        return self.second.train(self.first.train(self.other.use(self.one.use(items))))

    def sync(self) -> None:
        self.first.publish(self.one)
        self.second.publish(self.other)


@pytest.mark.parametrize("lanes", ["pool", "copying_pool"])
def test_two_sources_do_not_get_in_each_others_way(
    request: pytest.FixtureRequest, lanes: str
) -> None:
    pool = request.getfixturevalue(lanes)
    here, there = Placement(((0,),)), Placement(((1,), (2,)))
    spots = {"first": here, "second": here, "one": there, "other": there}
    plan = Plan("custom", pool.lanes, spots, deadline_seconds=30)
    flow = Pair(first=Source(), second=Source(), one=Target(), other=Target())
    with m2flow.launch(flow, items_per_step=4, plan=plan, lanes=pool) as run:
        check(list(run.steps(items() for _ in range(STEPS))))


@pytest.mark.parametrize("source", [((0,),), ((0, 1),)], ids=["single", "gang"])
def test_lanes_of_another_node_share_what_crosses_the_network(
    pool: Any, source: Sequence[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "same_node", lambda a, b: (a == 0) == (b == 0))
    results, lines = run_on(pool, source)
    check(results)
    assert any("of other nodes by copy" in line for line in lines)


def test_an_install_that_raises_ends_the_run(pool: Any) -> None:
    with launched(pool, ((0,),)) as run:
        run.step(items())
        run.worker_call("target", "refuse")
        with pytest.raises(RunFailed, match=r"install of source's weights in target .* lane 1"):
            run.step(items())


# --- the two halves, in one process ---------------------------------------------------------------


class Loopback:
    """Both halves of one lane."""

    def __init__(self) -> None:
        self.pool = SharedPool("test-publishing-")
        self.out = WeightsOut(self.pool, 0)
        self.there = WeightsIn(1, self.ask, Relay(self.ask))

    def ask(self, lane: int, key: Any, seconds: float) -> Any:
        return self.out.provide(key)

    def export(self, version: int, oldest: int = 0) -> Export:
        return self.out.lay_out("source", version, weights_of(version), oldest)

    def install(self, export: Export, name: str = "target") -> None:
        got, _ = self.there.collect("source", (name, Worker()), [export], 1.0)
        assert mark(got) == mark(weights_of(export.version))


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    both = Loopback()
    yield both
    both.pool.close()


def test_transfers_are_planned_once(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[object] = []

    def transfers(*known: Any) -> Any:
        planned.append(known)
        return plan_transfers(*known)

    monkeypatch.setattr("m2flow.runtime.weights.target.transfers", transfers)
    for version in range(4):
        loopback.install(loopback.export(version))
    assert len(planned) == 1


def test_a_late_reader_gets_the_version_that_it_asks_for(loopback: Loopback) -> None:
    """Though the source has gone on: what somebody still needs is kept."""
    exports = [loopback.export(version) for version in range(3)]
    loopback.install(exports[2])
    loopback.install(exports[1], name="late")
    loopback.install(exports[2], name="late")


def test_a_version_is_installed_as_a_whole_or_not_at_all(loopback: Loopback) -> None:
    """One of two lanes has lost its part: the target keeps the version before, bit by bit."""
    whole = weights_of(0)["fixed"]
    halves = [Shard(whole[:9], Box((0,), (9,)), (17,)), Shard(whole[9:], Box((9,), (8,)), (17,))]
    lanes = [WeightsOut(loopback.pool, lane) for lane in range(2)]

    def ask(lane: int, key: WeightsKey, seconds: float) -> Any:
        if lane == 1 and key.version == 1:
            raise ConnectionError("lane 1 is gone")
        return lanes[lane].provide(key)

    there = WeightsIn(2, ask, Relay(ask))

    def collect(version: int) -> Mapping[str, Tensor]:
        exports = [
            lane.lay_out("source", version, {"x": half}, 0)
            for lane, half in zip(lanes, halves, strict=False)
        ]
        return there.collect("source", ("target", Worker()), exports, 1.0)[0]

    installed = collect(0)["x"]
    whole.zero_()
    with pytest.raises(ConnectionError):
        collect(1)
    assert installed.all(), "nothing of the version that did not come was written"
    assert not collect(2)["x"].any()
    lanes.pop()
    with pytest.raises(ManifestError, match="8 of the 17 elements wanted are on no lane"):
        collect(3)


def test_a_relay_asks_once() -> None:
    asked: list[Any] = []
    started, go_on = threading.Event(), threading.Event()

    def ask(lane: int, key: WeightsKey, seconds: float) -> str:
        asked.append((lane, key))
        started.set()
        assert go_on.wait(seconds)
        return f"version {key.version}"

    relay = Relay(ask)

    def key(version: int) -> RelayKey:
        return RelayKey(0, WeightsKey("source", version), 60.0)

    with ThreadPoolExecutor(4) as threads:
        got = [threads.submit(relay.bring, key(1)) for _ in range(4)]
        assert started.wait(60)
        go_on.set()
        assert [one.result(60) for one in got] == ["version 1"] * 4
    assert len(asked) == 1
    assert relay.bring(key(2)) == "version 2"
    assert relay.bring(key(1)) == "version 1", "let go of, so brought again"
    assert len(asked) == 3


def test_a_relay_forgets_what_could_not_be_brought() -> None:
    answers = iter([ConnectionError("gone for a moment"), "brought"])

    def ask(lane: int, key: WeightsKey, seconds: float) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    relay, key = Relay(ask), RelayKey(0, WeightsKey("source", 1), 5.0)
    with pytest.raises(ConnectionError):
        relay.bring(key)
    assert relay.bring(key) == relay.bring(key) == "brought"


def test_what_nobody_needs_is_let_go(loopback: Loopback) -> None:
    for version in range(3):
        loopback.export(version, oldest=version)
    with pytest.raises(KeyError):
        loopback.out.provide(WeightsKey("source", 1))
    assert loopback.out.provide(WeightsKey("source", 2))[1].numel()


def test_a_manifest_is_new_where_what_matters_is() -> None:
    weights = weights_of(0)
    known = describe(weights)
    assert describe(weights_of(1)) == known, "new tensors of the same kind"
    for name, other in [
        ("tied", weights["matrix"].clone()),
        ("half", weights["half"].float()),
        ("half", weights["half"][1:]),
        ("fixed", Shard(weights["fixed"], Box((3,), (17,)), (20,))),
    ]:
        assert describe(weights | {name: other}) != known, name


def same_node(first: int, second: int) -> bool:
    """Lanes 0 and 1 are on the first node, 2 and 3 on the second, and so on."""
    return first // 2 == second // 2


def publisher(link: str | None = None, num_lanes: int = 4) -> Publisher:
    flow = Publishing(source=Source(), target=Target())
    readers = tuple((lane,) for lane in range(1, num_lanes))
    placements = {"source": Placement(((0,),)), "target": Placement(readers)}
    plan = Plan("custom", tuple(LaneSpec(n) for n in range(num_lanes)), placements)
    graphs = {"step": flow.trace()}
    return Publisher(same_node, plan, graphs, link)


def publish(one: Publisher, version: int, lanes: Sequence[int]) -> dict[int, int | None]:
    """Export and install a version; by way of which lane each got it."""
    one.export("source", version, (0,))
    one.laid_out([Export("source", version, 0, 200 << 20)])
    ways = {}
    for lane in lanes:
        command = InstallWeights(lane, "source", "target", version, (lane,), local=False)
        (found,) = one.install(command)
        ways[lane] = found.via
        one.finished(lane)
    return ways


def test_the_way_follows_from_where_the_lanes_are() -> None:
    one = publisher()
    assert one.explain() == {}
    assert publish(one, 1, (1, 2, 3)) == {1: None, 2: 2, 3: 2}
    assert one.explain() == {
        "source publishes to target on a lane of its node by shared": (
            "210 MB (they read one snapshot in shared memory)"
        ),
        "source publishes to target on 2 lanes of other nodes by copy": (
            "210 MB (each node is sent one copy)"
        ),
    }
    three = publisher(num_lanes=5)
    assert publish(three, 1, range(1, 5)) == {1: None, 2: 2, 3: 2, 4: None}


def test_weights_are_copied_where_all_payloads_take_one_link() -> None:
    one = publisher("stream")
    publish(one, 1, (1, 2, 3))
    assert set(one.explain().values()) == {"210 MB (all goes by stream)"}


def test_versions_that_somebody_needs_are_kept() -> None:
    one = publisher()
    publish(one, 1, (1, 2))
    assert one.export("source", 2, (0,))[0].oldest == 1, "lane 3 has not installed it"
    command = InstallWeights(3, "source", "target", 1, (3,), local=False)
    assert one.install(command)[0].version == 1
    one.finished(3)
    assert one.export("source", 3, (0,))[0].oldest == 2


def test_a_lane_that_was_lost_finds_its_version_until_the_next_one() -> None:
    """What it had taken over went with it, whether its installs had ended or not."""
    one = publisher()
    assert not one.has_published("source")
    assert one.copies("source", 1) is None
    publish(one, 1, (1, 2, 3))
    one.lost(2)
    command = InstallWeights(3, "source", "target", 1, (3,), local=False)
    assert [again.via for again in one.install(command)] == [3], "not by the lane that is gone"
    (copy,) = one.copies("source", 1) or ()
    assert (copy.version, copy.via) == (1, None)
    one.export("source", 2, (0,))
    assert one.has_published("source")
    assert one.copies("source", 1) is None, "the next one takes its place"
    assert one.copies("source", 2) is None, "it is not laid out yet"


def test_the_last_version_stays_for_a_lane_that_comes_back(loopback: Loopback) -> None:
    """Though all have read it from shared memory, and the source has gone on."""
    export = loopback.export(3)
    loopback.install(export)
    loopback.install(export, name="back")
    loopback.export(4, oldest=4)
    with pytest.raises(KeyError):
        loopback.out.provide(WeightsKey("source", 3))
