"""A native engine on a gang draws what one lane draws, with a part of the model on each lane."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from m2flow.errors import UserError
from m2flow.flow.worker import Gang
from m2flow.generation.architecture import architecture_of
from m2flow.generation.native import NativeEngine
from m2flow.generation.records import Completion, Request, SamplingParams
from m2flow.generation.tensor_parallel import WHOLE, TensorParallel
from m2flow.runtime.transport.groups import LaneGroups
from tests.generation.small_models import CONFIGS, CONTEXT, VOCAB_SIZE, drain, small_model
from tests.training.lane_processes import LaneProcesses

LANES = (0, 1)
DIVISIBLE = [*sorted(CONFIGS.keys() - {"qwen2-untied-one-kv-head"}), "gemma2", "gemma3"]
Drawn = dict[int, tuple[list[int], list[float], tuple[int, int], str]]


@pytest.fixture(scope="module")
def lanes() -> Iterator[LaneProcesses]:
    with LaneProcesses(len(LANES)) as lanes:
        yield lanes


def parallel_of(groups: LaneGroups) -> TensorParallel:
    groups.ensure([LANES])
    group = groups.group(LANES)
    return TensorParallel(group.rank(), len(LANES), group)


def requests() -> list[Request]:
    """Groups with a common prompt, lengths of all sorts, a stop token for all but one."""
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 9, 20)]
    return [
        Request(
            n,
            prompts[n % 4],
            100 + n,
            SamplingParams(9 if n == 5 else rng.choice((1, 4, CONTEXT - 20)), 1.0, (3,) * (n != 5)),
        )
        for n in range(12)
    ]


def shown(done: dict[int, Completion]) -> Drawn:
    return {
        n: (c.token_ids.tolist(), c.logprobs.tolist(), c.versions, c.finish_reason)
        for n, c in done.items()
    }


def eventful(parallel: TensorParallel, name: str) -> tuple[Drawn, int]:
    """Draws with few slots, a nap, other weights, and requests that begin again; bytes."""
    model, other = small_model(name), small_model(name, seed=1)
    engine = NativeEngine(
        model.config,
        dtype=torch.float64,
        max_running=5,
        parallel=parallel,
    )
    engine.install(model.state_dict(), 0)
    done: dict[int, Completion] = {}
    asked = requests()
    engine.submit(asked[:8])
    for _ in range(4):
        done |= {one.id: one for one in engine.step()}
    engine.sleep()
    engine.wake()
    back = engine.abort([0, 2, 7])
    boxes, weights = engine.weight_boxes(), other.state_dict()
    engine.install({key: box.of(weights[key]) for key, box in boxes.items()}, 1)
    engine.submit(asked[8:])
    engine.submit(asked[one.id] for one in back)
    done |= drain(engine)
    engine.submit(Request(n, [n, 4, 4], n, SamplingParams(9)) for n in range(5))
    engine.step()
    size = engine.state_bytes()
    engine.abort(range(5))
    return shown(done), size


def on_a_lane(groups: LaneGroups, name: str) -> tuple[Drawn, int]:
    return eventful(parallel_of(groups), name)


@pytest.mark.parametrize("name", DIVISIBLE)
def test_a_gang_draws_what_one_lane_draws(name: str, lanes: LaneProcesses) -> None:
    torch.set_num_threads(1)
    alone, whole_bytes = eventful(WHOLE, name)
    (first, first_bytes), (second, second_bytes) = lanes(on_a_lane, name)
    assert first == second, "to the last bit"
    assert first_bytes == second_bytes < 0.75 * whole_bytes
    assert first.keys() == alone.keys()
    for item, (tokens, logprobs, *others) in alone.items():
        assert first[item][0] == tokens
        assert first[item][1] == pytest.approx(logprobs, abs=1e-9)
        assert list(first[item][2:]) == others
    assert {versions for *_, versions, _ in alone.values()} >= {(0, 0), (0, 1), (1, 1)}


def in_half_precision(groups: LaneGroups) -> Drawn:
    model = small_model(dtype=torch.bfloat16)
    parallel = parallel_of(groups)
    engine = NativeEngine(model.config, dtype=torch.bfloat16, parallel=parallel)
    engine.install(model.state_dict(), 0)
    engine.submit(requests())
    return shown(drain(engine))


def test_lanes_draw_the_same_in_half_precision(lanes: LaneProcesses) -> None:
    first, second = lanes(in_half_precision)
    assert first == second
    assert len(first) == len(requests())


def different_draws(groups: LaneGroups) -> tuple[list[int], list[float]]:
    parallel = parallel_of(groups)
    token_B = torch.tensor([1, 2]) + 10 * parallel.rank
    logprob_B = torch.tensor([-0.1, -2.0]) - parallel.rank
    agreed = parallel.agree(token_B, logprob_B)
    assert agreed[1].dtype is torch.float32
    return agreed[0].tolist(), agreed[1].tolist()


def test_lanes_that_draw_differently_agree(lanes: LaneProcesses) -> None:
    first, second = lanes(different_draws)
    assert first == second
    assert first[0] == [1, 2]
    assert first[1] == pytest.approx([-0.1, -2.0])


@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_are_the_whole(size: int) -> None:
    whole = architecture_of(small_model("llama-biases-scaled-rope").config)
    whole = type(whole)(**{**vars(whole), "kv_heads": 6, "heads": 12, "intermediate_size": 40})
    parts = [TensorParallel(rank, size) for rank in range(size)]
    assert [n for part in parts for n in part.channels(whole)] == list(range(40))
    assert sum(part.part(whole).heads for part in parts) == 12
    assert {part.part(whole).group for part in parts} == {2}


def test_heads_that_do_not_divide_are_the_users_affair() -> None:
    config = small_model().config
    with pytest.raises(UserError, match=r"num_key_value_heads: .*3 lanes.*gangs of 1 or 2"):
        NativeEngine(config, parallel=TensorParallel(0, 3))


def test_weights_of_another_shape_are_refused() -> None:
    model = small_model()
    engine = NativeEngine(model.config, dtype=torch.float64, parallel=TensorParallel(1, 2))
    weights = model.state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert engine.weight_boxes()[name].offsets == (16, 0)
    with pytest.raises(ValueError, match=r"q_proj.weight is \[31, 32\], not \[32, 32\]"):
        engine.install({**weights, name: weights[name][1:]}, 0)


def test_a_gang_of_one_lane_holds_all() -> None:
    assert TensorParallel.of(Gang()) is WHOLE
