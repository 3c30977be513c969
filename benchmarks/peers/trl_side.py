"""The TRL side: GRPOTrainer on CPU, one generation batch and its optimizer steps at each word.

Runs inside TRL's own environment, started by `peers.side`. Of m2flow it imports the task alone, so
that both sides have the same problems and the same rule.

TRL is given what makes it fast here: a process of one thread for each core (data parallel, pinned;
one process with several threads is slower), no gradient checkpointing (its default), the fused
AdamW, whole mini-batches; nothing logged, saved, reported or evaluated.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import torch
from datasets import Dataset
from peers.countdown import reward, task
from peers.wire import Sample, Settings, StepRecord, Wire
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Gate(TrainerCallback):
    """Lets as many generation batches through as were asked for, and takes their times.

    Every rank holds one. Rank 0 talks to the driver; the others wait for its word, so that no rank
    begins a step before the driver said so. Collecting what the ranks saw is not timed.
    """

    def __init__(self, wire: Wire | None, optimizer_steps: int) -> None:
        self.wire, self.optimizer_steps = wire, optimizer_steps
        self.asked, self.began = 0, -1.0
        self.done: list[StepRecord] = []
        self.samples: list[Sample] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called before each optimizer step; the gate stands before the first of a generation."""
        if state.global_step % self.optimizer_steps:
            return
        if self.began >= 0:
            seconds = time.perf_counter() - self.began
            seen = [sample for samples in every_rank(self.samples) for sample in samples]
            self.samples = []
            self.done.append(StepRecord.of(seconds, seen))
        if len(self.done) == self.asked:
            answer = self.wire.next_request(self.done) if self.wire else 0
            self.asked, self.done = every_rank(answer)[0], []
            if not self.asked:
                os._exit(0)  # The trainer has steps left; there is nothing to save.
        self.began = time.perf_counter()


def every_rank(value: Any) -> list[Any]:
    """What each rank has, rank 0 first."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def reward_function(rule: Any, gate: Gate, end_id: int) -> Any:
    """The task's rule as TRL wants it; also hands each sample's reward and length to the gate."""

    def score(
        completions: list[str],
        completion_ids: list[list[int]],
        number: list[int],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        rewards = [
            rule("", completion, ids, {"answer": right, "finished": ids[-1:] == [end_id]})
            for right, completion, ids in zip(answer, completions, completion_ids, strict=True)
        ]
        gate.samples += [
            Sample(at, reward, len(ids))
            for at, reward, ids in zip(number, rewards, completion_ids, strict=True)
        ]
        return rewards

    return score


def configuration(settings: Settings, folder: str) -> GRPOConfig:
    """m2flow's algorithm in TRL's words.

    `bnpo` is the mean over the tokens of the mini-batch as long as one process has all of it. Over
    several processes it would be a mean of means; there `dapo` weighs every token alike, its
    denominator being the generation batch's tokens divided by the number of mini-batches.

    What stays different: TRL divides advantages by the unbiased deviation plus 1e-4, and its
    mini-batches are random parts of the samples.
    """
    options: dict[str, Any] = {
        "output_dir": folder,
        # Precision and memory: as m2flow, with nothing recomputed.
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        # One generation feeds `minibatches` optimizer steps, once.
        "num_generations": settings.samples_per_prompt,
        "per_device_train_batch_size": settings.samples_per_minibatch // settings.cores,
        "steps_per_generation": settings.minibatches,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "shuffle_dataset": False,
        # One more than will be asked for: a step ends where the next one begins.
        "max_steps": (settings.max_steps + 1) * settings.minibatches,
        "seed": settings.seed,
        # Sampling: the model's own distribution.
        "max_completion_length": settings.max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        # Loss.
        "loss_type": "bnpo" if settings.cores == 1 else "dapo",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "mask_truncated_completions": False,
        # Optimizer.
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        # Nothing beside the training itself.
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "ddp_backend": "gloo" if settings.cores > 1 else None,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_completions": False,
    }
    return GRPOConfig(**{**options, **settings.extra})


def take_rank(settings: Settings) -> int:
    """One process and one thread a core: start the other ranks (from rank 0), pin this one.

    Ranks other than 0 are children of rank 0 and end with it: their standard input closes.
    """
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    cores = sorted(os.sched_getaffinity(0))
    if settings.cores > 1 and "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        group = {
            "WORLD_SIZE": str(settings.cores),
            "LOCAL_WORLD_SIZE": str(settings.cores),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
        }
        os.environ.update(group | {"RANK": "0", "LOCAL_RANK": "0"})
        for other in range(1, settings.cores):
            child = subprocess.Popen(
                [sys.executable, "-m", "peers.trl_side"],
                env=os.environ | {"RANK": str(other), "LOCAL_RANK": str(other)},
                stdin=subprocess.PIPE,
                stdout=sys.stderr,
                text=True,
            )
            assert child.stdin is not None
            print(settings.to_json(), file=child.stdin, flush=True)
            _children.append(child)
    if settings.cores > 1:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return rank


_children: list[subprocess.Popen[str]] = []
"""Kept, so that their standard inputs stay open as long as this process lives."""


def end_with_parent() -> None:
    """Leave as soon as rank 0 is gone."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Serve steps until the other end closes."""
    wire = Wire()
    settings = wire.settings(Settings)
    rank = take_rank(settings)
    if rank > 0:
        threading.Thread(target=end_with_parent, daemon=True).start()
    source, rule = task(settings.task, settings.seed), reward(settings.task).load()
    problems = [
        source.train(n) for n in range((settings.max_steps + 1) * settings.prompts_per_step)
    ]
    tokenizer = AutoTokenizer.from_pretrained(settings.checkpoint, padding_side="left")
    gate = Gate(wire if rank == 0 else None, settings.minibatches)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings.checkpoint, dtype=torch.float32),
            reward_funcs=reward_function(rule, gate, tokenizer.eos_token_id),
            args=configuration(settings, folder),
            train_dataset=Dataset.from_dict(
                {
                    "prompt": [problem.prompt for problem in problems],
                    "answer": [problem.answer for problem in problems],
                    "number": list(range(len(problems))),
                }
            ),
            processing_class=tokenizer,
            callbacks=[gate],
        )
        trainer.train()


if __name__ == "__main__":
    main()
