"""What a recipe's stages ask of hardware that is not here, and what m2flow cannot do yet of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from m2flow.models.lengths import Answers, fit_lengths
from m2flow.models.shape import KNOWN_MODELS
from m2flow.models.work import decoding, forward_pass, prefill, ring_bytes, training_pass
from m2flow.plan.profile import Profile
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import parse_cluster
from m2flow.plan.profile.hardware import device_named
from m2flow.plan.profile.work import FlowWork, Work
from m2flow.plan.units import Items
from m2flow.training.division import Division
from m2flow.training.packing import pack
from m2flow.training.rollouts import TokenPairs
from m2flow.workloads.common.planning import flow_of
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.passes import prompts_computed
from m2flow.workloads.reasoning.work import LATENT, prices


def profile(cluster: str, model: str | None = "Qwen2.5-7B", /, **words: Any) -> Profile:
    recipe = ReasoningRecipe(**words)
    graph = flow_of(recipe).trace()
    priced = prices(recipe, graph, model)
    return analytic_profile(graph, parse_cluster(cluster), priced, recipe.prompts_per_step)


def work_on(device: str, model: str = "Qwen2.5-1.5B", /, lanes: int = 1, **words: Any) -> FlowWork:
    """What the stages of a recipe ask of lanes."""
    recipe = ReasoningRecipe(**words)
    return prices(recipe, flow_of(recipe).trace(), model)(device_named(device), lanes)


def in_line(work: Work) -> list[Work]:
    """A work and all that follows it."""
    return [work, *(part for one in work.then for part in in_line(one))]


def test_layouts_are_those_that_m2flow_can_run() -> None:
    found = profile("1x8xH100")
    assert {cost.layout for cost in found.stage("generator.generate").costs} == {
        "one", "tp2", "tp4"
    }  # fmt: skip
    assert {cost.layout for cost in found.stage("learner.train").costs} == {
        # fsdp2: 68.5 GB of state, and embedding and head stay gathered, with gradients: 9.7 GB.
        "fsdp4", "fsdp8", "tp2", "tp2.fsdp2", "tp2.fsdp4", "tp4", "tp4.fsdp2"
    }  # fmt: skip
    assert any("4 key-value heads cannot be divided by 8" in line for line in found.assumptions)


def test_layers_that_no_trainer_divides_by_heads_are_priced_in_no_such_layout(
    tmp_path: Path,
) -> None:
    fused = profile("1x8xH100", training={"fused_kernels": True})
    whole = {"fsdp4", "fsdp8"}
    assert {cost.layout for cost in fused.stage("learner.train").costs} == whole
    sizes = {"num_key_value_heads": 4, "num_attention_heads": 8, "vocab_size": 100}
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    for kind, divided in (("olmo2", False), ("cohere", True)):
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**sizes, "model_type": kind, "pad_token_id": 0}))
        costs = profile("1x8xH100", str(config)).stage("learner.train").costs
        assert ("tp2" in {cost.layout for cost in costs}) == divided


@pytest.mark.parametrize(
    ("cluster", "changes", "told"),
    [
        ("1x8xH100", {}, "on several lanes (tp2 and more): m2flow cannot do this yet"),
        ("1x1xH200", {}, None),
        ("1x8xH100", {"engine": "vllm"}, None),
        ("1x8xH100", {"captured_decode": False}, "no time: m2flow cannot do this yet"),
    ],
)
def test_what_is_priced_and_cannot_be_done_is_told(
    cluster: str, changes: dict[str, Any], told: str | None
) -> None:
    """Of one lane, and of an engine that does it, nothing is."""
    found = profile(cluster, "Qwen2.5-1.5B", generation=changes)
    not_yet = [line for line in found.assumptions if "cannot do this yet" in line]
    assert len(not_yet) == (told is not None)
    assert all(str(told) in line for line in not_yet)


FOUR_THOUSAND = {"max_new_tokens": 4096}


def test_activations_are_computed_again_as_the_run_will() -> None:
    """Answers of 16,384 tokens of a 7B model: 132 GB a lane in shards without, of the 72 there are;
    eight lanes of which four divide the layers have room, with 17 GB of state and 49 GB beside."""
    long = {"generation": {"max_new_tokens": 16_384}, "prompts_per_step": 64}
    recomputed, kept = (
        {
            cost.layout
            for cost in profile("1x8xA100-80GB", training={"gradient_checkpointing": flag}, **long)
            .stage("learner.train")
            .costs
        }
        for flag in (True, False)
    )
    assert {"fsdp4", "fsdp8"} <= recomputed
    assert kept == {"tp4.fsdp2"}
    again, once = (
        profile(
            "1x8xB200", training={"gradient_checkpointing": flag}, generation=FOUR_THOUSAND
        ).cost("learner.train", "fsdp8", 8, "gpu")
        for flag in (True, False)
    )
    assert again.call(64) / once.call(64) == pytest.approx(4 / 3, 0.05)


def test_the_generators_own_limit_is_known() -> None:
    found = profile("1x8xH100", generation={"max_running": 48})
    costs = found.stage("generator.generate").costs
    assert {cost.slots for cost in costs if cost.max_running is None} == {48}


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Llama-3.1-8B"])
def test_workers_hold_what_their_layout_divides(name: str) -> None:
    found = profile("1x8xH100", name)
    for cost in found.workers["learner"]:
        pieces = 1 if cost.layout.startswith("cp") else cost.lanes
        assert cost.state_bytes == pytest.approx(18 * KNOWN_MODELS[name].parameters / pieces, abs=1)


def test_a_mixture_is_divided_by_its_experts() -> None:
    found, model = profile("2x8xH100", "Qwen3-30B-A3B"), KNOWN_MODELS["Qwen3-30B-A3B"]
    states = {cost.layout: cost.state_bytes for cost in found.workers["learner"]}
    assert states.keys() == {"fsdp8", "fsdp16", "ep16"}
    dense = model.parameters - model.expert_parameters
    assert states["ep16"] == pytest.approx(18 * (dense + model.expert_parameters / 16), abs=1)


def test_deepseeks_models_are_mixtures_and_their_attention_is_told_of(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 100}
    sizes |= {"intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config.write_text(json.dumps({"model_type": "deepseek_v3", "kv_lora_rank": 16, **sizes}))
    found = profile("1x8xH100", str(config))
    assert "ep8" in {cost.layout for cost in found.stage("learner.train").costs}
    assert LATENT in found.assumptions
    assert LATENT not in profile("1x8xH100").assumptions


def test_an_optimizer_on_the_host_leaves_room_and_takes_time() -> None:
    here, there = (
        profile("1x8xH100", training={"optimizer_on_host": flag}) for flag in (False, True)
    )
    parameters = KNOWN_MODELS["Qwen2.5-7B"].parameters
    state = there.worker("learner", 8, "gpu", "fsdp8")
    assert state is not None
    assert state.state_bytes == pytest.approx(6 * parameters / 8, abs=1)
    of_here, of_there = (one.cost("learner.train", "fsdp8", 8, "gpu") for one in (here, there))
    assert of_there.finish_seconds(1) > 5 * of_here.finish_seconds(1)
    assert of_there.call(64) == of_here.call(64)


def test_further_epochs_take_mini_batches_again_where_they_end() -> None:
    once, thrice = (
        profile("1x8xH100", minibatches=2, algorithm={"epochs": epochs}).cost(
            "learner.train", "fsdp8", 8, "gpu"
        )
        for epochs in (1, 3)
    )
    assert thrice.call(64) == once.call(64)
    minibatch = once.call(ReasoningRecipe().samples_per_minibatch)
    again = minibatch + once.finish_seconds(1)
    assert thrice.finish_seconds(1) == pytest.approx(once.finish_seconds(1) + 2 * again, rel=1e-6)


def test_further_epochs_take_as_much_less_as_there_are_more_replicas() -> None:
    """The price of eight replicas was that of one: no point lay below an earlier one."""
    once, thrice = (
        profile(
            "1x8xH100", "Qwen2.5-0.5B", prompts_per_step=1024, algorithm={"epochs": epochs}
        ).cost("learner.train", "one", 1, "gpu")
        for epochs in (1, 3)
    )
    assert thrice.finish_seconds(8) < thrice.finish_seconds(1) / 4
    assert once.finish_seconds(8) >= once.finish_seconds(1), "gradients are added up"


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-7B"])
def test_a_critic_has_one_output_in_the_place_of_the_head(name: str) -> None:
    """Whether the policy's head is its embedding or not; and a critic has no adapters."""
    model, ppo = KNOWN_MODELS[name], {"algorithm": {"name": "ppo"}}
    found = profile("1x8xB200", name, **ppo, model={"lora_rank": 8}, minibatches=1)
    head = 0 if model.tied else model.vocabulary * model.hidden
    state = found.worker("critic", 1, "gpu", "one")
    assert state is not None
    assert state.state_bytes == pytest.approx(18 * (model.parameters - head + model.hidden), abs=18)
    full = profile("1x8xB200", name, **ppo, minibatches=1)
    critic, learner = (full.cost(f"{one}.train", "one", 1, "gpu") for one in ("critic", "learner"))
    assert critic.call(512) < learner.call(512)
    assert critic.working_bytes(Items(512)) < learner.working_bytes(Items(512))
    assert found.cost("critic.train", "one", 1, "gpu").call(512) == critic.call(512)


