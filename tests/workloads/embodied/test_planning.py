"""A step of environments is measured and planned as any other; on a lane its loop runs fused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from m2flow.engine.loops import fused_loops
from m2flow.engine.plan import LaneSpec
from m2flow.errors import UserError
from m2flow.models.work import decoding
from m2flow.plan import build_plan
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import lane_specs, parse_cluster
from m2flow.plan.profile.hardware import device_named
from m2flow.plan.profile.work import FlowWork, total
from m2flow.plan.simulate import simulate
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.workload import Assumed
from m2flow.workloads.embodied.bodies import body_of
from m2flow.workloads.embodied.flow import recipe_flow
from m2flow.workloads.embodied.workload import WORKLOAD
from tests.cli.conftest import predicted_plan, run_command
from tests.runtime.local_cluster import local_cluster

RECIPE = {
    "workload": "embodied",
    "name": "table",
    "lanes": "cpu:2",
    "steps": 2,
    "rollouts_per_step": 4,
    "environment": {"name": "table:red", "options": {"privileged": True, "pixels": 24}},
    "policy": {"hidden": [16]},
    "rollout": {"horizon": 8},
    "update": {"epochs": 1, "minibatches": 1},
    "evaluation": {"episodes": 2, "films": 0},
}


def test_a_recipe_is_measured_and_then_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a simulator of one's own takes is in no data sheet: it is measured, then planned."""
    monkeypatch.setenv("M2FLOW_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "table.yaml"
    recipe.write_text(json.dumps(RECIPE))
    before = run_command("plan", recipe, "--explain")
    assert before.code == 0
    assert "nothing is known of these lanes yet" in before.err
    own = run_command("plan", recipe, "environment.name=mine:Own", "--cluster", "1x2xCPU")
    assert own.code == 2
    assert "m2flow profile RECIPE" in own.err
    with local_cluster(2):
        done = run_command("profile", recipe, "--budget", 15)
    assert done.code == 0, done.err
    for word in ("simulator.step", "actor.act", "turns: mean 8", "simulator on 1 cpu", "measured"):
        assert word in done.out, word
    planned = run_command("plan", recipe, "--explain")
    assert planned.code == 0, planned.err
    assert "with a profile that is measured" in planned.out
    graph = recipe_flow(read_recipe(RECIPE)).trace()  # type: ignore[arg-type]
    plan = run_command("plan", recipe, "--json").plan
    assert fused_loops(graph, plan), "a trip between lanes is dearer than any of its turns"


RECIPES = Path(__file__).parents[3] / "recipes"
H100 = device_named("H100")


def priced(name: str, *changes: str, model: Path | None = None) -> FlowWork:
    """What a shipped recipe asks of an H100."""
    recipe: Any = read_recipe(RECIPES / f"{name}.yaml", list(changes))
    assumed = Assumed(model=None if model is None else str(model))
    return WORKLOAD.prices(recipe, recipe_flow(recipe).trace(), assumed)(H100, 8)


@pytest.mark.parametrize(
    "name",
    ["openvla-ppo-maniskill", "openvla-oft-grpo-libero-spatial", "openvla-oft-ppo-libero-spatial"],
)
def test_seven_billion_parameters_fit_an_accelerator(name: str) -> None:
    """Actor and learner beside each other, because activations are computed again."""
    work = priced(name)
    held = [total(work.workers[worker].states[0][1]) for worker in ("actor", "learner")]
    assert held[0] == pytest.approx(2 * 7_541_237_184)
    (training,), (kept,) = (
        some.stages["learner.train"].layouts
        for some in (work, priced(name, "update.gradient_checkpointing=false"))
    )
    assert sum(held) + total(training.working_bytes(1)) < H100.usable_bytes
    assert total(kept.working_bytes(1)) > 5 * total(training.working_bytes(1))
    assert training.finish is not None
    assert kept.finish is not None
    assert training.finish(8).on(H100) > 1.2 * kept.finish(8).on(H100), "a third more arithmetic"
    acting = work.stages["actor.act"]
    assert acting.turns is not None
    assert any("7.54 billion parameters" in line for line in work.assumptions)
    assert any("a step of" in line for line in work.assumptions)


def test_what_cut_episodes_are_worth_is_computed_in_pieces() -> None:
    """Of 64 of them no more is held than of a micro-batch."""
    for size in (8, 16):
        work = priced("openvla-ppo-maniskill", f"update.turns_per_microbatch={size}")
        (looking,), (acting,) = (
            work.stages[f"actor.{method}"].layouts for method in ("look_beyond", "act")
        )
        assert looking.working_bytes(64) == acting.working_bytes(size)
        assert looking.working_bytes(2) == acting.working_bytes(2)


def test_simulators_are_in_the_account_of_host_memory() -> None:
    """64 rollouts in 12 processes on each lane, and 12 in as many."""
    for count, size in ((512, 12 * 1.2e9 + 64 * 0.7e9), (96, 12 * 1.9e9)):
        work = priced("openvla-oft-grpo-libero-spatial", f"rollouts_per_step={count}")
        ((_, held),) = work.workers["simulator"].hosted
        assert isinstance(held, dict)
        assert held["simulators"] == pytest.approx(size)
        assert f"{size / 1e9:.3g} GB of host memory" in " ".join(work.assumptions)


def test_seven_billion_trained_parameters_are_divided() -> None:
    """In full they fit no accelerator alone; what is priced is what the learner declares."""
    name, changes = "openvla-oft-grpo-libero-spatial", ("policy.lora_rank=0",)
    work = priced(name, *changes)
    recipe: Any = read_recipe(RECIPES / f"{name}.yaml", list(changes))
    declared = recipe_flow(recipe).learner.layouts("gpu", 8)
    states, training = work.workers["learner"].states, work.stages["learner.train"].layouts
    assert [one.name for one in declared] == ["one", *(f"fsdp{n}" for n in range(2, 9))]
    assert [one for one, _ in states] == [one.layout for one in training]
    assert {one.name for one, _ in states} == {"one", "fsdp2", "fsdp4", "fsdp8"}
    held = {one.name: total(size) for one, size in states}
    assert held["one"] == pytest.approx(18 * 7_541_237_184)
    assert held["fsdp8"] == pytest.approx(held["one"] / 8)
    fits = [
        one.layout.name
        for one in training
        if held[one.layout.name] + total(one.working_bytes(64)) < H100.usable_bytes
    ]
    assert fits == ["fsdp4", "fsdp8"]
    seconds = {one.layout.name: one.finish(1).on(H100) for one in training if one.finish}
    assert 1 < seconds["fsdp4"] / (seconds["one"] / 4) < 2
    assert len(priced(name).stages["learner.train"].layouts) == 1, "adapters stay on a lane"


def test_training_is_priced_where_it_is_done_when_the_rollouts_are_there() -> None:
    """Each replica passes over its share; it was priced by the call, which only keeps rollouts."""
    (training,) = priced("openvla-ppo-maniskill").stages["learner.train"].layouts
    assert training.finish is not None
    assert training.call(64) == training.call(1)
    assert training.finish(8).on(H100) < training.finish(1).on(H100) / 4


def test_pi0_fits_where_it_is_trained_alone() -> None:
    work = priced("pi0-ppo-libero-spatial")
    (training,) = work.stages["learner.train"].layouts
    state = total(work.workers["learner"].states[0][1])
    assert 50e9 < state + total(training.working_bytes(1)) < H100.usable_bytes


def test_only_workers_hold_weights() -> None:
    """Pure functions of the flow were priced as if each held the learner's state."""
    work = priced("pi0-ppo-libero-spatial")
    holding = {name for name, worker in work.workers.items() if worker.states}
    assert holding == {"simulator", "actor", "learner"}


@pytest.mark.parametrize(
    "name",
    [
        "openvla-ppo-maniskill",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "openvla-grpo-maniskill",
                "openvla-oft-grpo-libero-spatial",
                "openvla-oft-ppo-libero-spatial",
                "pi0-ppo-libero-spatial",
            )
        ),
    ],
)
def test_predicted_plans_of_published_models_are_those_of_the_readme(name: str) -> None:
    done = run_command("plan", RECIPES / f"{name}.yaml", "--cluster", "1x8xH100")
    assert done.code == 0, done.err
    mode, seconds, stage, share, memory, limit = predicted_plan(done.out)
    assert limit == "72"
    row = f"| `{name}.yaml` | {seconds} | `{stage}`, {share} % | {memory} of 72 GB | {mode}"
    assert row in (RECIPES / "README.md").read_text()


