"""The workers by themselves, against slow loops and against their own promises."""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from m2flow.errors import RunFailed, UserError
from m2flow.flow import Batch, Place, Ragged
from m2flow.flow.worker import Gang
from m2flow.rewards.reward import WeightedReward
from m2flow.runtime.driver.runner import _mean
from m2flow.training.division import Division
from m2flow.training.optimizer import NOT_TAKEN
from m2flow.training.skipping import too_many
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.workers import (
    OUTCOME,
    Critic,
    Generator,
    Learner,
    ModelSource,
    Reference,
    Verifier,
    gae,
    group_advantage,
    outcome,
    reward_to_go,
    shape_reward,
    whiten,
)
from m2flow.workloads.reasoning.workers.columns import kept_rows, one_longer, token_pairs
from m2flow.workloads.reasoning.workers.generator import _cache_bytes

MakeRecipe = Any

GROUP = 4


@pytest.fixture(autouse=True)
def threads(one_thread: None) -> None:
    """All of this file computes in this process."""


def loaded(worker: Any, **place: Any) -> Any:
    worker.load(Place(**place))
    return worker


def make_generator(model: ModelSource, **settings: Any) -> Generator:
    wanted = {"samples_per_prompt": GROUP, "max_new_tokens": 6, **settings}
    generator: Generator = loaded(Generator(model, **wanted))
    return generator


def drawn(pieces: Iterator[Batch]) -> dict[int, tuple[list[int], list[float], str]]:
    """What was drawn for each item, in whatever pieces it came; no item comes twice."""
    found: dict[int, tuple[list[int], list[float], str]] = {}
    for piece in filter(len, pieces):  # one without items listens for what has arrived
        columns = ("completion_ids", "behaviour_logprobs", "finish_reason")
        for item, ids, logprobs, reason in zip(
            piece.ids, *(piece[name] for name in columns), strict=True
        ):
            assert item not in found
            found[item] = (ids.tolist(), logprobs.tolist(), reason)
    return found


@pytest.fixture(scope="module")
def recipe(tiny_recipe: MakeRecipe) -> Any:
    return tiny_recipe()


@pytest.fixture(scope="module")
def prompts(recipe: Any, warmed: ModelSource) -> Batch:
    return ReasoningExperiment(recipe, warmed).batch(0)


@pytest.fixture(scope="module")
def samples(recipe: Any, warmed: ModelSource, prompts: Batch) -> Batch:
    """Scored samples of four prompts, in order of item, with their advantages."""
    pieces = list(make_generator(warmed).generate(prompts))
    joined = Batch.concat(pieces)
    in_order = joined.select(sorted(range(len(joined)), key=joined.ids.__getitem__))
    verifier = loaded(Verifier(warmed, (WeightedReward("addition"),)))
    return group_advantage(verifier.score(in_order), group_size=GROUP)


@pytest.mark.parametrize("kind", [Generator, Verifier, Learner, Reference, Critic])
def test_a_worker_that_is_not_loaded_is_light(kind: Any, recipe: Any) -> None:
    """It is made to be traced and sent: no model, not even a folder."""
    source = ModelSource("no/such/folder")
    arguments: dict[Any, Any] = {
        Generator: {"samples_per_prompt": 2, "max_new_tokens": 3},
        Verifier: {"rewards": (WeightedReward("addition"),)},
    }
    worker = kind(source, **arguments.get(kind, {"recipe": recipe}))
    assert len(pickle.dumps(worker)) < 5000
    with pytest.raises(UserError, match="does not exist"):
        worker.load(Place())


def test_layouts_are_known_before_a_worker_is_loaded(warmed: ModelSource, recipe: Any) -> None:
    assert recipe.model.num_key_value_heads == 2
    generator = Generator(warmed, samples_per_prompt=2, max_new_tokens=3)
    known = generator.layouts("cpu", 3)
    assert [(one.name, one.lanes) for one in known] == [("one", 1), ("tp2", 2), ("tp3", 3)]
    assert [one.obstacle() for one in known] == [
        None,
        None,
        "2 key-value heads cannot be divided by 3",
    ]
    for worker in (Learner(warmed, recipe), Critic(warmed, recipe), Reference(warmed, recipe)):
        names = [one.name for one in worker.layouts("gpu", 3) if one.obstacle() is None]
        assert names == ["one", "fsdp2", "fsdp3", "tp2", "cp2", "cp3"]
    assert [one.name for one in Verifier(warmed).layouts("cpu", 8)] == ["one"]


# Generator


