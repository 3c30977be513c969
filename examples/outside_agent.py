"""An agent of somebody else's framework, trained through the OpenAI-compatible endpoint.

    pip install "m2flow[agents]"
    python examples/outside_agent.py [--seed N]

`solve` is an ordinary program of openai-agents: it knows a model by a base address and a key, has a
tool of its own, and nothing of m2flow. m2flow calls it once for each trajectory, answers what it
asks by the policy, and keeps the tokens that the policy saw and drew; on these it trains. A tiny
model that has mostly been shown to guess products of two numbers finds out that the tool pays.
Accuracy on what it is trained on rises from about 0.4 to above 0.6 in 20 steps; some minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.tokenizer import byte_tokenizer
from m2flow.observe.run_directory import read_metrics
from m2flow.workloads.agentic.config import AgenticRecipe
from m2flow.workloads.agentic.endpoint.agents import Endpoint
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.common import train as train_recipe

EXPECTED = {"accuracy in training": 0.6}

TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'tool' %}={{ turn.content }};"
    "{% else %}{{ turn.content or '' }}{% for call in turn.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if turn.role == 'assistant' %}<eos>{% else %}{% endif %}{% endif %}{% endfor %}"
)
"""As short as a chat template can be; that of a published model is in its tokenizer's folder."""

RECIPE: dict[str, Any] = {
    "workload": "agentic",
    "name": "outside-agent",
    "mode": "eager",
    "steps": 20,
    "prompts_per_step": 16,
    "samples_per_prompt": 8,
    "tools": "calculator",  # writes the demonstrations; the agent brings its own
    "data": {"options": {"min_digits": 1, "max_digits": 1, "tool_share": 0.4}},
    "generation": {"max_new_tokens": 72},
    "episode": {"max_turns": 3, "max_tokens": 160, "max_result_tokens": 16},
    "warmup": {"steps": 400, "samples_per_step": 16, "learning_rate": 1e-2},
    "algorithm": {"clip_high": 0.28, "aggregation": "token-mean"},
    "optimizer": {"learning_rate": 1e-3},
    "evaluation": {"every": 20, "problems": 16},
}


async def solve(problem: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Work on a problem, as any agent of this framework would."""
    import openai
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

    @function_tool
    def calculator(formula: str) -> str:
        """Compute a product such as `6*7`."""
        one, _, other = formula.partition("*")
        return str(int(one) * int(other))

    async with openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0
    ) as client:
        model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
        agent = Agent(name="solver", tools=[calculator], model=model)
        quiet = RunConfig(tracing_disabled=True)
        try:
            await Runner.run(agent, problem["prompt"], run_config=quiet)
        except openai.BadRequestError:
            return  # as many turns or tokens as the recipe allows: the trajectory ends here


def starting_model(seed: int, folder: Path) -> str:
    """A model with a chat template that has seen demonstrations, 40 % of them with a call."""
    spec = TinySpec(hidden_size=64, num_hidden_layers=1, intermediate_size=128)
    untrained = build_tiny(spec, vocab_size=258, eos_token_id=256, pad_token_id=257, seed=seed)
    untrained.save_pretrained(folder / "untrained")
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "untrained")
    recipe = RECIPE | {"model": {"path": str(folder / "untrained")}, "seed": seed}
    return AgenticExperiment(AgenticRecipe.model_validate(recipe)).prepare(folder).path


def train(seed: int = 0) -> dict[str, float]:
    """Accuracy of the last steps; held out before and after, with calls of a trajectory."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = RECIPE | {
            "seed": seed,
            "model": {"path": starting_model(seed, Path(folder))},
            "agent": {"function": f"{__name__}:solve"},
            "warmup": {"steps": 0},
        }
        rows = read_metrics(train_recipe(recipe, run_dir=Path(folder) / "run"))
    seen = [row for row in rows if "eval/accuracy" in row]
    return {
        "accuracy in training": sum(row["accuracy/mean"] for row in rows[-3:]) / 3,
        "accuracy before": seen[0]["eval/accuracy"],
        "accuracy": seen[-1]["eval/accuracy"],
        "calls": seen[-1]["eval/tools/calls"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an agent of another framework.")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in train(parser.parse_args().seed).items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