def test_adapters_take_less_time_than_all_weights() -> None:
    """No gradients of the weights (3 passes' worth of 4, one of them again), hardly an update."""
    full, adapters = (
        profile("1x8xB200", model={"lora_rank": rank}).cost("learner.train", "one", 1, "gpu")
        for rank in (0, 16)
    )
    assert adapters.call(512) / full.call(512) == pytest.approx(3 / 4, rel=0.01)
    assert adapters.finish_seconds(1) < full.finish_seconds(1) / 2


def test_adapters_are_priced_in_all_layouts_that_divide_in_one_way() -> None:
    found = profile("1x8xH100", model={"lora_rank": 8}).workers["learner"]
    bytes_of = {one.layout: one.state_bytes for one in found}
    assert bytes_of.keys() == {
        *("one", "fsdp2", "fsdp4", "fsdp8", "tp2", "tp4", "cp2", "cp4", "cp8"),
    }
    assert bytes_of["tp2"] == pytest.approx(bytes_of["one"] / 2, abs=1)
    assert bytes_of["cp2"] == bytes_of["one"], "each lane has all of it"


@pytest.mark.parametrize(
    ("device", "words", "numbers"),
    [
        ("H100", {}, (1, 1)),
        ("CPU", {}, (2, 2)),
        ("H100", {"generation": {"dtype": "float32"}}, (2, 1)),
        ("CPU", {"generation": {"dtype": "bfloat16"}}, (1, 2)),
    ],
)
def test_bytes_are_those_of_the_numbers_that_are_computed_with(
    device: str, words: dict[str, Any], numbers: tuple[int, int]
) -> None:
    """Of weights, keys and values, activations; cores compute in single precision, as
    accelerators do where they are told to. All were read as 16 bits."""
    found, model = work_on(device, lanes=8, **words), KNOWN_MODELS["Qwen2.5-1.5B"]
    drawn, trained = numbers
    for layout in found.stages["generator.generate"].layouts:
        rounds, lanes = layout.rounds, layout.layout.lanes
        assert rounds is not None
        for own, narrow in (
            (rounds.round(8, 8000), decoding(model, 8, 8000, lanes)),
            (rounds.admit(4), prefill(model, 4 * rounds.start, rounds.start / 2, lanes)),
        ):
            for one, half in zip(in_line(own), in_line(narrow), strict=True):
                assert one.read_bytes == pytest.approx(drawn * half.read_bytes)
                assert one.sent_bytes == pytest.approx(drawn * half.sent_bytes)
                assert (one.flops, one.seconds) == (half.flops, half.seconds)
    assert found.workers["generator"].weight_bytes == trained * model.weight_bytes


