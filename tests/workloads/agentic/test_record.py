"""The record of a trajectory is what the model saw and drew, token for token."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from m2flow.flow import Batch, Place
from m2flow.models.causal_lm import load_model
from m2flow.workloads.agentic.episodes import begin_episodes
from m2flow.workloads.agentic.experiment import AgenticExperiment
from m2flow.workloads.reasoning.workers import ModelSource

MakeRecipe = Any
pytestmark = pytest.mark.usefixtures("one_thread")


def rolled_out(experiment: Any, batch: Batch, seen: dict[int, list[list[int]]]) -> Batch:
    """All trajectories of a batch, as the loop makes them; `seen` is told what the engine saw."""
    flow = experiment.flow()
    generator, tools = flow.generator, flow.tools
    generator.load(Place())
    tools.load(Place())
    submit = generator.engine.submit

    def spy(requests: list[Any]) -> None:
        for request in requests:
            seen[request.id].append(list(request.prompt_ids))
        submit(requests)

    generator.engine.submit = spy
    count = experiment.recipe.samples_per_prompt
    inside = begin_episodes(batch, samples_per_prompt=count, greedy=False)
    done = []
    while len(inside):
        inside = tools.call(generator.turn(inside))
        over = inside["done"].tolist()
        done.append(inside.select([row for row, left in enumerate(over) if left]))
        inside = inside.select([row for row, left in enumerate(over) if not left])
    tools.close()
    return Batch.concat([some for some in done if len(some)])


def test_the_record_is_what_the_model_saw_over_512_random_dialogues(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    recipe = tiny_recipe(prompts_per_step=64, samples_per_prompt=8)
    experiment = AgenticExperiment(recipe, warmed)
    seen: dict[int, list[list[int]]] = defaultdict(list)
    episodes = rolled_out(experiment, experiment.batch(0), seen)
    assert sorted(episodes.ids) == list(range(512))
    model = load_model(warmed.path, torch.float32)
    several = errors = 0
    for row, item in enumerate(episodes.ids):
        prompt, ids, mask, logprobs = (
            episodes[name][row].tolist()
            for name in ("prompt_ids", "completion_ids", "loss_mask", "behaviour_logprobs")
        )
        turns = episodes["turns"][row]
        several += len(turns) > 1
        errors += sum(turn.errors for turn in turns)
        assert len(seen[item]) == len(turns)
        drawn = [False] * len(ids)
        for turn, context in zip(turns, seen[item], strict=True):
            assert context == prompt + ids[: turn.begin]
            drawn[turn.begin : turn.end] = [True] * (turn.end - turn.begin)
        assert mask == drawn
        assert not any(logp for logp, mine in zip(logprobs, drawn, strict=True) if not mine)
        if item % 8 == 0:  # what it saw, asked of the model itself
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
            plain = [float(logits[len(prompt) - 1 + t, token]) for t, token in enumerate(ids)]
            wanted = [p if was_drawn else 0.0 for p, was_drawn in zip(plain, drawn, strict=True)]
            assert logprobs == pytest.approx(wanted, abs=1e-4)
    assert several > 200
    assert errors > 5


def test_what_is_drawn_does_not_depend_on_who_is_beside(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    experiment = AgenticExperiment(tiny_recipe(), warmed)
    batch = experiment.batch(0)
    whole = rolled_out(experiment, batch, defaultdict(list))
    parts = [rolled_out(experiment, batch.select([row]), defaultdict(list)) for row in range(4)]
    alone = Batch.concat(parts)
    for item in whole.ids:
        one, other = whole.take([item]), alone.take([item])
        assert one["completion_ids"][0].tolist() == other["completion_ids"][0].tolist()


def test_trajectories_end_by_their_limits(tiny_recipe: MakeRecipe, warmed: ModelSource) -> None:
    for episode, reason in (
        ({"max_turns": 1}, "turns"),
        ({"max_tokens": 14, "max_turns": 9}, "length"),
    ):
        recipe = tiny_recipe(episode=episode, prompts_per_step=8)
        experiment = AgenticExperiment(recipe, warmed)
        episodes = rolled_out(experiment, experiment.batch(0), defaultdict(list))
        assert reason in episodes["finish_reason"]
        assert {"stop", "length", "turns"} >= set(episodes["finish_reason"])
        for row, turns in enumerate(episodes["turns"]):
            assert len(turns) <= recipe.episode.max_turns
            assert len(episodes["completion_ids"][row]) <= recipe.episode.max_tokens
            assert bool(episodes["loss_mask"][row][-1]), "what nobody reads is not kept"


def test_a_turn_ends_where_several_tokens_close_a_call(
    tiny_recipe: MakeRecipe, warmed: ModelSource
) -> None:
    """The model has learned to write `]`; only a call that ends in `2]` is one here."""
    recipe = tiny_recipe(prompts_per_step=64, samples_per_prompt=8, episode={"call": ("[", "2]")})
    experiment = AgenticExperiment(recipe, warmed)
    episodes = rolled_out(experiment, experiment.batch(0), defaultdict(list))
    tokenizer, closed = warmed.tokenizer(), 0
    for row in range(len(episodes)):
        ids = episodes["completion_ids"][row].tolist()
        for turn in episodes["turns"][row]:
            text = tokenizer.decode(ids[turn.begin : turn.end], skip_special_tokens=True)
            if "2]" in text:
                assert text.index("2]") == len(text) - 2
                closed += turn.tools == ("calculator",)
            else:
                assert not turn.tools
    assert closed > 3


def test_a_turn_gives_signs_while_it_is_drawn(tiny_recipe: MakeRecipe, warmed: ModelSource) -> None:
    """A batch that took longer than a call may ended the run, though each token was progress."""
    experiment, heard = AgenticExperiment(tiny_recipe(), warmed), list[int]()
    generator = experiment.flow().generator
    generator.load(Place(goes_on=lambda: heard.append(0)))
    episodes = begin_episodes(experiment.batch(0), samples_per_prompt=1, greedy=True)
    found = generator.turn(episodes)
    assert len(heard) >= max(found["completion_ids"].lengths) - 1 > 0
