"""A policy, or a critic, divided over lanes in any layout does what it does on one lane."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import ApertusConfig, AutoModelForCausalLM, CohereConfig, PhiConfig

from m2flow.algorithms.ppo import CriticLoss
from m2flow.errors import UserError
from m2flow.flow import Gang, Place
from m2flow.models.critic import critic_of
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.runtime.weights.manifest import describe, local_tensor
from m2flow.training.policy import PolicyTrainer
from m2flow.training.sharded import WHOLE, Shards, dealt, whole_weights
from m2flow.training.tensor_parallel import _plan_of
from m2flow.training.values import ValueTargets, ValueTrainer
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.workers import Learner, ModelSource
from tests.training.lane_processes import LaneProcesses
from tests.training.test_sharded import (
    ADAMW,
    CONFIG,
    FULL,
    RECIPE,
    assert_same,
    gang_of,
    place_on,
    rollouts_of,
    stepped,
)
from tests.training.tiny_policy import make_mixture, make_model, make_narrow_router

PAIR, FOUR, TWO_PAIRS = ((0, 1),), ((0, 1, 2, 3),), ((0, 1), (2, 3))

SHARES = [
    [[range(5), range(5, 12), range(12, 13), range(13, 24)]],
    [[range(0), range(24), range(0), range(0)]],
    [[range(1), range(1, 12), range(0), range(0)], [range(12, 20), range(20, 24)] + [range(0)] * 2],
]
"""For each optimizer step the folds, and for each fold the rows of each lane of one gang of four:
on two lanes the second also takes those of the others."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": make_model,
    "mixture": make_mixture,
    "narrow": lambda: make_model(torch.bfloat16),
    "router": make_narrow_router,
    "narrow, router": lambda: make_narrow_router(torch.bfloat16),
}

