"""Whole commands of which somebody is hit at a drawn moment: they end like undisturbed ones.

A seed draws the workload, the mode, who is hit, in which phase and how. A run that ends goes on
with `--resume`, as `m2flow doctor` says, which is asked. In the end figures and weights are those
of an eager run that nobody disturbed, up to the order of sums; of simulators, whose episodes are
lost with them, every step is there once, and every episode counts once. No process, file or shared
memory is left. Where a moment does not come, nobody is hit: then the seed draws again. What is hit
may also be the disk, and the network between two machines.

`make test-chaos` has what became of each seed written to the file that M2FLOW_CHAOS_RESULT names.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from m2flow.observe.ending import ending_of
from m2flow.observe.jsonl import read_rows
from m2flow.observe.run_directory import read_metrics
from m2flow.runtime.transport.listening import SILENT_SECONDS
from m2flow.workloads.common.reading import read_recipe
from tests.chaos import cut_network
from tests.chaos.disturbed import DISTURBED, PHASES, Strike
from tests.chaos.small_disk import small_disk
from tests.cli.conftest import TINY, run_command
from tests.cli.test_resume import figures
from tests.cli.test_signals import Started
from tests.results import add_result
from tests.workloads.agentic.conftest import TINY as AGENT

STEPS = 14
SHORT_STEPS = 8
"""Of a run that is not of the quick start's kind."""

MODES = ("collocated", "disaggregated", "auto")
OF_AUTO = ("re-plan", "race")

PHASES_OF = {
    "lane": PHASES,
    "launcher": PHASES,
    "ray": PHASES,
    "paused": PHASES,
    "engine": ("generation", "publish", "checkpoint"),
    "simulator": ("generation", "training"),
    "disk": PHASES,
    "network": PHASES,
}
"""By victim when it is hit. `paused` is a lane that is stopped for a while."""

VICTIMS = tuple(PHASES_OF)
WORKLOADS = ("native", "agentic", "embodied")
"""What lanes and launchers that are hit carry out, in turn."""

SEEDS = range(56)
"""So many that every victim is hit in each of its phases."""

DRAWS = 4
"""So often a seed may draw until somebody is hit."""

HEALS = ("lane", "paused", "engine", "simulator")
"""Those after whose loss the same command goes on."""

FAKE_VLLM = Path(__file__).parents[1] / "generation" / "fake_vllm"
MODELS = {
    **dict.fromkeys(
        ("native", "ahead", "vllm", "agentic"), "checkpoints/latest/model/model.safetensors"
    ),
    "embodied": "checkpoints/latest/policy.safetensors",
}
"""By workload the weights that it ends with."""

OF_THE_PLAN = ("publish/", "lanes/", "train/tokens_computed")
"""Figures that differ between plans, or tell of lost lanes."""

WEIGHTS_APART = {"native": 1e-4, "ahead": 1e-4, "vllm": 5e-4, "agentic": 1e-4, "embodied": 1e-4}
"""Most that a weight may differ, by workload. What vLLM computes depends on what else is in its
batch: runs on one lane and on two that nobody has disturbed differ by 1.1e-4."""

ROUNDING = 1e-6
"""The same as a share: a policy also has sums that it scales by, whose size grows with the run, of
what was computed in float32 (8 units in its last place)."""

NO_VLLM = find_spec("vllm") is None
"""Then a stand-in takes its place."""

END_SECONDS = 240.0 if NO_VLLM else 900.0  # vLLM itself takes minutes to start, and again

QUIET_SECONDS = 60.0
"""Longest that what a killed launcher leaves may stay: Ray's processes end one after the other."""

EPISODES, HORIZON = 4, 24
"""Of a step of the embodied run, in which a rollout is an episode."""

EMBODIED = f"""\
workload: embodied
name: tiny-table
steps: {SHORT_STEPS}
rollouts_per_step: {EPISODES}
environment: {{name: "table:red", processes: 2, options: {{privileged: true}}}}
policy: {{hidden: [16]}}
rollout: {{horizon: {HORIZON}, automatic_reset: false}}
evaluation: {{every: 1000, episodes: 4, films: 0}}
"""

