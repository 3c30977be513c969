"""Causal language models of transformers, by their own forward pass and transformers' own cache.

For models that `decoder` does not compute. The forward pass is slower: the cache is copied at each
token, projections are not fused. Rows are aligned at the right, as `generate` pads a batch: every
row's last token lies in the last column, and what is before its first is masked. So one call of the
model adds a column for all rows, whatever their lengths are.

Legend: B running rows, U prompts, P prompt tokens (padded), T tokens so far, V vocabulary,
K key-value heads, C columns, D channels.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.generation.causal_lms import OTHER_ENGINE, check_causal_lm
from m2flow.generation.decoder import Prefilled
from m2flow.generation.kv_cache import RowSpan
from m2flow.models.lora import unsummed
from m2flow.models.norms import widen_norms
from m2flow.runtime.weights.boxes import Box

UNBOUNDED = 1 << 20
"""Tokens that a model may see which has no positions of its own to run out of."""

ROUNDING_NATS, HALF_ROUNDING_NATS = 1e-4, 0.05
"""KL that rounding may make between two ways to compute the same; in half precision."""


@dataclass(frozen=True)
class Sizes:
    """What the engine asks of a model's sizes."""

    vocab_size: int
    max_position: int


class OwnForward:
    """A model of transformers and its forward passes, in the place of a `Decoder`.

    Args:
        config: a `transformers` configuration of a causal language model.
        dtype, device: of its weights, which are 0 until `install`.

    Attributes:
        cell_bytes: of one token's keys and values in all layers.

    Raises:
        UserError: the model is none whose cache can hold rows of different lengths.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        check_causal_lm(config.to_dict())
        self.dtype, self.device, self._checked = dtype, device, False
        config = copy.deepcopy(config)
        if dtype is torch.float64 and hasattr(config, "num_experts"):
            config._experts_implementation = "eager"  # there is no grouped product in float64
        if getattr(config, "attn_logit_softcapping", None):
            config._attn_implementation = "eager"  # up to 5.20 the fused kernel drops the cap
        with no_init_weights(), device:
            made = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            self._model: Any = made.eval()
            _widen(self._model, dtype)
        self._model.tie_weights()
        self._config = self._model.config
        context = getattr(config, "max_position_embeddings", None) or UNBOUNDED
        self.architecture = Sizes(config.vocab_size, context)
        accepted = inspect.signature(self._model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        with torch.inference_mode():
            for parameter in self._model.parameters():
                parameter.zero_()
            widen_norms(self._model)
            layers = list(_filled(self.prefill([[0]]).kv))
        self.cell_bytes = dtype.itemsize * sum(
            tensor.shape[1] * tensor.shape[3] for layer in layers for tensor in _content(layer)
        )

    @property
    def logprob_dtype(self) -> torch.dtype:
        """float64 for a float64 model, else float32."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def install(self, weights: Mapping[str, Tensor]) -> None:
        """Copies all weights; see `NativeEngine.install`."""
        own = dict(self._model.named_parameters())
        also = {**self._model.state_dict(), **dict(self._model.named_buffers())}
        missing = sorted(own.keys() - weights.keys())
        unknown = sorted(weights.keys() - own.keys() - also.keys())
        given = {**also, **own}
        wrong = [
            f"{name} is {list(x.shape)}, not {list(given[name].shape)}"
            for name, x in unsummed(weights).items()
            if name in given and x.shape != given[name].shape
        ]
        if missing or unknown or wrong:
            raise ValueError(f"weights do not fit: {missing=}, {unknown=}, {wrong=}")
        for name, x in weights.items():
            given[name].copy_(x)
        if not self._checked:
            self._check_batching()
        self._checked = True

    def _check_batching(self) -> None:
        """Refuse a model whose logits depend on padding, or on being computed in pieces.

        Raises:
            UserError: they do, by more than rounding.
        """
        long, short = (
            [(2 + 3 * n) % self.architecture.vocab_size for n in range(k)] for k in (7, 3)
        )
        bound = ROUNDING_NATS if self.dtype.itemsize > 2 else HALF_ROUNDING_NATS
        alone_V = self.prefill([short]).logits_UV[0].log_softmax(-1)
        begun = self.prefill([short[:2]])
        for how, logits_V in (
            ("beside a longer one", self.prefill([long, short]).logits_UV[1]),
            ("in pieces", self.prefill([short], 2, begun.kv).logits_UV[0]),
        ):
            gap = alone_V.exp() @ (alone_V - logits_V.log_softmax(-1))
            if float(gap) > bound:  # a NaN is the weights', and named when it is drawn from
                raise UserError(
                    f"its forward pass gives other tokens for a prompt {how} (KL {gap:.2g} nats)",
                    key="model_type",
                    value=self._config.model_type,
                    expected="a causal language model whose rows do not depend on each other",
                    hint=OTHER_ENGINE,
                )

    def boxes(self) -> dict[str, Box]:
        """Hugging Face parameter name -> all of it."""
        return {
            name: Box((0,) * parameter.ndim, tuple(parameter.shape))
            for name, parameter in self._model.named_parameters()
        }

    def tensors(self) -> list[Tensor]:
        """Weights and tables."""
        return [*self._model.parameters(), *self._model.buffers()]

    def room(self, prompts: int, tokens: int) -> Any:
        """An empty cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self._config)

    def prefill(
        self, prompts: Sequence[Sequence[int]], first: int = 0, kv: Any = None
    ) -> Prefilled:
        """Runs prompts, padded on the left to the longest, from one position on; as `Decoder`."""
        longest = max(map(len, prompts))
        ids_UT = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask_UT = torch.zeros_like(ids_UT)
        for row, prompt in enumerate(prompts):
            ids_UT[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_UT[row, longest - len(prompt) :] = 1
        ids_UT, mask_UT = ids_UT.to(self.device), mask_UT.to(self.device)
        position_UT = (mask_UT.cumsum(-1) - 1).clamp_min(0)
        cache = self.room(len(prompts), longest) if kv is None else kv
        logits_UV = self._forward(ids_UT[:, first:], position_UT[:, first:], mask_UT, cache)
        if not bool(mask_UT.all()):
            # A column of padding must not hold a NaN, which a weight of 0 would let through.
            for layer in _filled(cache):
                for tensor in _content(layer):
                    absent_UC = mask_UT[:, longest - tensor.shape[2] :] == 0
                    tensor.masked_fill_(absent_UC[:, None, :, None], 0.0)
        return Prefilled(cache, logits_UV)

    def decode(
        self, token_N: Tensor, position_N: Tensor, num_running: int, view: tuple[Any, Tensor]
    ) -> Tensor:
        """Feeds one token to each of the first B sequences; as `Decoder.decode`.

        Args:
            token_N, position_N, num_running: as there.
            view: transformers' cache of these rows, and the mask of its columns and the new one.
        """
        cache, mask_BT = view
        rows = slice(num_running)
        return self._forward(token_N[rows, None], position_N[rows, None], mask_BT, cache)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits after each row's last token."""
        more = {"position_ids": positions} if self._takes_positions else {}
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            **more,
            **self._last_only,
        ).logits[:, -1]
        return logits if logits.dtype is torch.float64 else logits.float()


