"""Packs hold every token once, under the budget, and every node sees its ancestors alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m2flow.errors import UserError
from m2flow.training.attention import PackLayout
from m2flow.training.context_parallel import ContextShard
from m2flow.training.packing import Pack, Sharing, pack
from m2flow.training.rollouts import TokenPairs

SHARINGS: tuple[Sharing, ...] = ("none", "prompt", "prefix")
TOKENS = st.integers(0, 2)
PAIRS = st.lists(
    st.tuples(
        st.sampled_from([[0], [1, 2], [1, 2, 0], [2, 2, 2, 2, 2]]), st.lists(TOKENS, max_size=8)
    ),
    max_size=8,
).map(lambda rows: TokenPairs.from_rows([p for p, _ in rows], [c for _, c in rows]))


def visible_along_paths(layout: PackLayout) -> dict[int, list[int]]:
    """The same as `visible_keys`, as a kernel has it that takes rows one after another."""
    paths = layout.paths
    keys = paths.key_nodes.split(paths.key_ends.diff().tolist())
    found: dict[int, list[int]] = {}
    for path, count in zip(keys, paths.query_ends.diff().tolist(), strict=True):
        assert count <= paths.most_queries
        assert len(path) <= paths.most_keys
        for place in range(len(path) - count, len(path)):
            found[len(found)] = path[: place + 1].tolist()
    return found


def visible_keys(layout: PackLayout) -> dict[int, list[int]]:
    """For each node, the nodes it attends to; fails where a node asks other than once."""
    blocks = layout.blocks
    answers: list[tuple[int, list[int]]] = []
    first_query = first_key = 0
    for bias in blocks.biases:
        num_rows, num_queries, num_keys = bias.shape
        for row in range(num_rows):
            keys = blocks.key_nodes[first_key : first_key + num_keys]
            for query in range(num_queries):
                asking = int(blocks.query_nodes[first_query])
                answers.append((asking, keys[bias[row, query] == 0].tolist()))
                first_query += 1
            first_key += num_keys
    taken = [answers[slot] for slot in blocks.slot_N.tolist()]
    assert [asking for asking, _ in taken] == list(range(len(taken)))
    assert dict(taken) == visible_along_paths(layout)
    return dict(taken)


def paths(microbatch: Pack) -> list[list[int]]:
    """For each row, the token ids that the prediction of its last completion token sees."""
    seen = visible_keys(microbatch.layout)
    last = (microbatch.lengths_R.cumsum(0) - 1).tolist()
    nodes = microbatch.predicting_M[microbatch.prediction_T[last]].tolist()
    return [microbatch.input_ids_N[seen[node]].tolist() for node in nodes]


@pytest.mark.parametrize("sharing", SHARINGS)
@given(pairs=PAIRS, budget=st.integers(1, 40))
def test_every_token_is_predicted_once_from_its_own_prefix(
    sharing: Sharing, pairs: TokenPairs, budget: int
) -> None:
    packs = pack(pairs, budget, sharing)
    indices = [index for p in packs for index in p.token_index_T.tolist()]
    assert sorted(indices) == list(range(pairs.completion_ids_T.numel()))
    prompts = pairs.prompt_ids_P.split(pairs.prompt_lengths_B.tolist())
    completions = pairs.completion_ids_T.split(pairs.completion_lengths_B.tolist())
    for p in packs:
        assert torch.equal(p.target_ids_T, pairs.completion_ids_T[p.token_index_T])
        assert torch.equal(p.lengths_R, pairs.completion_lengths_B[p.rows_R])
        expected = [(prompts[r].tolist() + completions[r].tolist())[:-1] for r in p.rows_R]
        assert paths(p) == expected
        for node, seen in visible_keys(p.layout).items():
            assert seen[-1] == node
            assert p.position_ids_N[seen].tolist() == list(range(len(seen)))


@pytest.mark.parametrize("sharing", SHARINGS)
@given(pairs=PAIRS, budget=st.integers(1, 40))
def test_only_a_row_too_long_by_itself_exceeds_the_budget(
    sharing: Sharing, pairs: TokenPairs, budget: int
) -> None:
    for p in pack(pairs, budget, sharing):
        assert p.num_nodes <= budget or len(p.rows_R.unique()) == 1 or _same_inputs(pairs, p)


def _same_inputs(pairs: TokenPairs, p: Pack) -> bool:
    """Rows that differ in their last token alone are one path, however long."""
    return len({tuple(path) for path in paths(p)}) == 1


def test_prompt_of_a_group_enters_once() -> None:
    pairs = TokenPairs.from_rows([[1, 2, 3]] * 4 + [[4, 5]] * 2, [[6, 7, 8]] * 4 + [[6, 7]] * 2)
    nodes = {sharing: pack(pairs, 100, sharing)[0].num_nodes for sharing in SHARINGS}
    assert nodes == {"none": 4 * 5 + 2 * 3, "prompt": 3 + 4 * 2 + 2 + 2 * 1, "prefix": 5 + 3}


def test_common_beginning_of_different_prompts_enters_once() -> None:
    pairs = TokenPairs.from_rows([[1, 2, 3], [1, 2, 4]], [[5], [5]])
    assert pack(pairs, 100, "prefix")[0].input_ids_N.tolist() == [1, 2, 3, 4]


def test_last_completion_token_is_not_computed() -> None:
    (only,) = pack(TokenPairs.from_rows([[1]], [[2, 3]]), 100)
    assert only.input_ids_N.tolist() == [1, 2]
    assert only.target_ids_T.tolist() == [2, 3]


def test_sample_longer_than_the_budget_gets_a_pack_of_its_own() -> None:
    pairs = TokenPairs.from_rows([[1], [2], [3]], [[4, 4], [5] * 50, [6, 6]])
    packs = pack(pairs, 10, "prompt")
    assert [p.rows_R.tolist() for p in packs] == [[0], [1], [2]]


def test_prompt_is_computed_again_where_a_group_is_cut() -> None:
    pairs = TokenPairs.from_rows([[1, 2, 3]] * 4, [[i, i] for i in range(4)])
    assert [p.num_nodes for p in pack(pairs, 5, "prompt")] == [5, 5]


def test_long_rows_ask_in_segments_and_still_see_all_ancestors() -> None:
    pairs = TokenPairs.from_rows([[1, 2]] * 2, [[3] * 300, [4] * 150])
    (only,) = pack(pairs, 10_000, "prompt")
    assert len(only.layout.blocks.biases) > 2
    assert paths(only) == [[1, 2] + [3] * 299, [1, 2] + [4] * 149]


@given(pairs=PAIRS, budget=st.integers(1, 40))
def test_packing_is_deterministic(pairs: TokenPairs, budget: int) -> None:
    for once, again in zip(pack(pairs, budget), pack(pairs, budget), strict=True):
        assert torch.equal(once.input_ids_N, again.input_ids_N)
        assert torch.equal(once.layout.blocks.query_nodes, again.layout.blocks.query_nodes)


def test_nothing_to_pack() -> None:
    assert not list(pack(TokenPairs.from_rows([], []), 10))
    assert not list(pack(TokenPairs.from_rows([[1]], [[]]), 10))


def test_budget_of_nothing_is_refused() -> None:
    with pytest.raises(AssertionError):
        pack(TokenPairs.from_rows([[1]], [[1]]), 0)


def test_empty_prompt_is_refused_by_row() -> None:
    with pytest.raises(UserError, match="prompt 1"):
        TokenPairs.from_rows([[1], []], [[1], [1]])


@given(pairs=PAIRS.filter(lambda pairs: len(pairs.completion_ids_T)), size=st.integers(1, 3))
def test_parts_of_a_pack_see_the_same_in_blocks_and_along_paths(
    pairs: TokenPairs, size: int
) -> None:
    for rank in range(size):
        for some in pack(pairs, 40, "prefix", ContextShard(rank, size)):
            assert len(visible_keys(some.layout)) == len(some.input_ids_N)
