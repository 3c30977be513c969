"""The flows on which the ablation takes mechanisms away; each is chosen to make one of them work.

  * `checked_grpo`: the quick start's model, of which 32 sequences are decoded at once, as where
    the KV cache has room for no more; the answers (5 to 24 tokens) go through math-verify as those
    of a real data set of mathematics do, 1 to 3 ms for each that is not spelt like the right one.
    Generation takes most of the step, as in real runs; verifying and training could be done
    meanwhile: what a pipeline is for.
  * `Seeing`: the rollout of a small vision model, each item with a frame of 3 x 224 x 224 bytes,
    and an output layer for a vocabulary of 32,768, which is most of its 37 MB: every step hands
    10 MB of frames on and publishes 37 MB. What shared memory is for.
  * `Distilling`: a frozen teacher of 67 MB and a student whose weights, gradients and moments are
    67 MB as well, both on every lane; no call needs both. What switching is for.
  * `Playing`: episodes of up to 40 turns around a loop of an environment and a policy, both cheap.
    What fused loops are for.

Draws belong to the item, so how the work is cut changes nothing but the rounding of sums.
Legend: B batch, P patches, D features.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from ray import cloudpickle
from starting_point import quickstart
from torch import Tensor, nn
from torch.nn import functional

from m2flow import Batch, Flow, Place, Stream, Worker, loop, stage
from m2flow.algorithms.sampling import derive_seed, sample_tokens
from m2flow.rewards.reward import WeightedReward
from m2flow.rewards.symbolic import same_expression
from m2flow.runtime.lane.state import MovableState, module_tensors
from m2flow.training.optimizer import AdamWConfig, SumOptimizer
from m2flow.workloads.reasoning.experiment import ReasoningExperiment
from m2flow.workloads.reasoning.flow import GRPO, recipe_flow
from m2flow.workloads.reasoning.workers import ModelSource, Verifier

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # lanes cannot import this file


def batch_of_seeds(step: int, items: int) -> Batch:
    """Items that are nothing but a seed each."""
    return Batch({"seed": torch.tensor([derive_seed(step, item) for item in range(items)])})


# --- GRPO with a verifier that costs something ----------------------------------------------------


def as_mathematics(
    prompt: str, completion: str, completion_ids: Sequence[int], row: Mapping[str, Any]
) -> float:
    """Compare what stands after the first `#` by math-verify, though a comparison would do."""
    _, _, final = completion.partition("#")
    return float(row["finished"] and same_expression(row["answer"], final))


def checked_grpo(prompts: int) -> tuple[GRPO, ReasoningExperiment, ModelSource]:
    """The flow, what makes its batches, and its model."""
    recipe, experiment, source = quickstart(
        f"prompts_per_step={prompts}", "generation.max_running=32"
    )
    flow = recipe_flow(recipe, source, experiment.rewards)
    flow.verifier = Verifier(source, (WeightedReward(as_mathematics),))
    return flow, experiment, source


# --- a vision model's rollout ---------------------------------------------------------------------

SIDE, PATCH, FEATURES, VOCABULARY = 224, 32, 256, 32768
STRIPES = 7
"""One of so many horizontal stripes is brighter than the rest; the action is to name it."""


class Vision(nn.Module):
    """Patches, one hidden layer, the mean of all patches, logits of the one token of the action."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH * PATCH, FEATURES)
        self.positions = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2, FEATURES))
        self.hidden = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits [B, VOCABULARY] of frames, uint8 [B, 3, SIDE, SIDE]."""
        x = frames.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)
        x_BPD = self.patches(x.flatten(3).flatten(1, 2).float() / 128 - 1)
        x_BPD = functional.gelu(self.hidden(functional.gelu(x_BPD + self.positions)))
        return self.head(x_BPD.mean(1))


def _vision() -> Vision:
    torch.manual_seed(0)
    return Vision()


class Player(Worker):
    """Sees a frame and acts on it."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = _vision()

    @stage
    @torch.no_grad()
    def rollout(self, episodes: Batch) -> Batch:
        """Adds `frame`, `action` and `reward`."""
        frames, stripes = zip(*map(_frame, episodes["seed"].tolist()), strict=True)
        frame = torch.stack(frames)
        seeds_B = episodes["seed"]
        actions_B, _ = sample_tokens(self.model(frame), seeds_B, torch.zeros_like(seeds_B), 1.0)
        rewards_B = (actions_B % STRIPES == torch.tensor(stripes)).double()
        return episodes.with_columns(frame=frame, action=actions_B, reward=rewards_B)

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.model.load_state_dict(weights)


