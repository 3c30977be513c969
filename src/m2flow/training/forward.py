"""Log-probabilities of the completion tokens of a pack, by a causal language model.

The head runs at the nodes that predict a completion token and nowhere else, and where the
vocabulary is large it runs over some of them at a time: in float32 the logits of 8,192 tokens over
152,064 ids take 5 GB, and their gradient as much again. Logits of a chunk are computed again in the
backward pass, so that they never lie in memory together. The model is any transformers causal LM;
afterwards it is as it was. Knows no losses.

Shapes: T completion tokens of a pack, M predicting nodes, V vocabulary, H width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from m2flow.algorithms.entropy import categorical_entropy
from m2flow.models.device import sent
from m2flow.models.work import LOGITS_AT_A_TIME, PLAIN_HEADS
from m2flow.training.attention import packed_attention_on
from m2flow.training.packing import Pack

CAPPED_HEADS = ("gemma2", "gemma3_text")
"""Architectures among `PLAIN_HEADS` whose configuration may have a cap."""


@dataclass(frozen=True)
class TokenFigures:
    """[T] log-probabilities in nats, and entropies [T] of the distributions they are taken from."""

    logprobs_T: Tensor
    entropy_T: Tensor | None


def token_logprobs(
    model: nn.Module,
    pack: Pack,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> TokenFigures:
    """log softmax(logits / temperature) of each completion token, at least in float32.

    Args:
        model: a transformers causal LM, on one device.
        pack: the micro-batch, on any device.
        temperature: that of the sampling; 0 (greedy) counts as 1.
        with_entropy: whether entropies are wanted too.

    Returns:
        Figures on the model's device, in the order of `pack.target_ids_T`.
    """
    device = next(model.parameters()).device
    causal_lm: Any = model
    config = causal_lm.config
    capped = config.model_type in CAPPED_HEADS
    cap = (getattr(config, "final_logit_softcapping", None) or None) if capped else None
    head = _Head(pack, temperature, with_entropy, cap)
    rows = max(1, LOGITS_AT_A_TIME // int(config.vocab_size))
    chunks = head.chunks(rows) if config.model_type in PLAIN_HEADS else None
    pack = pack.to(device)
    with packed_attention_on(model), _in_chunks(causal_lm, chunks, head):
        given: Tensor = causal_lm(
            input_ids=pack.input_ids_N[None],
            position_ids=pack.position_ids_N[None],
            use_cache=False,
            logits_to_keep=pack.predicting_M,
            pack_layout=pack.layout,
        ).logits[0]
    if chunks is None:
        given = head.figures(given, pack.prediction_T, pack.predicted_ids)
    if pack.layout.part is not None and pack.own_T is not None:
        given = pack.layout.part.put_together(given, pack.own_T, pack.target_ids_T.numel())
    return TokenFigures(given[:, 0], given[:, 1] if with_entropy else None)


@dataclass(frozen=True)
class _Chunk:
    """Predicting nodes `first` to `end`, and their targets, `targets_C` into the pack's."""

    first: int
    end: int
    targets_C: Tensor


@dataclass(frozen=True)
class _Head:
    """What is wanted of the logits of a pack.

    Attributes:
        cap: of logits that the head gives in chunks: `cap * tanh(logit / cap)`; None for none.
    """

    pack: Pack
    temperature: float
    with_entropy: bool
    cap: float | None = None

    def chunks(self, rows: int) -> list[_Chunk] | None:
        """Pieces of at most `rows` predicting nodes; None where one piece holds all."""
        nodes = self.pack.predicting_M.numel()
        if nodes <= rows:
            return None
        number_T = self.pack.prediction_T // rows
        order_T = number_T.argsort(stable=True)
        counts = number_T.bincount(minlength=-(-nodes // rows)).tolist()
        targets = order_T.split(counts)
        return [
            _Chunk(first, min(first + rows, nodes), targets_C)
            for first, targets_C in zip(range(0, nodes, rows), targets, strict=True)
        ]

    def figures(self, logits_MV: Tensor, prediction_T: Tensor, target_ids_T: Tensor) -> Tensor:
        """[T, 1 or 2] log-probabilities and, where they are wanted, entropies."""
        dtype = torch.promote_types(logits_MV.dtype, torch.float32)
        if self.with_entropy or self.temperature not in (0.0, 1.0):
            logits_MV = logits_MV.to(dtype)
        if self.temperature not in (0.0, 1.0):
            logits_MV = logits_MV / self.temperature
        # One kernel each way reads logits as they are; sums and differences would take a dozen.
        logprobs_MV = logits_MV.log_softmax(-1, dtype=dtype)
        found = [logprobs_MV[prediction_T, target_ids_T]]
        if self.with_entropy:
            found.append(categorical_entropy(logits_MV)[prediction_T])
        return torch.stack(found, dim=1)

    def over(
        self, chunks: list[_Chunk], linear: Callable[[Tensor], Tensor], x_MH: Tensor
    ) -> Tensor:
        """The `figures` [T, 1 or 2] of hidden states, whose logits are computed chunk by chunk."""

        def figures_of(x_CH: Tensor, prediction_C: Tensor, target_ids_C: Tensor) -> Tensor:
            logits_CV = linear(x_CH)
            if self.cap is not None:
                logits_CV = torch.tanh(logits_CV / self.cap) * self.cap
            return self.figures(logits_CV, prediction_C, target_ids_C)

        pack = self.pack.to(x_MH.device)
        found = []
        for chunk in chunks:
            targets_C = sent(chunk.targets_C, x_MH.device)
            prediction_C = pack.prediction_T[targets_C] - chunk.first
            arguments = (x_MH[chunk.first : chunk.end], prediction_C, pack.predicted_ids[targets_C])
            found.append(
                checkpoint(figures_of, *arguments, use_reentrant=False, preserve_rng_state=False)
            )
        order_T = sent(torch.cat([chunk.targets_C for chunk in chunks]), x_MH.device)
        return torch.cat(found)[order_T.argsort()]


@contextmanager
def _in_chunks(causal_lm: Any, chunks: list[_Chunk] | None, head: _Head) -> Iterator[None]:
    """Within, the model's head gives figures of the targets in the place of logits.

    They are not capped again: the configuration says so meanwhile. The head stays the module that
    it is, so that sharding, which looks at modules, sees no difference.
    """
    if chunks is None:
        yield
        return
    module: nn.Module = causal_lm.get_output_embeddings()
    linear, own = module.forward, "forward" in vars(module)  # a divided head has one of its own

    def forward(x_1MH: Tensor) -> Tensor:
        return head.over(chunks, linear, x_1MH[0])[None]

    module.forward = forward
    if head.cap is not None:
        causal_lm.config.final_logit_softcapping = None
    try:
        yield
    finally:
        if head.cap is not None:
            causal_lm.config.final_logit_softcapping = head.cap
        del module.forward
        if own:
            module.forward = linear
