"""On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649): a teacher judges a student.

The student samples sequences; the teacher says under which log-probability it would have drawn each
token; the student moves towards tokens that the teacher likes better than the student does. The
advantage of a token is `log teacher - log student`, whose mean is minus the reverse KL divergence.
Both are small models of the next token given the last two, so the divergence is computed exactly.

    python examples/distillation.py --seed 1
    python examples/distillation.py --mode disaggregated --lanes cpu:2

Expected after 40 steps: on the student's own sequences the reverse KL divergence, 0.3 nats a token
at first, falls to a tenth of that or less (`closer` is at least 10).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import m2flow
from m2flow import Batch, Flow, Place, Stream, Worker, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens

TOKENS, LENGTH, PROMPTS, SAMPLES = 12, 16, 32, 4
STEPS, LEARNING_RATE = 40, 1e-2
EXPECTED = {"closer": 10.0}


class NextToken(nn.Module):
    """[N, 2] last tokens -> [N, TOKENS] logits. Weights follow from a seed; `scale` sharpens."""

    def __init__(self, seed: int, scale: float, width: int = 32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(TOKENS, width)
            self.hidden, self.head = nn.Linear(2 * width, width), nn.Linear(width, TOKENS)
        self.scale = scale

    def forward(self, last: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.tokens(last).flatten(1)))) * self.scale


def pairs(text: Tensor) -> Tensor:
    """[N, 2 + LENGTH] -> [N * LENGTH, 2]: what each token follows."""
    return text.unfold(1, 2, 1)[:, :LENGTH].reshape(-1, 2)


class Student(Worker):
    """Writes, by weights that are published to it."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = NextToken(seed=0, scale=1.0)

    @stage(expands=SAMPLES)
    def write(self, prompts: Batch) -> Batch:
        asked = prompts.repeat(SAMPLES)
        seed = asked["seed"] + torch.arange(len(asked)) % SAMPLES
        text, logprobs = asked["prompt"], []
        with torch.inference_mode():
            for position in range(LENGTH):
                logits = self.model(text[:, -2:])
                token, logprob = sample_tokens(logits, seed, torch.full_like(seed, position), 1.0)
                text = torch.cat([text, token[:, None]], 1)
                logprobs.append(logprob)
        return Batch({"text": text, "logprobs": torch.stack(logprobs, 1)}, asked.ids)

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.model.load_state_dict(dict(weights))


class Teacher(Worker):
    """A larger and sharper model, which is never trained."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = NextToken(seed=1000 + self.seed, scale=3.0, width=64)

    @stage
    def judge(self, written: Batch) -> Batch:
        """Add each token's advantage, and for the figures the teacher's whole distributions."""
        with torch.inference_mode():
            logprobs = self.model(pairs(written["text"])).log_softmax(1)
        token = written["text"][:, 2:].reshape(-1, 1)
        liked = logprobs.gather(1, token).view(-1, LENGTH)
        teacher = logprobs.view(-1, LENGTH, TOKENS)
        return written.with_columns(advantage=liked - written["logprobs"], teacher=teacher)


class Learner(Worker):
    """Policy gradient on the teacher's judgement."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = NextToken(seed=0, scale=1.0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LEARNING_RATE)
        self.sums = torch.zeros(2)  # divergence, tokens

    @stage(accumulates=True)
    def learn(self, judged: Batch) -> Batch:
        own = self.model(pairs(judged["text"])).log_softmax(1)
        teacher = judged["teacher"].view(-1, TOKENS)
        drawn = own.gather(1, judged["text"][:, 2:].reshape(-1, 1))[:, 0]
        (-(judged["advantage"].flatten() * drawn).sum()).backward()
        with torch.no_grad():
            self.sums += torch.tensor([(own.exp() * (own - teacher)).sum(), len(own)])
        return judged.only("advantage")

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.place.all_reduce([*gradients, self.sums])
        divergence, tokens = self.sums.tolist()
        for gradient in gradients:
            gradient /= tokens
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.sums.zero_()
        return {"divergence": divergence / tokens}

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())


class Distillation(Flow):
    """The student writes, the teacher judges, the student learns."""

    student: Student
    teacher: Teacher
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        return self.learner.learn(self.teacher.judge(self.student.write(prompts)))

    def sync(self) -> None:
        self.learner.publish(self.student)


def prompts(seed: int, step: int) -> Batch:
    """The prompts of a step, two tokens each: a function of the seed and the step's number."""
    seeds = torch.tensor([derive_seed(seed, step, number) for number in range(PROMPTS)])
    return Batch({"seed": seeds, "prompt": torch.stack([seeds % TOKENS, seeds // 64 % TOKENS], 1)})


def train(seed: int = 0, mode: str = "eager", lanes: str = "auto") -> dict[str, float]:
    """Run the flow; how many times closer to the teacher the student is at the end."""
    flow = Distillation(student=Student(), teacher=Teacher(seed), learner=Learner())
    divergences: list[float] = []
    with m2flow.launch(flow, items_per_step=PROMPTS, mode=mode, lanes=lanes) as run:
        for result in run.steps(prompts(seed, step) for step in range(STEPS)):
            divergences.append(result.metrics["divergence"])
            if result.step % 10 == 0 or result.step == STEPS - 1:
                print(f"step {result.step:3d}  reverse KL {divergences[-1]:.4f} nats a token")
    return {"closer": divergences[0] / divergences[-1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A student learns from what a teacher says of it.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", default="eager", help="eager, collocated or disaggregated")
    parser.add_argument("--lanes", default="auto", help="such as cpu:2")
    train(**vars(parser.parse_args()))
