"""Work of passes over a decoder: against formulas by hand, known limits, published figures."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from m2flow.models.lengths import Answers, fit_lengths
from m2flow.models.shape import KNOWN_MODELS, WEIGHT_BYTES, model_from_config
from m2flow.models.work import (
    LOGITS_AT_A_TIME,
    RATES,
    Rates,
    decoding,
    forward_pass,
    fullest,
    fullest_balanced,
    lane_parameters,
    layer_activations,
    prefill,
    ring_bytes,
    training_bytes,
    training_parts,
    training_pass,
    update,
)
from m2flow.plan.profile.hardware import DEVICES, Device
from m2flow.plan.profile.work import Work
from m2flow.training.division import Division
from m2flow.training.sharded import dealt

H100, H200, L40S = DEVICES["H100"], DEVICES["H200"], DEVICES["L40S"]
QWEN, MOE = KNOWN_MODELS["Qwen2.5-7B"], KNOWN_MODELS["Qwen3-30B-A3B"]
EVEN = Answers(0, fit_lengths(999.9, 1000))
"""Answers of a thousand tokens, nearly all alike."""

MICROBATCH = 16_384

WHOLE = Division()

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_decoding_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    slow_memory = replace(H100, memory_bytes_per_second=H100.memory_bytes_per_second / 2)
    slow_arithmetic = replace(H100, flops_per_second=H100.flops_per_second / 2)

    def decode(device: Device) -> float:
        return decoding(QWEN, 32, 32 * 4000).on(device)

    def fill(device: Device) -> float:
        return prefill(QWEN, 8192, 4096).on(device)

    assert decode(slow_memory) > 1.5 * decode(H100)
    assert decode(slow_arithmetic) == decode(H100)
    assert fill(slow_arithmetic) > 1.9 * fill(H100)
    assert fill(slow_memory) < 1.1 * fill(H100)
    assert decode(H200) < decode(H100) < decode(L40S)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_numbers_of_four_bytes_are_computed_in_single_precision(device: Device) -> None:
    def passing(number_bytes: int) -> float:
        flops = replace(device, memory_bytes_per_second=1e30, peer_bytes_per_second=1e30)
        counted = Answers(2048, fit_lengths(1000, 4000))
        return forward_pass(QWEN, counted, 64, WHOLE, MICROBATCH, number_bytes=number_bytes).on(
            flops
        )

    assert passing(4) / passing(2) == pytest.approx(
        device.flops_per_second / device.single_flops_per_second, rel=0.05
    )


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 512), st.integers(0, 30_000), st.sampled_from([1, 2, 4]))
def test_a_decoding_step_never_gets_cheaper_by_more_work(
    running: int, context: int, lanes: int
) -> None:
    for model in (QWEN, MOE):
        here = decoding(model, running, running * context, lanes).on(H100)
        more = decoding(model, running + 1, (running + 1) * context, lanes).on(H100)
        longer = decoding(model, running, running * (context + 1), lanes).on(H100)
        assert here <= more + 1e-12
        assert here <= longer + 1e-12


@pytest.mark.parametrize(("lanes", "heads"), [(2, 2), (4, 1), (8, 1)])
def test_a_decoding_step_on_several_lanes_by_hand(lanes: int, heads: int) -> None:
    """Weights and whole heads of the cache dealt out, and two sums over the lanes a layer."""
    running, kv_tokens = 16, 16 * 3000
    read = MOE.expert_bytes_read(running) + 2 * (MOE.shared_parameters + MOE.head_parameters)
    cache = kv_tokens * 2 * MOE.layers * heads * MOE.head_dim * 2
    between = 2 * running * MOE.layers * (8 * MOE.hidden + 3 * 8 * 768 / lanes)
    memory = (read / lanes + cache + between) / (RATES.decode_bandwidth * 3350e9)
    grouped = 2 * running * MOE.experts_of_a_token / lanes / (RATES.experts * 989.5e12)
    ring = 2 * (lanes - 1) / lanes * running * MOE.hidden * 2 / (0.8 * 450e9)
    wires = 2 * MOE.layers * (10e-6 + ring)
    latencies = MOE.layers * RATES.layer_seconds
    step = decoding(MOE, running, kv_tokens, lanes).on(H100)
    assert step == pytest.approx(latencies + memory + grouped + wires)


def test_experts_of_a_prefill_wait_for_their_weights() -> None:
    """So few tokens meet each expert that reading and computing come one after the other."""
    short, long = (prefill(MOE, tokens, 0).on(H100) for tokens in (512, 1024))
    read = 2 * MOE.expert_parameters / (RATES.decode_bandwidth * 3350e9)
    assert short > read
    assert long - short < 0.4 * short


def test_many_works_one_after_the_other() -> None:
    step = decoding(MOE, 16, 16_000, 2)
    assert step.times(7).on(H100) == pytest.approx(7 * step.on(H100))


def test_training_is_six_flops_for_each_parameter_and_token() -> None:
    rates = Rates(training=0.5)
    work = training_pass(QWEN, EVEN, 1000, WHOLE, MICROBATCH, rates=rates)
    tokens, context = 1000 * EVEN.tokens, EVEN.context
    assert work.flops == pytest.approx(3 * QWEN.forward_flops(tokens, context))
    assert work.on(H100) == pytest.approx(work.flops / (0.5 * 989.5e12))
    again = training_pass(QWEN, EVEN, 1000, WHOLE, MICROBATCH, recomputes=True, rates=rates)
    assert again.on(H100) == pytest.approx(work.on(H100) * 8 / 6)


def test_shards_are_gathered_for_each_micro_batch() -> None:
    one, four = (training_pass(QWEN, EVEN, 8, Division(fsdp=4), size) for size in (2000, 500))
    assert four.sent_bytes == pytest.approx(4 * one.sent_bytes)
    assert one.sent_bytes == pytest.approx(2 * ring_bytes(QWEN.weight_bytes, 4))
    slow = replace(H100, peer_bytes_per_second=1e9)
    assert four.on(slow) == pytest.approx(four.sent_bytes / 0.8e9), "gathering hides the rest"
    assert training_pass(QWEN, EVEN, 8, WHOLE, 2000).sent_bytes == 0


def test_lanes_that_share_tokens_have_less_to_compute_and_more_to_tell() -> None:
    whole = training_pass(QWEN, EVEN, 8, WHOLE, MICROBATCH)
    tensor, context = (
        training_pass(QWEN, EVEN, 8, division, MICROBATCH)
        for division in (Division(tp=4), Division(cp=4))
    )
    assert tensor.flops == context.flops == pytest.approx(whole.flops / 4)
    assert tensor.sent_bytes == context.sent_bytes == 0, "nothing is gathered"
    (sums,), (keys,) = tensor.then, context.then
    tokens = 8 * EVEN.tokens
    layers = 4 * QWEN.layers * ring_bytes(tokens * QWEN.hidden * WEIGHT_BYTES, 4)
    assert sums.sent_bytes == pytest.approx(layers + 1.5 * tokens * QWEN.vocabulary * WEIGHT_BYTES)
    assert keys.sent_bytes == pytest.approx(2 * 0.75 * tokens * QWEN.kv_bytes_per_token)
    assert keys.sent_bytes < sums.sent_bytes / 10, "few heads of keys and values"
    assert not whole.then


def test_frozen_weights_have_no_gradients() -> None:
    """With adapters two passes' worth in place of three, nothing to scatter, and little to sum."""
    for again, full, frozen in ((False, 3, 2), (True, 4, 3)):
        both = [
            training_pass(QWEN, EVEN, 8, Division(fsdp=4), 2000, again, frozen=adapts)
            for adapts in (False, True)
        ]
        assert both[1].flops / both[0].flops == pytest.approx(frozen / full)
        assert both[1].sent_bytes == pytest.approx(both[0].sent_bytes / 2)
    adapters = QWEN.adapter_parameters(16)
    step = update(QWEN, Division(fsdp=2), 4, adapters)
    assert step.sent_bytes == ring_bytes(4 * adapters / 2, 4)
    assert step.read_bytes == 2 * 16 * adapters / 2
    (sums,) = update(QWEN, Division(cp=4), 1, adapters).then
    assert sums.sent_bytes == ring_bytes(4 * adapters, 4)


