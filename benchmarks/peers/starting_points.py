"""Checkpoints that both sides start from: a folder in Hugging Face layout for each task.

Addition's is the quick start's own. Countdown's is made here, by m2flow's supervised training on
the task's demonstrations, once; the folder's name changes with the task's code. A model of 0.1
billion parameters has random weights: to warm it up on a CPU would take hours.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness import CACHE
from peers import countdown
from peers.countdown import Countdown
from starting_point import quickstart

from m2flow.models.causal_lm import TinySpec, build_tiny
from m2flow.models.tokenizer import character_tokenizer
from m2flow.training.rollouts import TokenPairs
from m2flow.training.supervised import train_supervised
from m2flow.workloads.reasoning.tasks.addition import CHARACTERS

STEPS, BATCH_SIZE = 500, 16


LARGE = "0.1 B"

LARGE_SPEC = TinySpec(
    hidden_size=768, num_hidden_layers=16, num_attention_heads=12, num_key_value_heads=4,
    intermediate_size=2048, initializer_range=0.02,
)  # fmt: skip
"""100.7 million parameters beside the embedding of a few characters."""


def starting_point(task_name: str, model: str = "") -> Path:
    """The folder of the checkpoint; made if it is not there."""
    if model == LARGE:
        return _large(CACHE / "large")
    if task_name == "addition":
        return Path(quickstart()[2].path)
    code = Path(countdown.__file__).read_bytes() + repr((STEPS, BATCH_SIZE)).encode()
    folder = CACHE / f"countdown-{hashlib.sha256(code).hexdigest()[:12]}"
    if not (folder / "config.json").is_file():
        print(f"warming up the countdown model (once; kept in {folder})", flush=True)
        _warm_up(folder)
    return folder


def _large(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        tokenizer = character_tokenizer(CHARACTERS)
        model = build_tiny(
            LARGE_SPEC,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            seed=0,
        )
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def _warm_up(folder: Path) -> None:
    task = Countdown()
    assert task.characters is not None
    tokenizer = character_tokenizer(task.characters)
    model = build_tiny(
        TinySpec(),
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
    )
    shown = [task.demonstration(n) for n in range(STEPS * BATCH_SIZE)]
    prompts = tokenizer([prompt for prompt, _ in shown])["input_ids"]
    answers = tokenizer([answer for _, answer in shown])["input_ids"]
    pairs = TokenPairs.from_rows(prompts, [[*ids, tokenizer.eos_token_id] for ids in answers])
    train_supervised(model, pairs, steps=STEPS, batch_size=BATCH_SIZE, on_progress=_say)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _say(step: int, loss: float) -> None:
    print(f"warm-up {step}/{STEPS}: loss {loss:.4f}", flush=True)
