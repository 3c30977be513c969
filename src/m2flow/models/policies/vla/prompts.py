"""The instruction as OpenVLA reads it, in token ids.

The prompt is `In: What action should the robot take to {instruction}?\\nOut:` in lower case, opened
by the begin token and closed by the empty-word token (id 29871 of Llama 2), which stood before the
action tokens in training. The tokenizer is `tokenizer.json` alone: no code of the checkpoint runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from m2flow.errors import UserError

_BEGIN, _STOP, _EMPTY_WORD = "<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}"


def prompt(instruction: str) -> str:
    """Return the text that asks for an action."""
    return f"In: What action should the robot take to {instruction.strip().lower()}?\nOut:"


class PromptTokenizer:
    """Instructions to token ids, padded on the right."""

    def __init__(self, content: str, where: Path) -> None:
        """Read the content of a `tokenizer.json`; `where` names it in errors."""
        from tokenizers import Tokenizer

        self.json = content
        self._tokenizer = Tokenizer.from_str(content)
        self.begin, self.stop, self._empty_word = (
            self._id(token, where) for token in (_BEGIN, _STOP, _EMPTY_WORD)
        )
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def load(cls, folder: Path) -> PromptTokenizer:
        """Read `tokenizer.json` of a checkpoint folder."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                "tokenizer.json is missing",
                key=str(folder),
                hint="copy it from the checkpoint on the hub (openvla/openvla-7b has it)",
            )
        return cls(path.read_text(encoding="utf-8"), path)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._tokenizer.get_vocab_size()

    def ids(self, instruction: str) -> list[int]:
        """Return the ids of one prompt."""
        if instruction not in self._cache:
            encoded = self._tokenizer.encode(prompt(instruction), add_special_tokens=False).ids
            if encoded[-1] != self._empty_word:
                encoded.append(self._empty_word)
            self._cache[instruction] = [self.begin, *encoded]
        return self._cache[instruction]

    def batch(self, instructions: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return int64 ids [B, L], padded with the stop token, and a mask, True where real."""
        rows = [self.ids(instruction) for instruction in instructions]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [self.stop] * (longest - len(row)) for row in rows])
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(longest) < lengths.unsqueeze(1)
        return ids.to(device), mask.to(device)

    def _id(self, token: str, path: Path) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise UserError(
                f"the tokenizer has no token {token!r}", key=str(path), expected="that of Llama 2"
            )
        return found
