"""GRPO that teaches a small language model to add, in one file that reads from top to bottom.

This is the algorithm of m2flow's quick start without m2flow: padded batches, an ordinary loop that
generates token by token, plain PyTorch and transformers, no Ray. It is slow and obvious on purpose,
and m2flow is tested against it: the same checkpoint and seed give the same rewards and, in double
precision, the same weights.

    python examples/reference_grpo.py                        # warm-up, then 80 steps
    python examples/reference_grpo.py --checkpoint FOLDER    # from a model in Hugging Face layout

Shapes: B samples of a batch, P padded prompt, L padded prompt and completion, V vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Settings:
    """Everything that can be chosen; the command line has an option for each."""

    steps: int = 80
    seed: int = 0
    checkpoint: Path | None = None
    dtype: str = "float32"
    min_digits: int = 3
    max_digits: int = 4
    thinking_share: float = 0.4
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    minibatches: int = 2
    max_new_tokens: int = 24
    learning_rate: float = 1e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    warmup_steps: int = 1500
    warmup_samples_per_step: int = 16
    eval_every: int = 20
    eval_problems: int = 512


# --- the task: 347+285= is answered #632, or with column sums first, 12,13,06#632 -----------------


@dataclass(frozen=True)
class Problem:
    """A prompt and the only right answer."""

    prompt: str
    answer: str


def training_problem(settings: Settings, index: int) -> Problem:
    """Problem number `index` of a run: a function of settings and index alone."""
    draw = random.Random(f"addition/train/{settings.seed}/{index}")
    return problem_of(training_pair(draw, settings))


def held_out_problems(settings: Settings) -> list[Problem]:
    """Problems that training never sees, the same for every seed."""
    draw = random.Random("addition/held out")
    pairs: dict[tuple[int, int], None] = {}
    for _ in range(5000 + 100 * settings.eval_problems):  # few digits: there may not be enough
        pair = random_pair(draw, settings)
        if is_held_out(pair) and len(pairs) < settings.eval_problems:
            pairs[pair] = None
    return [problem_of(pair) for pair in pairs]


def demonstration(settings: Settings, index: int) -> tuple[str, str]:
    """Prompt and completion number `index` for the warm-up; some of them think first."""
    draw = random.Random(f"addition/demonstration/{settings.seed}/{index}")
    pair = training_pair(draw, settings)
    problem = problem_of(pair)
    thought = column_sums(*pair) if draw.random() < settings.thinking_share else ""
    return problem.prompt, f"{thought}#{problem.answer}"


def problem_of(pair: tuple[int, int]) -> Problem:
    """The sum of two numbers."""
    return Problem(f"{pair[0]}+{pair[1]}=", str(sum(pair)))


def column_sums(a: int, b: int) -> str:
    """`12,13,06` for 347+285: each column with its carry, the lowest digits first."""
    sums, carry = [], 0
    while a or b:
        column = a % 10 + b % 10 + carry
        sums.append(f"{column:02d}")
        a, b, carry = a // 10, b // 10, column // 10
    return ",".join(sums)


def training_pair(draw: random.Random, settings: Settings) -> tuple[int, int]:
    """The first pair drawn that is not held out."""
    while is_held_out(pair := random_pair(draw, settings)):
        pass
    return pair


def random_pair(draw: random.Random, settings: Settings) -> tuple[int, int]:
    """Two numbers of equally many digits."""
    digits = draw.randint(settings.min_digits, settings.max_digits)
    low, high = 10 ** (digits - 1), 10**digits - 1
    return draw.randint(low, high), draw.randint(low, high)


def is_held_out(pair: tuple[int, int]) -> bool:
    """One pair in sixteen is, by a hash of its content, whichever way round it stands."""
    content = f"{min(pair)}+{max(pair)}".encode()
    return hashlib.blake2b(content, digest_size=1).digest()[0] % 16 == 0


# --- characters as tokens -------------------------------------------------------------------------

CHARACTERS = "0123456789+=,#"
EOS, PAD = len(CHARACTERS), len(CHARACTERS) + 1
VOCABULARY_SIZE = len(CHARACTERS) + 2


def encode(text: str) -> list[int]:
    """One token for each character."""
    return [CHARACTERS.index(character) for character in text]


def decode(ids: Sequence[int]) -> str:
    """The text of tokens, end and padding left out."""
    return "".join(CHARACTERS[i] for i in ids if i < len(CHARACTERS))


# --- the model, and its supervised warm-up --------------------------------------------------------


def new_model(settings: Settings) -> nn.Module:
    """A Qwen2 of 0.79 M parameters, drawn in float32 whatever its dtype.

    The large `initializer_range` matters: with the usual 0.02 so small a model hardly learns.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    torch.manual_seed(settings.seed)
    return Qwen2ForCausalLM(config).to(getattr(torch, settings.dtype)).eval()


