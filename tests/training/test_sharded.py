"""A policy in shards over a gang of lanes does what it does on one lane.

Each test runs on four processes, of which the first two, or all in two replicas, are a gang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from m2flow.algorithms.grpo import GRPOLoss
from m2flow.errors import RunFailed, UserError
from m2flow.flow import Batch, Gang, Place, Ragged
from m2flow.flow.worker import grid_of
from m2flow.models.causal_lm import TinySpec, build_tiny, load_model
from m2flow.models.critic import load_critic
from m2flow.models.tokenizer import character_tokenizer
from m2flow.runtime.transport.groups import LaneGroups, lane_sets_of
from m2flow.runtime.transport.wire import pack
from m2flow.runtime.weights.manifest import local_tensor
from m2flow.training import checkpoint
from m2flow.training.optimizer import AdamWConfig, NotFinite, SumOptimizer
from m2flow.training.policy import PolicyTrainer, PolicyTrainerConfig
from m2flow.training.rollouts import TokenRollouts
from m2flow.training.schedule import Schedule
from m2flow.training.sharded import WHOLE, Shards, WholeModel, whole, whole_weights
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.workers import Critic, Learner, ModelSource, Reference
from tests.training.lane_processes import LaneProcesses
from tests.training.tiny_policy import make_model, make_rollouts

PAIR = ((0, 1),)
FOUR = ((0, 1, 2, 3),)
TWO_PAIRS = ((0, 1), (2, 3))

ADAMW = AdamWConfig(
    learning_rate=1e-2,
    betas=(0.9, 0.99),
    weight_decay=0.1,
    max_grad_norm=0.3,
    schedule=Schedule("linear", 0, 10),
)
CONFIG = PolicyTrainerConfig(optimizer=ADAMW, tokens_per_microbatch=20)
FULL = GRPOLoss(kl_coefficient=0.05, entropy_coefficient=0.01)

SHARES = {
    PAIR: [
        [[range(5), range(5, 12)], [range(12, 24), range(0)]],
        [[range(0), range(24)]],
        [[range(1), range(1, 20)], [range(0), range(0)], [range(20, 24), range(0)]],
    ],
    TWO_PAIRS: [
        [[range(3), range(3, 12), range(12, 20), range(20, 24)]],
        [[range(12), range(12, 24), range(0), range(0)]],
        [[range(0), range(1), range(1, 2), range(2, 24)]],
    ],
}
"""For each optimizer step the folds, and for each fold the rows of each lane: uneven, some none."""


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(4) as lanes:
        yield lanes


def gang_of(groups: LaneGroups, replicas: Any, layout: str = "") -> Gang | None:
    """This lane's, or None on a lane that takes no part; the layout is `fsdpN` if not another."""
    grid = grid_of(layout)
    groups.ensure(lane_sets_of(replicas, grid))
    lane = dist.get_rank()
    for number, lanes in enumerate(replicas):
        if lane in lanes:
            gang = Gang(
                lanes.index(lane),
                len(lanes),
                number,
                len(replicas),
                mesh=groups.mesh(replicas),
                layout=layout or f"fsdp{len(lanes)}",
            )
            return gang if grid is None else replace(gang, grid=groups.grid(replicas, grid))
    return None


def trainer_on(gang: Gang | None, algorithm: GRPOLoss = FULL) -> PolicyTrainer:
    model, shards = make_model(), WHOLE if gang is None else Shards.of(gang)
    shards.shard(model)
    return PolicyTrainer(model, algorithm, CONFIG, shards)


def rollouts_of(step: int) -> TokenRollouts:
    rollouts = make_rollouts(step, groups=6)
    return replace(rollouts, reference_logprobs_T=rollouts.behaviour_logprobs_T - 0.3)


def rows(rollouts: TokenRollouts, some: range) -> TokenRollouts:
    return rollouts.select(torch.tensor(list(some), dtype=torch.int64))


Run = tuple[list[dict[str, float]], list[Tensor], dict[str, Tensor], dict[str, Tensor]]


