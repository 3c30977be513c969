"""TRL's own loss of log-probabilities in a file, and its gradient; run by TRL's interpreter.

    python trl_loss.py CASES.pt FOUND.pt

Nothing of m2flow is imported. TRL's trainer is made with the settings of a case, and its method
that gets log-probabilities from a model gives those of the case instead: all behind it is TRL's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

SIZES = {
    "vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


def model_in(folder: Path) -> str:
    """A model that is asked nothing; TRL wants one, with a tokenizer, and from a folder."""
    Qwen2ForCausalLM(Qwen2Config(**SIZES, eos_token_id=1, pad_token_id=2)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1, "<pad>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    ).save_pretrained(folder)
    return str(folder)


def trainer_for(case: dict[str, Any], model: str, folder: Path) -> GRPOTrainer:
    """TRL's trainer with the settings of a case, all samples in one micro-batch."""
    size, width = case["mask"].shape
    arguments = GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, fp16=False, report_to="none",
        disable_tqdm=True, logging_strategy="no", save_strategy="no",
        num_generations=2, per_device_train_batch_size=size, gradient_accumulation_steps=1,
        steps_per_generation=1, num_iterations=1, max_completion_length=width,
        **case["settings"],
    )  # fmt: skip
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * size}),
    )


def loss_of(case: dict[str, Any], model: str, folder: Path) -> dict[str, Any]:
    """The loss of a case, and its gradient with respect to each log-probability."""
    trainer = trainer_for(case, model, folder)
    logprobs_BT = case["logprobs"].clone().requires_grad_(True)
    mask_BT = case["mask"].long()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        logprobs_BT,
        torch.zeros_like(logprobs_BT),  # entropies
        None,  # what balances experts
    )
    trainer.current_gradient_accumulation_steps = 1
    one_B1 = torch.ones(len(mask_BT), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": 0 * one_B1,
        "prompt_mask": one_B1,
        "completion_ids": 0 * mask_BT,
        "completion_mask": mask_BT,
        "advantages": case["advantages"],
        "old_per_token_logps": case["old"],
        "ref_per_token_logps": case["reference"],
        "num_items_in_batch": mask_BT.sum(),
    }
    if case.get("weights") is not None:  # of what another engine drew
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        inputs["importance_sampling_ratio"] = case["weights"]
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return {"loss": loss.detach(), "gradient": logprobs_BT.grad}


def main() -> None:
    cases, found = sys.argv[1:]
    told: dict[str, Any] = {"version": trl.__version__}
    with tempfile.TemporaryDirectory() as folder:
        model = model_in(Path(folder) / "model")
        for name, case in torch.load(cases).items():
            told[name] = loss_of(case, model, Path(folder) / "run")
    torch.save(told, found)


if __name__ == "__main__":
    main()