def test_what_a_layout_divides_of_the_memory() -> None:
    dense = MOE.parameters - MOE.expert_parameters
    assert lane_parameters(MOE, Division(ep=8)) == dense + MOE.expert_parameters / 8
    assert lane_parameters(QWEN, Division(tp=2, fsdp=4)) == QWEN.parameters / 8
    assert lane_parameters(QWEN, Division(cp=8)) == QWEN.parameters
    kept = {
        division.layout: training_bytes(QWEN, division, 4096, False)
        for division in (WHOLE, Division(tp=2), Division(tp=4), Division(cp=2))
    }
    assert kept["tp4"] < kept["tp2"] < kept["one"] < kept["cp2"], "of so many tokens on a lane"
    assert training_bytes(QWEN, Division(cp=2), 2048, False) < kept["one"]


def test_lanes_with_terms_of_a_gradient_sum_them_at_the_update() -> None:
    assert not update(QWEN, Division(tp=4), 1).then
    (sums,) = update(QWEN, Division(cp=4), 1).then
    assert sums.sent_bytes == ring_bytes(4 * QWEN.parameters, 4)
    (sums,) = update(MOE, Division(ep=4), 1).then
    assert sums.sent_bytes == ring_bytes(4 * (MOE.parameters - MOE.expert_parameters), 4)