def test_an_engine_of_another_package_is_refused_on_a_gang(warmed: ModelSource) -> None:
    generator = Generator(warmed, samples_per_prompt=2, max_new_tokens=3, engine="vllm")
    with pytest.raises(UserError, match="Generator: has no layout of 2 lanes"):
        generator.load(Place(gang=Gang(size=2)))


def test_every_sample_comes_once_with_the_columns_of_its_prompt(
    warmed: ModelSource, prompts: Batch
) -> None:
    pieces = list(make_generator(warmed).generate(prompts.select([2, 0])))
    assert sorted(item for piece in pieces for item in piece.ids) == [*range(4), *range(8, 12)]
    for piece in pieces:
        for row, item in enumerate(piece.ids):
            for name in ("prompt", "answer", "seed"):
                assert piece[name][row] == prompts[name][item // GROUP]


def test_a_completion_ends_at_its_end(warmed: ModelSource, prompts: Batch) -> None:
    end = warmed.tokenizer().eos_token_id
    found = drawn(make_generator(warmed, max_new_tokens=3).generate(prompts))
    for ids, logprobs, reason in found.values():
        assert len(ids) == len(logprobs) <= 3
        assert (ids[-1] == end) == (reason == "stop")
        assert end not in ids[:-1]
        assert reason == "stop" or len(ids) == 3
        assert all(logprob <= 0 for logprob in logprobs)
    assert {reason for *_, reason in found.values()} == {"stop", "length"}


def test_what_is_drawn_depends_on_the_item_and_not_on_its_company(
    warmed: ModelSource, prompts: Batch
) -> None:
    together = drawn(make_generator(warmed).generate(prompts))
    alone = {}
    for row in (3, 1, 0, 2):
        alone |= drawn(make_generator(warmed, max_running=3).generate(prompts.select([row])))
    assert together.keys() == alone.keys()
    for item, (ids, logprobs, reason) in together.items():
        assert (alone[item][0], alone[item][2]) == (ids, reason)
        assert alone[item][1] == pytest.approx(logprobs, abs=1e-5)


def test_more_prompts_can_be_fed_while_it_runs(warmed: ModelSource, prompts: Batch) -> None:
    together = drawn(make_generator(warmed).generate(prompts))
    running = make_generator(warmed).generate(prompts.select([1]))
    pieces = [next(running)]
    fed: Any = prompts.select([3, 0])
    while True:
        try:
            pieces.append(running.send(fed))  # type: ignore[attr-defined]
        except StopIteration:
            break
        fed = None
    found = drawn(iter(pieces))
    assert sorted(found) == [*range(8), *range(12, 16)]
    assert all(found[item][0] == together[item][0] for item in found)


def test_a_call_that_is_withdrawn_leaves_nothing_running(
    warmed: ModelSource, prompts: Batch
) -> None:
    """Its items are drawn again from their prompts, and come out as if nothing had happened."""
    generator = loaded(Generator(warmed, samples_per_prompt=4, max_new_tokens=6))
    call = generator.generate(prompts)
    next(call)
    assert generator.engine.busy
    call.close()
    assert not generator.engine.busy
    fresh = loaded(Generator(warmed, samples_per_prompt=4, max_new_tokens=6))
    again, never = (
        {
            item: row.tolist()
            for batch in one.generate(prompts)
            if len(batch)
            for item, row in zip(batch.ids, batch["completion_ids"], strict=True)
        }
        for one in (generator, fresh)
    )
    assert again == never


def test_greedy_answers_need_no_seed(warmed: ModelSource, prompts: Batch) -> None:
    other_seeds = prompts.with_columns(seed=[seed + 1 for seed in prompts["seed"]])
    options: dict[str, Any] = {"samples_per_prompt": 1, "temperature": 0.0}
    first = drawn(make_generator(warmed).generate(prompts, **options))
    second = drawn(make_generator(warmed).generate(other_seeds, **options))
    assert sorted(first) == [0, 1, 2, 3]
    assert {item: ids for item, (ids, *_) in first.items()} == {
        item: ids for item, (ids, *_) in second.items()
    }
    sampled = drawn(make_generator(warmed).generate(other_seeds))
    assert sampled != drawn(make_generator(warmed).generate(prompts))


def test_completions_carry_the_version_that_drew_them(warmed: ModelSource, prompts: Batch) -> None:
    generator = loaded(Generator(warmed, samples_per_prompt=2, max_new_tokens=2), version=3)
    assert {v for piece in generator.generate(prompts) for v in piece["version"]} == {(3, 3)}
    generator.offload()
    generator.onload()
    generator.install(warmed.load("cpu").state_dict(), 4)
    assert {v for piece in generator.generate(prompts) for v in piece["version"]} == {(4, 4)}


# Verifier and pure stages


def test_rewards_by_hand(samples: Batch, warmed: ModelSource) -> None:
    tokenizer = warmed.tokenizer()
    rewards = set()
    for row in range(len(samples)):
        values = samples.row(row)
        ids = [token for token in values["completion_ids"] if token != tokenizer.eos_token_id]
        a, b = values["prompt"].removesuffix("=").split("+")
        assert values["text"] == tokenizer.decode(ids)
        right = values["text"] == f"#{int(a) + int(b)}" and values["finish_reason"] == "stop"
        assert values["reward"] == float(right)
        rewards.add(values["reward"])
    assert rewards == {0.0, 1.0}


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_against_a_loop(samples: Batch, normalize_std: bool) -> None:
    found = group_advantage(samples, group_size=GROUP, normalize_std=normalize_std)["advantage"]
    for start in range(0, len(samples), GROUP):
        rewards = samples["reward"][start : start + GROUP]
        spread = statistics.pstdev(rewards) + 1e-6 if normalize_std else 1.0
        expected = [(reward - statistics.mean(rewards)) / spread for reward in rewards]
        assert found[start : start + GROUP].tolist() == pytest.approx(expected)
    assert any(found != 0)


def test_token_ids_stay_behind(samples: Batch) -> None:
    left = outcome(samples)
    assert tuple(left.columns) == (*OUTCOME, "version", "advantage")
    assert left["advantage"] == samples["advantage"].tolist()
    generated = samples.only(*(name for name in samples.columns if name != "advantage"))
    assert tuple(outcome(generated).columns) == (*OUTCOME, "version")
    lengths = samples["completion_ids"].lengths
    tokens = generated.with_columns(advantages=Ragged(torch.ones(sum(lengths)) * 2, lengths))
    assert outcome(tokens)["advantage"] == [2.0] * len(samples)
    assert left["num_tokens"] == [len(ids) for ids in samples["completion_ids"]]
    assert left["num_prompt_tokens"] == [len(ids) for ids in samples["prompt_ids"]]


# Learner and Reference


def slow_logprobs(model: ModelSource, samples: Batch) -> list[list[float]]:
    """One forward pass of transformers for every sample."""
    policy = model.load("cpu").double()
    found = []
    for prompt, completion in zip(samples["prompt_ids"], samples["completion_ids"], strict=True):
        with torch.no_grad():
            logits = policy(torch.cat([prompt, completion])[None]).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(1, completion[:, None])[:, 0].tolist())
    return found


