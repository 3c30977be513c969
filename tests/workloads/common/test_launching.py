"""What a run knows of its lanes before its first step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m2flow.engine.plan import LaneSpec
from m2flow.errors import PlanError, UserError
from m2flow.observe.progress import Quiet
from m2flow.plan import build_plan, with_memory, with_sizes
from m2flow.plan.file import to_json
from m2flow.plan.memory import check_memory
from m2flow.runtime.driver.pilot import Pilot
from m2flow.runtime.profiling import stored
from m2flow.workloads.common import launching, planning, profile_key, read_recipe, start
from m2flow.workloads.common.accounting import memory_lines
from m2flow.workloads.common.computed import computed_profile, whose_figures
from m2flow.workloads.common.launching import launched, with_working_memory
from m2flow.workloads.common.planning import flow_of, planned

RECIPE = read_recipe(Path(__file__).parents[3] / "recipes" / "quickstart.yaml", ())
GRAPH = flow_of(RECIPE).trace()
GPUS = tuple(LaneSpec(number, "gpu", gpu=number) for number in range(4))


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("m2flow.workloads.common.launching.gpu_name", lambda _lanes: name)


def test_a_run_on_known_accelerators_begins_with_a_computed_choice() -> None:
    profile = computed_profile(RECIPE, GRAPH, GPUS, "NVIDIA H200")
    assert profile is not None
    assert profile.source == "analytic"
    pilot = Pilot(GRAPH, GPUS, RECIPE.items_per_step, known=profile, num_steps=RECIPE.steps)
    assert pilot.decision is not None
    assert pilot.plan.predicted_seconds == pilot.decision.chosen.prediction.seconds


def test_a_fixed_plan_counts_what_calls_take_of_accelerators_with_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With states alone a generator and a learner would seem to fit beside each other's calls."""
    called(monkeypatch, "NVIDIA H200")
    limited = build_plan("collocated", GRAPH, with_memory(GPUS, 10**11), RECIPE.items_per_step)
    found = with_working_memory(RECIPE, GRAPH, limited).placements
    # Half of what an engine may have of the device: of 141 GB the limit's 100 / 0.9.
    assert found["generator"].working_bytes == pytest.approx(55.6e9, rel=0.02)
    for limit in (40, 80):
        less = build_plan(
            "collocated", GRAPH, with_memory(GPUS, limit * 10**9), RECIPE.items_per_step
        )
        spots = with_working_memory(RECIPE, GRAPH, less).placements
        assert spots["generator"].working_bytes < 0.6e9 * limit
    assert found["learner"].working_bytes > 0
    assert {spot.state_bytes for spot in found.values()} == {0}, "these the workers tell"
    free = build_plan("collocated", GRAPH, GPUS, RECIPE.items_per_step)
    assert with_working_memory(RECIPE, GRAPH, free) is free


