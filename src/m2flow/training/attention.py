"""How a pack attends: every node to its ancestors, in an untouched transformers model.

The model's linear layers run on the flat nodes of a pack. For attention alone keys and values are
gathered, path after path: a row's own nodes ask, the path down to them answers, and each node asks
exactly once. On CUDA one kernel takes all rows as they are (`varlen`); elsewhere they stand in
padded blocks of similar size, whose masks all layers share: 4 bytes of a query-key pair, and 2 more
in a model of 16 bits. The function is registered with transformers under `IMPLEMENTATION`; the
layout travels as a keyword argument through the model's forward.

Shapes: N nodes; blocks of R segments with Q asking and K answering nodes, both padded; H query
heads, J key-value heads, G = H / J, D head dimension, F = heads x D.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from m2flow.errors import UserError
from m2flow.models.device import sent
from m2flow.training import varlen
from m2flow.training.context_parallel import ContextShard

IMPLEMENTATION = "m2flow_packed"

BLOCK_COST = 4096
"""What one more block costs a layer, in query-key pairs: its dozen small operations."""

GATHER_COST = 4
"""What gathering one key and value costs, in query-key pairs."""

MIN_SEGMENT, MAX_SEGMENTS_PER_ROW = 64, 8
"""A long row asks in up to 8 segments, none shorter than 64 nodes."""

MAX_MATERIALISED_PAIRS = 256 * 256
"""Segments with more query-key pairs go to the fused kernel, which never stores the scores, unless
the scores are capped."""


@dataclass(frozen=True)
class Paths:
    """Rows one after another, for a kernel that takes them with their lengths.

    Of each row the own nodes ask, which are all nodes of the pack in their order.

    Attributes:
        key_nodes: int64, the answering nodes: of each row the path down to its last node.
        query_ends, key_ends: int32 [rows + 1], where the queries and keys of each row end.
        most_queries, most_keys: of a row.
    """

    key_nodes: Tensor
    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def build(
        cls, path_nodes: Tensor, lengths: Tensor, shared: Tensor, part: ContextShard | None
    ) -> Paths:
        """As `PackLayout.build`."""
        num_nodes = int((lengths - shared).sum())
        windows = [(0, num_nodes)] if part is None else part.windows(num_nodes)
        offsets = (lengths.cumsum(0) - lengths).tolist()
        num_queries, num_keys, keys = [], [], []
        for window in windows:  # a lane's nodes are numbered window after window
            for row, begin, end in _asking(shared.tolist(), lengths.tolist(), window):
                num_queries.append(end - begin)
                num_keys.append(end)
                keys.append(path_nodes[offsets[row] : offsets[row] + end])
        key_nodes = torch.cat(keys)
        if part is not None:
            key_nodes = part.gathered_places(num_nodes)[key_nodes]
        return cls(key_nodes, _ends(num_queries), _ends(num_keys), max(num_queries), max(num_keys))

    def to(self, device: torch.device) -> Paths:
        """The paths on a device."""
        moved: dict[str, Any] = {
            name: sent(getattr(self, name), device)
            for name in ("key_nodes", "query_ends", "key_ends")
        }
        return replace(self, **moved)


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@dataclass(frozen=True)
class PackLayout:
    """Which nodes of a pack each node attends to.

    Attributes:
        path_nodes, lengths, shared, part: as for `build`.
        paths: the same for a kernel, on the device.
        device: where the pack is computed.
    """

    path_nodes: Tensor
    lengths: Tensor
    shared: Tensor
    part: ContextShard | None
    paths: Paths
    device: torch.device

    @classmethod
    def build(
        cls, path_nodes: Tensor, lengths: Tensor, shared: Tensor, part: ContextShard | None = None
    ) -> PackLayout:
        """Lay out paths given one after another.

        Args:
            path_nodes: int64 nodes of each path, root first. Past the `shared` leading ones they
                are the row's own: all rows' own nodes, in order, number the pack 0, 1, 2, ...
            lengths: nodes of each path.
            shared: how many leading nodes of it belong to earlier rows.
            part: what is here of the pack; None for all of it.
        """
        paths = Paths.build(path_nodes, lengths, shared, part)
        return cls(path_nodes, lengths, shared, part, paths, path_nodes.device)

    @cached_property
    def blocks(self) -> AttentionBlocks:
        """The layout in padded blocks; made when it is asked for."""
        made = AttentionBlocks.build(self.path_nodes, self.lengths, self.shared, self.part)
        return made.to(self.device)

    def to(self, device: torch.device) -> PackLayout:
        """The layout on a device."""
        return replace(self, paths=self.paths.to(device), device=device)


@dataclass(frozen=True)
class AttentionBlocks:
    """Where the blocks' queries and keys come from, and where the answers go; indices are int64.

    Padding repeats the last node, so every query sees some key and no row of the softmax is empty.

    Attributes:
        query_nodes: the asking nodes of all blocks, one block after another.
        key_nodes: the answering ones, likewise.
        biases: for each block [R, Q, K] float32: 0 where a query sees a key, else minus infinity.
        slot_N: where in the blocks' answers that of each node lies. Where the pack is divided over
            lanes N are the nodes that are here, and keys are numbered as they are gathered.
        made: biases by window and dtype, made when a layer asks and kept for the others.
    """

    query_nodes: Tensor
    key_nodes: Tensor
    biases: tuple[Tensor, ...]
    slot_N: Tensor
    made: dict[tuple[int | None, torch.dtype], tuple[Tensor, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def within(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The biases in a dtype; a query sees no key that is `window` or more nodes above it."""
        if (window, dtype) not in self.made:
            seen = self.biases if window is None else [_narrow(b, window) for b in self.biases]
            self.made[window, dtype] = tuple(bias.to(dtype) for bias in seen)
        return self.made[window, dtype]

    @classmethod
    def build(
        cls, path_nodes: Tensor, lengths: Tensor, shared: Tensor, part: ContextShard | None
    ) -> AttentionBlocks:
        """As `PackLayout.build`."""
        own = lengths - shared
        num_nodes = int(own.sum())
        windows = [(0, num_nodes)] if part is None else part.windows(num_nodes)
        path_offsets = lengths.cumsum(0) - lengths
        node_offsets = own.cumsum(0) - own - shared  # of a row's own node, less its depth
        slot_N = torch.empty(num_nodes, dtype=torch.int64)
        queries, keys, biases = [], [], []
        num_slots = 0
        for block in _blocks(_segments(shared.tolist(), lengths.tolist(), windows)):
            row_R, begin_R, end_R = torch.tensor(block).T
            last_R1 = end_R[:, None] - 1
            asked_RQ = begin_R[:, None] + torch.arange(int((end_R - begin_R).max()))
            depth_RQ = torch.minimum(asked_RQ, last_R1)
            query_RQ = node_offsets[row_R, None] + depth_RQ
            depth_K = torch.arange(int(end_R.max()))
            key_RK = path_nodes[path_offsets[row_R, None] + torch.minimum(depth_K, last_R1)]
            hidden_RQK = depth_K > depth_RQ[..., None]
            queries.append(query_RQ.flatten())
            keys.append(key_RK.flatten())
            biases.append(torch.zeros(hidden_RQK.shape).masked_fill_(hidden_RQK, float("-inf")))
            real_RQ = asked_RQ <= last_R1
            slot_RQ = num_slots + torch.arange(query_RQ.numel()).view(query_RQ.shape)
            slot_N[query_RQ[real_RQ]] = slot_RQ[real_RQ]
            num_slots += query_RQ.numel()
        query_nodes, key_nodes = torch.cat(queries), torch.cat(keys)
        if part is not None:
            here = part.nodes(num_nodes)
            number_N = torch.empty(num_nodes, dtype=torch.int64)
            number_N[here] = torch.arange(len(here))
            query_nodes, slot_N = number_N[query_nodes], slot_N[here]
            key_nodes = part.gathered_places(num_nodes)[key_nodes]
        return cls(query_nodes, key_nodes, tuple(biases), slot_N)

    def to(self, device: torch.device) -> AttentionBlocks:
        """The blocks on a device."""
        biases = tuple(bias.to(device) for bias in self.biases)
        asking, answering = self.query_nodes.to(device), self.key_nodes.to(device)
        return AttentionBlocks(asking, answering, biases, self.slot_N.to(device))


