"""The memory account of a recipe: every gigabyte by its owner, against arithmetic by hand.

Qwen2.5-7B: 152,064 x 3,584 twice (embedding and head), and 28 layers of 2 x 3,584 x 3,584 and
2 x 512 x 3,584 (attention), 3 x 3,584 x 18,944 (MLP), 4,608 (biases) and 7,168 (norms), and 3,584
for the last norm: 7,615,616,512 parameters.
"""

from __future__ import annotations

import pytest

from m2flow.cli.deciding import Planning, Question
from m2flow.engine.plan import Plan
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.generation.prefixes import MAX_TOKENS
from m2flow.plan import build_plan
from m2flow.plan.account import LaneAccount, accounts, in_lines
from m2flow.plan.choose.judge import sized
from m2flow.plan.profile.analytic import analytic_profile
from m2flow.plan.profile.clusters import lane_specs, parse_cluster
from m2flow.workloads.common.accounting import memory_lines
from m2flow.workloads.common.planning import flow_of, planned
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.reasoning.work import PREFILL_TOKENS, prices

PARAMETERS = 7_615_616_512
SHARDS = Layout("fsdp8", 8)
TURNS = "more than the limit: states make way for each other"


def account_of(
    *words: str,
    cluster: str = "1x8xH100",
    learner: Layout = SHARDS,
    generator: Layout = ONE_LANE,
    mode: str = "collocated",
) -> tuple[Plan, list[LaneAccount]]:
    recipe = read_recipe("qwen2.5-7b-grpo-math", words)
    graph, where = flow_of(recipe).trace(), parse_cluster(cluster)
    asked = prices(recipe, graph)
    profile = analytic_profile(graph, where, asked, recipe.items_per_step)
    layouts = {"learner": learner, "generator": generator}
    plan = build_plan(mode, graph, lane_specs(where), recipe.items_per_step, layouts=layouts)
    plan = sized(plan, graph, profile, recipe.items_per_step)
    works = {kind: asked(device, where.lanes_of(kind)) for kind, device in where.kinds.items()}
    return plan, accounts(plan, graph, works, profile, recipe.items_per_step)


def test_a_7b_model_on_eight_lanes_of_80_gb() -> None:
    plan, (account,) = account_of()
    generator, learner = account.holdings
    assert (account.lanes, account.limit) == (tuple(range(8)), 72_000_000_000)
    assert generator.state == {"weights": 2 * PARAMETERS}  # 15.2 GB
    assert generator.stage == "generator.generate"
    assert {what: round(size / 1e6) for what, size in generator.call.items()} == {
        "keys and values": 40_000,  # half of the lane's 80 GB, taken at once
        "activations": 1_283,  # 8,192 tokens x (6 x 3,584 + 3 x 18,944) x 2 bytes
        "logits": 1_090,  # 256 requests x 152,064 x 28 bytes
    }
    assert learner.state == {
        "weights": 2 * PARAMETERS / 8,
        "float32 weights": 4 * PARAMETERS / 8,
        "gradients": 4 * PARAMETERS / 8,
        "moments": 8 * PARAMETERS / 8,
    }  # 17.1 GB
    assert {what: round(size / 1e6) for what, size in learner.call.items()} == {
        # 16,384 tokens x 2 bytes x (28 x 3,584 of the layers' inputs, and of the layer at hand
        # 8 x 3,584 of norms, 2 x 32 x 128 of heads, 4 x 18,944 of channels)
        "activations": 6_979,
        # Two layers of 28, and twice the embedding, last norm and head: weights and gradients.
        "gathered weights": 5_292,  # 2 x (2 x 6,525,618,176 / 28 + 2 x 1,089,998,336)
        "scattered gradients": 4_360,  # 4 x 1,089,998,336
        "logits": 805,  # 2^26 x 12 bytes
    }
    assert account.takes_turns, "15.2 + 17.1 GB of states, 42.4 GB of a call: more than 72"
    assert account.at_once[0] == pytest.approx(57.6e9, rel=1e-3)
    assert account.at_once[1] == "generator"
    published = 2 * PARAMETERS  # a version, which the lanes lay out for each other
    states = 8 * 18 * PARAMETERS / 8 + 8 * 2 * PARAMETERS
    assert account.host_bytes == pytest.approx(states + published)
    for one in account.holdings:
        spot = plan.placements[one.worker]
        assert spot.state_bytes == pytest.approx(one.state_bytes, abs=1), "what plans count with"
        assert spot.working_bytes == pytest.approx(one.call_bytes, abs=1)


def test_shards_of_frozen_weights_have_no_gradients_that_stand_whole() -> None:
    _, (account,) = account_of("model.lora_rank=16")
    call = account.holdings[1].call
    assert round(call["gathered weights"] / 1e6) == 3_112  # 2 x (2 x 6,525,618,176 / 28 + 1,089...)
    assert "scattered gradients" not in call


def test_an_optimizer_on_the_host_is_counted_there() -> None:
    _, (account,) = account_of("training.optimizer_on_host=true")
    _, learner = account.holdings
    assert sum(learner.state.values()) == pytest.approx(6 * PARAMETERS / 8)
    assert learner.hosted == {
        "float32 weights": 4 * PARAMETERS / 8,
        "gradients": 4 * PARAMETERS / 8,  # a copy of what adds up on the lane
        "moments": 8 * PARAMETERS / 8,
    }
    # Beside them room for what is on the lanes, the learner's and eight whole generators', and a
    # version of the weights.
    assert account.host_bytes == pytest.approx((16 + 6 + 16 + 2) * PARAMETERS)