def test_an_update_sums_gradients_between_replicas() -> None:
    assert update(QWEN, Division(fsdp=8), 1).sent_bytes == 0
    assert update(QWEN, Division(fsdp=2), 4).sent_bytes == ring_bytes(QWEN.weight_bytes, 4)
    assert update(QWEN, Division(fsdp=2), 8).on(H100) > update(QWEN, Division(fsdp=2), 4).on(
        H100
    ), "past one machine"


SMALL = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 384, "vocab_size": 64,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}


@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("gemma", {}), ("gemma3_text", {}),
     ("qwen3_moe", MIXTURE)],
)  # fmt: skip
def test_what_layers_keep_is_what_autograd_keeps(kind: str, more: dict[str, int]) -> None:
    """Of transformers' modules in bfloat16: the storages that a forward pass leaves behind."""
    tokens, found = 128, {}
    for layers in (1, 3):
        config = AutoConfig.for_model(kind, num_hidden_layers=layers, **{**SMALL, **more})
        config._attn_implementation = "sdpa"
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, own: set[int] = own, kept: dict = kept) -> torch.Tensor:
            if (at := tensor.untyped_storage().data_ptr()) not in own:
                kept[at] = tensor  # which holds the storage, so that no other one is there
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
        found[layers] = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens
    shape = model_from_config(config.to_dict(), kind)
    assert layer_activations(shape) == pytest.approx((found[3] - found[1]) / 2, rel=0.05)


def test_what_layers_keep_is_what_one_h200_showed() -> None:
    """Packed answers of Qwen2.5-1.5B: more than with activations computed again.

    `benchmarks/results/gpu/2026-11-26/training_first.json`, two answers a micro-batch.
    """
    measured = json.loads((RESULTS / "gpu/2026-11-26/training_first.json").read_text())["results"]
    kept, again = (measured[way]["GB at most"] for way in ("activations kept", "computed again"))
    priced = [
        training_bytes(KNOWN_MODELS["Qwen2.5-1.5B"], WHOLE, 2 * (256 + 4096), recomputes) / 1e9
        for recomputes in (False, True)
    ]
    assert priced[0] - priced[1] == pytest.approx(kept - again, rel=0.15)


def test_state_and_activations() -> None:
    kept, again = (
        training_bytes(QWEN, Division(fsdp=8), MICROBATCH, recomputes)
        for recomputes in (False, True)
    )
    assert kept > 3 * again
    assert training_bytes(QWEN, WHOLE, MICROBATCH, False) < kept, "nothing is gathered"


def test_logits_are_computed_in_pieces_by_plain_heads_alone() -> None:
    """As `training.forward` does: others compute those of a micro-batch at once."""
    other = replace(QWEN, model_type="granite")
    plain, whole = (
        training_parts(model, WHOLE, MICROBATCH, True)["logits"] for model in (QWEN, other)
    )
    assert plain == 12 * LOGITS_AT_A_TIME
    assert whole == 12 * MICROBATCH * QWEN.vocabulary


def test_the_fullest_rank_by_drawing() -> None:
    random_ = random.Random(1)
    ranks, sequences, deviation = 16, 64, 0.7
    largest = [
        max(
            sum(random_.gauss(1, deviation) for _ in range(sequences)) / sequences
            for _ in range(ranks)
        )
        for _ in range(200)
    ]
    assert fullest(ranks, sequences, deviation) == pytest.approx(sum(largest) / 200, rel=0.02)
    assert fullest(1, 64, 0.7) == 1