def test_the_models_own_config_is_what_is_priced(tmp_path: Path) -> None:
    """The published `config.json`, which leaves out what is Llama's; and one of another family."""
    fixture = Path(__file__).parents[2] / "models/policies/fixtures/openvla_7b_config.json"
    raw = json.loads(fixture.read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    published = priced("openvla-ppo-maniskill", model=tmp_path)
    assert published.workers == priced("openvla-ppo-maniskill").workers
    raw["text_config"]["num_hidden_layers"] = 16
    (tmp_path / "config.json").write_text(json.dumps(raw))
    half = priced("openvla-ppo-maniskill", model=tmp_path)
    assert half.workers["actor"].weight_bytes < 0.6 * published.workers["actor"].weight_bytes
    with pytest.raises(UserError, match="another family"):
        priced("pi0-ppo-libero-spatial", model=tmp_path)


@pytest.mark.parametrize(("dtype", "numbers"), [("bfloat16", 1), ("float32", 2)])
def test_each_decoded_token_is_a_whole_decoding_step(dtype: str, numbers: int) -> None:
    """Attention and logits too; bytes are those of the numbers that the policy computes with."""
    recipe: Any = read_recipe(RECIPES / "openvla-ppo-maniskill.yaml")
    body = body_of(recipe, None)
    assert body.decoded == 6
    acting = priced("openvla-ppo-maniskill", f"policy.dtype={dtype}").stages["actor.act"]
    (decoded,) = acting.layouts[0].call(4).then
    step = decoding(body.text, 4, 4 * body.tokens)
    for one, whole in zip((decoded, *decoded.then), (step, *step.then), strict=True):
        assert one.flops == pytest.approx(6 * whole.flops)
        assert one.read_bytes == pytest.approx(6 * numbers * whole.read_bytes)
        assert one.seconds == pytest.approx(6 * whole.seconds)


def test_more_simulators_at_a_time_take_less() -> None:
    def step(*changes: str) -> float:
        stage = priced("openvla-ppo-maniskill", *changes).stages["simulator.step"]
        return stage.layouts[0].call(16).on(H100)

    assert step("environment.processes=4") > 2 * step("environment.processes=16")


@pytest.mark.parametrize("count", [1, 2])
def test_collocated_loops_are_fused(count: int) -> None:
    graph = recipe_flow(read_recipe(RECIPE)).trace()  # type: ignore[arg-type]
    lanes = [LaneSpec(number) for number in range(count)]
    assert fused_loops(graph, build_plan("collocated", graph, lanes, 4))


def test_pictures_are_paid_for_where_they_travel() -> None:
    """A loop over two lanes hands the pictures of each turn on; on one lane they stay."""

    def links(mode: str, pixels: int) -> float:
        environment = {"name": "table:red", "options": {"pixels": pixels}}
        recipe: Any = read_recipe({**RECIPE, "environment": environment, "policy": {"kind": "cnn"}})
        graph, cluster = recipe_flow(recipe).trace(), parse_cluster("1x2xCPU")
        prices, count = WORKLOAD.prices(recipe, graph, Assumed()), recipe.items_per_step
        profile = analytic_profile(graph, cluster, prices, count)
        plan = build_plan(mode, graph, lane_specs(cluster), count)
        return float(simulate(graph, plan, profile, count).terms["links"])

    assert links("hybrid", 1024) > 10 * links("hybrid", 24)
    assert links("collocated", 1024) < links("hybrid", 24)
