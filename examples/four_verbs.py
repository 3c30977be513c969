"""Four verbs, as in the Tinker interface: forward_backward, optim_step, sample, save.

A client for those who would rather write the loop themselves. It is an adapter on a flow: the
optimizer's step is the flow's `step`, with the weight edge to the sampler, and the other verbs are
methods beside it. So the loop below runs in this process or on lanes, and data travel as in any
flow.

    python examples/four_verbs.py --seed 1
    python examples/four_verbs.py --mode collocated --lanes cpu:2

The loop teaches a model, built here, to answer one of two digits (cross-entropy), then the larger
one (policy gradient). Expected: greedy accuracy 0.9 at the end (`accuracy`), from about 0.4 after
the first part.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

import m2flow
from m2flow import Batch, Flow, Place, Ragged, Stream, Worker, stage
from m2flow.algorithms.grpo import GRPOLoss
from m2flow.algorithms.sampling import derive_seed
from m2flow.models.causal_lm import TinySpec, build_tiny, load_model
from m2flow.training.optimizer import AdamWConfig
from m2flow.training.policy import PolicyTrainer, PolicyTrainerConfig
from m2flow.training.rollouts import TokenPairs, TokenRollouts
from m2flow.workloads.reasoning.workers import Generator, ModelSource

EXPECTED = {"accuracy": 0.9}


class Policy(Worker):
    """The model in training: gradients add up until the optimizer takes its step."""

    def __init__(self, path: str, learning_rate: float) -> None:
        self.path, self.learning_rate = path, learning_rate

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = load_model(self.path).to(place.device)
        config = PolicyTrainerConfig(AdamWConfig(self.learning_rate, max_grad_norm=1.0))
        self.trainer = PolicyTrainer(self.model, GRPOLoss(aggregation="token-mean"), config)

    @stage(accumulates=True)
    def fold(self, data: Batch, *, loss: str) -> Batch:
        """Add the gradient of some samples; each token's log-probability under these weights."""
        answers = data["completion_ids"]
        pairs = TokenPairs(
            data["prompt_ids"].values,
            torch.tensor(data["prompt_ids"].lengths),
            answers.values,
            torch.tensor(answers.lengths),
        )
        logprobs = self.trainer.logprobs(pairs)
        advantages = data["advantage"].float().repeat_interleave(pairs.completion_lengths_B)
        # With the present log-probabilities as the old ones the ratio is 1, and the gradient that
        # of cross-entropy, weighted by the advantages.
        old = data["logprobs"].values if loss == "policy" else logprobs
        self.trainer.fold(TokenRollouts(pairs, old, advantages))
        return data.only("advantage").with_columns(logprobs=Ragged(logprobs, answers.lengths))

    @fold.finish
    def fold_finish(self) -> None:
        """Nothing: what was folded waits for `optim_step`."""

    @stage(accumulates=True)
    def update(self, nothing: Batch) -> Batch:
        return nothing

    @update.finish
    def update_finish(self) -> dict[str, float]:
        return self.trainer.finish(self.place.all_reduce)

    def weights(self) -> Mapping[str, Any]:
        return dict(self.model.state_dict())

    def save_to(self, folder: str) -> None:
        self.model.save_pretrained(folder)


class Verbs(Flow):
    """The verbs as methods of a flow."""

    policy: Policy
    sampler: Generator

    def step(self, nothing: Stream) -> Stream:
        return self.policy.update(nothing)

    def imitate(self, data: Stream) -> Stream:
        return self.policy.fold(data, loss="cross_entropy")

    def reinforce(self, data: Stream) -> Stream:
        return self.policy.fold(data, loss="policy")

    def sample(self, prompts: Stream) -> Stream:
        return self.sampler.generate(prompts)

    def greedy(self, prompts: Stream) -> Stream:
        return self.sampler.generate(prompts, temperature=0.0)

    def sync(self) -> None:
        self.policy.publish(self.sampler)