def alone(algorithm: GRPOLoss = FULL) -> Run:
    """Three steps on one lane: figures, log-probabilities before each, weights, trainer state."""
    trainer = trainer_on(None, algorithm)
    figures, logprobs = [], []
    for step in range(3):
        rollouts = rollouts_of(step)
        logprobs.append(trainer.logprobs(rollouts))
        trainer.fold(rollouts)
        figures.append(trainer.finish())
    return (
        figures,
        logprobs,
        dict(whole_weights(trainer.model)),
        dict(trainer.optimizer.state_items()),
    )


def on_gangs(groups: LaneGroups, replicas: Any, algorithm: GRPOLoss) -> Run | None:
    """The same, where each replica folds its lanes' shares; the lane's own log-probabilities."""
    gang = gang_of(groups, replicas)
    if gang is None:
        return None
    trainer = trainer_on(gang, algorithm)
    figures, logprobs = [], []
    lane = dist.get_rank()
    for step, folds in enumerate(SHARES[replicas]):
        rollouts = rollouts_of(step)
        logprobs.append(trainer.logprobs(rows(rollouts, range(7 * lane, 24 - lane))))
        for shares in folds:
            everyone = [shares[other] for other in replicas[gang.replica]]
            if any(everyone):  # a replica that has no call does not meet the other one
                trainer.fold(rows(rollouts, shares[lane]))
        figures.append(trainer.finish())
    return (
        figures,
        logprobs,
        dict(whole_weights(trainer.model)),
        dict(trainer.optimizer.state_items()),
    )