def warm_up(model: nn.Module, settings: Settings, log: Callable[[str], None] = print) -> None:
    """Supervised steps on demonstrations, each shown once: cross-entropy of the completions.

    The learning rate rises linearly over 50 steps (or a tenth of a shorter run) and falls linearly
    to 2 % of its peak.
    """
    steps, size = settings.warmup_steps, settings.warmup_samples_per_step
    shown = [demonstration(settings, index) for index in range(steps * size)]
    order = torch.randperm(len(shown), generator=torch.Generator().manual_seed(settings.seed))
    rising = min(50, steps // 10)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        if step < rising:
            factor = (step + 1) / rising
        else:
            factor = 1 - 0.98 * (step - rising) / (steps - rising)
        pairs = [shown[i] for i in order[step * size : (step + 1) * size].tolist()]
        prompts = [encode(prompt) for prompt, _ in pairs]
        completions = [[*encode(completion), EOS] for _, completion in pairs]
        logprobs_BL, is_completion_BL = completion_logprobs(model, prompts, completions)
        loss = -(logprobs_BL * is_completion_BL).sum() / is_completion_BL.sum()
        take_step(model, optimizer, loss, 2e-3 * factor, max_grad_norm=1.0)
        if (step + 1) % 250 == 0:
            log(f"warm-up {step + 1:4d}  loss {loss.item():.3f}")


# --- log-probabilities and optimizer steps --------------------------------------------------------


def completion_logprobs(
    model: nn.Module, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """[B, L-1] log-probabilities of each row's second token and on, and which are completion."""
    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    input_ids_BL = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    attention_mask_BL = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits_BLV = model(input_ids=input_ids_BL, attention_mask=attention_mask_BL).logits
    logprobs_BLV = logits_BLV[:, :-1].log_softmax(-1)
    logprobs_BL = logprobs_BLV.gather(-1, input_ids_BL[:, 1:, None])[..., 0]
    return logprobs_BL, place(prompts, [[1.0] * len(c) for c in completions], logprobs_BL) > 0


def place(
    prompts: Sequence[Sequence[int]], values: Sequence[Sequence[float]], like_BL: Tensor
) -> Tensor:
    """Values of completion tokens where `completion_logprobs` has these tokens, else 0."""
    placed_BL = torch.zeros_like(like_BL)
    for row, (prompt, some) in enumerate(zip(prompts, values, strict=True)):
        first = len(prompt) - 1
        placed_BL[row, first : first + len(some)] = torch.tensor(some, dtype=like_BL.dtype)
    return placed_BL


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    learning_rate: float,
    max_grad_norm: float,
) -> None:
    """Backward, clip the norm of the gradient, step."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


# --- random numbers that belong to a sample, not to the batch it is drawn in ----------------------

INCREMENT = 0x9E3779B97F4A7C15
MASK_64 = 2**64 - 1


def mix(value: int) -> int:
    """The finaliser of SplitMix64."""
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """One seed of several numbers below 2**64; their order counts."""
    state = mix(len(parts) + INCREMENT)
    for part in parts:
        for word in (2, part) if part else (0,):
            state = mix((state ^ word) + INCREMENT)
    return state & (2**63 - 1)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) with which a sample draws its token at this position."""
    return (mix(seed + (position + 1) * INCREMENT) >> 11) / 2**53


# --- generation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    """Tokens with the log-probabilities they were drawn with, the end token included if reached."""

    ids: list[int]
    logprobs: list[float]

    @property
    def finished(self) -> bool:
        return self.ids[-1] == EOS


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None,
    max_new_tokens: int,
) -> list[Completion]:
    """One completion to each prompt: at temperature 1, or greedy where there are no seeds."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[PAD] * (width - len(p)) + list(p) for p in prompts])
    attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    completions = [Completion([], []) for _ in prompts]
    for position in range(max_new_tokens):
        logits_BV = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        if seeds is None:
            token_B = logits_BV.argmax(-1)
        else:
            token_B = draw_tokens(logits_BV, [uniform(seed, position) for seed in seeds])
        logprob_B = logits_BV.log_softmax(-1).gather(-1, token_B[:, None])[:, 0]
        for completion, token, logprob in zip(
            completions, token_B.tolist(), logprob_B.tolist(), strict=True
        ):
            if not completion.ids or not completion.finished:
                completion.ids.append(token)
                completion.logprobs.append(logprob)
        if all(completion.finished for completion in completions):
            break
        attention_mask = torch.cat([attention_mask, torch.ones_like(token_B)[:, None]], dim=1)
        position_ids = attention_mask.sum(-1, keepdim=True) - 1
        input_ids = token_B[:, None]
    return completions


def draw_tokens(logits_BV: Tensor, uniforms: Sequence[float]) -> Tensor:
    """The first token whose cumulative probability exceeds the sample's uniform number."""
    cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
    uniform_B = torch.tensor(uniforms, dtype=torch.float64)
    first_above_B = (cumulative_BV <= uniform_B[:, None]).sum(-1)
    last_possible_B = (cumulative_BV < cumulative_BV[:, -1:]).sum(-1)  # where rounding ends below 1
    return torch.minimum(first_above_B, last_possible_B)


