"""A vision-language-action policy in shards over a gang of lanes learns what it does on one lane.

Each test runs on four processes, of which the first two, or all in two replicas, are a gang.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.training.first_import  # noqa: F401  (before transformers)
from m2flow.errors import UserError
from m2flow.flow import Batch, Place, Ragged
from m2flow.runtime.transport.groups import LaneGroups
from m2flow.training import checkpoint
from m2flow.training.sharded import whole
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers.learner import EmbodiedLearner
from m2flow.workloads.embodied.workers.source import WEIGHTS
from tests.runtime.local_cluster import local_cluster
from tests.training.lane_processes import LaneProcesses
from tests.training.test_sharded import PAIR, TWO_PAIRS, place_on
from tests.workloads.embodied.test_published import TABLE
from tests.workloads.embodied.test_published import checkpoint as published

pytestmark = pytest.mark.skipif(
    find_spec("timm") is None or find_spec("peft") is None, reason="needs the extra vla"
)
LENGTHS = [4, 1, 3, 2]
SHARES = {PAIR: ([0, 2, 3], [1]), TWO_PAIRS: ([1, 2], [], [0], [3])}
"""Rollouts of each lane; some have none, and micro-batches are unequally many."""


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(4) as processes:
        yield processes


def recipe_of(kind: str, name: str, **changes: Any) -> Any:
    algorithm: dict[str, Any] = {"name": name}
    if name == "grpo":
        algorithm["group_size"] = 2
    policy = {"kind": kind, "chunk": 2 if kind == "openvla-oft" else 1, "lora_rank": 0}
    own = {
        "model": "tiny",
        "steps": 4,
        "policy": policy | changes.pop("policy", {}),
        "algorithm": algorithm,
        "rollout.automatic_reset": name != "grpo",
        "update": {"epochs": 2, "minibatches": 2, "turns_per_microbatch": 2},
        "optimizer": {"learning_rate": 0.0003, "max_grad_norm": 0.3},
    }
    return read_recipe(TABLE, own | changes)


def learner_on(recipe: Any, place: Place, saved: Path | None = None) -> EmbodiedLearner:
    learner: EmbodiedLearner = EmbodiedExperiment(recipe).flow(saved).learner
    learner.load(place)
    return learner


def rollouts_of(recipe: Any, step: int) -> Batch:
    """What the first policy drew of noise; advantages and returns are noise too."""
    random, count = torch.Generator().manual_seed(step), sum(LENGTHS)
    policy: Any = EmbodiedExperiment(recipe).flow().actor.source.make()
    words = "reach the red ball"
    image = torch.randint(0, 256, (count, 32, 32, 3), generator=random).byte()
    seen = {"image": image, "instruction": [words] * count}
    drawn = policy.act(seen, seeds=list(range(count)))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    steps = torch.full((count,), drawn.tokens.shape[1])
    steps[[3, 4]] = 1
    columns = {
        "steps": steps,
        "observation.image": image,
        "tokens": drawn.tokens,
        "logprobs": drawn.logprobs + 0.1 * noise(*drawn.logprobs.shape),
        "advantage": noise(count).double(),
    }
    if drawn.values is not None:
        columns |= {"values": drawn.values + noise(count), "return": noise(count).double()}
    instructions = [[words] * length for length in LENGTHS]
    ragged = {f"turn.{name}": Ragged(column, LENGTHS) for name, column in columns.items()}
    return Batch(ragged | {"turn.observation.instruction": instructions})


def stepped(learner: EmbodiedLearner, steps: Sequence[int], rows: Sequence[int]) -> Any:
    """Train on a lane's rollouts of some steps; the figures, and whole weights and moments."""
    figures = {}
    for step in steps:
        batch = rollouts_of(learner.recipe, step).select(list(rows))
        if len(batch):
            learner._rollouts.append(batch)
        figures = learner.train_finish()
    moments = {
        name: x.clone() for name, x in learner.update.state_items() if name.startswith("exp_avg/")
    }
    weights = {name: whole(x).float().clone() for name, x in learner.weights().items()}
    return figures, weights, moments