def test_log_probabilities_of_all_three_agree(
    samples: Batch, warmed: ModelSource, recipe: Any
) -> None:
    """Those of the generator as it drew, of the learner, of the reference; and a plain loop's."""
    learner = loaded(Learner(warmed, recipe)).logprobs(samples)["old_logprobs"]
    reference = loaded(Reference(warmed, recipe)).logprobs(samples)["reference_logprobs"]
    for row, expected in enumerate(slow_logprobs(warmed, samples)):
        for column in (samples["behaviour_logprobs"], learner, reference):
            assert isinstance(column, Ragged)
            assert column[row].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="module")
def double(tiny_recipe: MakeRecipe, warmed: ModelSource) -> tuple[Any, ModelSource]:
    """Recipe and model in float64: its norms are float32 all the same, so 1e-7 is rounding."""
    return tiny_recipe(model={"dtype": "float64"}), ModelSource(warmed.path, "float64")


def in_double(samples: Batch) -> Batch:
    logprobs = samples["behaviour_logprobs"]
    return samples.with_columns(
        behaviour_logprobs=Ragged(logprobs.values.double(), logprobs.lengths)
    )


def test_the_pieces_of_a_mini_batch_do_not_matter(
    samples: Batch, double: tuple[Any, ModelSource]
) -> None:
    recipe, model = double
    whole, pieces = loaded(Learner(model, recipe)), loaded(Learner(model, recipe))
    samples = in_double(samples)
    whole.train(samples)
    for rows in ([5, 0], [1, 2, 3, 4], list(range(15, 5, -1))):
        assert pieces.train(samples.select(rows)).ids == tuple(samples.ids[row] for row in rows)
    first, second = whole.train_finish(), pieces.train_finish()
    assert first["samples"] == 16
    assert first["grad_norm"] > 0
    for name in first.keys() - {"tokens_computed"}:
        assert second[name] == pytest.approx(first[name], rel=1e-6, abs=1e-9), name
    before, after = whole.parameters(), pieces.parameters()
    start = model.load("cpu").state_dict()
    assert any(not before[name].equal(start[name]) for name in before)
    for name in before:
        assert torch.allclose(before[name], after[name], rtol=1e-4, atol=1e-6)


