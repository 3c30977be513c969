"""What a switch point gains on two real lanes, where few items take far longer than the others.

Lanes wait in place of an accelerator, so that the figures are those of the system and not of the
cores it happens to run on: a decode step of n sequences takes 2 ms + n x 5 us (it is bound by
memory), log-probabilities take 30 us a token and training 90 us. Lengths are lognormal
with a median of 60 tokens and sigma 0.8, cut off at 600, the same in every plan. Compared are the
collocated plan, the same with later stages in smaller calls, and those with a switch point.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Generator
from dataclasses import replace

import ray
from harness import Target, arguments, conclude, table
from ray import cloudpickle

import m2flow
from m2flow import Batch, Flow, LanePool, Stream, Worker, stage
from m2flow.flow import GIVE_BACK, Arrived, FlowGraph, Unfinished
from m2flow.plan import LaneSpec, Plan, build_plan
from m2flow.plan.switching import with_switch_points

PROMPTS, SAMPLES = 16, 8
STEP, SEQUENCE, LOGPROBS, TRAINING = 2e-3, 5e-6, 30e-6, 90e-6
PREFILL = 10e-6
"""Seconds of a token that is computed again where a sequence goes on."""


def length(step: int, item: int) -> int:
    """Tokens of a sample."""
    dice = random.Random(f"{step} {item}")
    return max(1, min(600, round(dice.lognormvariate(4.1, 0.8))))


class Decoder(Worker):
    """Draws samples by waiting as long as a step takes, step after step."""

    @stage(streaming=True, expands=SAMPLES, resumable=True)
    def draw(self, prompts: Batch | Unfinished) -> Generator[Batch | Unfinished, Arrived, None]:
        drawn: dict[int, int] = {}
        steps_of: dict[int, int] = {}

        def take(arrived: Arrived) -> None:
            if isinstance(arrived, Unfinished):
                rows = arrived.items
                drawn.update(zip(rows.ids, rows["drawn"], strict=True))
                steps_of.update(zip(rows.ids, rows["step"], strict=True))
                time.sleep(PREFILL * sum(rows["drawn"]))
            elif isinstance(arrived, Batch):
                samples = arrived.repeat(SAMPLES)
                drawn.update(dict.fromkeys(samples.ids, 0))
                steps_of.update(zip(samples.ids, samples["step"], strict=True))

        take(prompts)
        while drawn:
            time.sleep(STEP + SEQUENCE * len(drawn))
            for item in drawn:
                drawn[item] += 1
            done = [item for item, size in drawn.items() if size == length(steps_of[item], item)]
            tokens = [drawn.pop(item) for item in done]
            arrived = yield Batch({"tokens": tokens, "step": [steps_of[i] for i in done]}, done)
            if arrived is GIVE_BACK:
                rows = {"drawn": list(drawn.values()), "step": [steps_of[i] for i in drawn]}
                yield Unfinished(Batch(rows, list(drawn)))
                return
            take(arrived)


class Trainer(Worker):
    """Waits by the token."""

    @stage
    def logprobs(self, samples: Batch) -> Batch:
        time.sleep(LOGPROBS * sum(samples["tokens"]))
        return samples

    @stage(accumulates=True)
    def train(self, samples: Batch) -> Batch:
        time.sleep(TRAINING * sum(samples["tokens"]))
        return samples

    @train.finish
    def train_finish(self) -> dict[str, float]:
        return {}


class LongTailed(Flow):
    """Generation, then log-probabilities and training."""

    decoder: Decoder
    trainer: Trainer

    def step(self, prompts: Stream) -> Stream:
        return self.trainer.train(self.trainer.logprobs(self.decoder.draw(prompts)))


def flow() -> LongTailed:
    return LongTailed(decoder=Decoder(), trainer=Trainer())


def plans(graph: FlowGraph, lanes: tuple[LaneSpec, ...]) -> dict[str, Plan]:
    """By name what is compared."""
    collocated = build_plan("collocated", graph, lanes, PROMPTS)
    named = {"collocated": collocated}
    for plan in with_switch_points(collocated, graph, num_items=PROMPTS):
        stage_plan, chunk = plan.stages["decoder.draw"], plan.stages["trainer.train"].chunk
        unswitched = {"decoder.draw": replace(stage_plan, switch_at=None, keep=None)}
        named[f"calls of {chunk}"] = replace(plan, stages={**plan.stages, **unswitched})
        named[f"calls of {chunk}, switch at {stage_plan.switch_at:.0%}"] = plan
    return named


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    steps = 4 if options.quick else 5
    lanes = (LaneSpec(0), LaneSpec(1))
    compared = plans(flow().trace(), lanes)
    batches = [Batch({"step": [step] * PROMPTS}) for step in range(steps)]
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    each_step: dict[str, list[float]] = {name: [] for name in compared}
    with LanePool(lanes) as pool:
        for _ in range(1 if options.quick else 3):  # in turn, as the machine's load may change
            for name, plan in compared.items():
                with m2flow.launch(flow(), items_per_step=PROMPTS, plan=plan, lanes=pool) as run:
                    each_step[name] += [result.seconds for result in run.steps(batches)][1:]
    ray.shutdown()
    seconds = {name: statistics.median(some) for name, some in each_step.items()}
    table(
        ["plan", "seconds a step", "times collocated's speed"],
        [[name, each, seconds["collocated"] / each] for name, each in seconds.items()],
    )
    switched = min(each for name, each in seconds.items() if "switch" in name)
    gain = min(each for name, each in seconds.items() if "switch" not in name) / switched
    targets = [Target("gain of the best switch point over no switch point", gain, 1.1)]
    conclude("switch_points", {"seconds": seconds}, targets, options)


if __name__ == "__main__":
    main()
