"""Make the checkpoint from which both sides start: a tiny Qwen2 that half knows its task.

Supervised warm-up in a plain loop of its own, so that neither side's code has a hand in it. What
is written is the ordinary Hugging Face layout, tokenizer included. Kept and reused: the folder's
name carries the task and a hash of this file and of the tasks.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from peers.tasks import END, PAD, TASKS, Task

PAD_ID, END_ID = 0, 1
TOKENS_PER_BATCH = {"addition": 400, "countdown": 1200}
STEPS = {"addition": 1500, "countdown": 900}


def fingerprint(task_name: str) -> str:
    """Name of the checkpoint folder; changes with the recipe."""
    here = Path(__file__).parent
    code = b"".join((here / name).read_bytes() for name in ("checkpoint.py", "tasks.py"))
    return f"{task_name}-{hashlib.sha256(code).hexdigest()[:10]}"


def character_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Each character of the task's alphabet is one token; no token is added to a prompt."""
    vocabulary = {token: at for at, token in enumerate([PAD, END, "<unk>", *task.alphabet])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_qwen2(task: Task, vocab_size: int) -> Qwen2ForCausalLM:
    """0.79 M parameters. The wide initialisation is what lets so short a warm-up succeed."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen2ForCausalLM(config)


def _batches(task: Task, steps: int, seed: int) -> list[list[tuple[str, str]]]:
    """(prompt, completion) pairs, alike in length within a batch, about equal tokens a batch."""
    draw = random.Random(f"warm-up-{seed}")
    budget = TOKENS_PER_BATCH[task.name]
    batches: list[list[tuple[str, str]]] = []
    while len(batches) < steps:
        pool = [
            (problem.prompt, task.demonstration(problem, draw))
            for problem in task.problems(2048, draw.getrandbits(48))
        ]
        if task.name == "countdown":
            pool.sort(key=lambda pair: len(pair[0]) + len(pair[1]) + draw.random())
        made, current = [], []
        for pair in pool:
            longest = len(pair[0]) + len(pair[1]) + 1
            if current and longest * (len(current) + 1) > budget:
                made.append(current)
                current = []
            current.append(pair)
        draw.shuffle(made)
        batches += made
    return batches[:steps]


def warm_up(task: Task, folder: Path, seed: int = 0) -> float:
    """Train on demonstrations and write the checkpoint; returns the seconds it took."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    tokenizer = character_tokenizer(task)
    model = tiny_qwen2(task, len(tokenizer))
    steps = STEPS[task.name]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1 - 0.98 * max(step - 50, 0) / (steps - 50))
    )
    ids = tokenizer.get_vocab()
    for at, batch in enumerate(_batches(task, steps, seed)):
        longest = max(len(prompt) + len(completion) + 1 for prompt, completion in batch)
        tokens_BT = torch.full((len(batch), longest), PAD_ID)
        labels_BT = torch.full((len(batch), longest), -100)
        for row, (prompt, completion) in enumerate(batch):
            whole = [ids[character] for character in prompt + completion] + [END_ID]
            tokens_BT[row, : len(whole)] = torch.tensor(whole)
            labels_BT[row, len(prompt) : len(whole)] = tokens_BT[row, len(prompt) : len(whole)]
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if at % 100 == 0 or at == steps - 1:
            print(f"{task.name} warm-up {at:5d}/{steps} loss {loss.item():.4f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return time.perf_counter() - began


def main() -> None:
    """Write the checkpoint of one task into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    seconds = warm_up(TASKS[chosen.task], chosen.folder)
    print(f"warm-up took {seconds:.1f} s")


if __name__ == "__main__":
    main()
