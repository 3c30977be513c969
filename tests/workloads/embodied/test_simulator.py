"""The worker that hosts environments: it steps aside and goes on, and forgets a failed step."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import m2flow
from m2flow.engine.plan import LaneSpec
from m2flow.environments.demonstrations import record_demonstrations
from m2flow.environments.table import TableEnvironment
from m2flow.errors import UserError
from m2flow.flow import Batch, Place
from m2flow.plan import parse_lanes, with_memory
from m2flow.workloads.common import train
from m2flow.workloads.common.reading import read_recipe
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.embodied.config import EnvironmentSection
from m2flow.workloads.embodied.evaluation import examine
from m2flow.workloads.embodied.experiment import EmbodiedExperiment
from m2flow.workloads.embodied.workers import Simulator
from m2flow.workloads.embodied.workers.columns import FILM, NO_FILM, OPTIONAL_FILM

ROLLOUTS, HORIZON = 4, 6
CARTPOLE = "gymnasium:CartPole-v1"


def starts(first: int = 0) -> Batch:
    numbers = torch.arange(first, first + ROLLOUTS)
    none = torch.zeros(ROLLOUTS, dtype=torch.bool)
    return Batch(
        {
            "rollout": numbers,
            "seed": numbers * 7 + 1,
            "initial_state": torch.full((ROLLOUTS,), -1),
            "greedy": none,
            "single": none,
            "film": none,
            "turn": torch.zeros(ROLLOUTS, dtype=torch.int64),
        }
    )


def acted(seen: Batch, choices: bool = False) -> Batch:
    """The same actions for the same turn; choices are CartPole's."""
    turn = int(seen["turn"][0])
    action = torch.rand(ROLLOUTS, 1, 2, generator=torch.Generator().manual_seed(turn)) * 2 - 1
    if choices:
        action = (action[..., :1] > 0).float()
    who = seen.only("rollout", "seed", "greedy", "turn")
    return who.with_columns(action=action, tokens=action, logprobs=action, values=action[:, 0, 0])


def rolled_out(simulator: Simulator, between: Any) -> Batch:
    """Whole rollouts; `between` is called between the turns."""
    seen = simulator.begin(starts())
    while True:
        between()
        seen = simulator.step(acted(seen, simulator.environment.name == CARTPOLE))
        if bool(seen["done"].all()):
            return seen


def made(processes: int, name: str = "table:reach", steps_aside: bool = True) -> Simulator:
    section = EnvironmentSection(name=name, processes=processes)
    simulator = Simulator(section, HORIZON, ROLLOUTS, steps_aside)
    simulator.load(Place())
    return simulator


