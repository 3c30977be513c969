"""The m2flow side: the GRPO flow of the recipes on lanes, a step at a time at the driver's word.

The step is `m2flow.launch` on the same flow, workers and settings that `m2flow train` uses, with
the batch made inside the measured time as TRL's is. Evaluation, checkpoints and logs are left out
on both sides. `extra` is a part of the recipe (the mode, and switches of the learner that decide
how much work is done).
"""

from __future__ import annotations

import time

from peers.countdown import reward, task
from peers.wire import Sample, Settings, StepRecord, Wire

from m2flow.algorithms.sampling import derive_seed
from m2flow.flow import Batch
from m2flow.runtime.driver.launch import launch
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.encoding import encode
from m2flow.workloads.reasoning.flow import recipe_flow
from m2flow.workloads.reasoning.workers import ModelSource


def recipe_of(settings: Settings) -> ReasoningRecipe:
    """The settings as a recipe; whatever they do not say has the recipe's default."""
    return ReasoningRecipe.model_validate(
        {
            "seed": settings.seed,
            "steps": settings.max_steps,
            "lanes": f"cpu:{settings.cores}",
            "prompts_per_step": settings.prompts_per_step,
            "samples_per_prompt": settings.samples_per_prompt,
            "minibatches": settings.minibatches,
            "generation": {"max_new_tokens": settings.max_new_tokens},
            **settings.extra,
        }
    )


def main() -> None:
    """Serve steps until the other end closes."""
    wire = Wire()
    settings = wire.settings(Settings)
    recipe = recipe_of(settings)
    source = ModelSource(settings.checkpoint)
    problems, tokenizer = task(settings.task, settings.seed), source.tokenizer()
    context = source.load("cpu").config.max_position_embeddings

    def batch(step: int) -> Batch:
        numbers = range(step * recipe.prompts_per_step, (step + 1) * recipe.prompts_per_step)
        return encode(
            [problems.train(number) for number in numbers],
            [derive_seed(recipe.seed, 1, number) for number in numbers],
            tokenizer,
            context,
            settings.max_new_tokens,
        )

    flow = recipe_flow(recipe, source, (reward(settings.task),))
    done: list[StepRecord] = []
    step = 0
    with launch(
        flow, items_per_step=recipe.prompts_per_step, mode=recipe.mode, lanes=recipe.lanes
    ) as run:
        while asked := wire.next_request(done):
            done = []
            for _ in range(asked):
                began = time.perf_counter()
                output = run.step(batch(step)).output
                seconds = time.perf_counter() - began
                step += 1
                numbers = range(len(output))  # Rollouts come back in order of prompt.
                rows = zip(numbers, output["reward"], output["num_tokens"], strict=True)
                done.append(StepRecord.of(seconds, [Sample(*row) for row in rows]))


if __name__ == "__main__":
    main()