def _frame(seed: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    frame = torch.randint(0, 128, (3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    stripe, height = seed % STRIPES, SIDE // STRIPES
    frame[:, stripe * height : (stripe + 1) * height] += 100
    return frame, stripe


class Seer(Worker):
    """Learns by REINFORCE from the frames that it is sent."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = _vision()
        self.optimizer = SumOptimizer(self.model.named_parameters(), AdamWConfig(1e-4))
        self.sums = torch.zeros(2, dtype=torch.float64)

    @stage(accumulates=True)
    def train(self, played: Batch) -> Batch:
        logprobs = self.model(played["frame"]).log_softmax(-1)
        chosen_B = logprobs.gather(1, played["action"][:, None])[:, 0]
        loss = -(chosen_B * (played["reward"] - 1 / STRIPES)).sum()
        loss.backward()
        self.sums += torch.tensor([float(loss.detach()), len(played)])
        return played.only("action", "reward")

    @train.finish
    def train_finish(self) -> dict[str, float]:
        return _step(self)

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()


class Seeing(Flow):
    """Look and act, then learn."""

    player: Player
    seer: Seer

    def step(self, episodes: Stream) -> Stream:
        return self.seer.train(self.player.rollout(episodes))

    def sync(self) -> None:
        self.seer.publish(self.player)


def _step(learner: Any) -> dict[str, float]:
    """An optimizer step of a worker with `optimizer` and `sums` (loss and number of items)."""
    done = learner.optimizer.step(learner.sums, 1, learner.place.all_reduce)
    learner.sums = torch.zeros(2, dtype=torch.float64)
    return {"loss": float(done.sums[0] / done.sums[1])}


# --- distillation ---------------------------------------------------------------------------------

WIDTH, TEACHER_LAYERS, STUDENT_LAYERS = 1024, 16, 4
ROWS_AT_ONCE = 64
"""A call takes its items in pieces of so many, so that its activations stay small."""

STATE_BYTES = {
    "teacher": TEACHER_LAYERS * WIDTH * WIDTH * 4,
    "student": STUDENT_LAYERS * WIDTH * WIDTH * 4 * 4,  # weights, gradients and two moments
}

WORKING_BYTES = 24 << 20
"""What a call takes beside them at most: activations, and the gradient that backward is at."""


def _tower(layers: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    linear = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight)  # what goes in comes out in the same size
    return nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in linear))


def _pieces(batch: Batch) -> Iterator[Batch]:
    for start in range(0, len(batch), ROWS_AT_ONCE):
        yield batch.select(range(start, min(start + ROWS_AT_ONCE, len(batch))))


def _inputs(batch: Batch) -> Tensor:
    rows = [torch.Generator().manual_seed(seed) for seed in batch["seed"].tolist()]
    return torch.stack([torch.randn(WIDTH, generator=generator) for generator in rows])


class Movable(Worker):
    """A worker whose `state` can be put away."""

    state: MovableState

    def offload(self) -> None:
        self.state.offload()

    def onload(self) -> None:
        self.state.onload()

    def state_bytes(self) -> int:
        return self.state.nbytes()


class Teacher(Movable):
    """Frozen; says what it makes of an input."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = _tower(TEACHER_LAYERS, seed=1).requires_grad_(False)
        self.state = MovableState(lambda: module_tensors(self.model), place)

    @stage
    def label(self, items: Batch) -> Batch:
        labels = torch.cat([self.model(_inputs(piece)) for piece in _pieces(items)])
        return items.with_columns(label=labels)


class Student(Movable):
    """Learns to say the same."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.model = _tower(STUDENT_LAYERS, seed=2)
        self.optimizer = SumOptimizer(self.model.named_parameters(), AdamWConfig(1e-4))
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.state = MovableState(self.optimizer.tensors, place)

    def state_bytes(self) -> int:
        return super().state_bytes() + self.optimizer.bytes_to_come()

    @stage(accumulates=True)
    def train(self, items: Batch) -> Batch:
        errors = []
        for piece in _pieces(items):
            error_B = (self.model(_inputs(piece)) - piece["label"]).square().mean(1)
            error_B.sum().backward()
            errors.append(error_B.detach())
        self.sums += torch.tensor([float(torch.cat(errors).sum()), len(items)])
        return items.only("seed").with_columns(error=torch.cat(errors))

    @train.finish
    def train_finish(self) -> dict[str, float]:
        return _step(self)


class Distilling(Flow):
    """The teacher says what is right, the student learns it."""

    teacher: Teacher
    student: Student

    def step(self, items: Stream) -> Stream:
        return self.student.train(self.teacher.label(items))


# --- an environment loop --------------------------------------------------------------------------

MAX_TURNS, PRIME = 40, 1_000_003


class World(Worker):
    """Episodes that live here; each ends after a number of turns of its own."""

    def load(self, place: Place) -> None:
        super().load(place)
        self.places: dict[int, tuple[int, int]] = {}

    @stage(sticky=True)
    def move(self, episodes: Batch) -> Batch:
        """Carries out `action`, and says the new `place` and whether the episode is `done`."""
        places, done = [], []
        columns = (episodes["seed"].tolist(), episodes["action"].tolist())
        for seed, action in zip(*columns, strict=True):
            place, turn = self.places.pop(seed, (seed % PRIME, 0))
            place, turn = (place * 31 + action) % PRIME, turn + 1
            places.append(place)
            done.append(turn > seed % MAX_TURNS)
            if not done[-1]:
                self.places[seed] = place, turn
        return episodes.with_columns(place=torch.tensor(places), done=done)


class Walker(Worker):
    """A policy of one product."""

    @stage
    def act(self, episodes: Batch) -> Batch:
        return episodes.with_columns(action=episodes["place"] * 17 % 8)


class Playing(Flow):
    """Every episode to its end."""

    world: World
    walker: Walker

    def step(self, episodes: Stream) -> Stream:
        return loop(self.world.move, self.walker.act, until="done")(episodes)


def episodes(step: int, items: int) -> Batch:
    """Seeds, with a first action."""
    return batch_of_seeds(step, items).with_columns(action=torch.zeros(items, dtype=torch.int64))