@pytest.mark.parametrize("replicas", [PAIR, TWO_PAIRS])
@pytest.mark.parametrize("algorithm", [FULL, GRPOLoss()], ids=["full", "dropping"])
def test_gangs_with_unequal_shares_make_the_steps_of_one_lane(
    lanes: LaneProcesses, replicas: Any, algorithm: GRPOLoss
) -> None:
    figures, logprobs, weights, state = alone(algorithm)
    assert figures[0]["grad_norm"] > 0.3  # clipping is put to the test
    found = [run for run in lanes(on_gangs, replicas, algorithm) if run is not None]
    assert len(found) == sum(map(len, replicas))
    for lane, (figures_here, logprobs_here, weights_here, state_here) in enumerate(found):
        assert figures_here == found[0][0]
        for here, expected in zip(figures_here, figures, strict=True):
            for name in expected.keys() - {"tokens_computed"}:
                assert here[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
        for step, expected_T in enumerate(logprobs):
            lengths = rollouts_of(step).pairs.completion_lengths_B.tolist()
            own = torch.cat([expected_T[:0], *expected_T.split(lengths)[7 * lane : 24 - lane]])
            torch.testing.assert_close(logprobs_here[step], own, rtol=0, atol=1e-10)
        for here, expected in ((weights_here, weights), (state_here, state)):
            assert here.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(here[name], expected[name], rtol=1e-9, atol=1e-10)


def refusing(groups: LaneGroups) -> list[str]:
    """What each lane says when one of them has bad rollouts, and that the next step is good."""
    gang = gang_of(groups, PAIR)
    if gang is None:
        return []
    trainer = trainer_on(gang, GRPOLoss())
    rollouts = make_rollouts()
    bad = replace(rollouts, advantages_T=rollouts.advantages_T / 0)
    trainer.fold(bad if gang.rank == 1 else rollouts)
    with pytest.raises(NotFinite) as caught:
        trainer.finish()
    with pytest.raises(RunFailed if gang.rank else KeyError) as other:
        failing_on_the_first(gang, trainer.shards)
    trainer.fold(rollouts)
    trainer.finish()
    return [str(caught.value), str(other.value)]


def failing_on_the_first(gang: Gang, shards: Shards) -> None:
    with shards.together():
        if gang.rank == 0:
            raise KeyError("absent")


def test_what_one_lane_refuses_is_refused_on_all(lanes: LaneProcesses) -> None:
    first, second, *_ = lanes(refusing)
    assert second[0].startswith(first[0]), "and says what was wrong with its own"
    assert "advantages: " in second[0].removeprefix(first[0])
    assert (first[1], second[1]) == ("'absent'", "KeyError on another lane of the gang: 'absent'")


def not_finite(groups: LaneGroups) -> tuple[str, bool] | None:
    gang = gang_of(groups, FOUR)
    assert gang is not None
    trainer = trainer_on(gang, GRPOLoss())
    before = dict(whole_weights(trainer.model))
    trainer.fold(make_rollouts())
    if gang.rank == 2:
        gradient: Any = dict(trainer.model.named_parameters())["model.norm.weight"].grad
        gradient.to_local()[0] = float("nan")
    with pytest.raises(NotFinite) as caught:
        trainer.finish()
    after = dict(whole_weights(trainer.model))
    return str(caught.value), all(after[name].equal(before[name]) for name in before)


def test_a_gradient_that_is_not_finite_stops_every_lane_and_is_named(lanes: LaneProcesses) -> None:
    """On a gang of four, where the seven rows of the embedding leave one lane with a single one."""
    said = lanes(not_finite)
    assert len(set(said)) == 1
    assert "gradients of 1 of 26 parameters are not finite (model.norm.weight)" in said[0][0]
    assert said[0][1]


def matrix_of_two_rows(gang: Gang | None) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Two optimizer steps on a layer with fewer rows than the gang has lanes, one after reading."""
    torch.manual_seed(0)
    layer, shards = torch.nn.Linear(3, 2).double(), WHOLE if gang is None else Shards.of(gang)
    shards.shard(layer)
    optimizer = SumOptimizer(layer.named_parameters(), ADAMW, shards)
    for _ in range(2):
        state = dict(optimizer.state_items())
        optimizer = SumOptimizer(layer.named_parameters(), ADAMW, shards)
        optimizer.load_state_dict(state)
        layer(torch.arange(6.0).double().view(2, 3)).square().sum().backward()
        result = optimizer.step(torch.ones(1).double(), denominator=0, all_reduce=None)
    return result.grad_norm, whole(layer.weight), dict(optimizer.state_items())


def with_empty_pieces(groups: LaneGroups) -> tuple[float, Tensor, dict[str, Tensor]]:
    return matrix_of_two_rows(gang_of(groups, FOUR))


def test_a_lane_may_have_no_piece_of_a_parameter(lanes: LaneProcesses) -> None:
    norm, weight, state = matrix_of_two_rows(None)
    for norm_here, weight_here, state_here in lanes(with_empty_pieces):
        assert norm_here == pytest.approx(norm, rel=1e-12)
        torch.testing.assert_close(weight_here, weight, rtol=0, atol=1e-12)
        torch.testing.assert_close(state_here, state, rtol=0, atol=1e-12)


# A learner, its checkpoints and its context switches

RECIPE = {
    "steps": 8,
    "model": {"dtype": "float64"},
    "training": {"tokens_per_microbatch": 40},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder. Float64; the norms are float32 all the same, so that 1e-6 is rounding."""
    path = tmp_path_factory.mktemp("model")
    spec = TinySpec(
        hidden_size=16, num_hidden_layers=2, intermediate_size=24, max_position_embeddings=64
    )
    tokenizer = character_tokenizer("0123456789+=#")
    model = build_tiny(
        spec, vocab_size=15, eos_token_id=13, pad_token_id=14, seed=0, dtype=torch.float64
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def samples() -> Batch:
    rollouts = make_rollouts(5, groups=3)
    pairs = rollouts.pairs
    lengths = pairs.completion_lengths_B.tolist()
    count = len(lengths)
    return Batch(
        {
            "prompt": [""] * count,
            "text": [""] * count,
            "answer": [""] * count,
            "reward": [0.0] * count,
            "finish_reason": ["stop"] * count,
            "prompt_ids": Ragged(pairs.prompt_ids_P, pairs.prompt_lengths_B.tolist()),
            "completion_ids": Ragged(pairs.completion_ids_T, lengths),
            "behaviour_logprobs": Ragged(rollouts.behaviour_logprobs_T, lengths),
            "advantage": torch.stack([row[0] for row in rollouts.advantages_T.split(lengths)]),
        }
    )


def learner_at(folder: Path, place: Place, checkpoint: str | None = None) -> Learner:
    model = ModelSource(str(folder), "float64")
    learner = Learner(model, ReasoningRecipe.model_validate(RECIPE), checkpoint)
    learner.load(place)
    return learner


def stepped(learner: Learner) -> dict[str, Tensor]:
    """Weights after one step on the same samples, which the second lane of a gang takes alone."""
    batch = samples()
    if learner.place.gang.size > 1:
        batch = batch.select(list(range(12)) if learner.place.gang.rank == 1 else [])
    batch = learner.logprobs(batch)
    learner.train(batch)
    learner.train_finish()
    return learner.parameters()


def place_on(groups: LaneGroups, replicas: Any, spill: Path, layout: str = "") -> Place | None:
    gang = gang_of(groups, replicas, layout)
    if gang is None:
        return None
    everyone = tuple(lane for lanes in replicas for lane in lanes)
    lane = dist.get_rank()
    place = Place(lane, everyone.index(lane), len(everyone), gang=gang, spill=spill)
    return replace(place, all_reduce=groups.all_reduce(everyone))


def saved_by_pair(groups: LaneGroups, folder: Path, root: Path) -> Any:
    place = place_on(groups, PAIR, root)
    if place is None:
        return None
    learner = learner_at(folder, place)
    stepped(learner)
    resident = learner.state_bytes()
    learner.offload()
    saved = learner.save_checkpoint(str(root), 1, 1)
    learner.onload()
    shards = {name: tuple(t.to_local().shape) for name, t in learner.weights().items()}
    return saved, stepped(learner), resident, shards


def resumed_by_pair(groups: LaneGroups, saved: str, root: Path) -> Any:
    place = place_on(groups, PAIR, root)
    if place is None:
        return None
    return stepped(learner_at(Path(saved) / "model", place, saved))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_checkpoints_go_from_a_gang_to_one_lane_and_back(
    lanes: LaneProcesses, folder: Path, tmp_path: Path
) -> None:
    through = learner_at(folder, Place(spill=tmp_path))
    first, second = stepped(through), stepped(through)
    assert not first["model.norm.weight"].equal(second["model.norm.weight"])

    (saved, pair, resident, shards), (_, other_pair, _, _), *_ = lanes(
        saved_by_pair, folder, tmp_path / "gang"
    )
    assert_same(pair, second)
    assert_same(other_pair, pair)
    assert shards["model.embed_tokens.weight"] == (8, 16)  # of 15 rows
    assert 0.4 < resident / through.state_bytes() < 0.6
    assert checkpoint.resume_point(tmp_path / "gang") == Path(saved)
    config = ModelSource(f"{saved}/model").load("cpu").config
    assert config.architectures == ["Qwen2ForCausalLM"]
    assert_same(stepped(learner_at(Path(saved) / "model", Place(spill=tmp_path), saved)), second)

    lone = learner_at(folder, Place(spill=tmp_path))
    stepped(lone)
    saved = lone.save_checkpoint(str(tmp_path / "lone"), 1, 1)
    for found in lanes(resumed_by_pair, saved, tmp_path)[:2]:
        assert_same(found, second)


def saved_on(
    groups: LaneGroups, kind: type[Learner | Critic], words: Any, folder: Path, root: Path, on: Any
) -> dict[str, Tensor] | None:
    """What a worker on some lanes of the world has written its part of a checkpoint of."""
    if len(on) == 1:
        place = Place(dist.get_rank(), spill=root) if dist.get_rank() in on else None
    else:
        place = place_on(groups, (on,), root)
    if place is None:
        return None
    recipe = ReasoningRecipe.model_validate({**RECIPE, **words})
    worker = kind(ModelSource(str(folder), "float64"), recipe)
    worker.load(place)
    worker.save_part(str(root), 1)
    return worker.parameters()


@pytest.mark.parametrize("on", [(1,), (2, 3)])
@pytest.mark.parametrize("kind", [Learner, Critic])
def test_lanes_that_are_not_the_first_of_the_world_write_the_model(
    lanes: LaneProcesses, folder: Path, tmp_path: Path, kind: Any, on: Any
) -> None:
    """transformers wrote in the world's first process alone: `model/` held the tokenizer."""
    words = {"algorithm": {"name": "ppo"}} if kind is Critic else {}
    found = lanes(saved_on, kind, words, folder, tmp_path, on)
    path = checkpoint.begin(tmp_path, 1) / kind.part / "model"
    written = (load_critic if kind is Critic else load_model)(path, torch.float64).state_dict()
    assert written.keys() == found[on[0]].keys()
    assert all(tensor.equal(found[on[0]][name]) for name, tensor in written.items())


def test_a_model_of_which_nothing_was_written_is_refused(tmp_path: Path) -> None:
    class Silent:
        def save_pretrained(self, save_directory: str, state_dict: Any) -> None:
            Path(save_directory).mkdir()

    with pytest.raises(UserError, match=r"config\.json is missing"):
        checkpoint.write_model(tmp_path, WholeModel(Silent(), {}), None)


def publish(learner: Learner) -> None:
    """Copy the weights out, as is done for other lanes."""
    tensors = {name: local_tensor(weight) for name, weight in learner.weights().items()}
    for buffer in pack(tensors).buffers:
        buffer.copy_to(np.empty(buffer.nbytes, np.uint8))


def stepped_with_switches(
    groups: LaneGroups, folder: Path, root: Path, switching: bool
) -> tuple[list[dict[str, float]], dict[str, Tensor]] | None:
    """Three steps of two mini-batches; if wanted, the learner is away between any two calls."""
    place = place_on(groups, PAIR, root)
    if place is None:
        return None
    learner = learner_at(folder, place)
    others: list[Tensor] = []

    def switch() -> None:
        if switching:
            learner.offload()
            others.append(torch.ones(10_000))  # memory is not where it was
            learner.onload()

    figures = []
    switch()
    for _ in range(3):
        batch = learner.logprobs(samples().select([6 * place.rank + row for row in range(6)]))
        switch()
        for some in (range(2), range(2, 6)):
            learner.train(batch.select(list(some)))
            switch()
            figures.append(learner.train_finish())
            switch()
        publish(learner)
        switch()
    return figures, learner.parameters()


def test_a_gang_that_published_and_was_put_away_gathers_the_weights_it_steps(
    lanes: LaneProcesses, folder: Path, tmp_path: Path
) -> None:
    """Handing shards to NumPy made them unfit to be emptied in place; they were replaced, and
    passes went on with the old ones."""
    expected = lanes(stepped_with_switches, folder, tmp_path, False)
    found = lanes(stepped_with_switches, folder, tmp_path, True)
    ratios = [figures["ratio"] for figures in expected[0][0]]
    assert len({1.0, *ratios[1::2]}) == 4  # each step is seen by the next pass
    for (figures, weights), (figures_expected, weights_expected) in zip(
        found[:2], expected[:2], strict=True
    ):
        assert figures == figures_expected
        assert weights.keys() == weights_expected.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, weights_expected[name]), name


def reference_of_pair(groups: LaneGroups, folder: Path, root: Path) -> Any:
    place = place_on(groups, PAIR, root)
    if place is None:
        return None
    reference = Reference(
        ModelSource(str(folder), "float64"), ReasoningRecipe.model_validate(RECIPE)
    )
    reference.load(place)
    batch = samples().select([] if place.rank else list(range(12)))
    return reference.logprobs(batch)["reference_logprobs"].values


def test_a_reference_on_a_gang_gives_what_it_gives_on_one_lane(
    lanes: LaneProcesses, folder: Path, tmp_path: Path
) -> None:
    expected = learner_at(folder, Place(spill=tmp_path)).logprobs(samples())["old_logprobs"]
    first, second, *_ = lanes(reference_of_pair, folder, tmp_path)
    torch.testing.assert_close(first, expected.values, rtol=0, atol=1e-6)
    assert second.numel() == 0
