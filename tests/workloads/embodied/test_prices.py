"""What an embodied recipe is priced with before a run, against torch's counts and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from m2flow.environments.registry import maker
from m2flow.errors import UserError
from m2flow.models.policies.protocol import Policy
from m2flow.plan import build_plan
from m2flow.plan.account import accounts
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import lane_specs, parse_cluster
from m2flow.plan.profile.hardware import device_named
from m2flow.plan.profile.work import FlowWork, LayoutWork, Work, total
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.workload import Assumed
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.flow import recipe_flow
from m2flow.workloads.embodied.work import BESIDE_PICTURES
from m2flow.workloads.embodied.workers.source import PolicySource
from m2flow.workloads.embodied.workload import WORKLOAD

H100, CORE = device_named("H100"), device_named("CPU")
RECIPES = Path(__file__).parents[3] / "recipes"
ROWS = 8

PENDULUM: dict[str, Any] = {"name": "gymnasium:Pendulum-v1"}
CARTPOLE: dict[str, Any] = {"name": "gymnasium:CartPole-v1"}

POLICIES: dict[str, dict[str, Any]] = {
    "two layers": {"environment": PENDULUM, "policy": {"hidden": [64, 64]}},
    "three layers": {"environment": CARTPOLE, "policy": {"hidden": [256, 256, 256], "chunk": 2}},
    "large pictures": {
        "environment": {**CARTPOLE, "options": {"pixels": 84}},
        "policy": {"kind": "cnn", "features": 512},
    },
    "small pictures and a state": {"environment": {"name": "table:red"}, "policy": {"kind": "cnn"}},
    "two layers by sac": {
        "environment": PENDULUM,
        "policy": {"hidden": [64, 64], "distribution": "squashed"},
        "algorithm": {"name": "sac"},
        "replay": {"batch_size": ROWS, "updates": 3},
    },
}


def read(settings: dict[str, Any]) -> EmbodiedRecipe:
    sizes = {"rollouts_per_step": 4, "rollout": {"horizon": 16}}
    recipe = read_recipe({"workload": "embodied", **sizes, **settings})
    assert isinstance(recipe, EmbodiedRecipe)
    return recipe


def priced(recipe: EmbodiedRecipe, device: Any = H100, lanes: int = 8) -> FlowWork:
    graph = recipe_flow(recipe).trace()
    return WORKLOAD.prices(recipe, graph, Assumed())(device, lanes)


def shipped(name: str, *changes: str) -> EmbodiedRecipe:
    recipe = read_recipe(RECIPES / f"{name}.yaml", list(changes))
    assert isinstance(recipe, EmbodiedRecipe)
    return recipe


def only(work: FlowWork, stage: str) -> LayoutWork:
    (found,) = work.stages[stage].layouts
    return found


def flops(work: Work | None) -> float:
    assert work is not None
    return work.flops + sum(map(flops, work.then))


def made(recipe: EmbodiedRecipe) -> tuple[Policy, dict[str, Any]]:
    """The policy of a recipe, and what it is shown in `ROWS` turns."""
    section = recipe.environment
    spec = maker(section.name, section.options)().spec
    policy = PolicySource(recipe.policy, spec, critic=recipe.algorithm.has_critic).make()
    kinds = {"float32": torch.float32, "uint8": torch.uint8}
    seen = {
        part.name: torch.ones((ROWS, *part.shape), dtype=kinds[part.dtype])
        for part in spec.observations
    }
    return policy, seen


# --- small policies -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in POLICIES if "sac" not in name])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_small_policy_costs_the_arithmetic_of_its_layers(name: str, algorithm: str) -> None:
    """It took the same time whatever its widths and its pictures were."""
    settings: dict[str, Any] = {"algorithm": {"name": algorithm}}
    if algorithm == "grpo":
        settings["algorithm"]["group_size"] = 2
        settings["rollout"] = {"horizon": 16, "automatic_reset": False}
    recipe = read({**POLICIES[name], **settings})
    policy, seen = made(recipe)
    with FlopCounterMode(display=False) as acting, torch.no_grad():
        acted = policy.act(seen, seeds=range(ROWS))
    work = priced(recipe)
    assert only(work, "actor.act").call(ROWS).flops == pytest.approx(
        acting.get_total_flops(), rel=0.02
    )
    with FlopCounterMode(display=False) as learning:
        judged, pull = Policy.judge(policy, seen, acted.tokens)
        ppo = judged.values if recipe.algorithm.has_critic else None
        pull(torch.ones_like(judged.logprobs), None, None if ppo is None else torch.ones_like(ppo))
    update = recipe.update
    turns = update.epochs * recipe.rollouts_per_step * recipe.rollout.horizon / recipe.policy.chunk
    finish = only(work, "learner.train").finish
    assert finish is not None
    counted = learning.get_total_flops() / ROWS
    assert flops(finish(1)) == pytest.approx(turns * counted, rel=0.02)
    assert flops(finish(2)) == pytest.approx(turns * counted / 2, rel=0.02)


def test_an_update_of_sac_costs_the_arithmetic_of_its_networks() -> None:
    from m2flow.flow import Place
    from m2flow.workloads.embodied.replay import Transitions
    from m2flow.workloads.embodied.soft_update import SoftUpdate

    recipe = read(POLICIES["two layers by sac"])
    policy, _ = made(recipe)
    spec = maker(recipe.environment.name, {})().spec
    update = SoftUpdate(policy, recipe, spec, Place())
    batch = Transitions(torch.ones(ROWS, update.width), spec.state_size())
    with FlopCounterMode(display=False) as counted:
        update._judge(batch, list(range(ROWS)))
        update._act(batch, list(range(ROWS)))
    finish = only(priced(recipe), "learner.train").finish
    assert finish is not None
    assert flops(finish(1)) == pytest.approx(3 * counted.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("name", POLICIES)
def test_a_small_policy_takes_the_memory_of_its_parameters(name: str) -> None:
    """It was the product of all widths of an MLP, of convolutions too."""
    recipe = read(POLICIES[name])
    policy, _ = made(recipe)
    size = 4 * sum(one.numel() for one in policy.parameters())
    work = priced(recipe)
    assert work.workers["actor"].weight_bytes == size
    assert total(work.workers["actor"].states[0][1]) == size
    ((_, held),) = work.workers["learner"].states
    if recipe.algorithm.name != "sac":
        assert total(held) == 4 * size, "weights, gradients and two moments"
        return
    from m2flow.models.policies.twin_critics import TwinCritics

    critics = TwinCritics(3, 1, recipe.policy.hidden, normalise=True)
    twins = 4 * sum(one.numel() for one in critics.parameters())
    assert total(held) == 4 * size + 5 * twins, "critics, and targets without a gradient"


@pytest.mark.parametrize("name", ["two layers", "large pictures", "small pictures and a state"])
def test_a_micro_batch_keeps_what_autograd_saves(name: str) -> None:
    recipe = read(POLICIES[name])
    policy, seen = made(recipe)
    with torch.no_grad():
        tokens = policy.act(seen, seeds=range(ROWS)).tokens
    ours = {one.untyped_storage().data_ptr() for one in policy.state_dict().values()}
    saved: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.numel() >= ROWS and x.untyped_storage().data_ptr() not in ours:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        judged = policy.evaluate(seen, tokens)
    assert judged.values is not None
    rows = recipe.rollouts_per_step * recipe.rollout.horizon // recipe.update.minibatches
    small = only(priced(recipe), "learner.train").working_bytes(1)
    shown = sum(part.numel() * part.element_size() for part in seen.values()) / ROWS
    kept = total(small) / rows - shown - BESIDE_PICTURES
    assert kept == pytest.approx(sum(saved.values()) / ROWS, rel=0.1)


def test_a_core_is_slower_than_an_accelerator_by_its_arithmetic_alone() -> None:
    """Each was given the seconds of a core."""
    wide = read({**POLICIES["three layers"], "policy": {"hidden": [4096, 4096]}})
    seconds = [only(priced(wide, device), "learner.train").finish for device in (H100, CORE)]
    on_gpu, on_core = (
        finish(1).on(device)
        for finish, device in zip(seconds, (H100, CORE), strict=True)
        if finish is not None
    )
    assert on_core > 20 * on_gpu


# --- what is seen ---------------------------------------------------------------------------------


def test_pictures_are_those_that_the_environment_gives() -> None:
    """Their number was that of the cameras that the policy looks at, and their size always 256."""
    both, one = 2 * 256 * 256 * 3, 256 * 256 * 3

    def begun(name: str, *changes: str) -> float:
        return priced(shipped(name, *changes)).stages["simulator.begin"].output_bytes

    pi0 = "pi0-ppo-libero-spatial"
    assert begun(pi0) == pytest.approx(both, rel=0.01)
    assert begun(pi0, "policy.cameras=[image]") == begun(pi0), "it does not look, and they are sent"
    oft = "openvla-oft-ppo-libero-spatial"
    assert begun(oft) == pytest.approx(one, rel=0.01)
    given = begun(oft, "environment.options={}")
    assert given == pytest.approx(both, rel=0.01), "both cameras unless it is said otherwise"
    assert begun(oft, "environment.options.pixels=128") == pytest.approx(one / 4, rel=0.01)
    assert begun("openvla-ppo-maniskill") == pytest.approx(480 * 640 * 3, rel=0.01)
    assert begun("quickstart-embodied") == pytest.approx(32 * 32 * 3, rel=0.1)
    assert begun("quickstart-embodied", "policy={kind: mlp}") == begun("quickstart-embodied")
    assert begun("ppo-cnn-cartpole") == pytest.approx(64 * 64 * 3, rel=0.03)
    assert begun("ppo-mlp-reach") < 1000


def test_what_was_seen_is_in_the_account_of_host_memory() -> None:
    """The pictures of 8 rollouts of 512 turns, where they are recorded and where they are learned
    from; and where each of 19 episodes was cut off."""
    work = priced(shipped("openvla-oft-ppo-libero-spatial"))
    size = 8 * (512 + 19) * 256 * 256 * 3
    for worker in ("simulator", "learner"):
        ((_, held),) = work.workers[worker].hosted
        assert isinstance(held, dict)
        assert held["rollouts"] == pytest.approx(size, rel=0.01)
    ((_, held),) = priced(shipped("sac-mlp-pendulum")).workers["learner"].hosted
    assert held == {"replay buffer": 50_000 * 4 * (3 + 1 + 2 + 3)}


def test_a_policy_that_cannot_see_is_refused_before_a_run() -> None:
    with pytest.raises(UserError, match="no such picture"):
        priced(read({"environment": CARTPOLE, "policy": {"kind": "cnn"}}))
    for options in ({"pixels": "many"}, {"cameras": "image"}, {"max_episode_steps": -1}):
        environment = {"name": "libero:libero_spatial", "options": options}
        with pytest.raises(UserError, match=f"environment.options.{next(iter(options))}"):
            priced(read({"environment": environment}))


def test_what_is_not_installed_is_assumed_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    work = priced(read({"environment": CARTPOLE}))
    assert any("a state of 8 figures" in line for line in work.assumptions)


def test_every_family_has_prices_and_a_spec() -> None:
    from m2flow.environments.registry import FAMILIES
    from m2flow.workloads.embodied.scenes import SHOWN
    from m2flow.workloads.embodied.work import SIMULATORS

    assert set(SHOWN) == set(SIMULATORS) == set(FAMILIES)


# --- simulators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quickstart-embodied", "ppo-cnn-cartpole", "sac-mlp-pendulum"])
@pytest.mark.parametrize("device", [H100, CORE], ids=["gpu", "cpu"])
def test_light_simulators_run_one_by_one_in_their_lane(name: str, device: Any) -> None:
    """Each had a process, twelve beside an accelerator, of which every one drew there."""
    recipe = shipped(name, "rollouts_per_step=96")
    work = priced(recipe, device)
    ((_, state),), ((_, hosted),) = (
        work.workers["simulator"].states,
        work.workers["simulator"].hosted,
    )
    assert total(state) == 0
    assert isinstance(hosted, dict)
    assert hosted["simulators"] < 1e6
    step = only(work, "simulator.step")
    assert step.elsewhere == 0
    overhead = step.call(0).seconds
    assert step.call(12).seconds - overhead == pytest.approx(12 * (step.call(1).seconds - overhead))
    assert any("one after the other" in line for line in work.assumptions)
    given = recipe.environment.model_copy(update={"processes": 4})
    apart = priced(recipe.model_copy(update={"environment": given}), device)
    assert total(apart.workers["simulator"].hosted[0][1]) > 4 * 15e6
    assert total(apart.workers["simulator"].states[0][1]) == 0, "whatever draws is not the gpu"
    both = [only(one, "simulator.step").call(4).seconds - overhead for one in (apart, work)]
    assert both[1] == pytest.approx(4 * both[0])


def test_simulators_that_need_a_renderer_have_one_in_each_process() -> None:
    """ManiSkill draws by Vulkan for states too; Meta-World for pictures alone."""

    def renderers(name: str, *changes: str) -> float:
        return total(priced(shipped(name, *changes)).workers["simulator"].states[0][1]) / 0.3e9

    assert renderers("openvla-ppo-maniskill") == pytest.approx(12)
    assert renderers("openvla-ppo-maniskill", "model=states") == pytest.approx(1)
    assert renderers("ppo-mlp-reach") == 0
    assert renderers("ppo-mlp-reach", "environment.options.pixels=64") == pytest.approx(2)
    assert renderers("ppo-mlp-reach", "environment.options.pixels=0") == 0


def test_episodes_that_follow_one_another_begin_within_steps() -> None:
    """Eighteen more episodes of 220 steps begin in a rollout of 4,096; only the first was paid."""
    name = "openvla-oft-ppo-libero-spatial"
    step = only(priced(shipped(name)), "simulator.step")
    alone = only(priced(shipped(name, "rollout.automatic_reset=false")), "simulator.step")
    more = 512 * (step.call(8).seconds - alone.call(8).seconds)
    assert more == pytest.approx(18 * 1.004)
    assert alone.elsewhere == 1
    assert 0.5 < step.elsewhere < 1, "who begins an episode is waited for"


# --- cut episodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("openvla-oft-ppo-libero-spatial", 19),
        ("pi0-ppo-libero-spatial", 1),
        ("openvla-ppo-maniskill", 1),
        ("quickstart-embodied", 2),
        ("ppo-cnn-cartpole", 1),
    ],
)
def test_a_cut_episode_is_one_forward_pass(name: str, cuts: int) -> None:
    """A rollout had one cut, whatever its episodes; cuts pass through in micro-batches."""
    recipe = shipped(name)
    work = priced(recipe)
    looking, acting = only(work, "actor.look_beyond"), only(work, "actor.act")
    assert looking.call(8).flops == pytest.approx(acting.call(8 * cuts).flops)
    at_once = min(8 * cuts, recipe.update.turns_per_microbatch)
    assert total(looking.working_bytes(8)) == pytest.approx(total(acting.working_bytes(at_once)))


def test_a_critic_apart_looks_at_all_turns_and_at_the_cuts() -> None:
    """By the critic's own network, not by what acts."""
    recipe = shipped("ppo-mlp-reach")
    work = priced(recipe)
    critic = 2 * (39 * 128 + 128 * 128 + 128)
    assert only(work, "actor.look_beyond").call(3).flops == 3 * (128 + 2) * critic
    assert only(work, "actor.act").call(3).flops == 3 * (critic + 2 * 128 * 3)


