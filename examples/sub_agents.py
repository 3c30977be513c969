"""A policy whose tool is another policy.

    python examples/sub_agents.py [--steps N]

A problem is `6*7=`. The first policy, the caller, may answer it or ask: what it writes in brackets
is put to a second policy, the helper, as a problem of its own, and what the helper writes is the
answer, `[6*7]{42}#42`. Nothing tells the two apart but their place in the flow: the helper is
a half of the loop as a toolbox is, has a lane of its own if the plan gives it one, and runs on
weights that the learner publishes to both. Prints the mean reward of each step.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import m2flow
from m2flow import Place
from m2flow.tools import ToolCall, ToolResult
from m2flow.workloads.agentic.config import AgenticRecipe, EpisodeSection
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.agentic.flow import Agent, recipe_flow
from m2flow.workloads.agentic.workers import Caller
from m2flow.workloads.reasoning.workers import Generator, ModelSource

HELPER_TOKENS = 6

RECIPE: dict[str, Any] = {
    "workload": "agentic",
    "prompts_per_step": 16,
    "tools": "calculator",  # stands for the helper while the demonstrations are written
    "model": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128},
    "data": {"options": {"min_digits": 1, "max_digits": 1, "tool_share": 0.3}},
    "episode": {"max_turns": 2, "max_tokens": 32},
    "warmup": {"steps": 300, "learning_rate": 5e-3},
    "generation": {"max_new_tokens": 8},
    "algorithm": {"clip_high": 0.28, "aggregation": "token-mean"},
}


class Helper(Caller):
    """Answers calls by a policy of its own, greedily."""

    def __init__(self, model: ModelSource, episode: EpisodeSection, tools: Sequence[str]) -> None:
        super().__init__(model, episode, tools)
        self.policy = Generator(model, samples_per_prompt=1, max_new_tokens=HELPER_TOKENS)

    def load(self, place: Place) -> None:
        super().load(place)
        self.policy.load(place)
        self.tokenizer, self.stop_ids = self.model.tokenizer(), self.model.stop_ids()

    def answers(self, calls: Sequence[ToolCall], seeds: Sequence[int]) -> list[ToolResult]:
        from m2flow.generation.records import Request, SamplingParams

        params = SamplingParams(HELPER_TOKENS, temperature=0.0, stop_token_ids=self.stop_ids)
        prompts = [self.tokenizer(f"{call.arguments}=")["input_ids"] for call in calls]
        asked = zip(prompts, seeds, strict=True)
        engine, written = self.policy.engine, dict[int, str]()
        engine.submit(Request(n, ids, seed, params) for n, (ids, seed) in enumerate(asked))
        while engine.busy:
            for done in engine.step():
                written[done.id] = self.tokenizer.decode(done.token_ids, skip_special_tokens=True)
        return [ToolResult(written[number].lstrip("#")) for number in range(len(calls))]

    def install(self, weights: Mapping[str, Any], version: int) -> None:
        self.policy.install(weights, version)

    def offload(self) -> None:
        self.policy.offload()

    def onload(self) -> None:
        self.policy.onload()

    def state_bytes(self) -> int:
        return self.policy.state_bytes()


class Team(Agent):
    """The flow of an agent; both policies run on what the learner has learned."""

    def sync(self) -> None:
        self.learner.publish(self.generator, self.tools)


def train(steps: int, mode: str = "eager", lanes: str = "cpu:1") -> tuple[list[float], list[str]]:
    """Mean reward of each step, and trajectories of the last one."""
    recipe = AgenticRecipe.model_validate({**RECIPE, "steps": max(1, steps)})
    experiment = AgenticExperiment(recipe)
    with tempfile.TemporaryDirectory() as folder:
        model = experiment.prepare(Path(folder))
        agent = recipe_flow(recipe, model, experiment.rewards, tools=experiment.tools)
        workers = {name: worker for name, worker in agent.workers.items() if name != "tools"}
        flow = Team(**workers, tools=Helper(model, recipe.episode, experiment.tools))
        size = recipe.prompts_per_step
        with m2flow.launch(flow, items_per_step=size, mode=mode, lanes=lanes) as run:
            results = list(run.steps(experiment.batch(step) for step in range(steps)))
    rewards = [sum(result.output["reward"]) / len(result.output) for result in results]
    return rewards, list(results[-1].output["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description="A policy whose tool is another policy.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--lanes", default="cpu:1")
    options = parser.parse_args()
    rewards, texts = train(options.steps, options.mode, options.lanes)
    for step, reward in enumerate(rewards, start=1):
        print(f"step {step:3d}  reward {reward:.3f}")
    print("such as", *dict.fromkeys(text for text in texts if "{" in text), sep="  ")


if __name__ == "__main__":
    main()
