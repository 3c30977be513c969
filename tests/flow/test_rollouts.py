"""Which stages of a flow make rollouts."""

from __future__ import annotations

import pytest

from m2flow import Batch, Flow, Stream, Worker, loop, stage
from m2flow.flow.rollouts import rollout_stages


class Policy(Worker):
    @stage(streaming=True, expands=2)
    def sample(self, batch: Batch) -> Batch:
        return batch

    @stage
    def act(self, batch: Batch) -> Batch:
        return batch

    @stage
    def judge(self, batch: Batch) -> Batch:
        return batch


class Simulator(Worker):
    @stage(sticky=True)
    def begin(self, batch: Batch) -> Batch:
        return batch

    @stage(sticky=True)
    def go_on(self, batch: Batch) -> Batch:
        return batch

    @stage(sticky=True)
    def told(self, batch: Batch) -> Batch:
        return batch


class Learner(Worker):
    @stage(accumulates=True)
    def train(self, batch: Batch) -> Batch:
        return batch


@stage
def shape(batch: Batch) -> Batch:
    return batch


class Base(Flow):
    policy: Policy
    simulator: Simulator
    learner: Learner

    def sync(self) -> None:
        self.learner.publish(self.policy)


class Language(Base):
    def step(self, x: Stream) -> Stream:
        return self.learner.train(self.policy.judge(shape(self.policy.sample(shape(x)))))


class Embodied(Base):
    def step(self, x: Stream) -> Stream:
        x = loop(self.policy.act, self.simulator.go_on)(self.simulator.begin(x))
        return self.learner.train(self.policy.judge(x))


class TwoBranches(Base):
    def step(self, x: Stream) -> Stream:
        self.learner.train(self.policy.judge(x))
        return self.policy.act(x)


class StateBehind(Base):
    """What the simulator holds of an episode is read once more after the loop."""

    def step(self, x: Stream) -> Stream:
        x = loop(self.policy.act, self.simulator.go_on)(self.simulator.begin(x))
        return self.learner.train(self.simulator.told(shape(x)))


class Unpublished(Base):
    def step(self, x: Stream) -> Stream:
        return self.learner.train(self.policy.sample(x))

    def sync(self) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Language, ["policy.sample"]),
        (Embodied, ["policy.act"]),
        (TwoBranches, ["policy.judge", "policy.act"]),
        (StateBehind, []),
        (Unpublished, []),
    ],
)
def test_what_runs_first_on_published_weights_makes_rollouts(
    kind: type[Base], names: list[str]
) -> None:
    graph = kind(policy=Policy(), simulator=Simulator(), learner=Learner()).trace()
    assert [found.name for found in rollout_stages(graph)] == names


def test_a_loop_is_named_by_its_first_member() -> None:
    graph = Embodied(policy=Policy(), simulator=Simulator(), learner=Learner()).trace()
    (found,) = rollout_stages(graph)
    assert found.members == graph.loops[0].members
    assert (found.node, found.worker) == (found.members[0], "policy")
