"""Sequence classifiers that judge conversations, of `AutoModelForSequenceClassification`.

A head with one label gives a score; of a head with several the probability of one label is the
score. The score of a conversation depends on the conversation alone, and not on what is computed
beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from m2flow.errors import UserError, suggestion
from m2flow.models.causal_lm import load_tokenizer, loaded
from m2flow.models.chat_template import written
from m2flow.models.folder import checked_folder, from_folder, model_folder, read_json
from m2flow.models.tokenizer import spelled_out
from m2flow.training.sharded import WHOLE, Shards

HEAD = "ForSequenceClassification"
"""How the class of a classifier ends, in `architectures` of its `config.json`."""

READ = ("input_ids", "token_type_ids")

Encoded = Mapping[str, Sequence[int]]
"""A conversation as the tokenizer gives it: `input_ids`, and `token_type_ids` where it has them."""


def load_classifier(
    path: str | Path, dtype: torch.dtype = torch.float32, *, own_memory: bool = True
) -> PreTrainedModel:
    """The sequence classifier in a folder of Hugging Face layout, in evaluation mode on the CPU.

    Args:
        path: the folder.
        dtype: of the weights.
        own_memory: as for `m2flow.models.causal_lm.loaded`.

    Raises:
        UserError: the folder or its weights are missing or incomplete, or it has no head of this
            kind.
    """
    folder = checked_folder(path)
    check_head(folder)
    return loaded(AutoModelForSequenceClassification, folder, dtype, own_memory=own_memory)


def check_head(path: str | Path) -> None:
    """Refuse a folder whose model has no classification head: its scores would be random.

    Raises:
        UserError: it has none.
    """
    folder = model_folder(path)
    config = read_json(folder / "config.json", "the architecture")
    named = list(map(str, config.get("architectures") or ()))
    if not any(name.endswith(HEAD) for name in named):
        raise UserError(
            f"has no classification head: its config.json names {' '.join(named) or 'nothing'}",
            key="reward_model.path",
            value=str(path),
            expected=f"a model whose architecture ends in {HEAD}",
            hint="a model that answers in words can be a judge: judge.path",
        )


def label_index(path: str | Path, label: str | None) -> int | None:
    """Which label's probability is the score; None where the head has one figure, the score itself.

    Raises:
        UserError: a head with several labels is not told which, or does not have it.
    """
    config = from_folder(AutoConfig, model_folder(path))
    labels = [str(config.id2label[number]) for number in range(config.num_labels)]
    one = len(labels) == 1
    if one and label is None:
        return None
    if one or label not in labels:
        raise UserError(
            "the head has one label"
            if one
            else f"the head has {len(labels)} labels, of which one is the reward",
            key="reward_model.label",
            value=label,
            expected="nothing: the head gives the score" if one else ", ".join(labels),
            hint=suggestion(label, labels) if label is not None and not one else None,
        )
    return labels.index(label)


@dataclass(frozen=True)
class Conversations:
    """A classifier's tokenizer, and how many tokens the classifier reads."""

    tokenizer: Any
    context: int | None

    @classmethod
    def of(cls, path: str | Path) -> Conversations:
        """The conversations of a classifier's folder.

        Raises:
            UserError: the tokenizer is missing.
        """
        tokenizer = load_tokenizer(path, ends=False)
        config = read_json(model_folder(path) / "config.json", "the architecture")
        limits = [config.get("max_position_embeddings"), tokenizer.model_max_length]
        known = [int(limit) for limit in limits if limit is not None and limit < 10**9]
        return cls(tokenizer, min(known, default=None))

    def encoded(
        self, prompt: str, answer: str, before: Sequence[Mapping[str, str]] = ()
    ) -> dict[str, list[int]]:
        """A prompt and its answer, in the tokenizer's own chat template.

        A tokenizer without one takes the two texts as a pair, and then the prompt alone of what
        stands `before`. Names of special tokens in the answer are spelled out (`spelled_out`).
        """
        tokenizer = self.tokenizer
        if getattr(tokenizer, "chat_template", None):
            turns = [
                *map(dict, before),
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": spelled_out(answer, tokenizer)},
            ]
            text = written(tokenizer, turns, {})
            found = tokenizer(text, add_special_tokens=False)
        else:
            found = tokenizer(prompt, spelled_out(answer, tokenizer))
        return {name: list(found[name]) for name in READ if name in found}


def sequence_scores(
    model: nn.Module,
    rows: Sequence[Encoded],
    label: int | None,
    tokens_per_microbatch: int,
    shards: Shards = WHOLE,
) -> list[float]:
    """The score of each conversation; no gradient.

    Collective in the gang of a divided model; each lane asks for conversations of its own, or for
    none.

    Args:
        model: a classifier, on one device.
        rows: the conversations, none of them empty.
        label: as `label_index` gives it.
        tokens_per_microbatch: tokens that are computed at a time, padding included.
        shards: how the model is divided.
    """
    scores = [0.0] * len(rows)
    with torch.no_grad():
        for some in shards.padded(list(_microbatches(rows, tokens_per_microbatch))):
            mine: Sequence[Encoded] = [rows[row] for row in some or ()] or [{"input_ids": [0]}]
            logits_BL = _logits(model, mine)
            found_B = logits_BL[:, 0] if label is None else logits_BL.softmax(dim=1)[:, label]
            for row, score in zip(some or (), found_B.tolist(), strict=False):
                scores[row] = score
    shards.reshard(model)
    return scores


def _microbatches(rows: Sequence[Encoded], size: int) -> Iterator[list[int]]:
    """Rows of like lengths together, the longest first; at least one in each."""
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]["input_ids"]))
    while order:
        count = max(1, size // max(1, len(rows[order[0]]["input_ids"])))
        yield order[:count]
        order = order[count:]


def _logits(model: Any, rows: Sequence[Encoded]) -> Tensor:
    """float32 or wider [B, labels], on the CPU.

    A decoder's head reads the last token that is not the padding's, which its configuration names.
    Where it names none, the padding is a token that ends no row: so the head reads the last token.
    """
    device = next(model.parameters()).device
    config = model.config.get_text_config()
    own: int | None = config.pad_token_id
    last = {row["input_ids"][-1] for row in rows}
    pad = next(token for token in range(len(last) + 1) if token not in last) if own is None else own
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> Tensor:
        filled = [[*row[name], *[filler] * (width - len(row[name]))] for row in rows]
        return torch.tensor(filled, device=device)

    columns = {"input_ids": padded("input_ids", pad)}
    if "token_type_ids" in rows[0]:
        columns["token_type_ids"] = padded("token_type_ids", 0)
    lengths_B = torch.tensor([len(row["input_ids"]) for row in rows], device=device)
    mask_BT = (torch.arange(width, device=device) < lengths_B[:, None]).long()
    config.pad_token_id = pad
    try:
        logits_BL: Tensor = model(**columns, attention_mask=mask_BT).logits
    finally:
        config.pad_token_id = own
    return logits_BL.to(torch.promote_types(logits_BL.dtype, torch.float32)).cpu()
