"""Causal language models: a tiny one built on the spot, or a Hugging Face folder from disk.

Nothing here touches the network. A folder is checked before it is read, so that a missing or
half-written model is one line that names what is missing, and never a model with weights that
were silently drawn at random.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from m2flow.errors import UserError
from m2flow.models.folder import (
    check_not_quantized,
    checked_folder,
    from_folder,
    model_folder,
    read_json,
)
from m2flow.models.norms import widen_norms

if os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1":  # said by m2flow.models, unless a user did
    disable_progress_bar()  # what was imported before that has not read it

_GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True)
class TinySpec:
    """A Qwen2 architecture that learns in a minute on a CPU core: 0.79 M parameters.

    `initializer_range` is decisive: with the usual 0.02 so small a model barely starts to learn.
    """

    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    intermediate_size: int = 384
    max_position_embeddings: int = 2048
    initializer_range: float = 0.08

    def __post_init__(self) -> None:
        assert all(value > 0 for value in asdict(self).values()), self
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % (2 * heads):
            raise UserError(
                "rotary embeddings need an even number of channels a head",
                key="hidden_size",
                value=self.hidden_size,
                expected=f"a multiple of 2 * num_attention_heads = {2 * heads}",
            )
        if heads % kv_heads:
            raise UserError(
                "key-value heads are shared by equal groups of heads",
                key="num_key_value_heads",
                value=kv_heads,
                expected=f"a divisor of num_attention_heads = {heads}",
            )


def build_tiny(
    spec: TinySpec,
    *,
    vocab_size: int,
    eos_token_id: int,
    pad_token_id: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Qwen2ForCausalLM:
    """A freshly drawn model. The weights depend on `spec`, `vocab_size` and `seed` alone.

    They are drawn in float32 and then converted, so every dtype rounds the same numbers. The
    global random state is left as it was.
    """
    config = Qwen2Config(
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        **asdict(spec),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    # Parameters only: `model.to(dtype)` would also round the inverse frequencies of the rotary
    # embedding, which stay float32 in every dtype when a model is loaded from disk.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    widen_norms(model)
    return model.eval()


def load_model(
    path: str | Path, dtype: torch.dtype = torch.float32, *, own_memory: bool = True
) -> PreTrainedModel:
    """The causal language model in a folder of Hugging Face layout, in evaluation mode on the CPU.

    Args:
        path: the folder.
        dtype: of the weights.
        own_memory: as for `loaded`.

    Raises:
        UserError: the folder, its `config.json` or its weights are missing or incomplete.
    """
    return loaded(AutoModelForCausalLM, checked_folder(path), dtype, own_memory=own_memory)


def loaded(
    auto: Any, folder: Path, dtype: torch.dtype, *, own_memory: bool = True
) -> PreTrainedModel:
    """The model in a checked folder, of the kind that a transformers auto class makes.

    Args:
        auto: the class.
        folder: the checked folder.
        dtype: of the weights.
        own_memory: False for a model that is copied elsewhere at once. Weights of the files' dtype
            then lie in pages of the files, which all processes of a machine share and the system
            may drop. A model that is computed with needs memory of its own: where a tensor begins
            in a file depends on all names before it, and kernels choose their order of summation by
            alignment too, so a run that went on from a checkpoint would differ in the last bit from
            one that was never stopped.

    Raises:
        UserError: the weights are incomplete, of other shapes or quantized, need code of the
            folder, or hold a head of their own where the configuration says that it is the
            embedding.
    """
    check_not_quantized(read_json(folder / "config.json", "the architecture"), str(folder))
    model: PreTrainedModel
    with _report_held_back():
        model, loading = from_folder(
            auto,
            folder,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, in one line
        )
        others = sorted(loading["mismatched_keys"])
        if others:
            name, there, wanted = others[0]
            raise UserError(
                f"{len(others)} of the weights have another shape than config.json says, among "
                f"them {name}",
                key=str(folder),
                value=tuple(there),
                expected=str(tuple(wanted)),
                hint="its config.json belongs to another model",
            )
        missing = sorted(loading["missing_keys"])
        if missing:
            raise UserError(
                f"the weights lack {len(missing)} of the model's tensors, among them {missing[0]}",
                key=str(folder),
                hint="the folder is half-written, or its config.json belongs to another model",
            )
    _check_head(model, folder)
    for parameter in model.parameters() if own_memory else ():
        parameter.data = parameter.data.clone()
    widen_norms(model)
    if dtype is torch.float64 and hasattr(model.config, "num_experts"):
        model.config._experts_implementation = "eager"  # there is no grouped product in float64
    return model.eval()


def _check_head(model: PreTrainedModel, folder: Path) -> None:
    """Refuse a head of its own where the configuration, by which engines go, says otherwise."""
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if tied and head is not None and head.weight is not embedding.weight:
        raise UserError(
            "the weights have a head of their own, and config.json says that it is the embedding",
            key=str(folder),
            hint="set tie_word_embeddings to false in config.json",
        )


@contextmanager
def _report_held_back() -> Iterator[None]:
    """Drop what transformers says of a model that is refused within: not so many lines, of weights
    that were "newly initialized", before the one that is true. Of any other it is told after all.
    """
    logger, records = logging.getLogger("transformers.modeling_utils"), list[logging.LogRecord]()

    def hold(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield
    except UserError:
        records.clear()
        raise
    finally:
        logger.removeFilter(hold)
        for record in records:
            logger.handle(record)


def _splits_otherwise(tokenizer: PreTrainedTokenizerBase, file: Path) -> bool:
    """Whether a tokenizer of bytes normalises or splits text otherwise than its file says.

    Classes such as GPT2Tokenizer have their own way, and a file that declares one may have another,
    such as digits one by one.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not file.is_file():
        return False
    made, said = tokenizer.backend_tokenizer, Tokenizer.from_file(str(file))
    if b"ByteLevel" not in _state(said.pre_tokenizer):
        return False
    pairs = (made.normalizer, said.normalizer), (made.pre_tokenizer, said.pre_tokenizer)
    return any(_state(one) != _state(other) for one, other in pairs)