def test_the_largest_gap_to_the_engine_is_that_of_all_lanes(
    samples: Batch, warmed: ModelSource, recipe: Any
) -> None:
    """One token that the engine got wrong is lost in a mean."""

    def as_with_another(tensors: Any, largest: float) -> None:
        for found in tensors:
            if found.shape == (2,):
                assert found[0] == 0, "the other lane's place"
                found[0] = largest

    learner = loaded(Learner(warmed, recipe))
    logprobs = learner.logprobs(samples)["old_logprobs"]
    row = int(samples["advantage"].abs().argmax())
    wrong = [values.clone() for values in logprobs.rows()]
    wrong[row][0] -= 3.0
    changed = samples.with_columns(behaviour_logprobs=Ragged(torch.cat(wrong), logprobs.lengths))
    for other, expected in ((0.0, 3.0), (4.0, 4.0)):
        place = {"rank": 1, "size": 2, "all_reduce": partial(as_with_another, largest=other)}
        one = loaded(Learner(warmed, recipe), **place)
        one.train(changed)
        figures = one.train_finish()
        assert figures["engine_gap_max"] == pytest.approx(expected, abs=1e-4)
        assert figures["engine_gap"] < 1


def test_the_gap_to_the_engine_is_that_of_what_the_present_weights_drew(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    """With staleness too, where other samples are further away for their age."""
    learner = loaded(Learner(warmed, tiny_recipe(max_staleness=1, minibatches=1)), version=3)
    logprobs = learner.logprobs(samples)["old_logprobs"]
    fresh = [row % 2 == 0 for row in range(len(samples))]
    rows = zip(logprobs.rows(), fresh, strict=True)
    apart = torch.cat([values - (0.5 if new else 2.0) for values, new in rows])
    versions = [(3, 3) if new else (2, 3) for new in fresh]
    drawn_with = Ragged(apart, logprobs.lengths)
    some = samples.with_columns(behaviour_logprobs=drawn_with, version=versions)
    learner.train(some)
    figures = learner.train_finish()
    assert figures["logprob_gap"] > 0.6
    for name in ("engine_gap", "engine_gap_max"):
        assert figures[name] == pytest.approx(0.5, abs=1e-4)
    learner.train(some)  # by now all of them are of older weights
    assert not {"engine_gap", "engine_kl", "engine_gap_max"} & learner.train_finish().keys()


def test_good_answers_become_likelier(samples: Batch, warmed: ModelSource, recipe: Any) -> None:
    learner = loaded(Learner(warmed, recipe))
    old = learner.logprobs(samples)["old_logprobs"]
    learner.train(samples)
    learner.train_finish()
    new = learner.logprobs(samples)["old_logprobs"]
    moved = sum(
        float(advantage) * float(after.sum() - before.sum())
        for advantage, before, after in zip(samples["advantage"], old, new, strict=True)
    )
    assert moved > 0


def test_a_learner_goes_on_from_its_checkpoint(
    samples: Batch, warmed: ModelSource, recipe: Any, tmp_path: Path
) -> None:
    learner = loaded(Learner(warmed, recipe))
    learner.train(samples)
    learner.train_finish()
    folder = learner.save_checkpoint(str(tmp_path), 1, keep=1)
    resumed = loaded(Learner(ModelSource(f"{folder}/model"), recipe, folder))
    for each in (learner, resumed):
        each.train(samples)
        each.train_finish()
    here, there = learner.parameters(), resumed.parameters()
    assert all(value.equal(there[name]) for name, value in here.items())
    fresh = loaded(Learner(ModelSource(f"{folder}/model"), recipe))
    fresh.train(samples)
    fresh.train_finish()
    assert any(not value.equal(fresh.parameters()[name]) for name, value in here.items())


def test_parameters_are_copies(warmed: ModelSource, recipe: Any) -> None:
    learner = loaded(Learner(warmed, recipe))
    copies = learner.parameters()
    for value in copies.values():
        value.zero_()
    assert any(bool(value.any()) for value in learner.weights().values())


# Critic


def test_a_critic_is_folded_in_pieces_and_goes_on_from_its_checkpoint(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe(algorithm={"name": "ppo"}, minibatches=1)
    critic, learner = loaded(Critic(warmed, recipe)), loaded(Learner(warmed, recipe))
    values = critic.values(samples)
    assert set(values.columns) == {"values"}
    assert not values["values"].values.any(), "its head is made of zeros"
    valued = gae(samples, values, gamma=1.0, lam=1.0)
    rewards = torch.tensor(samples["reward"], dtype=torch.float64)
    expected = torch.repeat_interleave(rewards, torch.tensor(samples["completion_ids"].lengths))
    assert torch.equal(valued["advantages"].values, expected)
    pieces = loaded(Critic(warmed, recipe))
    critic.train(valued)
    pieces.train(valued.select(range(3)))
    pieces.train(valued.select(range(3, len(valued))))
    figures, other = critic.train_finish(), pieces.train_finish()
    assert figures["critic/loss"] == pytest.approx(other["critic/loss"])
    assert figures["critic/return"] == pytest.approx(float(expected.mean()))
    for name, value in critic.parameters().items():
        torch.testing.assert_close(value, pieces.parameters()[name], rtol=1e-4, atol=2e-4)

    critic.save_part(str(tmp_path), 1)
    folder = learner.save_checkpoint(str(tmp_path), 1, 1)
    resumed = loaded(Critic(ModelSource(f"{folder}/critic/model"), recipe, folder))
    for each in (critic, resumed):
        each.train(valued)
        each.train_finish()
    there = resumed.parameters()
    assert all(value.equal(there[name]) for name, value in critic.parameters().items())


def test_a_checkpoint_of_grpo_has_no_critic(
    warmed: ModelSource, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe(algorithm={"name": "ppo"})
    folder = loaded(Learner(warmed, recipe)).save_checkpoint(str(tmp_path), 1, 1)
    with pytest.raises(UserError, match="the checkpoint has no critic"):
        loaded(Critic(warmed, recipe, folder))


def test_whitening_is_over_all_tokens_of_the_step(samples: Batch) -> None:
    num_tokens = samples["completion_ids"].values.numel()
    lengths = samples["completion_ids"].lengths
    drawn = torch.randn(num_tokens, generator=torch.Generator().manual_seed(0)).double()
    white = whiten(samples.with_columns(advantages=Ragged(drawn, lengths)))["advantages"].values
    assert float(white.mean()) == pytest.approx(0, abs=1e-12)
    assert float(white.std(correction=0)) == pytest.approx(1, abs=1e-6)
    whole, parts = whiten.spec.unit, gae.spec.unit
    assert (whole, parts) == ("step", "item")


def test_an_advantage_of_an_answer_is_whitened_as_that_of_its_tokens(samples: Batch) -> None:
    lengths = torch.tensor(samples["completion_ids"].lengths)
    spread = Ragged(torch.repeat_interleave(samples["advantage"], lengths), lengths.tolist())
    of_tokens = whiten(samples.with_columns(advantages=spread))["advantages"].values
    assert torch.equal(whiten(samples)["advantages"].values, of_tokens)


def test_whitening_is_over_what_is_trained_on(samples: Batch) -> None:
    """Dropped groups and truncated answers stayed in mean and deviation."""
    four = samples.select([0, 1, 2, 3]).with_columns(
        completion_ids=Ragged.from_rows([torch.tensor([1])] * 4),
        advantage=torch.tensor([0, 0, 0.5, -0.5], dtype=torch.float64),
        failure=[""] * 4,
    )

    def white(drop_truncated: bool = False, **columns: Any) -> list[float]:
        found = whiten(four.with_columns(**columns), drop_truncated=drop_truncated)
        return [float(row[0]) for row in found["advantages"].rows()]

    expected = [0.0, 0.0, pytest.approx(1), pytest.approx(-1)]
    assert white(dropped=torch.tensor([True, True, False, False])) == expected
    reasons = ["length", "length", "stop", "stop"]
    assert white(finish_reason=reasons, drop_truncated=True) == expected
    assert white(finish_reason=reasons) == [
        0.0,
        0.0,
        *(pytest.approx(x) for x in (2**0.5, -(2**0.5))),
    ]


# What else a reward is, and what is trained on


def referred(samples: Batch) -> Batch:
    """With a reference that thinks each token a little less likely than the policy did."""
    drawn = samples["behaviour_logprobs"]
    less = 0.1 + torch.rand(len(drawn.values), generator=torch.Generator().manual_seed(1)).double()
    return samples.with_columns(reference_logprobs=Ragged(drawn.values - less, drawn.lengths))


def partly_cut(samples: Batch) -> Batch:
    """Every third answer reached the limit, and the second group got one reward for all."""
    reasons = ["length" if row % 3 == 0 else "stop" for row in range(len(samples))]
    rewards = [0.5 if row // GROUP == 1 else float(row % 2) for row in range(len(samples))]
    return samples.with_columns(finish_reason=reasons, reward=rewards)


def test_shaped_rewards_against_a_loop(samples: Batch) -> None:
    samples = referred(samples)
    shaped = shape_reward(samples, max_tokens=6, buffer=4, kl=0.5)["shaped"]
    for row, (reward, drawn, reference) in enumerate(
        zip(
            samples["reward"],
            samples["behaviour_logprobs"],
            samples["reference_logprobs"],
            strict=True,
        )
    ):
        over = max(0.0, (len(drawn) - 2) / 4)
        drift = sum(a - b for a, b in zip(drawn.tolist(), reference.tolist(), strict=True))
        assert float(shaped[row]) == pytest.approx(reward - over - 0.5 * drift)
    plain = shape_reward(samples, max_tokens=6, buffer=0, kl=0.0)["shaped"]
    assert plain.tolist() == samples["reward"]


def test_groups_are_compared_by_shaped_rewards(samples: Batch) -> None:
    shaped = shape_reward(referred(samples), max_tokens=6, buffer=4, kl=0.5)
    found = group_advantage(shaped, group_size=GROUP, leave_one_out=True)["advantage"]
    rewards = shaped["shaped"].tolist()
    for row, reward in enumerate(rewards):
        start = row // GROUP * GROUP
        others = [
            x for place, x in enumerate(rewards[start : start + GROUP], start) if place != row
        ]
        assert float(found[row]) == pytest.approx(reward - statistics.mean(others))


def test_groups_are_dropped_by_what_was_given_for_answers(samples: Batch) -> None:
    """With an overlong penalty or a KL in the reward no group was equal, and none dropped."""
    shaped = shape_reward(referred(partly_cut(samples)), max_tokens=6, buffer=4, kl=0.5)
    assert len(set(shaped["shaped"][GROUP : 2 * GROUP].tolist())) == GROUP
    dropped = group_advantage(shaped, group_size=GROUP, drop_equal=True)["dropped"].tolist()
    assert dropped == [row // GROUP == 1 for row in range(len(samples))]


def test_rewards_to_go_against_a_loop(samples: Batch) -> None:
    samples = referred(samples)
    found = reward_to_go(samples, gamma=0.9, kl=0.5)["advantages"]
    for row, reward in enumerate(samples["reward"]):
        drawn, reference = samples["behaviour_logprobs"][row], samples["reference_logprobs"][row]
        rewards = (-0.5 * (drawn - reference)).tolist()
        rewards[-1] += reward
        for t in range(len(rewards)):
            expected = sum(0.9**k * each for k, each in enumerate(rewards[t:]))
            assert float(found[row][t]) == pytest.approx(expected)


def test_what_is_dropped_counts_for_nothing(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    """Equal groups, and answers that were cut off; the rest alone gives the same step."""
    recipe = tiny_recipe(algorithm={"truncated": "drop", "equal_groups": "drop"}, minibatches=1)
    marked = group_advantage(partly_cut(samples), group_size=GROUP, drop_equal=True)
    kept = [
        row
        for row, (dropped, reason) in enumerate(
            zip(marked["dropped"].tolist(), marked["finish_reason"], strict=True)
        )
        if not dropped and reason == "stop"
    ]
    assert len(kept) == 7
    dropping, plain = loaded(Learner(warmed, recipe)), loaded(Learner(warmed, tiny_recipe()))
    assert dropping.train(marked).ids == samples.ids
    plain.train(marked.select(kept))
    found, expected = dropping.train_finish(), plain.train_finish()
    assert found["tokens"] == expected["tokens"]
    for name, value in dropping.parameters().items():
        torch.testing.assert_close(value, plain.parameters()[name])


def test_without_anything_to_train_on_there_are_no_means(
    samples: Batch, warmed: ModelSource, recipe: Any
) -> None:
    """They once were zeros, which then were averaged with those of other mini-batches."""
    learner = loaded(Learner(warmed, recipe))
    learner.train(samples.with_columns(dropped=torch.ones(len(samples), dtype=torch.bool)))
    figures = learner.train_finish()
    assert figures["steps"] == figures["tokens"] == 0
    assert not {"ratio", "behaviour_entropy", "clip_fraction"} & figures.keys()


def test_epochs_go_through_all_mini_batches_again(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    recipe = tiny_recipe(algorithm={"epochs": 3}, minibatches=2)
    thrice, plain = loaded(Learner(warmed, recipe)), loaded(Learner(warmed, tiny_recipe()))
    halves = [samples.select(range(8)), samples.select(range(8, 16))]
    for _ in range(2):  # what is kept of a step does not come back in the next
        shown, single = [], []
        for half in halves:
            for piece in (half.select(range(3)), half.select(range(3, 8))):
                thrice.train(piece)
            shown.append(thrice.train_finish())
        for half in halves * 3:
            for piece in (half.select(range(3)), half.select(range(3, 8))):
                plain.train(piece)
            single.append(plain.train_finish())
        assert shown[0] == {}, "figures come with the last optimizer step"
        found = _mean(shown)
        for name in found.keys() - single[-1].keys():  # of the very first step alone
            assert found[name] == single[0][name]
        for name in single[-1]:
            assert found[name] == pytest.approx(statistics.fmean(one[name] for one in single))
    assert thrice.trainer.optimizer.num_steps == 12
    assert all(x.equal(plain.parameters()[name]) for name, x in thrice.parameters().items())


def test_further_epochs_make_progress_with_each_piece(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    """All of them stood under the deadline of one call."""
    recipe, heard = tiny_recipe(algorithm={"epochs": 3}, minibatches=2), []
    learner = Learner(warmed, recipe)
    loaded(learner, goes_on=lambda: heard.append(learner.trainer.optimizer.num_steps))
    for half in (samples.select(range(8)), samples.select(range(8, 16))):
        for piece in (half.select(range(3)), half.select(range(3, 8))):
            learner.train(piece)
        learner.train_finish()
    assert heard == [2, 2, 3, 3, 4, 4, 5, 5]


def test_a_step_that_is_left_out_counts_among_those_of_all_epochs(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    """A mini-batch that is not finite is left out in each epoch; the others give the figures."""
    recipe = tiny_recipe(algorithm={"epochs": 3}, minibatches=2, max_skipped_updates=5)
    learner = loaded(Learner(warmed, recipe))
    broken = samples.select(range(8)).with_columns(advantage=torch.full((8,), float("nan")))
    learner.train(broken)
    assert learner.train_finish() == {}
    assert NOT_TAKEN in learner.take_note()
    learner.discard()  # a step that is taken back leaves no figures
    learner.train(samples.select(range(8, 16)))
    assert learner.train_finish() == {}
    learner.train(broken)
    found = learner.train_finish()
    assert found["skipped_share"] == pytest.approx(3 / 6)
    assert (found["steps"], found["samples"]) == (1.0, 8.0)


def test_one_bad_batch_does_not_end_a_run_of_several_epochs(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    """It counted in each of them, so that a single token that is no number ended the run."""
    recipe = tiny_recipe(algorithm={"epochs": 5}, minibatches=1, max_skipped_updates=3)
    learner, drawn = loaded(Learner(warmed, recipe)), samples["behaviour_logprobs"]
    spoilt_T = drawn.values.clone()
    spoilt_T[3] = float("nan")
    broken = samples.with_columns(behaviour_logprobs=Ragged(spoilt_T, drawn.lengths))

    def ends(batch: Batch, skipped: float) -> bool:
        learner.train(batch)
        assert learner.train_finish()["skipped_share"] == skipped
        return bool(too_many([learner.take_note()]))

    assert not ends(broken, 1.0)
    assert not ends(samples, 0.0)
    assert [ends(broken, 1.0) for _ in range(4)] == [False, False, False, True]


def test_a_step_that_is_taken_back_leaves_nothing_for_further_epochs(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    recipe = tiny_recipe(algorithm={"epochs": 2}, minibatches=1)
    broken, plain = loaded(Learner(warmed, recipe)), loaded(Learner(warmed, recipe))
    broken.train(samples.select(range(5)))
    broken.discard()
    for each in (broken, plain):
        each.train(samples)
        each.train_finish()
    assert all(x.equal(plain.parameters()[name]) for name, x in broken.parameters().items())


def test_behind_a_truncated_answer_the_critic_is_asked(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    recipe = tiny_recipe(algorithm={"name": "ppo", "truncated": "bootstrap"})
    critic = loaded(Critic(warmed, recipe))
    with torch.no_grad():  # a head of zeros expects nothing anywhere
        for parameter in critic.policy.score.parameters():
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    samples = partly_cut(samples)
    valued = critic.values(samples)
    plain = loaded(Critic(warmed, tiny_recipe(algorithm={"name": "ppo"})))
    plain.policy.load_state_dict(critic.policy.state_dict())
    alone = plain.values(samples)["values"].values
    torch.testing.assert_close(valued["values"].values, alone)
    found = gae(samples, valued, gamma=0.9, lam=1.0)["returns"]
    for row, reason in enumerate(samples["finish_reason"]):
        beyond = float(valued["beyond"][row])
        assert (beyond == 0.0) == (reason == "stop")
        assert float(found[row][-1]) == pytest.approx(samples["reward"][row] + 0.9 * beyond)
        if reason != "stop":
            longer = torch.cat([samples["prompt_ids"][row], samples["completion_ids"][row]])
            with torch.no_grad():
                value = critic.policy(longer[None]).logits[0, -1, 0]
            assert beyond == pytest.approx(float(value), abs=1e-4)


def test_a_lane_without_samples_takes_part(
    samples: Batch, warmed: ModelSource, tiny_recipe: MakeRecipe
) -> None:
    """In a gang that has fewer samples than lanes the calls of the others are collective."""
    none = samples.select([])
    assert kept_rows(none, drop_truncated=True) is None
    critic = loaded(
        Critic(warmed, tiny_recipe(algorithm={"name": "ppo", "truncated": "bootstrap"}))
    )
    valued = critic.values(none)
    assert (len(valued), len(valued["beyond"])) == (0, 0)
    assert len(one_longer(token_pairs(none)).completion_lengths_B) == 0


# Rollouts that an engine should not give


@pytest.mark.parametrize("length", [0, 7])
def test_an_engine_that_breaks_its_word_is_named(
    warmed: ModelSource, prompts: Batch, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokens, or more than were asked for: memory and the packing were planned for others."""
    generator = make_generator(warmed)
    step = generator.engine.step

    def wrong(*arguments: Any) -> Any:
        return [
            replace(one, token_ids=torch.ones(length, dtype=torch.int64))
            for one in step(*arguments)
        ]

    monkeypatch.setattr(generator.engine, "step", wrong)
    with pytest.raises(RunFailed, match=rf"item \d+ {length} tokens; it was asked for 1 to 6"):
        list(generator.generate(prompts.select([0])))
    assert not generator.engine.busy, "what had begun was dropped"


def test_a_sample_without_tokens_changes_nothing_that_is_learned(
    recipe: Any, warmed: ModelSource, samples: Batch
) -> None:
    """Whoever brings samples of their own may bring one in which nothing was said."""
    some = samples.select(list(range(GROUP)))
    row = some.select([0])
    none = torch.zeros(0)
    empty = row.with_columns(
        completion_ids=Ragged.from_rows([none.to(torch.int64)]),
        behaviour_logprobs=Ragged.from_rows([none]),
    )
    weights = []
    for batch in (some, Batch.concat([some, empty])):
        learner = loaded(Learner(warmed, recipe))
        learner.train(batch)
        figures = learner.train_finish()
        assert figures["skipped_share"] == 0.0
        weights.append({name: tensor.clone() for name, tensor in learner.weights().items()})
    assert any(not weights[0][name].equal(warm) for name, warm in before(warmed).items())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, msg=name)


def before(model: ModelSource) -> dict[str, Any]:
    return dict(model.load("cpu").state_dict())


@pytest.mark.parametrize(
    ("limit", "weights", "expected"),
    [(None, 0, 40e9), (72_000_000_000, 0, 40e9), (36_000_000_000, 0, 20e9),
     (36_000_000_000, 30_000_000_000, 6e9), (36_000_000_000, 40_000_000_000, 0.0)],
)  # fmt: skip
def test_the_cache_keeps_within_the_memory_of_its_lane(
    limit: int | None, weights: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane may be given less than the 80 GB of its device."""
    device = SimpleNamespace(total_memory=80_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    place = Place(device="cuda:0", memory_bytes=limit)
    assert _cache_bytes(None, place, weights) == pytest.approx(expected)
    assert _cache_bytes(2.5, place, weights) == 2_500_000_000
    assert _cache_bytes(None, Place()) is None


@pytest.mark.parametrize("kind", [Learner, Critic, Reference])
def test_all_that_compute_logprobs_or_values_take_the_same_kernels(
    kind: Any, tiny_recipe: MakeRecipe, warmed: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("m2flow.training.fused.fuse", lambda *given: asked.append(given))
    for setting in (None, False, True):
        recipe = tiny_recipe(training={"fused_kernels": setting})
        worker = loaded(kind(warmed, recipe))
        assert asked.pop() == (worker.policy, "cpu", Division(), setting)


@pytest.mark.parametrize("kind", [Learner, Critic, Reference])
def test_fused_kernels_that_are_asked_for_on_a_cpu_are_refused(
    kind: Any, tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    recipe = tiny_recipe(training={"fused_kernels": True})
    with pytest.raises(UserError, match=r"training\.fused_kernels: .*they run on CUDA"):
        loaded(kind(warmed, recipe))


def test_layers_are_not_divided_where_fused_kernels_are_asked_for(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    def names(setting: bool | None) -> set[str]:
        recipe = tiny_recipe(training={"fused_kernels": setting})
        return {layout.name for layout in Learner(warmed, recipe).layouts("gpu", 4)}

    assert names(None) - names(True) == {"tp2", "tp2.fsdp2", "tp3", "tp4"}
    assert names(False) == names(None)