OFTEN = ("checkpoint.every=3", "evaluation.every=1000", "samples_logged_per_step=16")
HEAD_OF_32 = ("model.num_attention_heads=1", "model.num_key_value_heads=1")
"""The smallest head that vLLM's own kernels take."""

OF_VLLM = ("generation.engine=vllm", "generation.cache_gb=0.125", *HEAD_OF_32)

AHEAD = ("max_staleness=1", "algorithm.epochs=16")
"""A step is drawn before the one before it is trained: that takes long."""

RECIPES = {
    "native": (TINY, f"steps={STEPS}", *OFTEN),
    "ahead": (TINY, f"steps={SHORT_STEPS}", "checkpoint.every=2", *OFTEN[1:], *AHEAD),
    "vllm": (TINY, f"steps={STEPS}", *OFTEN, *OF_VLLM),
    "agentic": (json.dumps({**AGENT, "name": "tiny-tools"}), f"steps={SHORT_STEPS}", *OFTEN),
    "embodied": (EMBODIED, "checkpoint.every=3"),
}
"""By workload its recipe, and what is set beside it."""


@dataclass(frozen=True)
class Drawn:
    """What a seed has drawn."""

    workload: str
    mode: str
    journal: bool
    victim: str
    strike: Strike
    cut_seconds: float = 0.0

    @property
    def words(self) -> list[str]:
        journal = [] if self.journal else ["journal_gb=0"]
        return [*RECIPES[self.workload][1:], f"mode={self.mode}", *journal]


def draw(seed: int, again: int = 0) -> Drawn:
    """What a seed draws; `again` is how often nobody was hit so far."""
    drawn, turn = random.Random(f"{seed} {again}"), seed // len(VICTIMS)
    victim = VICTIMS[seed % len(VICTIMS)]
    phases = PHASES_OF[victim]
    phase = phases[(VICTIMS.index(victim) + turn) % len(phases)]
    workload = {"engine": "vllm", "simulator": "embodied"}.get(victim, "native")
    if victim in ("lane", "launcher"):
        workload = WORKLOADS[turn % len(WORKLOADS)]
    modes = MODES[:2] if workload == "embodied" else MODES
    latest = 5 if workload in ("agentic", "embodied") else 9
    return Drawn(
        workload,
        "auto" if phase in OF_AUTO else drawn.choice(modes),
        drawn.random() < 0.7,
        victim,
        Strike(
            {"paused": "lane", "network": ""}.get(victim, victim),
            phase,
            0 if phase in OF_AUTO else drawn.randrange(1, latest),
            drawn.choice((0.0, drawn.uniform(0.0, 0.05))),
            "pause" if victim == "paused" else "kill",
            seed,
        ),
        drawn.choice((drawn.uniform(1.0, 8.0), SILENT_SECONDS + drawn.uniform(4.0, 12.0))),
    )


