"""A model with random weights whose answers have a long tail, and a rule that judges them.

Whoever generates with it ends an answer at each token with the same probability, 1 in `mean`: so
lengths are geometric, and nothing is cut or forced to make them so. One channel of the residual
stream is kept at the same value from the embedding to the last layer (no layer writes to it), and
in the table of embeddings the end token has more of that channel than the others have. The last
norm makes of the channel very nearly a constant, which is then what the end token's score has
beyond that of any other.

Standard library only until the model is made: TRL's side imports the rule alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CHANNEL, LEVEL = 0, 4.0
"""Which channel stays as it is, and its value: about the size of the others after all layers."""


def even(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """1.0 for an answer of an even number of tokens: in a group some are, and some are not."""
    return float(len(completion_ids) % 2 == 0)


def write_model(config: dict[str, Any], mean: float, folder: Path, device: str) -> float:
    """Write a folder in Hugging Face layout, bfloat16, whose answers have so many tokens.

    Returns:
        The probability of the end token, the mean over positions, as the model then has it.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from m2flow.models.tokenizer import byte_tokenizer

    assert config["tie_word_embeddings"], "the table of embeddings scores the tokens"
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    ends = {"eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    made = Qwen2Config(**config, **ends, bos_token_id=None, max_position_embeddings=8192)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen2ForCausalLM(made).to(torch.bfloat16).eval()
            ids = torch.randint(256, (8, 128))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[CHANNEL] = 0
            layer.mlp.down_proj.weight[CHANNEL] = 0
        table = model.get_input_embeddings().weight
        table[:, CHANNEL] = LEVEL
        hidden = model.model(ids).last_hidden_state.flatten(0, 1)
        others = (hidden @ table.T).float().logsumexp(-1)
        own, each = (hidden @ table[end]).float(), hidden[:, CHANNEL].float()
        low, high = 0.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            score = own + middle * each
            # The end token is one of `others` already, of next to no weight.
            share = (score - torch.logaddexp(score, others)).exp().mean().item()
            low, high = (middle, high) if share < 1 / mean else (low, middle)
        table[end, CHANNEL] += high
        logits = model(ids).logits.float().flatten(0, 1)
        found = float(logits.softmax(-1)[:, end].mean())
        model.to("cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return found
