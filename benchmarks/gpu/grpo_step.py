"""Whole GRPO steps of a model of 1.5 billion parameters on one GPU, by the command line.

Random weights of the published shape, a byte tokenizer, sums as problems: answers end where a
random model happens to draw the end token, or at the limit. What is shown is seconds by phase, and
that generation, scoring and training take turns on one device. With `--device cpu` a tiny model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import ROOT, arguments, conclude, table

from m2flow.models.shape import PUBLISHED
from m2flow.models.tokenizer import byte_tokenizer

LIMIT_SECONDS = 110
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "config": PUBLISHED["Qwen2.5-1.5B"], "lanes": "gpu:1", "prompts": 64, "answers": 16,
        "tokens": 1024, "microbatch": 16384,
    },
    "cpu": {
        "config": SMALL, "lanes": "cpu:1", "prompts": 4, "answers": 4, "tokens": 32,
        "microbatch": 1024,
    },
}  # fmt: skip
STEPS = 3


def write_model(config: dict[str, Any], folder: Path) -> None:
    """A folder in Hugging Face layout, bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    made = Qwen2Config(**config, **ends, bos_token_id=None, max_position_embeddings=4096)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(made).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=tuple(SIZES))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no GPU that PyTorch can use")
        sys.exit(2)
    sizes = SIZES[options.device]
    with tempfile.TemporaryDirectory(prefix="m2flow-grpo-") as folder:
        model, run = Path(folder) / "model", Path(folder) / "run"
        write_model(sizes["config"], model)
        subprocess.run(
            [
                *(sys.executable, "-m", "m2flow", "train", str(ROOT / "recipes/quickstart.yaml")),
                *("--mode", "collocated", "--quiet", "--run-dir", str(run)),
                *(f"lanes={sizes['lanes']}", f"model.path={model}", "warmup.steps=0"),
                *(f"steps={STEPS}", "evaluation.problems=0", "optimizer.learning_rate=1e-6"),
                f"prompts_per_step={sizes['prompts']}",
                f"samples_per_prompt={sizes['answers']}",
                f"generation.max_new_tokens={sizes['tokens']}",
                f"training.tokens_per_microbatch={sizes['microbatch']}",
            ],
            check=True,
            timeout=LIMIT_SECONDS,
        )
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("seconds", "throughput/", "length/mean", "tokens/", "train/engine_gap")
    figures = {name: value for name, value in rows[-1].items() if name.startswith(kept)}
    table(["figure of the last step", "value"], [[name, figures[name]] for name in sorted(figures)])
    conclude("gpu/grpo_step", figures, [], options)


if __name__ == "__main__":
    main()