def test_the_seeds_draw_everybody_in_every_phase() -> None:
    drawn = [draw(seed) for seed in SEEDS]
    assert min(Counter(one.victim for one in drawn)[victim] for victim in VICTIMS) >= 3
    assert min(Counter(one.strike.phase for one in drawn)[phase] for phase in PHASES) >= 2
    assert {one.cut_seconds > SILENT_SECONDS for one in drawn if one.victim == "network"} == {
        True,
        False,
    }
    assert {one.mode for one in drawn} == set(MODES)
    assert {one.journal for one in drawn} == {True, False}
    for victim in ("lane", "launcher"):
        assert {one.workload for one in drawn if one.victim == victim} == set(WORKLOADS)
    assert {(one.victim, one.strike.phase) for one in drawn} == {
        (victim, phase) for victim, phases in PHASES_OF.items() for phase in phases
    }
    assert draw(7) == draw(7)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a workload that nobody disturbs; each is made once."""
    made: dict[str, Path] = {}

    def run(workload: str) -> Path:
        if workload not in made:
            folder = tmp_path_factory.mktemp("straight")
            recipe, *words = RECIPES[workload]
            (folder / "tiny.yaml").write_text(recipe)
            made[workload] = folder / "run"
            said = ["--run-dir", made[workload], "mode=eager", "lanes=cpu:1"]
            outcome = run_command("train", folder / "tiny.yaml", *words, *said)
            assert outcome.code == 0, outcome.err
        return made[workload]

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    if NO_VLLM:
        monkeypatch.syspath_prepend(str(FAKE_VLLM))
        before = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{FAKE_VLLM}:{before}")
    runs: list[Started] = []
    yield runs
    for run in runs:
        run.end()


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What becomes of a seed, which is added to the file that M2FLOW_CHAOS_RESULT names."""
    begun, what = time.monotonic(), {"outcome": "failed"}
    yield what
    what["seconds"] = round(time.monotonic() - begun, 1)
    add_result("M2FLOW_CHAOS_RESULT", "chaos", str(request.node.callspec.params["seed"]), what)


