"""What flow, engine and lane cost: m2flow on one lane against a plain loop over the same objects.

Both sides take the quick start's steps from the same model with the same seeds, on the same core,
in alternating blocks, and must draw the same rewards. The plain loop calls the generator, the
verifier's rule and the trainer directly; m2flow runs the collocated plan on one Ray lane.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from harness import Target, arguments, conclude, table
from starting_point import quickstart

from m2flow.algorithms.advantages import group_advantages
from m2flow.algorithms.sampling import derive_seed
from m2flow.engine.plan import LaneSpec
from m2flow.flow import Batch
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Request, SamplingParams
from m2flow.rewards import addition_reward
from m2flow.runtime.driver.launch import launch
from m2flow.training.policy import PolicyTrainer
from m2flow.training.rollouts import TokenRollouts
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.learning import loss_of, trainer_config
from m2flow.workloads.reasoning.workers import ModelSource


class PlainLoop:
    """The step as one would write it without m2flow's flow, engine and lanes."""

    def __init__(
        self, recipe: ReasoningRecipe, experiment: ReasoningExperiment, source: ModelSource
    ) -> None:
        self.recipe = recipe
        self.tokenizer = source.tokenizer()
        model = source.load("cpu")
        self.generator = NativeEngine(model.config, max_running=recipe.generation.max_running)
        self.generator.install(model.state_dict(), 0)
        self.trainer = PolicyTrainer(model, loss_of(recipe), trainer_config(recipe))
        self.params = SamplingParams(
            recipe.generation.max_new_tokens,
            recipe.generation.temperature,
            (model.generation_config.eos_token_id,),
        )

    def step(self, batch: Batch) -> list[float]:
        """One training step; the rewards in order of sample."""
        count = self.recipe.samples_per_prompt
        prompts = [prompt for prompt in batch["prompt_ids"] for _ in range(count)]
        answers = [answer for answer in batch["answer"] for _ in range(count)]
        seeds = [derive_seed(seed, k) for seed in batch["seed"] for k in range(count)]
        self.generator.submit(
            Request(n, prompts[n], seeds[n], self.params) for n in range(len(prompts))
        )
        done = []
        while self.generator.busy:
            done += self.generator.step()
        done.sort(key=lambda completion: completion.id)
        texts = self.tokenizer.batch_decode(
            [completion.token_ids.tolist() for completion in done], skip_special_tokens=True
        )
        rewards = [
            addition_reward(
                "", text, (), {"answer": answer, "finished": completion.finish_reason == "stop"}
            )
            for answer, text, completion in zip(answers, texts, done, strict=True)
        ]
        advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), count)
        size = self.recipe.samples_per_minibatch
        for start in range(0, len(done), size):
            rows = slice(start, start + size)
            self.trainer.fold(
                TokenRollouts.from_rows(
                    prompts[rows],
                    [completion.token_ids for completion in done[rows]],
                    [completion.logprobs for completion in done[rows]],
                    advantages[rows].float(),
                )
            )
            self.trainer.finish()
        self.generator.install(self.trainer.model.state_dict(), self.generator.version + 1)
        return rewards


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Bind this process's main thread to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def timed(step: Callable[[Batch], list[float]], batches: list[Batch]) -> tuple[list[float], list]:
    """Seconds and rewards of each step."""
    seconds, rewards = [], []
    for batch in batches:
        start = time.perf_counter()
        rewards.append(step(batch))
        seconds.append(time.perf_counter() - start)
    return seconds, rewards


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, help="blocks of steps of each side")
    options = parser.parse_args()
    blocks, block = options.blocks or (4 if options.quick else 12), 5
    torch.set_num_threads(1)
    core = max(os.sched_getaffinity(0))
    recipe, experiment, source = quickstart()
    plain = PlainLoop(recipe, experiment, source)
    flow = recipe_flow(recipe, source, experiment.rewards)
    seconds: dict[str, list[float]] = {"plain": [], "m2flow": []}
    same = True
    lanes = (LaneSpec(0, cores=(core,)),)
    with launch(
        flow, items_per_step=recipe.prompts_per_step, mode="collocated", lanes=lanes
    ) as run:
        for number in range(blocks + 1):
            batches = [
                experiment.batch(step) for step in range(number * block, (number + 1) * block)
            ]
            with on_core(core):
                plain_seconds, plain_rewards = timed(plain.step, batches)
            flow_seconds, flow_rewards = timed(lambda b: run.step(b).output["reward"], batches)
            same = same and plain_rewards == flow_rewards
            if number:  # the first block warms both sides up
                seconds["plain"] += plain_seconds
                seconds["m2flow"] += flow_seconds
    samples = recipe.samples_per_step
    rate = {side: samples / statistics.median(some) for side, some in seconds.items()}
    pairs = [p / f for p, f in zip(seconds["plain"], seconds["m2flow"], strict=True)]
    table(
        ["side", "median ms/step", "samples/s"],
        [[side, 1e3 * statistics.median(some), rate[side]] for side, some in seconds.items()],
    )
    ratio = statistics.median(pairs)
    conclude(
        "overhead",
        {
            "steps": len(pairs),
            "samples_per_s": rate,
            "ratio_of_medians": rate["m2flow"] / rate["plain"],
            "ratio_pairwise_quartiles": statistics.quantiles(pairs, n=4),
            "same_rewards": same,
        },
        [
            Target("samples/s of the flow against the plain loop", ratio, 0.92),
            Target("rewards are the same (1: yes)", float(same), 1.0),
        ],
        options,
    )


if __name__ == "__main__":
    main()
