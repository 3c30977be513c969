"""Scoring a model on a file of problems: a flow of its own, of two stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m2flow.algorithms.sampling import derive_seed
from m2flow.engine.plan import LaneSpec
from m2flow.flow import Flow, Stream
from m2flow.workloads.reasoning.data import OnBadRow, read_problems
from m2flow.workloads.reasoning.encoding import Names, context_of, encode
from m2flow.workloads.reasoning.verify import verify
from m2flow.workloads.reasoning.workers import Generator, ModelSource, Verifier, outcome


class Evaluate(Flow):
    """Draw answers and score them."""

    generator: Generator
    verifier: Verifier

    def step(self, prompts: Stream) -> Stream:
        return outcome(self.verifier.score(self.generator.generate(prompts)))


class MathRule:
    """The rule for mathematics: the answer in the text decides."""

    def score(
        self,
        answer: str,
        completion: str,
        *,
        finished: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> float:
        """1.0 if the completion's answer equals the right one, else 0.0."""
        return verify(answer, completion)


@dataclass(frozen=True)
class Scores:
    """What came out.

    Attributes:
        rewards: for each problem, the reward of each of its answers.
        mean_tokens: mean length of an answer.
        truncated_share: share of the answers that did not end by themselves.
        seconds: generation and scoring, start-up left out.
    """

    rewards: list[list[float]]
    mean_tokens: float
    truncated_share: float
    seconds: float


def model_folder(path: Path) -> Path:
    """The Hugging Face folder that a path means: itself, or the `model` folder of a checkpoint."""
    return path / "model" if (path / "model").is_dir() else path


def evaluate_file(
    model: Path,
    data: Path,
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    limit: int | None,
    seed: int,
    template: str,
    lanes: Sequence[LaneSpec],
    on_bad_row: OnBadRow,
) -> Scores:
    """Score a model on a JSON lines file; see `m2flow.cli.evaluate` for the arguments."""
    from m2flow.runtime.driver.launch import launch

    problems = read_problems(data, template=template, on_bad_row=on_bad_row)[:limit]
    source = ModelSource(str(model_folder(model)))
    tokenizer, context = source.tokenizer(), context_of(source.path)
    seeds = [derive_seed(seed, 2, index) for index in range(len(problems))]
    names = Names(str(data), "--max-new-tokens", "max_position_embeddings")
    batch = encode(problems, seeds, tokenizer, context, max_new_tokens, names)
    flow = Evaluate(
        generator=Generator(
            source,
            samples_per_prompt=samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        ),
        verifier=Verifier(source, MathRule()),
    )
    mode = "eager" if len(lanes) == 1 else "collocated"
    with launch(flow, items_per_step=len(batch), mode=mode, lanes=lanes) as run:
        result = run.step(batch)
    rewards, output = result.output["reward"], result.output
    return Scores(
        rewards=[rewards[n : n + samples] for n in range(0, len(rewards), samples)],
        mean_tokens=sum(output["num_tokens"]) / len(output),
        truncated_share=sum(r != "stop" for r in output["finish_reason"]) / len(output),
        seconds=result.seconds,
    )
