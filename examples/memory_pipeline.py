"""A memory-hungry flow, pipelined over lanes: each lane has room for one of two large models.

A reader and a judge of 16 MB each serve a small policy. On one lane with room for 20 MB the engine
moves one of them out of the other's way, again and again. The plan of `--lanes cpu:2` gives each
of them a lane, cuts the step into pieces that follow each other, and nothing has to move. Nothing
in the flow changes, and neither do the weights learnt.

    python examples/memory_pipeline.py --seed 1
    python examples/memory_pipeline.py --lanes cpu:2

Expected after 15 steps: of the best possible reward, the policy gets at least 85 % (`share`, at
first 0). `moves` is how often a state was moved in a step: 4 on one lane, none on two.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens
from m2flow.plan import Placement, Plan, StagePlan, parse_lanes, with_memory
from m2flow.runtime.lane.state import MovableState

WIDTH, ACTIONS, LANE_MEMORY = 2048, 4, 20 << 20
ITEMS, DRAWS, STEPS, LEARNING_RATE = 32, 8, 15, 0.01
EXPECTED = {"share": 0.85}


class Large(Worker):
    """A frozen matrix of 16 MB, which leaves the lane's memory where another worker needs it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def load(self, place: Place) -> None:
        super().load(place)
        chance = torch.Generator().manual_seed(self.seed)
        self.matrix = torch.randn(WIDTH, WIDTH, generator=chance)
        self.state = MovableState(lambda: [self.matrix], place, frozen=True)

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        return self.state.nbytes()


class Reader(Large):
    """What a context is about: a row of the matrix, of which the policy sees a part."""

    @stage
    def read(self, contexts: Batch) -> Batch:
        return contexts.with_columns(seen=self.matrix[contexts["context"], :16].clone())


class Judge(Large):
    """What each action is worth in a context, and hence the reward of the one that was drawn."""

    @stage
    def judge(self, drawn: Batch) -> Batch:
        worth = drawn["seen"] @ self.matrix[:16, :ACTIONS]
        reward = worth.gather(1, drawn["action"][:, None])[:, 0]
        return drawn.with_columns(reward=reward, best=worth.amax(1))


class Policy(Worker):
    """A linear policy, drawn from several times for each context (REINFORCE, group baseline)."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.weight = torch.zeros(16, ACTIONS)
        self.gradient = torch.zeros_like(self.weight)

    @stage(expands=DRAWS)
    def draw(self, contexts: Batch) -> Batch:
        drawn = contexts.repeat(DRAWS)
        number = torch.arange(len(drawn)) % DRAWS
        action, _ = sample_tokens(drawn["seen"] @ self.weight, drawn["seed"], number, 1.0)
        return drawn.with_columns(action=action)

    @stage(unit="group", accumulates=True)
    def learn(self, drawn: Batch) -> Batch:
        rewards = drawn["reward"].view(-1, DRAWS)
        advantage = (rewards - rewards.mean(1, keepdim=True)).flatten()
        chosen = torch.nn.functional.one_hot(drawn["action"], ACTIONS)
        better = chosen - (drawn["seen"] @ self.weight).softmax(1)
        self.gradient += drawn["seen"].T @ (advantage[:, None] * better)
        return drawn.only("reward", "best")

    @learn.finish
    def learn_finish(self) -> None:
        self.place.all_reduce([self.gradient])
        self.weight += LEARNING_RATE * self.gradient
        self.gradient.zero_()

    def weights(self) -> dict[str, Tensor]:
        return {"weight": self.weight}


class Judged(Flow):
    """Read, draw, judge, learn."""

    reader: Reader
    policy: Policy
    judge: Judge

    def step(self, contexts: Stream) -> Stream:
        drawn = self.policy.draw(self.reader.read(contexts))
        return self.policy.learn(self.judge.judge(drawn))


def contexts(seed: int, step: int) -> Batch:
    """The contexts of a step: a function of the seed and the step's number."""
    seeds = torch.tensor([derive_seed(seed, step, number) for number in range(ITEMS)])
    return Batch({"seed": seeds, "context": seeds % WIDTH})


def plan_for(lanes: str) -> Plan:
    """One lane for everything, or the reader on the first lane and the judge on the last."""
    specs = with_memory(parse_lanes(lanes), LANE_MEMORY)
    first, last = ((specs[0].id,),), ((specs[-1].id,),)
    where = {"reader": Placement(first), "policy": Placement(first), "judge": Placement(last)}
    pieces = 1 if first == last else 4
    stages = {name: StagePlan(chunk=ITEMS // pieces) for name in ("reader.read", "policy.draw")}
    stages["judge.judge"] = StagePlan(chunk=ITEMS * DRAWS // pieces)
    stages["policy.learn"] = StagePlan(chunk=ITEMS // pieces)
    return Plan("eager" if pieces == 1 else "custom", tuple(specs), where, stages)


def train(seed: int = 0, lanes: str = "cpu:1") -> dict[str, float]:
    """Run the flow; the share of the best reward, and how often a state was moved in a step."""
    flow = Judged(reader=Reader(2 * seed), policy=Policy(), judge=Judge(2 * seed + 1))
    found: dict[str, float] = {}
    with m2flow.launch(flow, items_per_step=ITEMS, plan=plan_for(lanes)) as run:
        for result in run.steps(contexts(seed, step) for step in range(STEPS)):
            made = result.output
            moves = sum(span.kind == "switch" for span in result.spans)
            found = {"share": float(made["reward"].sum() / made["best"].sum()), "moves": moves}
            if result.step % 5 == 0 or result.step == STEPS - 1:
                print(f"step {result.step:2d}  share {found['share']:.3f}  moves {moves}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two models that do not fit one lane together.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", default="cpu:1", help="cpu:1, or cpu:2 for the pipeline")
    train(**vars(parser.parse_args()))