def test_shards_of_single_precision_have_gradients_of_no_more() -> None:
    """Three rings' halves of four bytes, where 16 bits have two of two and one of four."""
    model, answers = KNOWN_MODELS["Qwen2.5-1.5B"], Answers(0, fit_lengths(999.9, 1000))
    narrow, wide = (
        training_pass(model, answers, 8, Division(fsdp=4), 2000, number_bytes=size)
        for size in (2, 4)
    )
    assert narrow.sent_bytes == pytest.approx(2 * ring_bytes(2 * model.parameters, 4))
    assert wide.sent_bytes == pytest.approx(1.5 * ring_bytes(4 * model.parameters, 4))
    frozen = training_pass(model, answers, 8, Division(fsdp=4), 2000, frozen=True, number_bytes=4)
    assert frozen.sent_bytes == pytest.approx(ring_bytes(4 * model.parameters, 4))
    passing = forward_pass(model, answers, 8, Division(fsdp=4), 2000, number_bytes=4)
    assert passing.sent_bytes == pytest.approx(ring_bytes(4 * model.parameters, 4) / 2)
    assert wide.read_bytes == pytest.approx(2 * narrow.read_bytes)
    assert wide.flops == narrow.flops


def test_a_few_requests_take_twice_as_long_on_cores_as_with_16_bits() -> None:
    """Decoding them is bound by what memory gives."""
    (one,) = work_on("CPU").stages["generator.generate"].layouts
    assert one.rounds is not None
    device = device_named("CPU")
    narrow = decoding(KNOWN_MODELS["Qwen2.5-1.5B"], 1, 500).on(device)
    assert one.rounds.round(1, 500).on(device) > 1.8 * narrow