@pytest.mark.parametrize("recipe", ["qwen2.5-1.5b-grpo-math", "qwen2.5-3b-grpo-search"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_keys_and_values_that_an_engine_tells_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, recipe: str, engine: str
) -> None:
    """They were counted as its state and once more as what its calls take: never a fit."""
    called(monkeypatch, "NVIDIA H200")
    found = read_recipe(recipe, (f"generation.engine={engine}",))
    graph, lanes = flow_of(found).trace(), with_memory(GPUS[:1], 135_700_000_000)
    plan = build_plan("collocated", graph, lanes, found.items_per_step)
    plan = with_working_memory(found, graph, plan)
    told = {"generator": int(3.1e9 + 75e9)}
    check_memory(with_sizes(plan, told, {}), graph)
    assert plan.placements["generator"].working_bytes < 2 * 10**9
    profile = computed_profile(found, graph, lanes, "NVIDIA H200")
    assert profile is not None
    state = profile.worker("generator", 1, "gpu")
    assert state is not None
    assert 70e9 < state.state_bytes < 80e9, "so awake it holds"
    assert state.offload < 1, "and its weights alone are copied"
    with pytest.raises(PlanError, match="generator"):
        check_memory(with_sizes(plan, {"generator": 136 * 10**9}, {}), graph)


def test_accelerators_without_figures_count_by_their_memory() -> None:
    """They began with all of a model's training state on each lane, whatever its memory."""
    name = "NVIDIA RTX A6000"
    assert computed_profile(RECIPE, GRAPH, GPUS, name) is None, "and nobody says how much"
    assert computed_profile(RECIPE, GRAPH, [LaneSpec(0, cores=(0,))], name) is None
    large = read_recipe("qwen2.5-7b-grpo-math", ())
    graph, lanes = flow_of(large).trace(), with_memory(GPUS * 2, 43 * 10**9)
    lanes = tuple(replace(lane, id=number, gpu=number) for number, lane in enumerate(lanes))
    profile = computed_profile(large, graph, lanes, name)
    assert profile is not None
    layouts = {cost.layout for cost in profile.stage("learner.train").costs}
    assert "fsdp8" in layouts
    assert layouts.isdisjoint({"one", "fsdp2"}), "18 bytes of 7.6 billion parameters"
    assert whose_figures(name) == (
        "with the rates of an H100, as no figures of these accelerators are known"
    )


def test_what_the_recipe_says_of_lanes_reaches_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"load_deadline_seconds": 9.0, "lane_restarts": 5, "snapshot_every": 2}
    experiment: Any = SimpleNamespace(
        recipe=RECIPE.model_copy(update=said), flow=lambda checkpoint: flow_of(RECIPE)
    )
    monkeypatch.setattr(launching, "launch", lambda flow, **settings: settings)
    lanes = [LaneSpec(0, cores=(0,))]
    plan = build_plan("collocated", GRAPH, lanes, RECIPE.items_per_step)
    settings: Any = launched(
        experiment, plan, None, Quiet(), checkpoint=None, first_step=0, also={}
    )
    assert {name: settings[name] for name in said} == said