@pytest.mark.parametrize(
    ("ranks", "each", "mean", "prompt"),
    [
        (8, 16, 1106, 150), (8, 4, 1106, 150), (8, 64, 1106, 150), (64, 2, 1106, 150),
        (2, 16, 1106, 150), (64, 32, 1106, 150), (8, 16, 3500, 150), (8, 16, 1106, 4000),
        (8, 1, 1106, 150),
    ],
)  # fmt: skip
def test_what_balancing_leaves_by_dealing(ranks: int, each: int, mean: int, prompt: int) -> None:
    """Lengths are drawn, and dealt out as lanes of a gang do it. It was priced as if nobody looked:
    1.25 in place of 1.06 for sixteen answers on each of eight lanes."""
    answers = Answers(prompt, fit_lengths(mean, 4096))
    pool = torch.tensor(answers.lengths.stratified(4000)).round().long() + prompt
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(300):
        lengths_B = pool[torch.randint(len(pool), (ranks * each,), generator=generator)]
        loads = torch.zeros(ranks).index_add(0, dealt(lengths_B, ranks), lengths_B.float())
        found.append(float(loads.max() / loads.mean()))
    priced = fullest_balanced(ranks, each, answers)
    assert priced - 1 == pytest.approx(sum(found) / len(found) - 1, rel=0.25)
    assert priced <= fullest(ranks, each, answers.deviation)


def test_one_answer_does_not_get_faster_by_idle_lanes() -> None:
    def seconds(lanes: int, count: int) -> float:
        return forward_pass(QWEN, EVEN, count, Division(fsdp=lanes), MICROBATCH).flops

    assert seconds(8, 1) == seconds(1, 1)
    assert seconds(8, 8) == pytest.approx(seconds(1, 1), rel=0.01)
    assert seconds(8, 16) == pytest.approx(2 * seconds(1, 1), rel=0.01)


def test_small_dense_models_attain_less_of_arithmetic() -> None:
    """Narrow layers and large vocabularies move more for each operation; nothing else is scaled."""
    names = ("Qwen2.5-7B", "Qwen2.5-1.5B", "Qwen3-0.6B", "Qwen3-32B")
    seven, one, half, wide = (RATES.arithmetic(KNOWN_MODELS[name], 0.5) for name in names)
    assert seven == 0.5
    assert half < one < seven < wide < 0.54
    assert RATES.arithmetic(MOE, 0.5) == 0.5 * (1 - MOE.expert_share * (1 - RATES.grouped))


def test_training_a_small_model_is_what_was_measured_on_one_gpu() -> None:
    """Two measurements of m2flow's own trainer on one H200, 1.5 billion parameters.

    Sixteen answers of 4,096 tokens a mini-batch, and a GRPO step of 1,024 answers, 921 tokens in
    the mean (`benchmarks/results/gpu`).
    """
    small = KNOWN_MODELS["Qwen2.5-1.5B"]
    for answers, count, updates, measured in (
        (Answers(0, fit_lengths(4095.9, 4096)), 16, 1, 1.933),
        (Answers(9, fit_lengths(921.3, 4096)), 1024, 4, 26.76),
    ):
        passes = training_pass(small, answers, count, WHOLE, 8192)
        seconds = passes.on(H200) + updates * update(small, WHOLE, 1).on(H200)
        assert seconds == pytest.approx(measured, rel=0.06)


# Published figures that constants are taken from --------------------------------------------------


def test_training_small_experts_is_what_was_measured() -> None:
    """NVIDIA's performance summary of Megatron Bridge 25.11: 5,275 tokens/s for each of 16 H100.

    Two pipeline stages, eight lanes with the experts of each: tokens go to their experts and back,
    over the network, in each of two passes.
    """
    tokens, lanes, experts = 512 * 4096, 16, 8
    replicas = lanes / 2
    passes = Work(
        3 * MOE.forward_flops(tokens, 2048) / lanes,
        arithmetic=RATES.arithmetic(MOE, RATES.training),
    )
    bubble = 1 + 1 / (512 / replicas)
    sent = tokens / replicas * MOE.hidden * WEIGHT_BYTES * MOE.experts_per_token
    there = 2 * MOE.layers / 2 * (experts - 1) / experts * sent
    wires = Work(sent_bytes=2 * there, span=experts)
    shards = Work(
        sent_bytes=ring_bytes(MOE.weight_bytes / 2, int(replicas)),
        span=int(replicas),
        read_bytes=2 * 16 * MOE.parameters / lanes,
    )
    seconds = bubble * passes.on(H100) + wires.on(H100) + shards.on(H100)
    assert tokens / seconds / 16 == pytest.approx(5275, rel=0.03)