def on_lanes(groups: LaneGroups, recipe: Any, replicas: Any, root: Path) -> Any:
    """Two steps and a checkpoint; a third step, which is taken again from the state before it."""
    place = place_on(groups, replicas, root)
    if place is None:
        return None
    learner, rows = learner_on(recipe, place), SHARES[replicas][place.rank]
    first = stepped(learner, (1, 2), rows)
    learner.save_checkpoint(str(root), 2, 1)
    learner.offload()
    learner.onload()
    state = learner.save()
    assert bool(state) == (place.gang.rank == 0)
    if place.rank == 0:
        save_file({name: x.contiguous().clone() for name, x in state.items()}, root / "state")
    place.all_reduce([torch.zeros(1)])  # it is there
    sizes = {name: x.to_local().numel() for name, x in learner.weights().items()}
    second = stepped(learner, (3,), rows)
    learner.restore(load_file(root / "state"))
    return first, second, stepped(learner, (3,), rows), sizes


def resumed_on(groups: LaneGroups, recipe: Any, saved: Path) -> Any:
    place = place_on(groups, PAIR, saved.parent)
    if place is None:
        return None
    learner = learner_on(recipe, place, saved)
    return stepped(learner, (3,), SHARES[PAIR][place.rank])


def alone(recipe: Any, root: Path) -> Any:
    """The same on one lane."""
    learner, rows = learner_on(recipe, Place(spill=root)), range(len(LENGTHS))
    first = stepped(learner, (1, 2), rows)
    learner.save_checkpoint(str(root), 2, 1)
    return first, stepped(learner, (3,), rows)


