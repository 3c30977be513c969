"""Three flows whose result must be the eager one under every plan.

  * `toy()`: generation that streams and expands, groups, a learner with two mini-batches; all in
    whole numbers, modulo a prime, so that the slightest difference shows;
  * `grpo(folder)`: the real thing on a tiny model in double precision;
  * `environment()`: episodes of different lengths around a loop of a sticky environment and a
    policy, then a learner; in whole numbers too.

Workers that hold a state really put it away when they are offloaded, and a call that meets a state
that is not there fails.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import m2flow
from m2flow import Batch, Flow, Place, Ragged, Stream, Worker, loop, stage
from m2flow.runtime.driver.runner import StepResult

MODULUS = 1_000_003
"""A prime; products of two residues fit into 64 bits."""

WEIGHTS = 4
"""Entries of the weights that the learners of the integer flows publish."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves.

    Attributes:
        outputs: for each step its output, column by column, as Python values.
        states: the final state of the trained worker on each of its lanes.
        metrics: for each step what `finish` has said.
        num_switches: how often a state was moved.
    """

    outputs: list[dict[str, list[Any]]]
    states: list[dict[str, Any]]
    metrics: list[dict[str, float]]
    num_switches: int


@dataclass(frozen=True)
class Scenario:
    """A flow with its data, and what a plan of it needs to know.

    Attributes:
        name: for people.
        make_flow: a fresh flow, nothing of it loaded.
        batches: the input of each step, all of the same size.
        trained: the worker whose final state counts, and its method that gives it.
        state_bytes: worker to the size that its state is said to have.
        gangs_allowed: workers of which several lanes may take part in one call.
        tolerance: the largest relative difference of a floating-point number; 0 for none.
    """

    name: str
    make_flow: Callable[[], Flow]
    batches: Sequence[Batch]
    trained: tuple[str, str]
    state_bytes: Mapping[str, int]
    gangs_allowed: frozenset[str]
    tolerance: float = 0.0

    @property
    def items_per_step(self) -> int:
        return len(self.batches[0])


def outcome_of(scenario: Scenario, **how: Any) -> Outcome:
    """Run a scenario to its end.

    Args:
        scenario: what is run.
        how: for `m2flow.launch`: a mode and lanes, or a plan.
    """
    items = scenario.items_per_step
    with m2flow.launch(scenario.make_flow(), items_per_step=items, num_threads=1, **how) as run:
        results = list(run.steps(scenario.batches))
        states = run.worker_call_everywhere(*scenario.trained)
    outputs = [output_of(result) for result in results]
    metrics = [dict(result.metrics) for result in results]
    switches = sum(span.kind == "switch" for result in results for span in result.spans)
    return Outcome(outputs, states, metrics, switches)


def output_of(result: StepResult) -> dict[str, list[Any]]:
    """The output of a step, column by column, as Python values."""
    return {name: _values(column) for name, column in result.output.columns.items()}


def eager_outcome(scenario: Scenario) -> Outcome:
    """What every plan must give."""
    return outcome_of(scenario, mode="eager", lanes="cpu:1")


def check_same(there: Outcome, eager: Outcome, scenario: Scenario) -> None:
    """Assert that a run has given the eager result, on every lane of the trained worker."""
    assert len(there.outputs) == len(eager.outputs)
    for step, (some, others) in enumerate(zip(there.outputs, eager.outputs, strict=True)):
        _check_values(f"output of step {step}", some, others, scenario.tolerance)
    assert there.states
    for rank, state in enumerate(there.states):
        where = f"state of {scenario.trained[0]}, lane {rank} of its own"
        _check_values(where, state, eager.states[0], scenario.tolerance)


def _check_values(
    where: str, some: Mapping[str, Any], others: Mapping[str, Any], tolerance: float
) -> None:
    assert some.keys() == others.keys(), where
    for name, value in some.items():
        other = others[name]
        if isinstance(other, Tensor) and other.is_floating_point():
            size = float(other.abs().max()) or 1.0
            far = float((value - other).abs().max()) / size
            assert far <= tolerance, f"{where}: {name} is off by {far:.1e}"
        elif isinstance(other, Tensor):
            assert torch.equal(value, other), f"{where}: {name}: {value} instead of {other}"
        else:
            assert value == other, f"{where}: {name}: {value} instead of {other}"


def _values(column: Any) -> list[Any]:
    if isinstance(column, Ragged):
        return [row.tolist() for row in column.rows()]
    return column.tolist() if isinstance(column, Tensor) else list(column)


# --- state that is really put away ----------------------------------------------------------------


class Held(Worker):
    """A worker with a state that `offload` puts away as bytes."""

    declared_bytes = 0

    def beginning(self) -> dict[str, Any]:
        """The state to start from."""
        raise NotImplementedError

    def load(self, place: Place) -> None:
        super().load(place)
        self._state: dict[str, Any] | None = self.beginning()
        self._away = b""

    @property
    def state(self) -> dict[str, Any]:
        assert self._state is not None, f"{type(self).__name__} was called while it was put away"
        return self._state

    def offload(self) -> None:
        self._away, self._state = pickle.dumps(self.state), None

    def onload(self) -> None:
        if self._state is None:
            self._state, self._away = pickle.loads(self._away), b""

    def state_bytes(self) -> int:
        return self.declared_bytes

    def save(self) -> dict[str, torch.Tensor]:
        return {"state": torch.frombuffer(bytearray(pickle.dumps(self.state)), dtype=torch.uint8)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = pickle.loads(state["state"].numpy().tobytes())

    def final(self) -> dict[str, Any]:
        """The state, wherever it is."""
        state: dict[str, Any] = pickle.loads(self._away) if self._state is None else self._state
        return state


class Reader(Held):
    """Runs on published weights."""

    declared_bytes = 100

    def beginning(self) -> dict[str, Any]:
        return {"w": torch.arange(1, WEIGHTS + 1), "version": self.place.version}

    def install(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.state["w"] = weights["w"].clone()
        self.state["version"] = version


class Folder(Held):
    """Folds numbers into sums by item, and its weights change with them at each mini-batch."""

    minibatches = 2
    declared_bytes = 300

    def beginning(self) -> dict[str, Any]:
        return {
            "w": torch.arange(1, WEIGHTS + 1),
            "sums": torch.zeros(WEIGHTS, dtype=torch.int64),
            "folded": torch.zeros(1, dtype=torch.int64),
        }

    def fold(self, ids: Sequence[int], values: Tensor) -> None:
        """Add each item's value, times one more than its number, where its number says."""
        numbers = torch.tensor(ids)
        parts = values * (numbers + 1) % MODULUS
        self.state["sums"].index_add_(0, numbers % WEIGHTS, parts)
        self.state["folded"] += len(ids)

    def update(self) -> dict[str, float]:
        """The new weights, no linear function of the sums, so that each boundary counts."""
        state = self.state
        self.place.all_reduce([state["sums"], state["folded"]])
        w = state["w"]
        state["w"] = (w * w + state["sums"] % MODULUS + w.roll(1) + 1) % MODULUS
        folded = int(state["folded"])
        state["sums"].zero_()
        state["folded"].zero_()
        return {"folded": float(folded)}

    def weights(self) -> dict[str, Tensor]:
        return {"w": self.state["w"]}