Run = tuple[list[dict[str, float]], list[dict[int, Tensor]], dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(4) as lanes:
        yield lanes


def shares_of(fold: list[range], replicas: Any) -> list[list[int]]:
    """The rows of each lane of the world, in a fold on these gangs."""
    if len(replicas[0]) == 4:
        return [list(some) for some in fold]
    pair = [list(fold[0]), [row for some in fold[1:] for row in some]]
    if len(replicas) == 1:
        return [*pair, [], []]
    return [part for some in pair for part in (some[::2], some[1::2])]


def run(gang: Gang | None, replicas: Any, model: str, lean: bool) -> Run:
    """Five steps: figures, log-probabilities of this lane's rows before each fold, all weights and
    the trainer's state.

    Args:
        gang, replicas, model: who trains what.
        lean: whether activations are computed again, and the optimizer's state is on the host.
    """
    policy, shards = MODELS[model](), WHOLE if gang is None else Shards.of(gang)
    shards.shard(policy)
    config = replace(
        CONFIG,
        optimizer=replace(ADAMW, on_host=lean),
        gradient_checkpointing=lean,
        tokens_per_microbatch=50,
    )
    trainer = PolicyTrainer(policy, FULL, config, shards)
    figures, logprobs = [], list[dict[int, Tensor]]()
    for step, folds in enumerate([*SHARES, *SHARES[:2]]):
        rollouts = rollouts_of(step)
        for fold in folds:
            shares = [sorted(row for some in fold for row in some)]
            if gang is not None:
                shares = shares_of(fold, replicas)
            mine = shares[0 if gang is None else dist.get_rank()]
            own = rollouts.select(torch.tensor(mine, dtype=torch.int64))
            by_row = trainer.logprobs(own).split(own.pairs.completion_lengths_B.tolist())
            logprobs.append(dict(zip(mine, by_row, strict=True)))
            trainer.fold(own)
        figures.append(trainer.finish())
    weights, state = dict(whole_weights(policy)), dict(trainer.optimizer.state_items())
    return figures, logprobs, weights, state


def on_lanes(groups: LaneGroups, layout: str, replicas: Any, *arguments: Any) -> Run | None:
    gang = gang_of(groups, replicas, layout)
    return None if gang is None else run(gang, replicas, *arguments)


CASES = [
    ("tp2", PAIR, "dense", False),
    ("cp2", PAIR, "dense", False),
    ("ep2", PAIR, "mixture", True),
    ("fsdp2", PAIR, "router", True),
    ("tp2.fsdp2", FOUR, "dense", True),
    pytest.param("tp2", TWO_PAIRS, "dense", True, marks=pytest.mark.slow),
    pytest.param("cp4", FOUR, "mixture", True, marks=pytest.mark.slow),
    pytest.param("ep2", TWO_PAIRS, "mixture", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "replicas", "model", "lean"), CASES)
def test_a_layout_makes_the_steps_of_one_lane(
    lanes: LaneProcesses, layout: str, replicas: Any, model: str, lean: bool
) -> None:
    """A mixture's router computes in single precision, whatever the model's is."""
    near = 1e-9 if model == "dense" else 1e-6
    figures, logprobs, weights, state = run(None, None, model, False)
    found = [one for one in lanes(on_lanes, layout, replicas, model, lean) if one is not None]
    assert len(found) == sum(map(len, replicas))
    for fold, by_row in enumerate(logprobs):
        together = {row: own for _, theirs, *_ in found for row, own in theirs[fold].items()}
        torch.testing.assert_close(dict(sorted(together.items())), by_row, rtol=0, atol=near)
    for figures_here, _, weights_here, state_here in found:
        assert figures_here == found[0][0]
        for here, expected in zip(figures_here, figures, strict=True):
            for name in expected.keys() - {"tokens_computed"}:
                assert here[name] == pytest.approx(expected[name], rel=near, abs=near), name
        for here, expected in ((weights_here, weights), (state_here, state)):
            names = {name for name in here if not name.startswith("master/")}
            assert names == expected.keys()
            for name in expected:
                torch.testing.assert_close(here[name], expected[name], rtol=near, atol=near)


@pytest.mark.parametrize(
    ("layout", "replicas", "model"),
    [
        ("cp2", PAIR, "narrow"),
        ("fsdp2", PAIR, "narrow, router"),
        pytest.param("tp2.fsdp2", FOUR, "narrow", marks=pytest.mark.slow),
    ],
)
def test_layouts_in_bfloat16_move_the_masters_alike(
    lanes: LaneProcesses, layout: str, replicas: Any, model: str
) -> None:
    """Sums in another order round otherwise, and small gradients then change their sign."""
    before = {f"master/{name}": x for name, x in MODELS[model]().float().named_parameters()}

    def moved(state: dict[str, Tensor]) -> Tensor:
        names = [name for name in state if name.startswith("master/")]
        return torch.cat([(state[name] - before[name]).flatten() for name in names])

    *_, expected = run(None, None, model, False)
    found = [one for one in lanes(on_lanes, layout, replicas, model, False) if one is not None]
    for *_, state in found:
        assert torch.cosine_similarity(moved(state), moved(expected), dim=0) > 0.95
        for name in expected:
            assert state[name].equal(found[0][3][name]), name


def dealt_on(groups: LaneGroups, layout: str, replicas: Any) -> Any:
    """Tokens that come to this lane, and whether it gets back what it has given."""
    gang = gang_of(groups, replicas, layout)
    assert gang is not None
    given = rollouts_of(0).select(torch.arange(24) if gang.rank == 1 else torch.arange(gang.rank))
    shards = Shards.of(gang)
    rows, own = shards.join(given)
    mine, given_back = shards.balance(rows)
    back_T = given_back(mine.behaviour_logprobs_T)[own]
    return int(mine.row_lengths().sum()), back_T.equal(given.behaviour_logprobs_T)


@pytest.mark.parametrize("layout", ["fsdp4", "tp2.fsdp2"])
def test_rows_are_dealt_out_so_that_lanes_have_equal_tokens(
    lanes: LaneProcesses, layout: str
) -> None:
    """Within one answer, of which the longest has fifteen tokens with its prompt."""
    found = lanes(dealt_on, layout, FOUR)
    assert all(good for _, good in found)
    tokens = [number for number, _ in found]
    assert max(tokens) - min(tokens) <= 15
    if layout == "tp2.fsdp2":
        assert tokens[0] == tokens[1]
        assert tokens[2] == tokens[3]


def test_no_row_is_lost_where_there_are_many_tokens() -> None:
    """In float32 the last of 10^8 tokens was at the very end, in a share that nobody has."""
    assert dealt(torch.tensor([10**8 // 64] * 64 + [2]), 4).bincount().tolist() == [16, 16, 16, 17]
    assert dealt(torch.tensor([5, 5, 0]), 2).tolist() == [0, 1, 1]
    assert dealt(torch.tensor([0, 0]), 2).tolist() == [0, 0]


def valued(gang: Gang | None) -> tuple[list[dict[str, float]], Tensor, dict[str, Tensor]]:
    """Two steps of a critic that the policy is made of: figures, values before them, weights."""
    model: Any = make_model()
    critic = critic_of(model)
    torch.nn.init.normal_(critic.score.weight)
    shards = WHOLE if gang is None else Shards.of(gang)
    shards.shard(critic)
    trainer = ValueTrainer(critic, CriticLoss(), CONFIG, shards)
    rollouts = rollouts_of(0)
    targets = ValueTargets(rollouts.pairs, rollouts.behaviour_logprobs_T, rollouts.advantages_T)
    if gang is not None:
        shares = [range(0), range(24), *[range(0)] * 2]
        if gang.size == 4:
            shares = [range(6), range(6, 8), range(8, 20), range(20, 24)]
        targets = targets.select(torch.tensor(list(shares[gang.rank]), dtype=torch.int64))
    values, figures = trainer.values(targets.pairs), []
    for _ in range(2):
        trainer.fold(targets)
        figures.append(trainer.finish())
    return figures, values, dict(whole_weights(critic))


def valued_on(groups: LaneGroups, layout: str, replicas: Any) -> Any:
    gang = gang_of(groups, replicas, layout)
    return None if gang is None else valued(gang)


@pytest.mark.parametrize(
    ("layout", "replicas"),
    [("tp2", PAIR), ("cp2", PAIR), pytest.param("tp2.fsdp2", FOUR, marks=pytest.mark.slow)],
)
def test_a_critic_learns_in_a_layout_as_on_one_lane(
    lanes: LaneProcesses, layout: str, replicas: Any
) -> None:
    figures, values, weights = valued(None)
    found = [one for one in lanes(valued_on, layout, replicas) if one is not None]
    everyone = torch.cat([values_here for _, values_here, _ in found])
    torch.testing.assert_close(everyone, values, rtol=0, atol=1e-9)
    for figures_here, _, weights_here in found:
        for here, expected in zip(figures_here, figures, strict=True):
            for name in expected.keys() - {"tokens_computed"}:
                assert here[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
        for name, weight in weights.items():
            torch.testing.assert_close(weights_here[name], weight, rtol=1e-9, atol=1e-9)


# A learner, its checkpoints and what it publishes


def learner_of(folder: Path, place: Place, checkpoint: str | None = None) -> Learner:
    """In single precision, in which experts can be computed as grouped products."""
    dtype = "float64" if folder.name.startswith("dense") else "float32"
    learner = Learner(
        ModelSource(str(folder if checkpoint is None else f"{checkpoint}/model"), dtype),
        ReasoningRecipe.model_validate({**RECIPE, "model": {"dtype": dtype}}),
        checkpoint,
    )
    learner.load(place)
    return learner


def saved_on(
    groups: LaneGroups, layout: str, replicas: Any, folder: Path, root: Path, other: str
) -> Any:
    """A step, a checkpoint and a further step; a step that goes on from another's checkpoint."""
    place = place_on(groups, replicas, root, layout)
    if place is None:
        return None
    learner = learner_of(folder, place)
    stepped(learner)
    weights = learner.weights()
    published = {
        name: (part.box, local_tensor(weights[name]).clone())
        for name, part in describe(weights).held.items()
    }
    resident = learner.state_bytes()
    learner.offload()
    saved = learner.save_checkpoint(str(root), 1, 1)
    learner.onload()
    return saved, published, resident, stepped(learner), stepped(learner_of(folder, place, other))


@pytest.mark.parametrize(
    ("layout", "replicas", "model", "held"),
    [
        ("tp2", PAIR, "dense", (0.5, 0.52)),
        ("cp2", PAIR, "dense", (1.0, 1.0)),
        ("ep2", PAIR, "mixture", (0.6, 0.8)),
        pytest.param("tp2.fsdp2", FOUR, "dense", (0.25, 0.3), marks=pytest.mark.slow),
    ],
)
def test_a_learner_in_a_layout_goes_on_from_one_lanes_checkpoint_and_back(
    lanes: LaneProcesses,
    folders: dict[str, Path],
    tmp_path: Path,
    layout: str,
    replicas: Any,
    model: str,
    held: tuple[float, float],
) -> None:
    folder = folders[model]
    through = learner_of(folder, Place(spill=tmp_path))
    first = stepped(through)
    alone = through.save_checkpoint(str(tmp_path / "alone"), 1, 1)
    second = stepped(through)

    found = lanes(saved_on, layout, replicas, folder, tmp_path / "divided", alone)
    found = [one for one in found if one is not None]
    for _, _, resident, went_on, resumed in found:
        assert held[0] <= resident / through.state_bytes() <= held[1]
        assert_same(went_on, second)
        assert_same(resumed, second)
    saved = found[0][0]
    assert_same(stepped(learner_of(folder, Place(spill=tmp_path), saved)), second)
    for name in found[0][1]:
        together = torch.full_like(first[name], torch.nan)
        for _, published, *_ in found:
            box, here = published[name]
            together[
                tuple(slice(n, n + m) for n, m in zip(box.offsets, box.shape, strict=True))
            ] = here
        torch.testing.assert_close(together, first[name], rtol=1e-5, atol=1e-6)


def test_adapters_are_not_trained_by_lanes_that_divide_in_two_ways() -> None:
    recipe = ReasoningRecipe.model_validate({"model": {"lora_rank": 4}})
    names = [one.name for one in Learner(ModelSource(""), recipe).layouts("cpu", 4)]
    assert names == [
        *("one", "fsdp2", "fsdp3", "fsdp4", "tp2", "tp3", "tp4", "cp2", "cp3", "cp4"),
    ]


def test_a_plan_may_name_the_embedding_and_other_kinds_are_refused() -> None:
    """Some versions of transformers name it in the plan of a tied model; it is divided anyway."""
    model: Any = make_model()
    layers = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    model.config.base_model_tp_plan = {**layers, "embed_tokens": "embedding_rowwise"}
    assert _plan_of(model) == layers
    model.config.base_model_tp_plan = {**layers, "layers.*.mlp.gate_proj": "embedding_rowwise"}
    with pytest.raises(UserError, match="cannot be divided over lanes"):
        _plan_of(model)


_SMALL: dict[str, Any] = {
    "vocab_size": 7, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BESIDE: dict[str, tuple[Callable[[], Any], str]] = {
    "an activation": (lambda: ApertusConfig(**_SMALL), r"layers\.0\.mlp\.act_fn\.alpha_p lies"),
    "norms of all heads": (
        lambda: CohereConfig(**_SMALL, use_qk_norm=True),
        r"layers\.0\.self_attn\.q_norm\.weight lies",
    ),
    "a bias": (lambda: PhiConfig(**_SMALL), "a head with a bias"),
}


def divided_on(groups: LaneGroups, name: str) -> str:
    """How a model is refused."""
    gang = gang_of(groups, PAIR, "tp2")
    if gang is None:
        return ""
    model: Any = AutoModelForCausalLM.from_config(BESIDE[name][0]())
    with pytest.raises(UserError) as caught:
        Shards.of(gang).shard(model)
    return str(caught.value)


@pytest.mark.parametrize("name", BESIDE)
def test_what_lanes_would_train_apart_is_refused(lanes: LaneProcesses, name: str) -> None:
    """A lane has the gradient of its own channels alone, so copies of a parameter drift apart."""
    for told in lanes(divided_on, name)[:2]:
        assert re.search(f"{BESIDE[name][1]}.*fsdpN divide any model", told), told