# --- reward, advantage, loss ----------------------------------------------------------------------


def reward_of(problem: Problem, completion: Completion) -> float:
    """1 where the model ended its text, and what follows the only `#` is the sum; else 0."""
    final = decode(completion.ids).partition("#")[2]
    return float(completion.finished and final == problem.answer)


def group_advantages(rewards: Sequence[float], group_size: int) -> list[float]:
    """(r - mean) / (std + 1e-6) within each group (arXiv 2402.03300, section 4.1.2)."""
    advantages = []
    for first in range(0, len(rewards), group_size):
        group = rewards[first : first + group_size]
        mean = sum(group) / group_size
        std = (sum((r - mean) ** 2 for r in group) / group_size) ** 0.5
        advantages += [(r - mean) / (std + 1e-6) for r in group]
    return advantages


def policy_loss(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    advantages: Sequence[float],
    settings: Settings,
) -> Tensor:
    """The clipped surrogate, a mean over all completion tokens (arXiv 2503.14476, equation 8)."""
    ids = [completion.ids for completion in completions]
    logprobs_BL, is_completion_BL = completion_logprobs(model, prompts, ids)
    old_logprobs_BL = place(prompts, [c.logprobs for c in completions], logprobs_BL)
    advantage_B1 = torch.tensor(advantages, dtype=logprobs_BL.dtype)[:, None]
    ratio_BL = (logprobs_BL - old_logprobs_BL).where(is_completion_BL, 0.0).exp()
    clipped_BL = ratio_BL.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_BL = -torch.minimum(ratio_BL * advantage_B1, clipped_BL * advantage_B1)
    return (loss_BL * is_completion_BL).sum() / is_completion_BL.sum()


# --- the run --------------------------------------------------------------------------------------


def accuracy(model: nn.Module, settings: Settings) -> float:
    """Share of the held-out problems that greedy answers get right."""
    problems = held_out_problems(settings)
    prompts = [encode(problem.prompt) for problem in problems]
    answers = generate(model, prompts, None, settings.max_new_tokens)
    return sum(map(reward_of, problems, answers)) / len(problems)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, settings: Settings
) -> tuple[list[float], list[Completion]]:
    """One step of reinforcement learning; the rewards and completions of its samples, in order."""
    count, minibatches = settings.samples_per_prompt, settings.minibatches
    first = step * settings.prompts_per_step
    problems, seeds = [], []
    for index in range(first, first + settings.prompts_per_step):
        item_seed = derive_seed(settings.seed, 1, index)
        for number in range(count):
            problems.append(training_problem(settings, index))
            seeds.append(derive_seed(item_seed, number))
    prompts = [encode(problem.prompt) for problem in problems]
    completions = generate(model, prompts, seeds, settings.max_new_tokens)
    rewards = list(map(reward_of, problems, completions))
    advantages = group_advantages(rewards, count)
    size = len(problems) // minibatches
    for start in range(0, size * minibatches, size):
        part = slice(start, start + size)
        loss = policy_loss(model, prompts[part], completions[part], advantages[part], settings)
        take_step(model, optimizer, loss, settings.learning_rate, settings.max_grad_norm)
    return rewards, completions


def run(
    settings: Settings, log: Callable[[str], None] = print
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Warm up or load, then train; the rewards of each step's samples, and the final weights."""
    if settings.checkpoint is None:
        model = new_model(settings)
        warm_up(model, settings, log)
    else:
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_pretrained(settings.checkpoint, dtype=dtype).eval()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    if settings.eval_problems:
        log(f"step    0  held-out greedy accuracy {accuracy(model, settings):.3f}")
    rewards_of_steps = []
    for step in range(settings.steps):
        started = time.perf_counter()
        rewards, completions = train_step(model, optimizer, step, settings)
        rewards_of_steps.append(rewards)
        done = step + 1
        log(
            f"step {done:4d}  reward {sum(rewards) / len(rewards):.3f}  "
            f"length {sum(len(c.ids) for c in completions) / len(completions):5.2f}  "
            f"{time.perf_counter() - started:.2f} s"
        )
        if settings.eval_problems and (done % settings.eval_every == 0 or done == settings.steps):
            log(f"step {done:4d}  held-out greedy accuracy {accuracy(model, settings):.3f}")
    return rewards_of_steps, model.state_dict()


def settings_from(arguments: Sequence[str] | None = None) -> Settings:
    """The settings that a command line asks for; one option for each of them."""
    parser = argparse.ArgumentParser(description="GRPO on addition in one file.")
    for field in fields(Settings):
        kind = Path if field.name == "checkpoint" else type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return Settings(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    run(settings_from())