# --- the toy flow ---------------------------------------------------------------------------------


class Sampler(Reader):
    """Draws samples one after the other; those of some prompts take longer than others."""

    samples = 3

    @stage(streaming=True, expands="samples")
    def generate(self, prompts: Batch) -> Generator[Batch, Batch | None, None]:
        """Adds `y`, ragged `tokens`, `note` and the `version` of the weights."""
        running = self._begin(prompts)
        while running:
            done = [batch for rounds, batch in running if rounds == 0]
            running = [(rounds - 1, batch) for rounds, batch in running if rounds]
            fed = (
                yield Batch.concat([*map(self._sample, reversed(done))]) if done else Batch({}, [])
            )
            running += self._begin(fed)

    def _begin(self, prompts: Batch | None) -> list[tuple[int, Batch]]:
        if prompts is None:
            return []
        samples = prompts.repeat(self.samples)
        rows = [samples.select([row]) for row in range(len(samples))]
        return [((row.ids[0] * 7 + int(row["x"])) % 5, row) for row in rows]

    def _sample(self, row: Batch) -> Batch:
        w = self.state["w"]
        item, x = row.ids[0], int(row["x"])
        y = (x * int(w[item % WEIGHTS]) + int(w.sum()) + item) % MODULUS
        tokens = torch.arange(1 + y % 4) * y % MODULUS
        return row.with_columns(
            y=torch.tensor([y]),
            tokens=Ragged(tokens, [len(tokens)]),
            note=[f"{x}/{item}"],
            version=[self.state["version"]],
        )


