"""`FlowGraph`: what a traced flow says about its items, cycles and weights."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m2flow.flow import (
    SOURCE,
    Batch,
    Flow,
    FlowGraph,
    LoopSpec,
    Stream,
    WeightEdge,
    Worker,
    loop,
    stage,
)
from tests.engine.random_cases import flows


class Model(Worker):
    @stage(streaming=True, expands=4)
    def generate(self, b: Batch) -> Any:
        yield b.repeat(4)

    @stage(expands=2)
    def turn(self, b: Batch) -> Batch:
        return b.repeat(2)

    @stage
    def score(self, b: Batch) -> Batch:
        return b

    @stage(sticky=True)
    def act(self, b: Batch) -> Batch:
        return b

    @stage(accumulates=True, minibatches=2)
    def train(self, a: Batch, b: Batch) -> Batch:
        return a

    @train.finish
    def train_finish(self) -> dict[str, float]:
        return {}


@stage(unit="group")
def normalise(b: Batch) -> Batch:
    return b


class Big(Flow):
    """Expansion, a group, a loop, a fork and a join."""

    actor: Model
    judge: Model
    learner: Model

    def step(self, x: Stream) -> Stream:
        x = self.actor.generate(x)
        a = normalise(x)
        b = loop(self.actor.act, self.judge.score, until="over", max_turns=3)(x)
        c = normalise(self.judge.turn(b))
        self.learner.train(c, self.judge.turn(a))
        return a

    def sync(self) -> None:
        self.learner.publish(self.actor, self.judge)


def big() -> FlowGraph:
    return Big(actor=Model(), judge=Model(), learner=Model()).trace()


def test_nodes_inputs_and_names() -> None:
    graph = big()
    assert [node.name for node in graph.nodes] == [
        "actor.generate",
        "normalise",
        "actor.act",
        "judge.score",
        "judge.turn",
        "normalise#2",
        "judge.turn#2",
        "learner.train",
    ]
    assert [node.inputs for node in graph.nodes] == [
        (SOURCE,), (0,), (0,), (2,), (3,), (4,), (1,), (5, 6),
    ]  # fmt: skip
    assert graph.output == 1
    assert graph.name == "Big.step"
    assert graph.node("learner.train").has_finish
    assert graph.node("learner.train").minibatches == 2
    assert not graph.node("judge.score").has_finish


def test_a_function_used_twice_stands_twice() -> None:
    graph = big()
    assert graph.workers == ("actor", "normalise", "judge", "normalise#2", "learner")
    assert set(graph.functions) == {"normalise", "normalise#2"}
    assert graph.functions["normalise#2"] is normalise
    assert graph.node("normalise#2").is_function
    assert graph.node("judge.turn#2").worker == "judge"
    assert graph.node("judge.turn#2").method == "turn"


def test_fanout_and_groups() -> None:
    graph = big()
    assert [node.fanout for node in graph.nodes] == [1, 4, 4, 4, 4, 8, 4, 8]
    assert [node.group_size for node in graph.nodes] == [1, 4, 4, 4, 4, 2, 4, 2]


def test_a_group_may_be_of_one() -> None:
    """What the flow may say does not depend on how many samples the recipe asks for."""

    class Sampler(Worker):
        def __init__(self, n: int) -> None:
            self.n = n

        @stage(expands="n")
        def sample(self, b: Batch) -> Batch:
            return b.repeat(self.n)

    class Grouped(Flow):
        sampler: Sampler

        def step(self, x: Stream) -> Stream:
            return normalise(self.sampler.sample(x))

    for n in (1, 2):
        node = Grouped(sampler=Sampler(n)).trace().node("normalise")
        assert (node.group_size, node.fanout) == (n, n)


def test_loops_and_edges() -> None:
    graph = big()
    assert graph.loops == (LoopSpec((2, 3), "over", 3),)
    assert [node.loop for node in graph.nodes] == [None, None, 0, 0, None, None, None, None]
    assert (3, 2) in graph.edges  # the way back
    assert graph.edge_name(3, 2) == "judge.score->actor.act"
    assert graph.edge_name(SOURCE, 0) == "source->actor.generate"
    assert graph.output_nodes == (1,)


def test_the_output_of_a_loop_comes_from_any_of_its_members() -> None:
    class Around(Flow):
        actor: Model

        def step(self, x: Stream) -> Stream:
            return loop(self.actor.act, self.actor.score)(x)

    assert Around(actor=Model()).trace().output_nodes == (0, 1)


def test_a_pure_function_may_stand_in_a_loop() -> None:
    @stage
    def halve(b: Batch) -> Batch:
        return b

    class Around(Flow):
        def step(self, x: Stream) -> Stream:
            return loop(halve, until="done")(x)

    graph = Around().trace()
    assert graph.nodes[0].is_function
    assert graph.loops == (LoopSpec((0,), "done", None),)


def test_weight_edges() -> None:
    assert big().weight_edges == (WeightEdge("learner", "actor"), WeightEdge("learner", "judge"))


def test_describe_has_a_line_for_everything() -> None:
    lines = big().describe()
    assert lines[0] == "actor.generate <- source  [streaming, expands=4]"
    assert lines[2] == "actor.act <- actor.generate  [sticky, loop 0]"
    assert lines[7] == "learner.train <- normalise#2, judge.turn#2  [accumulates, minibatches=2]"
    assert lines[8:] == ["learner => actor  [weights]", "learner => judge  [weights]"]


def test_between() -> None:
    graph = big()
    assert graph.between(0, 7) == (1, 2, 3, 4, 5, 6, 7)
    assert graph.between(1, 7) == (6, 7)
    assert graph.between(0, 4) == (2, 3, 4)
    assert graph.between(4, 5) == (5,)
    assert graph.between(6, 5) == ()


def reach(start: int, edges: set[tuple[int, int]]) -> set[int]:
    found: set[int] = set()
    pending = [start]
    while pending:
        here = pending.pop()
        for a, b in edges:
            if a == here and b not in found:
                found.add(b)
                pending.append(b)
    return found


@given(st.sampled_from([1, 2, 4, 6]).flatmap(flows))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graphs_against_slow_definitions(graph: FlowGraph) -> None:
    count = len(graph.nodes)
    forward = {(a, node.index) for node in graph.nodes for a in node.inputs if a != SOURCE}
    after = {index: reach(index, forward) for index in range(count)}
    for a in range(count):
        for b in range(count):
            between = {n for n in after[a] if n == b or b in after[n]}
            assert graph.between(a, b) == tuple(sorted(between))
    for node in graph.nodes:
        for made_by in node.inputs:
            if made_by != SOURCE:
                maker = graph.nodes[made_by]
                assert node.fanout == maker.fanout * maker.expands
    assert len({node.name for node in graph.nodes}) == count


def test_the_flow_language_pulls_in_neither_torch_nor_ray() -> None:
    code = (
        "import sys, m2flow.flow\n"
        "heavy = {'torch', 'numpy', 'ray', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
