"""TRL's side of `grpo_step.py`: whole GRPO steps by GRPOTrainer, in an interpreter that has TRL.

Standard input is one line of JSON (`grpo_step.Work`, the folder of the model, and when this was
begun, in seconds since the epoch), standard output one line: seconds of each step, seconds of its
generation, and the lengths of its answers. TRL is given what makes it fast on one GPU without
another server: transformers' continuous batching, bfloat16, gradient checkpointing, the fused
optimizer; nothing is logged, saved or evaluated.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is not the answer

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from long_answers import even  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Clock(TrainerCallback):
    """Seconds of each generation and the optimizer steps that it feeds."""

    def __init__(self, optimizer_steps: int, began: float) -> None:
        self.optimizer_steps, self.began = optimizer_steps, began
        self.starts: list[float] = []
        self.judged: list[float] = []
        self.lengths: list[list[int]] = []

    def say(self, what: str) -> None:
        """Onto standard error, so that what is known of a run that is stopped can be read there."""
        print(f"{time.time() - self.began:.1f} s: {what}", file=sys.stderr, flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before each optimizer step."""
        self.say(f"optimizer step {state.global_step} begins")
        if state.global_step % self.optimizer_steps == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.starts.append(time.perf_counter())

    def score(self, prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        """The reward; generation has ended when it is asked for."""
        if len(self.lengths) < len(self.starts):
            self.lengths.append([])
            self.judged.append(time.perf_counter())
            self.say("answers are there")
        self.lengths[-1] += [len(ids) for ids in completion_ids]
        return [even("", "", ids, {}) for ids in completion_ids]


def main() -> None:
    work = json.loads(sys.stdin.readline())
    on_gpu = work["device"] == "cuda"
    samples, minibatches = work["prompts"] * work["answers"], work["minibatches"]
    each = work["trl_samples"]
    accumulated = samples // minibatches // each
    clock = Clock(minibatches, work["began"])
    prompts = [f"{n}+{n * 7 % 97}=" for n in range((work["steps"] + 1) * work["prompts"])]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=not on_gpu,
            bf16=on_gpu,
            gradient_checkpointing=on_gpu,
            num_generations=work["answers"],
            per_device_train_batch_size=each,
            gradient_accumulation_steps=accumulated,
            steps_per_generation=accumulated * minibatches,
            shuffle_dataset=False,
            max_steps=(work["steps"] + 1) * minibatches,
            max_completion_length=work["tokens"],
            top_k=0,
            loss_type="dapo",
            beta=0.0,
            learning_rate=work["learning_rate"],
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            use_transformers_continuous_batching=on_gpu,
            transformers_continuous_batching_config={"max_memory_percent": 0.4} if on_gpu else None,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                work["model"], dtype=torch.bfloat16 if on_gpu else torch.float32
            ),
            reward_funcs=clock.score,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(work["model"], padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    ends, count = clock.starts[1:], work["steps"]
    done = {
        "seconds": [end - start for start, end in zip(clock.starts, ends, strict=False)][:count],
        "generation": [j - s for s, j in zip(clock.starts, clock.judged, strict=False)][:count],
        "lengths": clock.lengths[:count],
    }
    print(json.dumps(done), file=answers, flush=True)


if __name__ == "__main__":
    main()