@pytest.mark.parametrize("dear", [False, True])
def test_optional_films_are_given_up_where_drawing_takes_long(
    dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four episodes were drawn in full in each evaluation, which a software renderer took most of
    a run's time for."""
    monkeypatch.setattr("m2flow.workloads.embodied.workers.simulator.DRAWING_SECONDS", 1e9)
    simulator = made(processes=0)
    wanted = torch.tensor([FILM, OPTIONAL_FILM, OPTIONAL_FILM, NO_FILM])
    alone = torch.ones(ROLLOUTS, dtype=torch.bool)
    seen = simulator.begin(starts().with_columns(film=wanted, single=alone))
    if dear:
        simulator._drawing_seconds = 1e12
    while "done" not in seen or not bool(seen["done"].all()):
        seen = simulator.step(acted(seen))
    filmed = [film is not None for film in seen["film"]]
    assert filmed == [True, not dear, not dear, False]
    simulator.begin(starts(ROLLOUTS))
    assert simulator._drawing_seconds == 0.0, "another evaluation begins anew"
    simulator.close()


@pytest.mark.parametrize("resets", [False, True])
def test_a_film_shows_how_its_episode_ended(resets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last picture was of the turn before the one that ended the episode."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    section = EnvironmentSection(name="counting:Counting", options={"length": 3})
    simulator = Simulator(section, HORIZON, ROLLOUTS)
    simulator.load(Place())
    begun = starts().with_columns(film=torch.full((ROLLOUTS,), FILM))
    seen = simulator.begin(begun.with_columns(single=torch.full((ROLLOUTS,), not resets)))
    films = [told.film for told in simulator._recordings.told.values()]
    while "done" not in seen or not bool(seen["done"].all()):
        seen = simulator.step(acted(seen, choices=True))
    assert [len(film.all()) for film in films if film is not None] == [4] * ROLLOUTS
    assert all(len(some) == 1 + resets for some in seen["episodes"])
    simulator.close()


@pytest.fixture(
    params=[(0, "table:reach"), (2, "table:reach"), (2, CARTPOLE)],
    ids=["here", "processes", "replayed in processes"],
)
def simulator(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    if request.param[1] == CARTPOLE:
        pytest.importorskip("gymnasium")
    found = made(*request.param)
    yield found
    found.close()


def test_rollouts_go_on_after_their_simulators_were_away(simulator: Simulator) -> None:
    plain = rolled_out(simulator, lambda: None)
    seen_away = []

    def away_and_back() -> None:
        resident = simulator.state_bytes()
        simulator.offload()
        seen_away.append(len(simulator._pool._vectors))
        assert simulator.state_bytes() == resident > 0, "what it takes when it is back"
        simulator.onload()

    again = rolled_out(simulator, away_and_back)
    assert len(seen_away) == HORIZON
    assert not any(seen_away), "no simulator is left"
    columns = [name for name in plain.columns if name.startswith("turn.")]
    assert {"turn.observation.state", "turn.reward"} <= set(columns)
    for name in columns:
        ours, theirs = plain[name], again[name]
        same = ours == theirs if isinstance(ours, list) else torch.equal(ours.values, theirs.values)
        assert same, name
    assert plain["episodes"] == again["episodes"]


def test_simulators_in_processes_give_their_memory_back() -> None:
    simulator = made(2)
    try:
        simulator.begin(starts())
        (vector,) = simulator._pool._vectors
        pids = vector.pids
        assert simulator.state_bytes() > 2 * 5_000_000, "two interpreters with NumPy"
        simulator.offload()
        assert not any(alive(pid) for pid in pids)
        simulator.onload()
        assert simulator._pool._vectors[0].pids != pids
    finally:
        simulator.close()


def test_simulators_may_have_an_interpreter_of_their_own(tmp_path: Path) -> None:
    """A module that this interpreter has not: it is found by the other one alone."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "only_there.py").write_text(ONLY_THERE)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path / "elsewhere"} exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    recipe = {
        "workload": "embodied",
        "mode": "eager",
        "steps": 1,
        "rollouts_per_step": 2,
        "environment": {"name": "only_there:Reach", "python": str(python)},
        "rollout": {"horizon": 4},
        "update": {"epochs": 1, "minibatches": 1},
        "evaluation": {"episodes": 0},
    }
    run = train(recipe, run_dir=tmp_path / "run")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["environment_steps"] == 8
    shown = tmp_path / "shown.npz"
    record_demonstrations(shown, TableEnvironment("reach"), lambda one: one.expert(), range(3))
    cloned = train(
        recipe, {"warmup": {"steps": 2, "data": str(shown)}}, run_dir=tmp_path / "cloned"
    )
    assert (cloned / "warmup" / "policy.safetensors").is_file()
    shown.unlink()  # an evaluation clones nothing
    saved, lanes = cloned / "checkpoints" / "latest", parse_lanes("cpu:1")
    assert examine(Examination(saved, None, limit=2, lanes=lanes))["length"] > 0
    for changes, line in (
        ({"environment.python": "/nowhere/python"}, "environment.python: is no program"),
        ({"environment.processes": 0}, "environment.processes: another interpreter runs"),
        ({"warmup.steps": 3}, "warmup.steps: demonstrations are played where the run is"),
        ({"environment.name": "only_there:Reech"}, "only_there has no such class"),
    ):
        with pytest.raises(UserError, match=line):
            EmbodiedExperiment(read_recipe(recipe, changes))


ONLY_THERE = """
from m2flow.environments.table import TableEnvironment


class Reach(TableEnvironment):
    def __init__(self):
        super().__init__("reach")
"""


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_simulator_that_cannot_save_stays_where_it_is() -> None:
    pytest.importorskip("gymnasium")
    simulator = made(0, CARTPOLE, steps_aside=False)
    try:
        simulator.begin(starts())
        vectors = list(simulator._pool._vectors)
        simulator.offload()
        assert simulator.state_bytes() == 0
        assert simulator._pool._vectors == vectors
        simulator.onload()
        assert simulator._pool._vectors == vectors
    finally:
        simulator.close()


def test_what_simulators_hold_that_cannot_save_is_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes' memory on the CPU, and on an accelerator what they draw in, by number."""
    simulator = made(2, steps_aside=False)
    saving = made(2)
    try:
        for one in (simulator, saving):
            one.begin(starts())
        assert simulator.state_bytes() == saving.beside_bytes() == 0
        assert simulator.beside_bytes() > 2 * 5_000_000, "two interpreters with NumPy"
        smi = tmp_path / "nvidia-smi"
        first, second = simulator._pool.pids
        smi.write_text(
            "#!/bin/sh\necho '# gpu   pid  type  fb  ccpm  command'\n"
            f"echo '0 {first} G 310 0 python'; echo '0 {second} C+G 25 0 python'\n"
            "echo '0 1 C 4000 0 another'; echo '1 - - - - -'\n"
        )
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        simulator.place = Place(device="cuda:0")
        assert simulator.beside_bytes() == 335 << 20
        smi.unlink()
        assert simulator.beside_bytes() == 0, "nobody tells"
    finally:
        simulator.close()
        saving.close()


def test_rollouts_of_a_step_that_failed_hold_no_environment() -> None:
    simulator = made(0, steps_aside=False)
    try:
        simulator.begin(starts())
        simulator.step(acted(simulator.begin(starts())))
        simulator.discard()
        simulator.begin(starts(first=ROLLOUTS))  # those of the other lane's share, say
        (vector,) = simulator._pool._vectors
        assert vector.spec.num_envs == ROLLOUTS, "they took the places that were free again"
        assert len(simulator._recordings) == ROLLOUTS
    finally:
        simulator.close()


@pytest.mark.parametrize(
    "environment",
    [
        {"name": "table:red", "options": {"privileged": True}, "processes": 2},
        pytest.param(
            {
                "name": CARTPOLE, "options": {"max_episode_steps": 4}, "processes": 2,
                "steps_aside": True,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["saved", "replayed"],
)  # fmt: skip
def test_a_run_under_a_memory_limit_moves_simulators_and_computes_the_same(
    environment: dict[str, Any],
) -> None:
    """The learner and the simulators' processes do not fit on the lane together."""
    if environment["name"] == CARTPOLE:
        pytest.importorskip("gymnasium")
    some = read_recipe(
        {
            "workload": "embodied",
            "rollouts_per_step": ROLLOUTS,
            "environment": environment,
            "policy": {"hidden": [1024, 1024]},
            "rollout": {"horizon": HORIZON},
            "update": {"epochs": 1, "minibatches": 1},
            "evaluation": {"episodes": 0, "films": 0},
        }
    )
    experiment = EmbodiedExperiment(some)  # type: ignore[arg-type]

    def outputs(**options: Any) -> tuple[list[Any], set[str]]:
        flow = experiment.flow()
        with m2flow.launch(flow, items_per_step=ROLLOUTS, **options) as run:
            results = list(run.steps(experiment.batch(step) for step in range(2)))
        moved = {span.name for one in results for span in one.spans if span.kind == "switch"}
        return [one.output["episodes"] for one in results], moved

    flow = experiment.flow()
    with m2flow.launch(flow, items_per_step=ROLLOUTS, mode="eager") as run:
        sizes = {w: int(run.worker_call(w, "state_bytes")) for w in ("simulator", "learner")}
    plain, nobody = outputs(mode="eager")
    limit = sizes["simulator"] + sizes["learner"]
    lanes = with_memory([LaneSpec(0)], limit)
    limited, moved = outputs(mode="collocated", lanes=lanes, num_threads=1)
    assert limited == plain
    assert not nobody
    assert {"offload simulator", "onload simulator"} <= moved
