"""Tokenizers that need no download: one token a character, or one token a byte.

Both are ordinary `PreTrainedTokenizerFast` objects. `save_pretrained` writes them in Hugging Face
layout and `AutoTokenizer.from_pretrained` reads them back offline. Text is always taken literally:
the name of a special token inside a text is plain characters, never the special token.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

EOS_TOKEN = "<eos>"
PAD_TOKEN = "<pad>"


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token for each of the given characters, in their order, then eos and pad.

    Ids: `characters[i]` is i, eos is len(characters), pad is len(characters) + 1. Text with any
    other character cannot be encoded and raises.
    """
    assert characters and len(set(characters)) == len(characters), f"not each once: {characters!r}"
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    # The dot of this regular expression language does not match a line break.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _literal(tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte of UTF-8: the id of a byte is its value, eos is 256, pad is 257.

    Every text makes the round trip unchanged. Ids that are no valid UTF-8 decode to U+FFFD.
    """
    # BPE without merges over the byte alphabet: GPT-2's stand-ins, one printable character a byte.
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _literal(tokenizer)


def spelled_out(text: str, tokenizer: Any) -> str:
    """Text with a space in the name of each special token, which stays text where it is encoded.

    For what a policy has written, and stands within a template whose own special tokens count: by
    their names an answer could end its turn, and go on as somebody else. A tokenizer that takes all
    text literally needs none of it.
    """
    if getattr(tokenizer, "split_special_tokens", False):
        return text
    named = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
    for name in sorted(named, key=len, reverse=True):
        text = text.replace(name, f"{name[0]} {name[1:]}")
    return text


def _literal(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Adds eos and pad, and switches off everything that would read or change the text."""
    tokenizer.add_special_tokens([EOS_TOKEN, PAD_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