class Judge(Held):
    """Scores by a table."""

    declared_bytes = 60

    def beginning(self) -> dict[str, Any]:
        return {"table": torch.arange(11) ** 3}

    @stage
    def score(self, samples: Batch) -> Batch:
        y = samples["y"]
        sums = torch.tensor([int(row.sum()) for row in samples["tokens"]])
        notes = torch.tensor([len(note) for note in samples["note"]])
        return samples.with_columns(
            r=(y * y + sums * self.state["table"][y % 11] + notes) % MODULUS
        )


@stage(unit="group")
def compare(samples: Batch, *, group_size: int) -> Batch:
    """Each score against those of its group."""
    r = samples["r"].reshape(-1, group_size)
    return samples.with_columns(a=((group_size * r - r.sum(1, keepdim=True)) % MODULUS).flatten())


class Learner(Folder):
    """Reads its own state for each item before it changes it."""

    @stage
    def weigh(self, samples: Batch) -> Batch:
        w = self.state["w"]
        return samples.with_columns(old=(samples["a"] * w[0] + w[1]) % MODULUS)

    @stage(accumulates=True, minibatches="minibatches")
    def train(self, samples: Batch) -> Batch:
        w = self.state["w"]
        values = (samples["old"] + samples["a"] * w[2]) % MODULUS
        self.fold(samples.ids, values)
        return samples.with_columns(value=values).only(
            "y", "tokens", "note", "old", "value", "version"
        )

    @train.finish
    def train_finish(self) -> dict[str, float]:
        return self.update()


class ForgetfulLearner(Learner):
    """One that does not say how its state is saved."""

    save, restore = Worker.save, Worker.restore


class Toy(Flow):
    """Draw, score, compare within the group, train; as GRPO does."""

    sampler: Sampler
    judge: Judge
    learner: Learner

    def step(self, prompts: Stream) -> Stream:
        samples = self.judge.score(self.sampler.generate(prompts))
        samples = compare(samples, group_size=self.sampler.samples)
        return self.learner.train(self.learner.weigh(samples))

    def sync(self) -> None:
        self.learner.publish(self.sampler)


def toy(steps: int = 3, prompts: int = 8) -> Scenario:
    """The toy flow; 2 must divide 3 x prompts."""
    return Scenario(
        name="toy",
        make_flow=lambda: Toy(sampler=Sampler(), judge=Judge(), learner=Learner()),
        batches=[
            Batch({"x": torch.arange(step * prompts + 1, (step + 1) * prompts + 1)})
            for step in range(steps)
        ],
        trained=("learner", "final"),
        state_bytes=_declared(sampler=Sampler, judge=Judge, learner=Learner),
        gangs_allowed=frozenset({"judge", "compare", "learner"}),
    )


# --- the environment loop -------------------------------------------------------------------------

BEGIN = -1
"""In place of a move: start the episode."""


class World(Held):
    """Every episode's place (two numbers) and turn live here, from its first step to its last."""

    declared_bytes = 120

    def beginning(self) -> dict[str, Any]:
        return {"episodes": {}}

    @stage(sticky=True)
    def step(self, episodes: Batch) -> Batch:
        """Carry out the moves of all episodes of the call at once."""
        held = self.state["episodes"]
        numbers, moves_B = episodes["episode"].tolist(), episodes["move"]
        seeds_B = episodes["seed"]
        fresh_B = torch.stack([seeds_B, seeds_B % 97 + 1, torch.zeros_like(seeds_B)])
        for row, (number, move) in enumerate(zip(numbers, moves_B.tolist(), strict=True)):
            assert (number in held) == (move != BEGIN), f"episode {number} is not where it was"
            if move == BEGIN:
                held[number] = fresh_B[:, row]
        place_B, path_B, turn_B = torch.stack([held[number] for number in numbers], dim=1)
        begun_B = moves_B != BEGIN
        after_B = torch.where(begun_B, (place_B * 31 + moves_B) % MODULUS, place_B)
        path_B = torch.where(begun_B, (path_B * 17 + place_B * (moves_B + 1)) % MODULUS, path_B)
        turn_B = turn_B + begun_B
        done_B = turn_B == episodes["length"]
        for row, (number, done) in enumerate(zip(numbers, done_B.tolist(), strict=True)):
            if done:
                del held[number]
            else:
                held[number] = torch.stack([after_B[row], path_B[row], turn_B[row]])
        return episodes.with_columns(place=after_B, path=path_B, turn=turn_B, done=done_B.tolist())


