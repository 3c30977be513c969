"""The embodied flows on every plan: the same rollouts, the same weights, and something learned."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import m2flow
from m2flow.engine.plan import LaneSpec, StagePlan
from m2flow.environments import Deadlines
from m2flow.errors import UserError
from m2flow.flow import Batch
from m2flow.observe.jsonl import read_rows
from m2flow.plan import build_plan
from m2flow.runtime.driver.call_watch import CallWatch
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.embodied.config import DeadlinesPart, EmbodiedRecipe
from m2flow.workloads.embodied.experiment import EmbodiedExperiment, episode_figures
from m2flow.workloads.embodied.workers.columns import FILM, NO_FILM, OPTIONAL_FILM
from m2flow.workloads.embodied.workers.film import FRAMES, Pictures, filmed

HERE = Path(__file__).parent
COUNTING = "counting:Counting"

SMALL: dict[str, Any] = {
    "workload": "embodied",
    "name": "counting",
    "rollouts_per_step": 8,
    "environment": {"name": COUNTING},
    "policy": {"hidden": [16]},
    "rollout": {"horizon": 12},
    "update": {"epochs": 2, "minibatches": 2},
    "optimizer": {"learning_rate": 0.01},
    "evaluation": {"episodes": 6},
}
GROUPS = {
    "algorithm": {"name": "grpo", "group_size": 4, "reward": "return"},
    "rollout": {"horizon": 8, "automatic_reset": False},
}

FILTERED = {
    **GROUPS,
    "algorithm": {
        "name": "grpo", "group_size": 4, "success_bounds": [0.2, 0.8],
        "aggregation": "sequence-mean-token-mean",
    },
}  # fmt: skip

DRAWN_AGAIN = {**FILTERED, "algorithm": {**FILTERED["algorithm"], "further_draws": 2}}

IN_CHUNKS = {"policy": {"hidden": [16], "chunk": 3}}
"""Of which episodes end in the middle."""

BY_ACTION = {**IN_CHUNKS, "algorithm": {"name": "ppo", "advantage_level": "action"}}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """The environment's module, here and on lanes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    pytest.importorskip("ray")
    from m2flow.runtime.driver.pool import LanePool

    with LanePool([LaneSpec(0), LaneSpec(1)]) as lanes:
        yield lanes


def recipe(**changes: Any) -> EmbodiedRecipe:
    found = read_recipe({**SMALL, **changes})
    assert isinstance(found, EmbodiedRecipe)
    return found


