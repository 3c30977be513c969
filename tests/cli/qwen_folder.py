"""A model folder with the layout of Qwen2.5-7B-Instruct: everything but the numbers in its weights.

`config.json`, `generation_config.json`, special tokens with their ids, and what the chat template
writes are as published. The vocabulary is a stand-in of the same size, with each byte and few
merged tokens; the template is restated for conversations without tools. Shards, if they are wanted,
are sparse files: headers as published, with nothing behind them on the disk.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip

GENERATION = {
    "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True,
    "eos_token_id": [151645, 151643], "repetition_penalty": 1.05, "temperature": 0.7,
    "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0",
}  # fmt: skip

FIRST_SPECIAL = 151643
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

TEMPLATE = """\
{%- macro turn(role, content) -%}
{{ '<|im_start|>' ~ role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
{%- endmacro -%}
{%- if messages[0].role != 'system' -%}{{ turn('system', 'DEFAULT') }}{%- endif -%}
{%- for message in messages -%}{{ turn(message.role, message.content) }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
""".replace("DEFAULT", SYSTEM)
"""Of conversations without tools."""


def write_qwen_folder(folder: Path, shards: bool = False) -> Path:
    """Write the folder; `shards` with the files of the weights, which take no room."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2))
    _write_tokenizer(folder)
    if shards:
        _write_shards(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    merges = ["\u0120 t", "h e", "\u0120t he"]
    letters = [chr(code) for code in _byte_letters()]
    tokens = [*letters, *("".join(pair.split(" ")) for pair in merges)]
    tokens += [f"\u0120unused{number}" for number in range(FIRST_SPECIAL - len(tokens))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    added = [
        {
            "id": FIRST_SPECIAL + number, "content": token, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": token in SPECIAL,
        }
        for number, token in enumerate((*SPECIAL, *ADDED))
    ]  # fmt: skip
    splitting = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split", "pattern": {"Regex": splitting}, "behavior": "Isolated",
                    "invert": False,
                },
                {**bytes_only, "use_regex": False},
            ],
        },
        "post_processor": {**bytes_only, "use_regex": False},
        "decoder": {**bytes_only, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip
    config: dict[str, Any] = {
        "add_bos_token": False, "add_prefix_space": False,
        "added_tokens_decoder": {
            str(one["id"]): {key: value for key, value in one.items() if key != "id"}
            for one in added
        },
        "additional_special_tokens": list(SPECIAL[1:]), "bos_token": None,
        "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 131072,
        "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")


def _byte_letters() -> list[int]:
    """Return the letter of each byte, printable ones first, as byte-level BPE writes them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*printable, *(256 + n for n in range(256 - len(printable)))]


def _tensors() -> dict[str, tuple[int, ...]]:
    wide, inner, keys = CONFIG["hidden_size"], CONFIG["intermediate_size"], 512
    rows = CONFIG["vocab_size"]
    assert isinstance(wide, int)
    assert isinstance(inner, int)
    assert isinstance(rows, int)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, wide)}
    for layer in range(28):
        name = f"model.layers.{layer}"
        for part, size in (("q", wide), ("k", keys), ("v", keys)):
            found[f"{name}.self_attn.{part}_proj.weight"] = (size, wide)
            found[f"{name}.self_attn.{part}_proj.bias"] = (size,)
        found[f"{name}.self_attn.o_proj.weight"] = (wide, wide)
        for part in ("gate", "up"):
            found[f"{name}.mlp.{part}_proj.weight"] = (inner, wide)
        found[f"{name}.mlp.down_proj.weight"] = (wide, inner)
        for part in ("input_layernorm", "post_attention_layernorm"):
            found[f"{name}.{part}.weight"] = (wide,)
    return {**found, "model.norm.weight": (wide,), "lm_head.weight": (rows, wide)}


def _write_shards(folder: Path) -> None:
    """Four files, headers and length as of the published kind, and holes for the numbers."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = 0
    for name, shape in _tensors().items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        if room + size > 4_000_000_000:
            shards, room = [*shards, {}], 0
        shards[-1][name], room = shape, room + size
    where, together = {}, 0
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shard.items():
            begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
            where[name] = file.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
        together += end
    index = {"metadata": {"total_size": together}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