class OwnSlots:
    """Rows of transformers' cache, in the place of a `KVCache`.

    Args:
        forward: whose keys and values these are.
        budget: bytes that they may take; None for what is needed.
    """

    span: int | None = None
    """All rows attend together."""

    def __init__(self, forward: OwnForward, budget: int | None = None) -> None:
        self._forward = forward
        self.max_cells = None if budget is None else budget // forward.cell_bytes
        """Rows times columns at most."""
        self.free()

    def free(self) -> None:
        """Gives the memory back; all content is lost."""
        self._cache = self._forward.room(0, 0)
        self.rows = self.columns = 0

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether rows for sequences of so many tokens are within the budget."""
        return self.max_cells is None or len(lengths) * max(lengths, default=0) <= self.max_cells

    def tensors(self) -> tuple[Tensor, ...]:
        """All that takes memory."""
        return tuple(self.tensors_of(self._cache))

    def tensors_of(self, kv: Any) -> Iterator[Tensor]:
        """All that a prefill left behind."""
        for layer in _filled(kv):
            yield from _content(layer)

    def ensure(self, lengths: Sequence[int], *, keep: int) -> None:
        """Have a row for each sequence of so many tokens, the next one of which ends the longest.

        The first `keep` rows stay; columns come and go on the left.
        """
        rows, columns = len(lengths), max(lengths)
        for layer in _filled(self._cache):
            width = _width(layer, columns - 1)
            layer.keys, layer.values = (
                _fitted(tensor, rows, width, min(keep, rows)) for tensor in _content(layer)
            )
            _count(layer, columns - 1)
        self.rows, self.columns = rows, columns

    def write_prompts(self, rows: Tensor, kv: Any, prompts: Tensor, columns: int) -> None:
        """Copies prompt `prompts[i]` of a prefill into row `rows[i]`; both int64."""
        for own, source in zip(self._cache.layers, kv.layers, strict=True):
            if source.keys is None:
                continue
            width = _width(own, self.columns - 1)
            if own.keys is None:
                own.lazy_initialization(source.keys, source.values)
                own.keys, own.values = (
                    tensor.new_zeros(self.rows, tensor.shape[1], width, tensor.shape[3])
                    for tensor in _content(source)
                )
                _count(own, self.columns - 1)
            for target, tensor in zip(_content(own), _content(source), strict=True):
                shared = min(width, tensor.shape[2])
                target[rows, :, : width - shared] = 0.0
                picked = tensor[:, :, tensor.shape[2] - shared :].index_select(0, prompts)
                target[rows, :, width - shared :] = picked

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copies rows over other rows; no row is both."""
        for tensor in self.tensors():
            tensor[list(targets)] = tensor[list(sources)]

    def keep(self, rows: int) -> None:
        """Rows from this one on are free; the next `ensure` takes them away."""

    def view(self, position_B: Tensor, spans: Sequence[RowSpan]) -> tuple[Any, Tensor]:
        """The cache for one decode step, and which columns each row sees [B, columns]."""
        columns = max(span.longest for span in spans)
        column_C = torch.arange(columns, device=position_B.device)
        seen_BC = column_C >= columns - 1 - position_B[:, None]
        return self._cache, seen_BC.long()

    def spans(self, lengths: Sequence[int]) -> list[RowSpan]:
        """One, of all rows."""
        return [RowSpan.of(lengths)]