@pytest.mark.slow
@pytest.mark.timeout(5 * END_SECONDS)
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"{seed}-{VICTIMS[seed % len(VICTIMS)]}")
def test_a_disturbed_run_ends_like_an_undisturbed_one(
    seed: int,
    straight: Callable[[str], Path],
    started: list[Started],
    told: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for again in range(DRAWS):
        drawn, folder = draw(seed, again), tmp_path / str(again)
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("M2FLOW_CACHE", str(folder / "cache"))  # or nothing is left to race for
        told.update(victim=drawn.victim, phase=drawn.strike.phase, mode=drawn.mode)
        stands_in = drawn.workload == "vllm" and NO_VLLM
        told["workload"] = "stand-in for vllm" if stands_in else drawn.workload
        outcome = (cut if drawn.victim == "network" else disturbed)(drawn, folder, started)
        if outcome:
            break
        print(f"seed {seed}, draw {again}: nobody was hit ({drawn})")
    else:
        pytest.fail(f"nobody was hit in {DRAWS} draws")
    if drawn.workload == "embodied":
        every_episode_counts_once(folder / "run")
    if drawn.victim != "simulator":
        ends_like(folder / "run", straight(drawn.workload), drawn.workload)
    told["outcome"] = outcome


def ends_like(run: Path, straight: Path, workload: str) -> None:
    """Each sample is there once, figures and weights are the same, up to the order of sums."""
    for row, wanted in zip(figures(run), figures(straight), strict=True):
        expected = {key: x for key, x in wanted.items() if not key.startswith(OF_THE_PLAN)}
        found = {key: row.get(key) for key in expected}
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    drawn, expected = (
        sorted((one["step"], one["item"]) for one in read_rows(folder / "samples.jsonl").rows)
        for folder in (run, straight)
    )
    assert drawn == expected
    here, there = (load_file(folder / MODELS[workload]) for folder in (run, straight))
    for key, tensor in there.items():
        apart = WEIGHTS_APART[workload]
        assert here[key].allclose(tensor, rtol=ROUNDING, atol=apart), key


def disturbed(drawn: Drawn, folder: Path, started: list[Started]) -> str:
    """A run to its end, with whatever it takes; "" where nobody was hit.

    It is in `folder`/run then.

    Returns:
        Whether it "went on" by itself, or was "resumed".
    """
    outcome = "went on"
    with ExitStack() as ended:
        enter, outside = (), folder
        if drawn.victim == "disk":
            disk = ended.enter_context(small_disk(folder, "size=64m"))
            enter, outside = disk.enter, disk.outside
        recipe = outside / "tiny.yaml"
        recipe.write_text(RECIPES[drawn.workload][0])

        def start(*words: str, program: tuple[str, ...] = ("-m", "m2flow")) -> Started:
            said = [*drawn.words, "lanes=cpu:2", *words]
            run = Started(Path("tiny.yaml"), *said, program=program, enter=enter)
            started.append(run)
            return run

        run = start(program=(DISTURBED, json.dumps(asdict(drawn.strike))))
        code, errors = ended_with(run)
        if not (outside / "hit").exists():
            assert code == 0, errors
            return ""
        assert code == 0 or drawn.victim not in HEALS, errors
        assert run.pools, "nobody knows what its files in shared memory are called"
        run.wait_until_quiet(QUIET_SECONDS)
        (outside / "filler").unlink(missing_ok=True)
        if code:
            outcome = "resumed"
            assert "Traceback" not in errors
            check_account(outside, drawn.victim)
            run = start(*(["--resume"] if (outside / "run/config.yaml").exists() else []))
            code, errors = ended_with(run)
            assert code == 0, errors
            run.wait_until_quiet(QUIET_SECONDS)
        assert ending_of(outside / "run").state == "finished"
        if outside != folder:
            shutil.copytree(outside / "run", folder / "run", symlinks=True)
    return outcome


def cut(drawn: Drawn, folder: Path, started: list[Started]) -> str:
    """The same of a run on two machines whose link is cut for a while."""
    recipe, *_ = RECIPES[drawn.workload]
    (folder / "tiny.yaml").write_text(recipe)
    with cut_network.linked() as cluster:
        run = cut_network.start_disturbed(cluster, folder, drawn.strike, *drawn.words)
        try:
            struck = cut_network.hit(run, folder)
            if struck:
                cluster.cut()
                with suppress(subprocess.TimeoutExpired):
                    run.wait(drawn.cut_seconds)
                cluster.mend()
            _, errors = run.communicate(timeout=cut_network.END_SECONDS)
            cut_network.wait_until_quiet(cluster, folder)
        finally:
            run.kill()
    assert run.returncode == 0 or drawn.cut_seconds > SILENT_SECONDS, errors
    assert run.returncode == 0 or struck, errors
    if run.returncode:
        assert "Traceback" not in errors
        check_account(folder, drawn.victim)
        again = Started(Path("tiny.yaml"), *drawn.words, "lanes=cpu:2", "--resume")
        started.append(again)
        code, errors = ended_with(again)
        assert code == 0, errors
        again.wait_until_quiet(QUIET_SECONDS)
    assert ending_of(folder / "run").state == "finished"
    if not struck:
        return ""
    return "resumed" if run.returncode else "went on"


def check_account(folder: Path, victim: str) -> None:
    """The doctor says what became of the run, and how it goes on."""
    if not (folder / "run/config.yaml").exists():
        return
    account = ending_of(folder / "run")
    expected = {"launcher": ("killed",), "ray": ("failed", "killed")}.get(victim, ("failed",))
    assert account.state in expected, account
    assert any(line.startswith("to go on: m2flow train ") for line in account.lines), account
    if victim == "disk":
        assert "could not be written" in account.lines[0]
        assert any(line.startswith("first: make room") for line in account.lines), account


def every_episode_counts_once(run: Path) -> None:
    """In steps of which each is there once, also those in which episodes were lost: every turn of
    an episode that was finished is learnt from once in each pass."""
    passes = read_recipe(run / "config.yaml").update.epochs
    rows = [row for row in read_metrics(run) if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, SHORT_STEPS + 1))
    assert all(row["episodes/finished"] + row["episodes/failed"] == EPISODES for row in rows)
    for row in rows:
        turns = round(row["episodes/finished"] * row["episodes/length"])
        assert 0 < turns == row["environment_steps"] <= EPISODES * HORIZON
        assert row["train/turns"] == passes * turns


def ended_with(run: Started) -> tuple[int, str]:
    _, errors = run.process.communicate(timeout=END_SECONDS)
    return run.process.returncode, errors


def test_a_strike_is_told_as_it_was_made() -> None:
    strike: Any = asdict(draw(3).strike)
    assert Strike(**json.loads(json.dumps(strike))) == draw(3).strike