# --- published models -----------------------------------------------------------------------------


def test_a_vision_language_action_model_computes_no_logits_of_what_it_reads() -> None:
    """A quarter of what pi0's decoder was priced with; by parameters that every token passes."""
    from m2flow.workloads.embodied.bodies import body_of

    for name in ("pi0-ppo-libero-spatial", "openvla-oft-ppo-libero-spatial"):
        body = body_of(shipped(name), None)
        without = replace(body.text, vocabulary=1)
        assert replace(body, text=without).forward_flops() == body.forward_flops()


def test_pi0_is_as_large_as_the_model_that_is_loaded() -> None:
    """With the expert's table of embeddings, which is held and not trained."""
    from m2flow.models.policies.flow_matching import _pi0_class
    from m2flow.models.work import trained_bytes
    from m2flow.workloads.embodied.bodies import body_of

    made_by = _pi0_class()
    with torch.device("meta"):
        model = made_by(made_by.config_class())
    idle = model.model.dit.embed_tokens.weight.numel()
    held = sum(one.numel() for one in model.parameters())
    recipe = shipped("pi0-ppo-libero-spatial")
    body = body_of(recipe, None)
    assert body.parameters == pytest.approx(held, rel=0.002)
    assert body.idle == idle
    ((_, state),) = priced(recipe).workers["learner"].states
    of_trained = sum(trained_bytes(2).values()) - 2
    assert total(state) == pytest.approx(2 * held + of_trained * (held - idle), rel=0.002)