def trained(
    some: EmbodiedRecipe, mode: str, steps: int = 2, lanes: Any = "cpu:1"
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What the steps gave, and the weights after them."""
    experiment = EmbodiedExperiment(some)
    with m2flow.launch(
        experiment.flow(), items_per_step=some.items_per_step, mode=mode, lanes=lanes
    ) as run:
        results = list(run.steps(experiment.batch(step) for step in range(steps)))
        return results, run.worker_call("learner", "weights")


@pytest.mark.parametrize(
    "changes",
    [{}, IN_CHUNKS, BY_ACTION, GROUPS, FILTERED, DRAWN_AGAIN],
    ids=["ppo", "ppo in chunks", "ppo by action", "grpo", "filtered", "drawn again"],
)
def test_every_plan_computes_the_same(pool: Any, changes: dict[str, Any]) -> None:
    some = recipe(**changes)
    wanted, weights = trained(some, "eager", 6)
    for mode in ("collocated", "disaggregated", "hybrid", "auto"):
        found, others = trained(some, mode, 6, lanes=pool)
        for ours, theirs in zip(wanted, found, strict=True):
            assert ours.output["episodes"] == theirs.output["episodes"]
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, others[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, IN_CHUNKS, DRAWN_AGAIN], ids=["ppo", "ppo in chunks", "drawn again"]
)
def test_groups_that_take_turns_on_a_lane_compute_the_same(changes: dict[str, Any]) -> None:
    """Simulators of one group step in their processes while the policy acts for another."""
    some = recipe(**changes, environment={"name": COUNTING, "processes": 2})
    wanted, weights = trained(some, "eager", 4)
    experiment = EmbodiedExperiment(some)
    graph = experiment.flow().trace()
    plan = build_plan("eager", graph, (LaneSpec(0),), some.items_per_step)
    for group in (4, 3):
        waiting = {node.name: StagePlan(chunk=group) for node in graph.nodes if node.waits}
        cut = replace(plan, stages={**plan.stages, **waiting})
        count = some.items_per_step
        with m2flow.launch(experiment.flow(), items_per_step=count, plan=cut) as run:
            found = list(run.steps(experiment.batch(step) for step in range(4)))
            others = run.worker_call("learner", "weights")
        for ours, theirs in zip(wanted, found, strict=True):
            assert ours.output["episodes"] == theirs.output["episodes"]
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, others[name], atol=1e-4, rtol=1e-4)
        groups = {n.args["groups"] for one in found for n in one.spans if "groups" in n.args}
        assert groups == {-(-8 // group)}


@pytest.mark.parametrize("changes", [{}, GROUPS], ids=["ppo", "grpo"])
def test_rollouts_may_run_ahead_of_training(pool: Any, changes: dict[str, Any]) -> None:
    some = recipe(**changes)
    experiment = EmbodiedExperiment(some)
    graph = experiment.flow().trace()
    apart = build_plan("disaggregated", graph, pool.lanes, some.items_per_step)
    found = {}
    for budget in (0, 1):
        plan = replace(apart, max_staleness=budget)
        count = some.items_per_step
        with m2flow.launch(experiment.flow(), items_per_step=count, plan=plan, lanes=pool) as run:
            found[budget] = list(run.steps(experiment.batch(step) for step in range(12)))
            if not budget:
                weights = run.worker_call("learner", "weights")
    wanted, expected = trained(some, "eager", 12)
    for ours, theirs in zip(wanted, found[0], strict=True):
        assert ours.output["episodes"] == theirs.output["episodes"]
        assert theirs.staleness == 0
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-4, rtol=1e-4)
    ahead = [one.staleness for one in found[1]]
    assert 0 < max(ahead) <= 1, "the engine admits a step's rollouts before the last is trained"
    figures = [experiment.metrics(one) for one in found[1]]
    assert figures[0]["episodes/return"] < 5.5 < 6.5 < figures[-1]["episodes/return"]


def test_an_update_makes_progress_with_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes of a step stood under the deadline of one call."""
    heard = Counter[str]()

    def note(watch: CallWatch) -> None:
        assert watch._call is not None
        heard[watch._call.name] += 1

    monkeypatch.setattr(CallWatch, "heard", note)
    trained(recipe(update={"epochs": 3, "minibatches": 2}), "eager", 1)
    assert heard["learner.train.finish (step 0, mini-batch 0)"] == 6


@pytest.mark.parametrize("changes", [{}, GROUPS], ids=["ppo", "grpo"])
def test_it_learns(changes: dict[str, Any]) -> None:
    results, _ = trained(recipe(**changes), "eager", steps=12)
    experiment = EmbodiedExperiment(recipe(**changes))
    first, last = (experiment.metrics(results[at])["episodes/return"] for at in (0, -1))
    assert first < 5.5 < 6.5 < last


def test_the_same_seed_gives_the_same_rollouts() -> None:
    (first,), _ = trained(recipe(), "eager", steps=1)
    (again,), _ = trained(recipe(), "eager", steps=1)
    (other,), _ = trained(recipe(seed=1), "eager", steps=1)
    assert first.output["episodes"] == again.output["episodes"]
    assert first.output["episodes"] != other.output["episodes"]


@pytest.mark.parametrize("changes", [{}, GROUPS], ids=["ppo", "grpo"])
def test_an_episode_that_fails_is_counted_and_the_run_goes_on(changes: dict[str, Any]) -> None:
    some = recipe(environment={"name": COUNTING, "options": {"fails_at": 3}}, **changes)
    (result,), weights = trained(some, "eager", steps=1)
    figures = EmbodiedExperiment(some).metrics(result)
    assert figures["episodes/failed"] > 0
    assert figures["episodes/finished"] > 0
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_an_episode_that_fails_has_no_film(tmp_path: Path) -> None:
    """One of even seed raises at its third step; before, its film had two sizes, and ended all."""
    run = train(
        {
            **SMALL,
            "mode": "eager",
            "steps": 1,
            "environment": {"name": COUNTING, "options": {"fails_at": 3}},
            "evaluation": {"episodes": 6, "films": 6},
        },
        run_dir=tmp_path / "run",
    )
    (row,) = [row for row in read_rows(run / "metrics.jsonl").rows if row["step"] == 1]
    films = len(list((run / "films").glob("step_000001_*.webp")))
    assert films == row["eval/episodes"]
    assert 0 < films < 6


def test_where_every_episode_fails_there_are_no_figures_of_them() -> None:
    output = {"episodes": [[], []], "failed": torch.tensor([1, 2]), "steps_taken": [0, 0]}
    result: Any = SimpleNamespace(output=output)
    experiment = EmbodiedExperiment(recipe())
    assert experiment.evaluation(result) == {}
    assert [said.partition(":")[0] for said in experiment.alarms(result)] == [
        "a simulator crashed, hung or gave NaN", "no step is left of any episode",
    ]  # fmt: skip
    output["steps_taken"] = [0, 3]  # of an episode that goes on
    assert len(experiment.alarms(result)) == 1


@pytest.mark.parametrize(
    "key", ["rollouts_per_step", "rollout.horizon", "update.turns_per_microbatch", "max_staleness"]
)
def test_a_number_that_no_tensor_can_hold_is_refused(key: str) -> None:
    """It ended in torch's own words, with a list of its frames."""
    with pytest.raises(UserError, match=rf"^{key}: is wrong .*expected.*2\*\*63"):
        read_recipe(SMALL, {key: 10**30})


def test_a_policy_that_stands_still_in_the_whole_run_is_said() -> None:
    output = {"episodes": [[1]], "failed": torch.tensor([0]), "steps_taken": [3]}
    result: Any = SimpleNamespace(output=output)
    for still, said in ((3, 0), (4, 1)):
        made = recipe(steps=4, algorithm={"name": "ppo", "value_warmup_steps": still})
        assert len(EmbodiedExperiment(made).alarms(result)) == said


@pytest.mark.parametrize(
    ("episodes", "each", "more"), [(4, 0, [0, 2, 5, 7]), (10, 1, []), (25, 2, [0, 2, 4, 6, 8])]
)
def test_an_evaluation_is_spread_over_the_initial_states(
    episodes: int, each: int, more: list[int]
) -> None:
    experiment = EmbodiedExperiment(recipe(evaluation={"episodes": episodes}))
    experiment.spec = replace(experiment.spec, num_initial_states=10)
    starts = experiment.held_out()
    assert starts is not None
    found = Counter(starts["initial_state"].tolist())
    assert found == Counter([*range(10)] * each + more)


def test_a_film_has_one_size_and_a_strip_of_it() -> None:
    pictures = [torch.full((size, size, 3), 10 * size, dtype=torch.uint8) for size in (16, 24, 2)]
    episode = {"success_once": 1.0, "return": 2.5}
    film = filmed(pictures, episode, "count")
    assert film is not None
    assert film.title == "solved · count · return 2.5"
    moving, strip = (Image.open(BytesIO(one)) for one in (film.moving, film.strip))
    assert (moving.size, moving.n_frames) == ((16, 16), 3)
    assert (strip.size, strip.n_frames) == ((48, 16), 1)
    longer = [torch.full((4, 6, 3), n, dtype=torch.uint8) for n in range(250)]
    film = filmed(longer, {**episode, "success_once": 0.0})
    assert film is not None
    assert film.title == "unsolved · return 2.5"
    moving, strip = (Image.open(BytesIO(one)) for one in (film.moving, film.strip))
    assert moving.n_frames <= 120
    assert strip.size == (8 * 6, 4)
    shown = [strip.convert("L").getpixel((6 * n + 3, 2)) for n in range(8)]
    assert shown == pytest.approx([n * 249 / 7 for n in range(8)], abs=8)
    assert filmed(pictures, None) is None, "of an episode that did not end"


def test_solved_episodes_are_filmed_first() -> None:
    """Four episodes are filmed for each film that is kept; the solved ones among them lead."""
    some = recipe(evaluation={"episodes": 20, "films": 2})
    experiment = EmbodiedExperiment(some)
    starts = experiment.held_out()
    assert starts is not None
    assert starts["film"].tolist() == [FILM] * 2 + [OPTIONAL_FILM] * 6 + [NO_FILM] * 12
    episodes = [[{"success_once": float(n == 2)}] for n in range(4)]
    result: Any = SimpleNamespace(output={"film": ["a", None, "c", "d"], "episodes": episodes})
    assert experiment.films(result) == ["c", "a"]


@pytest.mark.parametrize("fault", ["kill", "hang", "nan", "raise", "noreset"])
def test_faults_of_real_processes_cost_episodes_and_not_the_run(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-episode, two simulators in each process; another step is trained with them then."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "environments"))
    some = recipe(
        environment={
            "name": "toy_environments:Faulty", "options": {"folder": str(tmp_path)}, "processes": 2,
            "deadlines": {"step": 1.0, "reset": 10.0},
        },
        policy={"kind": "mlp"},
        rollouts_per_step=4,
    )  # fmt: skip
    (tmp_path / fault).write_text("3")
    results, weights = trained(some, "eager", steps=2)
    first, second = (EmbodiedExperiment(some).metrics(result) for result in results)
    assert not (tmp_path / fault).exists()
    assert 1 <= first["episodes/failed"] <= 2
    assert second["episodes/failed"] == 0
    assert second["environment_steps"] == 4 * some.rollout.horizon
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


def test_deadlines_are_those_of_environments_and_hold_for_processes() -> None:
    assert DeadlinesPart().model_dump() == asdict(Deadlines())
    with pytest.raises(UserError, match=r"environment.deadlines.*environment.processes: 1"):
        recipe(environment={"name": COUNTING, "deadlines": {"step": 10}})
    for more in ({"processes": 2}, {"python": "/somewhere/python"}):
        made = recipe(environment={"name": COUNTING, "deadlines": {"step": 10}, **more})
        assert made.environment.hung_after == replace(Deadlines(), step=10)
    for name in asdict(Deadlines()):
        with pytest.raises(UserError, match=rf"deadlines\.{name}.*less than or equal to 1000000"):
            recipe(environment={"name": COUNTING, "processes": 2, "deadlines": {name: 1e9}})


def test_episodes_that_end_by_themselves() -> None:
    some = recipe(environment={"name": COUNTING, "options": {"stops": True}})
    (result,), _ = trained(some, "eager", steps=1)
    assert EmbodiedExperiment(some).metrics(result)["episodes/length"] < 8
    assert result.output["steps_taken"] == [12] * 8


def test_groups_in_which_all_fail_or_all_succeed_are_dropped() -> None:
    some = recipe(**FILTERED, rollouts_per_step=32)
    (result,), _ = trained(some, "eager", steps=1)
    solved = [one["success_once"] for (one,) in result.output["episodes"]]
    shares = [sum(solved[n : n + 4]) / 4 for n in range(0, 32, 4)]
    dropped = sum(not 0.2 <= share <= 0.8 for share in shares)
    assert 0 < dropped < 8, "neither none nor all, or the seed shows nothing"
    figures = EmbodiedExperiment(some).metrics(result)
    assert figures["groups/dropped"] == dropped
    assert figures["episodes/finished"] == 32


def test_without_a_kept_group_no_step_is_taken() -> None:
    algorithm = {"name": "grpo", "group_size": 4, "success_bounds": [0.99, 0.995]}
    some = recipe(**{**GROUPS, "algorithm": algorithm})
    (result,), weights = trained(some, "eager", steps=1)
    begun = EmbodiedExperiment(some).flow().learner.source.make().state_dict()
    assert EmbodiedExperiment(some).metrics(result)["groups/dropped"] == 2
    for name, tensor in weights.items():
        assert torch.equal(tensor, begun[name]), name


def test_rollouts_of_a_group_begin_alike() -> None:
    some = recipe(**GROUPS)
    experiment = EmbodiedExperiment(some)
    from m2flow.workloads.embodied.workers.stages import begin_alike

    rollouts = begin_alike(experiment.batch(3), group_size=4)
    assert len(set(rollouts["rollout"].tolist())) == 8
    assert len(set(rollouts["seed"].tolist())) == 8
    states = rollouts["initial_state"].view(2, 4)
    assert bool((states == states[:, :1]).all())
    assert states[0, 0] != states[1, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollouts_per_step": 9, **GROUPS}, "rollouts_per_step: the rollouts do not fill"),
        ({"algorithm": {"name": "grpo"}}, "rollout.automatic_reset: a group compares"),
        ({"algorithm": {"group_size": 4}}, "algorithm.group_size: ppo has no use for it"),
        ({"algorithm": {"name": "grpo", "gamma": 0.9}}, "algorithm.gamma: grpo has no use for it"),
        (
            {"policy": {"kind": "pi0", "noise": "network", "noise_level": 0.1}},
            "policy.noise_level: network has no use for it",
        ),
        (
            {
                "algorithm": {"name": "sac"},
                "replay": {"capacity": 500},
                "policy": {"distribution": "squashed"},
            },
            "replay.begin: the buffer never holds so many transitions",
        ),
        (
            {"optimizer": {"schedule": "linear", "warmup_steps": 10**6}},
            "optimizer.warmup_steps: leaves nothing of the linear schedule",
        ),
        ({"algorithm": {"success_bounds": [0, 1]}}, "algorithm.success_bounds: ppo has no use"),
        (
            {**GROUPS, "algorithm": {"name": "grpo", "success_bounds": [0.9, 0.1]}},
            "algorithm.success_bounds: the lower bound comes first",
        ),
        ({"algorithm": {"name": "sac"}}, "policy: sac is for policies of states"),
        ({"replay": {"updates": 3}}, "replay: ppo has no use for it"),
        ({"policy": {"chunk": 5}}, "rollout.horizon: a rollout does not hold whole chunks"),
        ({"policy": {"distribution": "gaussian"}}, "policy.distribution: counting takes choices"),
        ({"policy": {"kind": "cnn"}}, "policy.cameras: counting has no such picture (got 'image')"),
        ({"environment": {"name": "table:rech"}}, "did you mean 'reach'"),
        (
            {"policy": {"kind": "pi0"}, "algorithm": {"entropy_coefficient": 0.01}},
            "algorithm.entropy_coefficient: the noise of the stochastic equation is fixed",
        ),
        (
            {"policy": {"kind": "cnn"}, "model": "states"},
            "model: the recipe has no stand-in by state",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        EmbodiedExperiment(recipe(**changes))
    assert words in str(refused.value)


def test_where_no_episode_ended_there_are_no_means_of_episodes() -> None:
    """They would read 0, which a reward below 0 or a share of successes is not."""
    output = Batch({"episodes": [[], []], "failed": torch.tensor([0, 0])}, [0, 1])
    assert episode_figures(output) == {"episodes/finished": 0.0, "episodes/failed": 0.0}


def test_episodes_from_one_numbered_state_are_no_independent_trials() -> None:
    """A policy without chance does in all of them what it does in one."""
    experiment = EmbodiedExperiment(recipe())
    solved = [[{"success_once": x}] for x in (1.0, 1.0, 0.0, 0.0, 1.0, 0.0)]
    starts = Batch({"initial_state": torch.tensor([0, 0, 1, 1, 2, 2])})
    result: Any = SimpleNamespace(output={"episodes": solved})
    assert experiment.success_by_start(starts, result) == [1, 1, 0, 0, 1, 0]
    experiment.spec = replace(experiment.spec, num_initial_states=3)
    assert experiment.success_by_start(starts, result) == [1.0, 0.0, 0.5]


def test_pictures_of_a_long_episode_are_thinned_out() -> None:
    pictures = Pictures()
    for number in range(1001):
        pictures.add(torch.full((1, 1, 3), number))
        assert len(pictures.all()) <= 2 * FRAMES
    shown = [int(one[0, 0, 0]) for one in pictures.all()]
    assert (shown[0], shown[-1], len(shown) >= FRAMES) == (0, 1000, True)
    steps = {b - a for a, b in pairwise(shown[:-1])}
    assert len(steps) == 1