def test_a_stored_profile_that_lacks_a_stage_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was taken, and the choice of a plan then refused the recipe."""
    monkeypatch.setenv("M2FLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(launching, "launch", lambda flow, **settings: settings["auto"].profile)
    called(monkeypatch, "an accelerator without figures")
    monkeypatch.setattr(profile_key, "gpu_name", lambda _lanes: "")
    computed = computed_profile(RECIPE, GRAPH, GPUS, "NVIDIA H200")
    assert computed is not None
    known = replace(computed, key=profile_key.profile_key(RECIPE, GPUS))
    experiment: Any = SimpleNamespace(recipe=RECIPE, flow=lambda checkpoint: flow_of(RECIPE))
    pool: Any = SimpleNamespace(lanes=GPUS)
    for stages in (known.stages, {name: known.stages[name] for name in list(known.stages)[1:]}):
        stored.keep(replace(known, stages=stages))
        found: Any = launched(
            experiment, None, pool, Quiet(), checkpoint=None, first_step=0, also={}
        )
        assert (found is not None) == (stages is known.stages)


@pytest.mark.parametrize(
    ("said", "spares"), [((), 1), (("spare_lanes=0",), 0), (("lane_restarts=0",), 0)]
)
def test_a_process_is_spare_where_lanes_are_started_again(
    said: tuple[str, ...], spares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def lanes_ahead(
        _lanes: object, _modules: object, count: int, *, start_seconds: float
    ) -> AbstractContextManager[None]:
        assert start_seconds == 9.0
        asked.append(count)
        return nullcontext()

    monkeypatch.setattr("m2flow.runtime.driver.ahead.LanesAhead", lanes_ahead)
    quickstart = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
    recipe = read_recipe(quickstart, (*said, "load_deadline_seconds=9"))
    with start._lanes_ahead(recipe, "auto", GPUS, ()):
        assert asked == [spares]


def test_a_plan_that_runs_further_ahead_than_the_data_allow_is_refused(tmp_path: Path) -> None:
    """Which problems come next follows from results: of how many steps before, the recipe says."""
    keys: dict[str, Any] = {"workload": "reasoning", "mode": "collocated", "lanes": "cpu:2"}
    recipe = read_recipe(keys)
    _, plan = planned(recipe)
    file = tmp_path / "plan.json"
    file.write_text(to_json(replace(plan, max_staleness=1)))
    assert planned(recipe, file)[1].max_staleness == 1
    for more in (
        {"algorithm": {"name": "dapo"}},
        {"generation": {"max_versions": 1}},
        {"generation": {"max_new_tokens": 6, "tokens_per_step": 3}},
    ):
        with pytest.raises(UserError, match=r"max_staleness: .*set max_staleness: 1 in the recipe"):
            planned(read_recipe({**keys, **more}), file)
        planned(read_recipe({**keys, **more, "max_staleness": 1}), file)


@pytest.mark.parametrize(
    ("keys", "worker", "error"),
    [
        ({"workload": "agentic"}, "generator", "the worker has no layout of 3 lanes"),
        (
            {"workload": "reasoning", "generation": {"engine": "vllm"}},
            "generator",
            "the worker has no layout of 3 lanes",
        ),
        ({"workload": "reasoning"}, "generator", "2 key-value heads cannot be divided by 3"),
        (
            {"workload": "embodied", "environment": {"name": "table"}},
            "learner",
            "the worker has no layout of 3 lanes",
        ),
        ({"workload": "reasoning"}, "learner", None),
        ({"workload": "reasoning"}, "verifier", None),
    ],
)
def test_a_gang_that_the_worker_has_no_layout_for_is_refused(
    tmp_path: Path, keys: dict[str, Any], worker: str, error: str | None
) -> None:
    """The lanes of a gang drew each a part of every token, for items that only one of them had."""
    recipe = read_recipe({**keys, "mode": "collocated", "lanes": "3xcpu:1"})
    _, plan = planned(recipe)
    gang = replace(plan.placements[worker], replicas=((0, 1, 2),))
    file = tmp_path / "plan.json"
    file.write_text(to_json(replace(plan, placements={**plan.placements, worker: gang})))
    if error is None:
        assert planned(recipe, file)[1].placements[worker] == gang
        return
    with pytest.raises(UserError, match=rf"placements\.{worker}\.replicas: {error}"):
        planned(recipe, file)


def test_lanes_of_a_devices_own_kind_have_an_account() -> None:
    recipe = read_recipe({"workload": "reasoning", "mode": "collocated", "lanes": "cpu:2"})
    graph, plan = planned(recipe)
    lanes = tuple(replace(one, kind="h100", gpu=one.id, cores=()) for one in plan.lanes)
    lines = memory_lines(recipe, graph, replace(plan, lanes=lanes))
    assert any("learner" in line for line in lines)


def test_working_memory_is_counted_for_lanes_of_a_devices_own_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called(monkeypatch, "NVIDIA H100")
    lanes = [replace(one, kind="h100") for one in with_memory(GPUS, 6 * 10**10)]
    plan = build_plan("collocated", GRAPH, lanes, RECIPE.items_per_step)
    assert with_working_memory(RECIPE, GRAPH, plan).placements["generator"].working_bytes > 0


def test_accelerators_of_other_machines_are_like_those_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile_key, "gpu_names", lambda: ("NVIDIA H100",))
    lanes = [LaneSpec(0, "gpu", gpu=0), LaneSpec(1, "gpu", gpu=5, node=1)]
    assert profile_key.gpu_name(lanes) == "NVIDIA H100"


def test_accelerators_are_refused_where_torch_is_built_for_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(planning.metadata, "version", lambda _: "2.13.0+cpu")
    with pytest.raises(UserError, match=r"lanes: torch is built for CPUs alone.*'gpu:4'"):
        planning.check_build(GPUS)
    planning.check_build([LaneSpec(0, cores=(0,))])
    monkeypatch.setattr(planning.metadata, "version", lambda _: "2.13.0")
    planning.check_build(GPUS)