def _widen(model: Any, dtype: torch.dtype) -> None:
    """Have in float32 what transformers keeps so in a model of 16 bits that it reads from a folder.

    Such as the bias by which DeepSeek-V3 chooses experts. Models made of a configuration, as here,
    have all of it in their dtype.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return
    kept = set(model._keep_in_fp32_modules_strict or ())
    if dtype is torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    patterns = [re.compile(name.replace("*", ".*")) for name in kept]
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                path = f"{prefix}.{name}"
                if tensor is None or not tensor.is_floating_point():
                    continue
                if any(pattern.search(path) for pattern in patterns):
                    wide = tensor.detach().float()
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[name] = nn.Parameter(wide, False) if is_parameter else wide


def _filled(cache: Any) -> Iterator[Any]:
    """Layers that hold anything; some models share keys and values between layers."""
    return (layer for layer in cache.layers if layer.keys is not None)


def _content(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def _width(layer: Any, columns: int) -> int:
    """Columns that a layer stores of so many."""
    window = getattr(layer, "sliding_window", None)
    return columns if window is None else min(columns, window - 1)


def _count(layer: Any, columns: int) -> None:
    """Tell a layer with a window how many columns it has seen."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = columns


def _fitted(tensor_RKCD: Tensor, rows: int, width: int, keep: int) -> Tensor:
    """The first `keep` rows among so many, their last columns at the right of so many."""
    if tensor_RKCD.shape[0] == rows == keep and tensor_RKCD.shape[2] == width:
        return tensor_RKCD
    fitted = tensor_RKCD.new_zeros(rows, tensor_RKCD.shape[1], width, tensor_RKCD.shape[3])
    shared = min(width, tensor_RKCD.shape[2])
    fitted[:keep, :, width - shared :] = tensor_RKCD[:keep, :, tensor_RKCD.shape[2] - shared :]
    return fitted