class Policy(Reader):
    """Moves by the published weights and the turn."""

    declared_bytes = 80

    @stage
    def act(self, episodes: Batch) -> Batch:
        w, turn = self.state["w"], episodes["turn"]
        move = (episodes["place"] * w[turn % WEIGHTS] + episodes["seed"] + turn) % 1009
        return episodes.with_columns(move=move)


class PathLearner(Folder):
    """Folds the paths that episodes have taken."""

    @stage(accumulates=True, minibatches="minibatches")
    def learn(self, episodes: Batch) -> Batch:
        self.fold(episodes.ids, episodes["path"])
        return episodes.only("episode", "turn", "path", "move")

    @learn.finish
    def learn_finish(self) -> dict[str, float]:
        return self.update()


class Environment(Flow):
    """Play episodes to their ends, learn from their paths."""

    world: World
    policy: Policy
    learner: PathLearner

    def step(self, episodes: Stream) -> Stream:
        played = loop(self.world.step, self.policy.act, until="done")(episodes)
        return self.learner.learn(played)

    def sync(self) -> None:
        self.learner.publish(self.policy)


def environment(steps: int = 3, episodes: int = 8) -> Scenario:
    """The loop; episodes last from one turn to seven; their number is even."""

    def batch(step: int) -> Batch:
        numbers = torch.arange(step * episodes, (step + 1) * episodes)
        seeds = (numbers * 7919 + 13) % MODULUS
        zeros = torch.zeros_like(numbers)
        return Batch(
            {
                "episode": numbers,
                "seed": seeds,
                "length": 1 + seeds % 7,
                "move": torch.full_like(numbers, BEGIN),
                "place": zeros,
                "path": zeros,
                "turn": zeros,
                "done": [False] * episodes,
            }
        )

    return Scenario(
        name="environment",
        make_flow=lambda: Environment(world=World(), policy=Policy(), learner=PathLearner()),
        batches=[batch(step) for step in range(steps)],
        trained=("learner", "final"),
        state_bytes=_declared(world=World, policy=Policy, learner=PathLearner),
        gangs_allowed=frozenset({"policy", "learner"}),
    )


def _declared(**workers: type[Held]) -> dict[str, int]:
    return {name: worker.declared_bytes for name, worker in workers.items()}


# --- GRPO on a tiny model -------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "minibatches": 2,
    "model": {
        "dtype": "float64",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
    "data": {"options": {"min_digits": 1, "max_digits": 1, "thinking_share": 0}},
    "warmup": {"steps": 60, "samples_per_step": 32, "learning_rate": 2e-2},
    "optimizer": {"learning_rate": 3e-3},
    "generation": {"max_new_tokens": 6},
    "algorithm": {"kl_coefficient": 0.01},
    "training": {"tokens_per_microbatch": 64, "recompute_logprobs": True},
}
"""With a reference and log-probabilities of the learner's own: everything that GRPO can have."""


def grpo(folder: Path, steps: int = 2) -> Scenario:
    """GRPO on sums of two digits, by a model that gets some of them right.

    Args:
        folder: where the model that it starts from is written.
        steps: training steps.
    """
    from m2flow.workloads.reasoning.config import ReasoningRecipe
    from m2flow.workloads.reasoning.experiment import ReasoningExperiment
    from m2flow.workloads.reasoning.flow import recipe_flow

    recipe = ReasoningRecipe.model_validate({**TINY, "steps": steps})
    experiment = ReasoningExperiment(recipe)
    model = experiment.prepare(folder)
    weights = sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
    return Scenario(
        name="grpo",
        make_flow=lambda: recipe_flow(recipe, model, experiment.rewards),
        batches=[experiment.batch(step) for step in range(steps)],
        trained=("learner", "parameters"),
        state_bytes={"generator": weights, "reference": weights, "learner": 4 * weights},
        gangs_allowed=frozenset({"verifier", "group_advantage", "reference", "learner"}),
        tolerance=1e-4,
    )