class TrainingClient:
    """The four verbs on a model folder; use it as a context manager.

    Args:
        path: a folder in Hugging Face layout.
        learning_rate: of AdamW.
        max_new_tokens: of a sample.
        mode, lanes: as for `m2flow.launch`.
    """

    def __init__(
        self,
        path: str,
        *,
        learning_rate: float,
        max_new_tokens: int,
        mode: str = "eager",
        lanes: str = "auto",
    ) -> None:
        sampler = Generator(ModelSource(path), samples_per_prompt=1, max_new_tokens=max_new_tokens)
        verbs = dict.fromkeys(("imitate", "reinforce", "sample", "greedy"), 64)
        flow = Verbs(policy=Policy(path, learning_rate), sampler=sampler)
        self.run = m2flow.launch(flow, items_per_step=1, mode=mode, lanes=lanes, also=verbs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.run.close()

    def forward_backward(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        *,
        advantages: Sequence[float] | None = None,
        logprobs: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Add the gradient of these samples; the log-probabilities of their tokens.

        Without `advantages` the loss is cross-entropy; with them, and the `logprobs` under which
        the tokens were drawn, it is the clipped policy gradient.
        """
        data = {
            "prompt_ids": Ragged.from_rows([torch.tensor(row) for row in prompts]),
            "completion_ids": Ragged.from_rows([torch.tensor(row) for row in answers]),
            "advantage": torch.tensor(advantages or [1.0] * len(prompts)),
        }
        if logprobs is not None:
            data["logprobs"] = Ragged.from_rows(list(logprobs))
        verb = "imitate" if advantages is None else "reinforce"
        return self.run.run_method(verb, Batch(data)).output["logprobs"].rows()

    def optim_step(self) -> dict[str, float]:
        """Step on all that was added up; the sampler has the new weights afterwards."""
        return dict(self.run.step(Batch({"nothing": [None]})).metrics)

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, greedy: bool = False
    ) -> list[tuple[list[int], torch.Tensor]]:
        """An answer to each prompt: its tokens, and the log-probability of each when drawn."""
        asked = Ragged.from_rows([torch.tensor(row) for row in prompts])
        batch = Batch({"prompt_ids": asked, "seed": torch.tensor(seeds)})
        made = self.run.run_method("greedy" if greedy else "sample", batch).output
        tokens = [row.tolist() for row in made["completion_ids"].rows()]
        return list(zip(tokens, made["behaviour_logprobs"].rows(), strict=True))

    def save(self, folder: str | Path) -> None:
        """Write the model in Hugging Face layout."""
        self.run.worker_call("policy", "save_to", str(folder))


EQUALS, END = 10, 11


def prompts(seed: int, count: int) -> list[list[int]]:
    """Two different digits and `=`."""
    drawn = [derive_seed(seed, number) for number in range(count)]
    return [[n % 10, (n % 10 + 1 + n // 10 % 9) % 10, EQUALS] for n in drawn]


def train(seed: int = 0, mode: str = "eager", lanes: str = "auto") -> dict[str, float]:
    """The loop, of the four verbs alone; greedy accuracy at the end."""
    spec = TinySpec(hidden_size=32, num_hidden_layers=2, intermediate_size=96)
    with tempfile.TemporaryDirectory() as folder:
        tiny = build_tiny(spec, vocab_size=12, eos_token_id=END, pad_token_id=END, seed=seed)
        tiny.save_pretrained(folder)
        settings = {"learning_rate": 3e-3, "max_new_tokens": 2, "mode": mode, "lanes": lanes}
        with TrainingClient(folder, **settings) as client:  # type: ignore[arg-type]
            asked = prompts(-1, 200)

            def accuracy(step: int) -> float:
                made = client.sample(asked, range(200), greedy=True)
                right = [
                    [max(a, b), END] == tokens
                    for (a, b, _), (tokens, _) in zip(asked, made, strict=True)
                ]
                print(f"step {step:3d}  accuracy {sum(right) / 200:.3f}")
                return sum(right) / 200

            for step in range(60):
                some = prompts(derive_seed(seed, step), 32)
                digits = [row[derive_seed(seed, step, n) % 2] for n, row in enumerate(some)]
                client.forward_backward(some, [[digit, END] for digit in digits])
                client.optim_step()
            accuracy(60)
            for step in range(60, 110):
                some = [row for row in prompts(derive_seed(seed, step), 16) for _ in range(4)]
                drawn = client.sample(some, [derive_seed(seed, step, n) for n in range(64)])
                rewards = [
                    float(tokens == [max(a, b), END])
                    for (a, b, _), (tokens, _) in zip(some, drawn, strict=True)
                ]
                means = [sum(rewards[n - n % 4 : n - n % 4 + 4]) / 4 for n in range(64)]
                client.forward_backward(
                    some,
                    [tokens for tokens, _ in drawn],
                    advantages=[r - mean for r, mean in zip(rewards, means, strict=True)],
                    logprobs=[logprobs for _, logprobs in drawn],
                )
                client.optim_step()
            found = accuracy(110)
            client.save(Path(folder) / "trained")
    return {"accuracy": found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A training loop of four verbs.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="eager", help="eager or collocated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    train(**vars(parser.parse_args()))