def test_pi0_keeps_the_activations_of_its_action_expert() -> None:
    """Each denoising step's: 4 of 51 tokens, besides 542 of pictures and prompt."""
    from m2flow.models.work import layer_activations
    from m2flow.workloads.embodied.bodies import body_of

    recipe = shipped("pi0-ppo-libero-spatial")
    body = body_of(recipe, None)
    assert body.expert is not None
    assert body.expert.shared_parameters == pytest.approx(311e6, rel=0.01)
    held = only(priced(recipe), "learner.train").working_bytes(1)
    towers = 34 * 2 * 256 * 27 * 1152
    kept = 18 * (542 * layer_activations(body.text) + 4 * 51 * layer_activations(body.expert))
    assert total(held) == pytest.approx(4 * (kept + towers), rel=0.01)


def test_simulators_on_half_of_the_lanes_are_twice_as_many_on_each() -> None:
    """The account told the bytes that each lane has where they stand on all."""
    recipe = read_recipe(RECIPES / "openvla-oft-ppo-libero-spatial.yaml")
    assert isinstance(recipe, EmbodiedRecipe)
    graph, cluster = recipe_flow(recipe).trace(), parse_cluster("1x8xH100")
    asked = WORKLOAD.prices(recipe, graph, Assumed())
    profile = analytic_profile(graph, cluster, asked, recipe.items_per_step)
    works = {kind: asked(device, 8) for kind, device in cluster.kinds.items()}

    def held(mode: str) -> float:
        plan = build_plan(mode, graph, lane_specs(cluster), recipe.items_per_step)
        found = accounts(plan, graph, works, profile, recipe.items_per_step)
        each = (one for account in found for one in account.holdings)
        return max(one.hosted["simulators"] for one in each if one.worker == "simulator")

    assert held("hybrid") == pytest.approx(2 * held("collocated"))