def _narrow(bias_RQK: Tensor, window: int) -> Tensor:
    seen_RQ1 = (bias_RQK == 0).sum(-1, keepdim=True)  # 1 + the depth of the query
    depth_K = torch.arange(bias_RQK.shape[-1], device=bias_RQK.device)
    return bias_RQK.masked_fill(depth_K < seen_RQ1 - window, float("-inf"))


Segment = tuple[int, int, int]  # row, and the depths [begin, end) of its own nodes that ask


def _segments(
    shared: list[int], lengths: list[int], windows: Sequence[tuple[int, int]]
) -> list[Segment]:
    """Long rows in several pieces: an early node need not be scored against the keys after it.

    Those nodes ask that are in one of the windows [first, end) of the pack's nodes.
    """
    segments: list[Segment] = []
    for window in windows:
        for row, begin, end in _asking(shared, lengths, window):
            own = lengths[row] - shared[row]
            size = max(MIN_SEGMENT, -(-own // MAX_SEGMENTS_PER_ROW))
            segments += [(row, first, min(first + size, end)) for first in range(begin, end, size)]
    return segments


def _asking(
    shared: Sequence[int], lengths: Sequence[int], window: tuple[int, int]
) -> Iterator[Segment]:
    """Of each row the own nodes that are among those [first, end) of the pack, where there are."""
    first_own = 0
    for row, (depth, length) in enumerate(zip(shared, lengths, strict=True)):
        begin, end = (min(max(depth, depth + n - first_own), length) for n in window)
        if begin < end:
            yield row, begin, end
        first_own += length - depth


def _blocks(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Group segments so that no block wastes more on padding than another block would cost."""
    members: list[Segment] = []
    exact = max_asking = max_length = 0
    for segment in sorted(segments, key=lambda s: (s[2] - s[1], s[2], s[0], s[1])):
        _, begin, length = segment
        asking = length - begin
        cost = length * (asking + GATHER_COST)
        joint_asking, joint_length = max(max_asking, asking), max(max_length, length)
        padded = (len(members) + 1) * joint_length * (joint_asking + GATHER_COST)
        if members and padded - exact - cost > BLOCK_COST:
            yield members
            members, exact, joint_asking, joint_length = [], 0, asking, length
        members.append(segment)
        exact, max_asking, max_length = exact + cost, joint_asking, joint_length
    if members:
        yield members


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    pack_layout: PackLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a pack, in the form that transformers calls.

    Args:
        module: the layer that attends.
        query, key, value: [1, H, N, D], [1, J, N, D] and [1, J, N, D].
        attention_mask: None; the layout says it all.
        scaling: of the scores; 1 / sqrt(D) if None.
        dropout: must be 0.
        pack_layout: the pack's layout.
        sliding_window: nodes of its path that a node sees, itself included; None for all, or for
            a window that the model would tell by its mask alone.
        softcap: scores are `softcap tanh(score / softcap)`; None for the scores as they are.

    Returns:
        [1, N, H, D], and None for the weights.

    Raises:
        UserError: the model asks for attention that is not computed here.
    """
    assert pack_layout is not None and query.shape[0] == 1
    _refuse_unsupported(dropout, attention_mask, kwargs)
    window = _window_of_mask(module) if sliding_window is None else sliding_window
    H, D = query.shape[1], query.shape[3]
    scaling = D**-0.5 if scaling is None else scaling
    key_NF, value_NF = _nodes_first(key), _nodes_first(value)
    if pack_layout.part is not None:
        both = pack_layout.part.gather(torch.cat([key_NF, value_NF], 1))
        key_NF, value_NF = both.split([key_NF.shape[1], value_NF.shape[1]], 1)
    against = varlen.reason_against(query, value, softcap)
    if against is None:
        paths, J = pack_layout.paths, key.shape[1]
        answer_NHD = varlen.attend(
            query[0].transpose(0, 1).contiguous(),
            key_NF.index_select(0, paths.key_nodes).view(-1, J, D),
            value_NF.index_select(0, paths.key_nodes).view(-1, J, D),
            paths.query_ends,
            paths.key_ends,
            paths.most_queries,
            paths.most_keys,
            scale=scaling,
            window=window,
        )
        return answer_NHD[None], None
    if query.is_cuda:
        varlen.warn_once(against)
    # One gather for all blocks: its backward is one scatter, and not one the size of N a block.
    blocks = pack_layout.blocks
    biases = blocks.within(window, query.dtype)
    num_queries = [bias.shape[0] * bias.shape[1] for bias in biases]
    num_keys = [bias.shape[0] * bias.shape[2] for bias in biases]
    query_SF = (_nodes_first(query) * scaling).index_select(0, blocks.query_nodes)
    key_SF = key_NF.index_select(0, blocks.key_nodes)
    value_SF = value_NF.index_select(0, blocks.key_nodes)
    answers = [
        _attend(*block, H, D, softcap)
        for block in zip(
            torch.split(query_SF, num_queries),
            torch.split(key_SF, num_keys),
            torch.split(value_SF, num_keys),
            biases,
            strict=True,
        )
    ]
    answer_NF = torch.cat(answers).index_select(0, blocks.slot_N)
    return answer_NF.view(1, len(answer_NF), H, -1), None


def _nodes_first(heads_1HND: Tensor) -> Tensor:
    return heads_1HND[0].transpose(0, 1).flatten(1)


def _attend(
    query_SF: Tensor,
    key_SF: Tensor,
    value_SF: Tensor,
    bias_RQK: Tensor,
    H: int,
    D: int,
    softcap: float | None,
) -> Tensor:
    """Answers [R * Q, H * D] of one block; S is R * Q for queries and R * K for keys and values."""
    R, Q, K = bias_RQK.shape
    J = key_SF.shape[1] // D
    query_RQJGD = query_SF.view(R, Q, J, H // J, D)
    key_RKJD = key_SF.view(R, K, J, D)
    value_RKJD = value_SF.view(R, K, J, -1)  # values may be narrower than keys
    if Q * K > MAX_MATERIALISED_PAIRS and softcap is None:
        if H != J and query_SF.is_cuda:  # kernels with a mask have a key head for each query head
            key_RKJD = key_RKJD.repeat_interleave(H // J, dim=2)
            value_RKJD = value_RKJD.repeat_interleave(H // J, dim=2)
        answer_RHQD = nn.functional.scaled_dot_product_attention(
            query_RQJGD.view(R, Q, H, D).transpose(1, 2),
            key_RKJD.transpose(1, 2),
            value_RKJD.transpose(1, 2),
            attn_mask=bias_RQK[:, None],
            scale=1.0,
            enable_gqa=key_RKJD.shape[2] != H,
        )
    else:
        # Query heads that share a key head stand in one matrix (X = G Q rows): no key is repeated.
        query_BXD = query_RQJGD.permute(0, 2, 3, 1, 4).reshape(R * J, -1, D)  # B = R J
        key_BDK = key_RKJD.permute(0, 2, 3, 1).reshape(R * J, D, K)
        value_BKD = value_RKJD.transpose(1, 2).reshape(R * J, K, -1)
        scores_BXK = torch.bmm(query_BXD, key_BDK)
        if softcap is not None:
            scores_BXK = softcap * torch.tanh(scores_BXK / softcap)
        scores_RHQK = scores_BXK.view(R, H, Q, K).add_(bias_RQK[:, None])
        weights_BXK = scores_RHQK.softmax(-1).view(R * J, -1, K).to(value_SF.dtype)
        answer_RHQD = torch.bmm(weights_BXK, value_BKD).view(R, H, Q, -1)
    return answer_RHQD.transpose(1, 2).reshape(R * Q, -1)


def _window_of_mask(module: nn.Module) -> int | None:
    """The window of a layer of the two kinds of model that hand it to their masks alone."""
    config: Any = getattr(module, "config", None)
    holders = {"phimoe": config, "qwen2_moe": module}  # the latter where the layer has a window
    holder = holders.get(getattr(config, "model_type", ""))
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _refuse_unsupported(
    dropout: float, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    """A model that attends in some way not computed here must not be trained as if it did not."""
    found: dict[str, Any] = {"attention_dropout": dropout or None}
    found |= {"attention_mask": attention_mask, "s_aux": kwargs.get("s_aux")}
    for name, value in found.items():
        if value is not None:
            raise UserError(
                "packed training does not compute this kind of attention",
                key=name,
                value=value if isinstance(value, int | float) else "a tensor",
                expected="a model with causal attention, in windows or not",
            )


@contextmanager
def packed_attention_on(model: nn.Module) -> Iterator[None]:
    """Within, the transformers `model` attends by layouts; after, as it did before."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before
