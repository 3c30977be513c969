"""What the quick start's task is learnt to by each algorithm, precision, layout and staleness.

Whole `m2flow train` commands from one warmed-up model (a mixture of experts has a warm-up of its
own), two seeds of reinforcement each. What counts is the accuracy on the 512 held-out problems
before and after; no time is judged, so other work on the machine changes nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from harness import CACHE, ROOT, Target, arguments, conclude, table
from starting_point import quickstart
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from m2flow.observe.run_directory import read_metrics
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.reasoning.experiment import ReasoningExperiment

SEEDS = (0, 1)

GAIN = 0.20
"""Least that the accuracy must rise by."""

ERROR = 0.02
"""Two standard errors of an accuracy near 0.95 on 512 problems."""

STALE = ("training.recompute_logprobs=true", "--mode", "disaggregated", "lanes=cpu:2")

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "grpo": ("quickstart",),
    "grpo, bfloat16": ("quickstart", "model.dtype=bfloat16"),
    "grpo, LoRA": ("quickstart", "model.lora_rank=16", "optimizer.learning_rate=3e-3"),
    "dapo": ("quickstart", "algorithm.name=dapo"),
    "ppo": ("ppo_quickstart",),
    "grpo, staleness 1": ("quickstart", "max_staleness=1", *STALE),
    "grpo, staleness 2": ("quickstart", "max_staleness=2", *STALE),
    "grpo, mixture of experts in ep2": (
        *("quickstart", "--mode", "collocated", "lanes=cpu:2", "layouts.learner=ep2"),
    ),
}
"""The recipe of each run and what is said beside it; where no mode is said, `auto`."""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    seeds = SEEDS[:1] if options.quick else SEEDS
    _, _, dense = quickstart()
    found: dict[str, list[list[float]]] = {}
    for name in options.variants:
        start = str(_mixture(Path(dense.path)) if "experts" in name else dense.path)
        found[name] = [_accuracies(VARIANTS[name], start, seed) for seed in seeds]
        for seed, (before, after) in zip(seeds, found[name], strict=True):
            print(f"{name}, seed {seed}: {before:.3f} to {after:.3f}", flush=True)
    table(
        ["variant", *(f"seed {seed}" for seed in seeds)],
        [[name, *(f"{a:.3f} to {b:.3f}" for a, b in some)] for name, some in found.items()],
    )
    targets = [
        Target(f"{name}: least rise of the accuracy", min(b - a for a, b in some), GAIN)
        for name, some in found.items()
    ]
    results = {name: dict(zip(map(str, seeds), some, strict=True)) for name, some in found.items()}
    conclude("learning", results, targets + _against_on_policy(found), options)


def _against_on_policy(found: Mapping[str, Sequence[Sequence[float]]]) -> list[Target]:
    """How far stale runs end below those without staleness; noise is what seeds differ by."""
    if "grpo" not in found:
        return []
    ends = [after for _, after in found["grpo"]]
    noise = max(ends) - min(ends) + ERROR
    return [
        Target(
            f"{name}: end below that of staleness 0",
            statistics.mean(ends) - statistics.mean(after for _, after in some),
            noise,
            at_most=True,
        )
        for name, some in found.items()
        if "staleness" in name
    ]


def _accuracies(words: tuple[str, ...], start: str, seed: int) -> list[float]:
    """The accuracy on held-out problems before and after a run."""
    recipe, *others = words
    with tempfile.TemporaryDirectory(prefix="m2flow-learning-") as folder:
        run = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "m2flow", "train", str(ROOT / "recipes" / f"{recipe}.yaml")),
            *("--run-dir", str(run), f"seed={seed}", f"model.path={start}", "warmup.steps=0"),
            *others,
        ]
        subprocess.run(command, check=True, timeout=3600, stdout=subprocess.DEVNULL)
        rows = [row for row in read_metrics(run) if "eval/accuracy" in row]
    return [float(rows[0]["eval/accuracy"]), float(rows[-1]["eval/accuracy"])]


def _mixture(dense: Path) -> Path:
    """A Qwen3 mixture of four experts on the quick start's tokens, warmed up once and kept."""
    random, warm = CACHE / "mixture", CACHE / "mixture-warm"
    if not (random / "config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(dense)
        shape = json.loads((dense / "config.json").read_text())
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=shape["vocab_size"],
                hidden_size=128,
                intermediate_size=384,
                moe_intermediate_size=192,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                num_experts=4,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                initializer_range=0.08,
                eos_token_id=shape["eos_token_id"],
                pad_token_id=shape["pad_token_id"],
                tie_word_embeddings=shape["tie_word_embeddings"],
            )
        )
        tokenizer.save_pretrained(random)
        model.save_pretrained(random)
    recipe = read_recipe(ROOT / "recipes" / "quickstart.yaml", [f"model.path={random}"])
    return Path(ReasoningExperiment(recipe).prepare(warm).path)


if __name__ == "__main__":
    main()
