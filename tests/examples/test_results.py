"""Each example reaches the result that its docstring states, on two seeds.

`train(seed)` gives figures, of which `EXPECTED` names the least; the short ones run always.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.conftest import ROOT

SHORT = "my_first_flow dqn self_play hierarchical collocated_algorithms distillation".split()
LONG = "memory_pipeline iql asynchronous_sac four_verbs".split()
Example = Callable[[str], ModuleType]


@pytest.mark.parametrize("name", SHORT)
def test_the_result_is_reached(name: str, example: Example) -> None:
    reached(example(name), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_the_result_is_reached_on_another_seed(name: str, example: Example) -> None:
    reached(example(name), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LONG)
def test_the_result_is_reached_in_the_end(name: str, seed: int, example: Example) -> None:
    reached(example(name), seed)


def reached(module: ModuleType, seed: int) -> None:
    found = module.train(seed=seed)
    assert found.keys() >= module.EXPECTED.keys()
    missed = {name: found[name] for name, least in module.EXPECTED.items() if found[name] < least}
    assert not missed, f"expected at least {module.EXPECTED}"


@pytest.mark.slow
def test_those_with_results_of_their_own_reach_them_on_another_seed(example: Example) -> None:
    assert sum(example("own_flow").train(steps=30, seed=1)[-5:]) / 5 > 0.8
    assert example("tabular_q_learning").train(steps=20, seed=1)[0][-1] == 1.0
    assert sum(example("dagger").train(steps=6, seed=1)[-3:]) / 3 > 0.8


def test_every_example_is_tested() -> None:
    """By its name here, or in a file of its own beside this one."""
    here = Path(__file__).parent
    own = {path.stem.removeprefix("test_") for path in here.glob("test_*.py")}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} <= {*SHORT, *LONG} | own


def test_the_first_flow_is_forty_lines() -> None:
    lines = (ROOT / "examples" / "my_first_flow.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 45


@pytest.mark.slow
def test_lanes_change_nothing(run_example: Callable[..., list[str]]) -> None:
    there = run_example("hierarchical", "--mode", "collocated", "--lanes", "cpu:2")
    assert there == run_example("hierarchical")
    assert len(there) == 4


@pytest.mark.slow
def test_a_pipeline_over_two_lanes_moves_no_state(run_example: Callable[..., list[str]]) -> None:
    alone, pipeline = (
        run_example("memory_pipeline"),
        run_example("memory_pipeline", "--lanes", "cpu:2"),
    )
    assert [line.rpartition("moves")[0] for line in alone] == [
        line.rpartition("moves")[0] for line in pipeline
    ]
    assert {line.split()[-1] for line in alone} == {"4"}
    assert {line.split()[-1] for line in pipeline[1:]} == {"0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("asynchronous_sac", "disaggregated"),
        ("dqn", "disaggregated"),
        ("self_play", "disaggregated"),
        ("distillation", "disaggregated"),
        ("four_verbs", "collocated"),
        ("iql", "collocated"),
    ],
)
def test_it_runs_on_two_lanes(name: str, mode: str, run_example: Callable[..., list[str]]) -> None:
    assert run_example(name, "--mode", mode, "--lanes", "cpu:2")


def test_gradients_of_the_four_verbs_add_up(example: Example, tmp_path: Path) -> None:
    """Two calls before the optimizer's step are one call on both; what is saved is what sampled."""
    verbs = example("four_verbs")
    spec = verbs.TinySpec(hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    model = verbs.build_tiny(spec, vocab_size=12, eos_token_id=11, pad_token_id=11, seed=0)
    model.save_pretrained(tmp_path / "model")
    prompts, answers = verbs.prompts(0, 4), [[1, 11], [2, 11], [3, 11], [4, 11]]
    norms, drawn = [], []
    for cuts in ((0, 4), (0, 1, 4)):
        settings = {"learning_rate": 1e-2, "max_new_tokens": 2}
        with verbs.TrainingClient(str(tmp_path / "model"), **settings) as client:
            for first, last in pairwise(cuts):
                client.forward_backward(prompts[first:last], answers[first:last])
            norms.append(client.optim_step()["grad_norm"])
            ((_, logprobs),) = client.sample(prompts[:1], [0], greedy=True)
            drawn.append(logprobs)
            client.save(tmp_path / "trained")
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    with verbs.TrainingClient(str(tmp_path / "trained"), **settings) as client:
        ((_, logprobs),) = client.sample(prompts[:1], [0], greedy=True)
    assert logprobs.tolist() == pytest.approx(drawn[1].tolist(), abs=1e-5)