def _state(part: Any) -> bytes:
    """What a part of a tokenizer does, as JSON; of none, nothing."""
    return b"" if part is None else bytes(part.__getstate__())


def load_tokenizer(path: str | Path, *, ends: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder of Hugging Face layout.

    Args:
        path: the folder.
        ends: whether completions are to be drawn with it, which an eos token ends.

    Raises:
        UserError: the folder or its tokenizer files are missing or damaged, or need code of the
            folder; or there is no eos token or no vocabulary.
    """
    folder = model_folder(path)
    declared = read_json(folder / "tokenizer_config.json", "the tokenizer").get("tokenizer_class")
    # A folder that declares the generic class says all in tokenizer.json. AutoTokenizer does not
    # believe it beside some architectures (Qwen2 among them) and rebuilds the tokenizer with that
    # architecture's own normalisation and splitting, which drops characters without a word.
    generic = declared in _GENERIC_TOKENIZERS and (folder / "tokenizer.json").is_file()
    reader = PreTrainedTokenizerFast if generic else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase
    try:
        tokenizer = from_folder(reader, folder)
        if not generic and _splits_otherwise(tokenizer, folder / "tokenizer.json"):
            tokenizer = from_folder(PreTrainedTokenizerFast, folder)
    except UserError:
        raise
    except Exception as error:  # tokenizers has no class of its own for what it raises
        raise UserError(
            f"the tokenizer cannot be read ({type(error).__name__}: {error})",
            key=str(folder),
            hint="copy tokenizer.json and the files of its kind again",
        ) from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
        raise UserError(
            "the tokenizer has no vocabulary: it would make no token of any text",
            key=str(folder),
            expected="tokenizer.json, or the vocabulary file of its kind, beside it",
            hint="the folder is half-written; finish the download or the copy",
        )
    if ends and tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no eos token, so no completion could end",
            key=str(folder),
            hint="set eos_token in tokenizer_config.json",
        )
    return tokenizer