def test_moments_of_8_bits_and_weights_without_copies_are_counted_as_they_are() -> None:
    """8 bits and a scale of 4 bytes for each 256 of them."""
    _, (account,) = account_of("training.moments=8bit", "training.rounding=stochastic")
    assert account.holdings[1].state == {
        "weights": 2 * PARAMETERS / 8,
        "gradients": 4 * PARAMETERS / 8,
        "moments": 2 * (1 + 4 / 256) * PARAMETERS / 8,
    }


def test_an_optimizer_on_the_host_copies_weights_of_four_bytes_too() -> None:
    _, (account,) = account_of("training.optimizer_on_host=true", "model.dtype=float32")
    _, learner = account.holdings
    assert sum(learner.state.values()) == pytest.approx(8 * PARAMETERS / 8)
    assert sum(learner.hosted.values()) == pytest.approx(16 * PARAMETERS / 8)


def test_a_generator_on_two_lanes_has_embedding_and_head_on_each() -> None:
    _, (account,) = account_of(generator=Layout("tp2", 2))
    outside = 2 * 152_064 * 3_584 + 3_584
    size = 2 * (outside + (PARAMETERS - outside) / 2)
    assert account.holdings[0].state == {"weights": pytest.approx(size)}


def test_a_cache_that_is_said_is_the_cache_that_is_counted() -> None:
    _, (account,) = account_of("generation.cache_gb=20")
    assert account.holdings[0].call["keys and values"] == pytest.approx(20e9, abs=2)
    assert not account.takes_turns


def test_lanes_that_hold_something_else_have_an_account_of_their_own() -> None:
    _, found = account_of(learner=Layout("fsdp4", 4), mode="disaggregated")
    assert [[one.worker for one in account.holdings] for account in found] == [
        ["generator"], ["learner"],
    ]  # fmt: skip
    assert [account.lanes for account in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert sum(found[1].holdings[0].state.values()) == pytest.approx(18 * PARAMETERS / 4)


def test_a_version_of_published_weights_is_in_host_memory_once_on_a_machine() -> None:
    """Laid out by the lanes that publish, and brought to a machine of others once; not counted."""
    version = {"learner": pytest.approx(2 * PARAMETERS)}
    _, (generators, learners) = account_of(learner=Layout("fsdp4", 4), mode="disaggregated")
    assert (dict(generators.published), learners.published) == ({}, version)
    two = account_of(cluster="2x8xH100", mode="disaggregated")[1]
    assert [one.published for one in two] == [version, version]
    assert two[0].host_bytes == pytest.approx((8 * 2 + 2) * PARAMETERS)
    (over,) = account_of(cluster="2x8xH100", learner=Layout("fsdp16", 16))[1]
    assert over.published == version, "half of it laid out on each machine, the other half brought"
    (own,) = account_of("model.lora_rank=16", learner=ONE_LANE)[1]
    assert own.published == {}, "each lane takes the tensors of its own learner"


def test_numbers_of_four_bytes_on_cores() -> None:
    """A run on cores computes in single precision: no further copy of the weights."""
    recipe = read_recipe("qwen2.5-7b-grpo-math", ["lanes=cpu:1", "mode=collocated"])
    lines = memory_lines(recipe, *planned(recipe))
    assert lines[0] == "memory of cpu lane 0, no limit:"
    sizes = [line.split()[:2] for line in lines if line.split()[0] == "weights"]
    assert sizes == [["weights", "30.5"], ["weights", "30.5"]]
    assert any(line.split()[:2] == ["moments", "60.9"] for line in lines)


def test_the_account_in_lines() -> None:
    _, found = account_of()
    lines = in_lines(found)
    assert lines[0] == "memory of each of 8 gpu lanes (0 to 7), at most 72 GB:"
    told = [" ".join(line.split()) for line in lines]
    for row in (
        "generator 57.6 GB",
        "weights 15.2 GB",
        "keys and values 40 GB while generator.generate runs",
        "moments 7.62 GB",
        f"all states and the largest call 74.7 GB {TURNS}",
        "needed at once at most 57.6 GB for generator (80% of the limit)",
        "weights that learner publishes 15.2 GB in host memory once, not counted here",
        "host memory of a machine 274 GB",
    ):
        assert row in told, lines
    assert len({line.index("GB") for line in lines[1:] if "GB" in line}) == 1, "one column"


def test_the_plan_that_is_chosen_has_room_for_answers_of_8192_tokens() -> None:
    recipe = read_recipe("qwen2.5-7b-grpo-math", ())
    assert recipe.generation.max_new_tokens == 8192  # type: ignore[attr-defined]
    planning = Planning(Question(recipe, cluster="1x8xH100"))
    decision = planning.decision()
    found = planning.account(decision)
    assert found
    for account in found:
        assert account.limit == 72_000_000_000
        assert 0 < account.at_once[0] <= account.limit
        for one in account.holdings:
            assert one.state_bytes + one.call_bytes <= account.limit + 2


def test_an_engine_takes_its_share_of_what_a_lane_may_have() -> None:
    """As in a run: half of the device whose usable nine tenths are the limit; of a device with less
    memory, half of what there is.
    """
    for limit, cache in (("40GB", 20e9 / 0.9), ("90GB", 40e9)):
        recipe = read_recipe("qwen2.5-7b-grpo-math", [f"lane_memory={limit}"])
        planning = Planning(Question(recipe, cluster="1x8xH100"))
        for account in planning.account(planning.decision()):
            for one in account.holdings:
                if one.worker == "generator":
                    assert one.call["keys and values"] == pytest.approx(cache, abs=2)


def test_what_the_prices_say_of_prompts_is_what_the_engine_does() -> None:
    assert PREFILL_TOKENS == MAX_TOKENS