def assert_alike(found: Any, wanted: Any, within: float = 1e-4) -> None:
    """Figures; and weights and means of gradients, by how far they are apart as a whole."""
    for name, figure in wanted[0].items():
        assert found[0][name] == pytest.approx(figure, rel=within, abs=within), name
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        assert mine.keys() == theirs.keys()
        assert distance(mine, theirs) < within


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Euclidean, as a share of the length of what is wanted."""
    away = sum(float((found[name] - x).double().square().sum()) for name, x in wanted.items())
    return (away / sum(float(x.double().square().sum()) for x in wanted.values())) ** 0.5


@pytest.mark.parametrize(
    ("kind", "name", "replicas"),
    [
        pytest.param("openvla-oft", "ppo", PAIR, marks=pytest.mark.slow),
        ("openvla-oft", "ppo", TWO_PAIRS),
        ("openvla", "grpo", PAIR),
        pytest.param("openvla", "grpo", TWO_PAIRS, marks=pytest.mark.slow),
    ],
)
def test_in_shards_it_learns_as_on_one_lane(
    lanes: LaneProcesses, tmp_path: Path, kind: str, name: str, replicas: Any
) -> None:
    """Figures and weights, with activations computed again too; each lane has about a half."""
    recipe = recipe_of(kind, name)
    of_one = tmp_path / "one"
    first, second = alone(recipe, of_one)
    again = recipe_of(kind, name, **{"update.gradient_checkpointing": True})
    for number, some in enumerate((recipe, again)):
        root = tmp_path / str(number)
        root.mkdir()
        answers = [one for one in lanes(on_lanes, some, replicas, root) if one is not None]
        assert len(answers) == sum(map(len, replicas))
        for found, then, once_more, sizes in answers:
            assert_alike(found, first)
            assert_alike(then, second)
            assert_alike(once_more, second)
            assert sum(sizes.values()) < 0.6 * sum(x.numel() for x in first[1].values())
        saved, there = (checkpoint.resume_point(folder) for folder in (root, of_one))
        assert saved is not None
        assert there is not None
        for file in (WEIGHTS, "model/model.safetensors"):
            mine, theirs = load_file(saved / file), load_file(there / file)
            assert mine.keys() == theirs.keys()
            assert distance(mine, theirs) < 1e-5
    assert saved is not None
    assert there is not None
    assert_alike(stepped(learner_on(recipe, Place(), saved), (3,), range(len(LENGTHS))), second)
    for answer in lanes(resumed_on, recipe, there)[:2]:
        assert_alike(answer, second)


def test_in_shards_of_16_bits_a_value_head_of_32_learns(
    lanes: LaneProcesses, tmp_path: Path
) -> None:
    """And while the critic alone learns, the rest stands still."""
    folder = published(tmp_path / "model")
    sixteen = {"dtype": "bfloat16", "statistics": None}
    recipe = recipe_of(
        "openvla-oft", "ppo", model=folder, policy=sixteen,
        algorithm={"name": "ppo", "value_warmup_steps": 2, "value_coefficient": 1e-6},
        **{"optimizer.learning_rate": 1e-4},
    )  # fmt: skip
    first, second = alone(recipe, tmp_path / "one")
    assert 0 < first[0]["grad_norm"] < 1e-3 < second[0]["grad_norm"], (
        "what is clipped, by what learns"
    )
    before = dict(learner_on(recipe, Place()).weights())
    for found, then, once_more, _ in lanes(on_lanes, recipe, PAIR, tmp_path)[:2]:
        for name, weight in found[1].items():
            moved = not torch.equal(weight, before[name].float())
            assert moved == name.startswith("value_head."), name
        assert_alike(found, first, 1e-3)
        assert_alike(then, second, 5e-2)
        assert_alike(once_more, second, 5e-2)
        moved = [not torch.equal(x, before[name].float()) for name, x in then[1].items()]
        assert sum(moved) > len(moved) / 2


def test_a_run_in_shards_is_the_eager_run(tmp_path: Path) -> None:
    """Published to an actor that has all of it, and resumed in another layout."""
    data = TABLE | {"model": "tiny", "steps": 3, "rollouts_per_step": 3}
    data |= {"policy": TABLE["policy"] | {"lora_rank": 0}, "checkpoint": {"every": 1}}
    eager = train(data, run_dir=tmp_path / "eager")
    divided = {"mode": "collocated", "lanes": "cpu:2", "layouts": {"learner": "fsdp2"}}
    with local_cluster(2):
        run = train(data, divided | {"steps": 2}, run_dir=tmp_path / "run")
        train(data, divided | {"steps": 3, "layouts": {}}, run_dir=run, resume=True)
    mine, theirs = (
        [row for line in (one / "metrics.jsonl").read_text().splitlines()
         if "train/grad_norm" in (row := json.loads(line))]
        for one in (run, eager)
    )  # fmt: skip
    assert len(theirs) == 3
    for row, wanted in zip(mine, theirs, strict=True):
        assert row["episodes/finished"] == wanted["episodes/finished"]
        assert ("episodes/return" in row) == (row["episodes/finished"] > 0)
        ended = ["episodes/return"] * ("episodes/return" in wanted)
        for figure in ("loss/policy", "loss/value", "train/grad_norm", *ended):
            assert row[figure] == pytest.approx(wanted[figure], rel=1e-3, abs=1e-5), figure
    found, wanted = (load_file(one / "checkpoints" / "latest" / WEIGHTS) for one in (run, eager))
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"lora_rank": 2}, {"kind": "pi0"}])
def test_what_is_not_divided_is_refused_with_what_would_do(changes: dict[str, Any]) -> None:
    data = TABLE | {"model": "tiny", "mode": "collocated", "lanes": "cpu:2"}
    data |= {"policy": TABLE["policy"] | changes, "layouts": {"learner": "fsdp2"}}
    with pytest.raises(UserError, match=r"layouts.learner.*fsdp2.*one of one"):
        train(data)