def test_steps_of_answers_that_go_on_have_no_tail_of_whole_answers() -> None:
    """Steps of at most 4,096 tokens were priced as if they drew all of 27,648."""
    whole, cut = (
        profile(
            "1x8xH100", "Qwen2.5-1.5B", prompts_per_step=128, samples_per_prompt=16,
            generation={"max_new_tokens": 27_648, "tokens_per_step": most},
        )
        for most in (None, 4096)
    )  # fmt: skip
    of_whole, of_cut = (one.cost("generator.generate", "one", 1, "gpu") for one in (whole, cut))
    assert of_cut.call(16) < 0.4 * of_whole.call(16)
    lengths = cut.stage("generator.generate").lengths
    assert lengths is not None
    assert lengths.largest == 4096
    assert of_cut.admit is not None
    assert of_whole.admit is not None
    assert of_cut.admit.at(16) > 2 * of_whole.admit.at(16), "what is there is read again"
    steps = [line for line in cut.assumptions if "groups end after" in line]
    assert len(steps) == 1
    number = float(steps[0].split()[3])
    trained = [one.cost("learner.train", "fsdp8", 8, "gpu").call(2048) for one in (whole, cut)]
    assert trained[0] / trained[1] == pytest.approx(number, rel=0.1)


@pytest.mark.parametrize("most", [None, 512])
def test_keys_and_values_have_room_for_a_whole_answer(most: int | None) -> None:
    """8,342 tokens of 57,344 bytes are 0.478 GB on one lane; an engine refuses what its cache does
    not hold. Only what the lane has was asked, and of an answer that goes on only a step's part.
    """
    for gigabytes, layouts in ((0.47, {"tp2", "tp4"}), (0.48, {"one", "tp2", "tp4"})):
        cut = {"max_new_tokens": 8192, "tokens_per_step": most, "cache_gb": gigabytes}
        found = profile("1x8xH100", "Qwen2.5-7B", generation=cut)
        costs = found.stage("generator.generate").costs
        assert {cost.layout for cost in costs} == layouts


# Prompts that are shared, groups that are left out


@pytest.mark.parametrize(("group", "budget"), [(8, 2000), (8, 700), (16, 500), (4, 150), (1, 2000)])
@pytest.mark.parametrize(("prompt", "mean"), [(100, 40), (20, 60), (300, 15)])
def test_prompts_are_computed_as_often_as_packs_need_them(
    prompt: int, mean: int, group: int, budget: int
) -> None:
    """Against real packs of drawn lengths: tokens computed, and what they attend to."""
    answers = Answers(prompt, fit_lengths(mean, 200))
    random_, drawn = random.Random(0), iter(answers.lengths.sample(256, seed=1))
    prompts, completions = [], []
    for _ in range(256 // group):
        asked = [random_.randrange(50) for _ in range(prompt)]
        prompts += [asked] * group
        lengths = [max(1, round(next(drawn))) for _ in range(group)]
        completions += [[random_.randrange(500) for _ in range(1 + one)] for one in lengths]
    pairs = TokenPairs.from_rows(prompts, completions)
    for sharing in ("prefix", "prompt", "none"):
        packs = pack(pairs, budget, sharing)
        nodes = sum(one.num_nodes for one in packs)
        depths = sum(int(one.position_ids_N.sum()) for one in packs)
        shared = 1.0 if sharing == "none" else prompts_computed(answers, group, 256, budget)
        assert nodes / 256 == pytest.approx(answers.computed(shared), rel=0.1)
        assert depths / nodes == pytest.approx(answers.context_of(shared), rel=0.12)


def test_a_long_prompt_is_computed_once_for_the_answers_of_a_pack() -> None:
    """It was priced for each of them: 70,400 tokens a group, of which a fifth is computed."""
    flops = {}
    for sharing in ("none", "prompt", "prefix"):
        section = {"sharing": sharing, "tokens_per_microbatch": 16_384, "recompute_logprobs": True}
        recipe = ReasoningRecipe(
            samples_per_prompt=16, generation={"max_new_tokens": 4096}, training=section
        )
        priced = prices(recipe, flow_of(recipe).trace(), "Qwen2.5-1.5B", 4000, 400)
        stages = priced(device_named("H100"), 1).stages
        for name in ("learner.train", "learner.logprobs"):
            (one,) = (one for one in stages[name].layouts if one.layout.name == "one")
            flops[name, sharing] = one.call(64).flops
    for name in ("learner.train", "learner.logprobs"):
        assert flops[name, "prefix"] == flops[name, "prompt"]
        assert flops[name, "none"] / flops[name, "prefix"] == pytest.approx(5.05, rel=0.03)


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ({}, 0.7),
        ({"training": {"drop_zero_advantage": False}}, 1.0),
        ({"algorithm": {"name": "ppo"}, "samples_per_prompt": 1}, 1.0),
        ({"algorithm": {"kl_coefficient": 0.001}}, 1.0),
        ({"algorithm": {"entropy_coefficient": 0.001}}, 1.0),
        ({"algorithm": {"name": "reinforce++-baseline"}}, 1.0),
        ({"algorithm": {"name": "dapo"}}, 1 - 0.3**4),
        ({"algorithm": {"equal_groups": "drop", "further_draws": 0, "kl_coefficient": 0.1}}, 0.7),
    ],
)
def test_groups_that_teach_nothing_are_left_out(words: dict[str, Any], share: float) -> None:
    """As the trainer leaves them out; where it does, that is told."""
    section = {**words.get("training", {}), "sharing": "none", "tokens_per_microbatch": 16_384}
    words = {**words, "training": section, "generation": {"max_new_tokens": 4096}}
    found = work_on("H100", **words)
    (one,) = (one for one in found.stages["learner.train"].layouts if one.layout.name == "one")
    answers = Answers(10, fit_lengths(0.55 * 4096, 4096))
    model = KNOWN_MODELS["Qwen2.5-1.5B"]
    whole = training_pass(model, answers, 64, Division(), 16_384, recomputes=True)
    assert one.call(64).flops / whole.flops == pytest.approx(share)
    told = [line for line in found.assumptions if "30% of the groups teach nothing" in line]
    assert len(told) == (share < 1)
