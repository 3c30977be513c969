"""`m2flow train` that is struck once, at a chosen moment: `python disturbed.py STRIKE train ...`.

STRIKE is a `Strike` as JSON. The launcher sees every command that it sends, so it knows what its
lanes are about to do; a moment later it strikes: itself, a lane, Ray's process, an engine's or a
simulator's, or the disk; or it leaves that to whoever waits for the word. Only who is there can be
hit: otherwise the next moment of that phase is taken. The file `hit` in the working directory says
who was, and when.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

PHASES = ("generation", "scoring", "training", "publish", "checkpoint", "re-plan", "race")
"""A race is where the pilot looks for the next plan, a re-plan where the run goes over to it."""

STAGES = {
    "generation": (
        "generator.generate",
        "generator.turn",
        "simulator.begin",
        "simulator.step",
        "actor.act",
    ),
    "scoring": ("verifier.score",),
    "training": ("learner.train",),
}
"""By phase the stages that it is made of."""

PROGRAMS = {
    "ray": "raylet/raylet",
    "engine": "m2flow.generation.external_process",
    "simulator": "m2flow.environments.child",
}
"""By victim what its command line has."""

PAUSE_SECONDS = 2.0

DISTURBED = __file__
"""The program."""


@dataclass(frozen=True)
class Strike:
    """Who is hit, when and how.

    Attributes:
        victim: "lane", "launcher", "disk", one of `PROGRAMS`, or "" for nobody.
        phase: one of `PHASES`.
        step: not before this one.
        later: seconds after the command of that phase was sent.
        how: "kill" (SIGKILL), "pause" (SIGSTOP for `PAUSE_SECONDS`) or "halt" (SIGSTOP; of a
            simulator as soon as a step is asked of it: a reset has a longer deadline).
        seed: which one of several.
    """

    victim: str
    phase: str
    step: int = 0
    later: float = 0.0
    how: str = "kill"
    seed: int = 0


class Striker:
    """Hits once."""

    def __init__(self, strike: Strike) -> None:
        self.strike, self.dice = strike, random.Random(strike.seed)
        self.armed = True
        self.due: tuple[int, tuple[int, ...]] | None = None
        self.carrier: Any = None

    def moment(self, phase: str, step: int, lanes: tuple[int, ...] = ()) -> None:
        """A phase of a step is about to be carried out, by some lanes."""
        if phase == self.strike.phase and step >= self.strike.step and self.armed:
            self.armed = False
            if (self.strike.victim, self.strike.how) == ("simulator", "halt"):
                self.due = step, lanes
                return
            timer = threading.Timer(self.strike.later, self.hit, (step, lanes))
            timer.daemon = True
            timer.start()

    def stepping(self, *_: Any) -> None:
        """Simulators are about to be asked for a step."""
        if self.due is not None:
            due, self.due = self.due, None
            self.hit(*due)

    def hit(self, step: int, lanes: tuple[int, ...]) -> None:
        victims = self.victims(lanes)
        if not victims:
            self.armed = True
            return
        victim = self.dice.choice(victims)
        told = asdict(self.strike) | {"at": step, "who": victim}
        Path("hit.part").write_text(json.dumps(told))
        Path("hit.part").rename("hit")
        if self.strike.victim == "disk":
            fill(Path("filler"))
        elif self.strike.victim and self.strike.how == "kill":
            os.kill(victim, signal.SIGKILL)
        elif self.strike.victim:
            os.kill(victim, signal.SIGSTOP)
            if self.strike.how == "pause":
                time.sleep(PAUSE_SECONDS)
                os.kill(victim, signal.SIGCONT)

    def victims(self, lanes: tuple[int, ...]) -> list[int]:
        """Processes that could be hit; the launcher stands for the disk, and for nobody."""
        if self.strike.victim in ("launcher", "disk", ""):
            return [os.getpid()]
        if self.strike.victim == "lane":
            pool = getattr(self.carrier, "pool", None)
            if pool is None:
                return []
            there = [pool.addresses[lane].process_id for lane in lanes or pool.addresses]
            return [process for process in there if lives(process)]
        word, found = PROGRAMS[self.strike.victim], []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if word in " ".join(process.cmdline()):
                    found.append(process.pid)
        return sorted(found)


def lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def fill(filler: Path) -> None:
    """Take all room that is left on the file system of a file."""
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)


def before(kind: Any, name: str, look: Callable[..., None]) -> None:
    """Have a method tell what it is called with."""
    method = getattr(kind, name)

    def told(self: Any, *arguments: Any, **options: Any) -> Any:
        look(self, *arguments, **options)
        return method(self, *arguments, **options)

    setattr(kind, name, told)


def watch(striker: Striker) -> None:
    """See every moment of the run that is about to begin."""
    from m2flow.engine.messages import ExportWeights, FeedCall, InstallWeights, RunCall, RunFinish
    from m2flow.environments import processes
    from m2flow.environments.deadlines import Deadlines
    from m2flow.runtime.driver.carrier import RayCarrier
    from m2flow.runtime.driver.inline import InlineCarrier
    from m2flow.runtime.driver.pilot import Pilot
    from m2flow.runtime.driver.run import Run
    from m2flow.workloads.embodied.experiment import EmbodiedExperiment
    from m2flow.workloads.reasoning.experiment import ReasoningExperiment

    def sent(carrier: Any, flow: str, command: Any) -> None:
        striker.carrier = carrier
        if flow != "step":
            return
        match command:
            case RunCall() | FeedCall():
                name = carrier.graphs[flow].nodes[command.node].name
                for phase, stages in STAGES.items():
                    if name in stages:
                        striker.moment(phase, command.step, command.lanes)
            case RunFinish():
                striker.moment("training", command.step, command.lanes)
            case ExportWeights() | InstallWeights():
                striker.moment("publish", command.version, command.lanes)

    def saves(_experiment: Any, _run: Any, _checkpoints: Path, step: int) -> None:
        striker.moment("checkpoint", step)

    def replans(run: Run, _plan: Any) -> None:
        striker.moment("re-plan", run.pilot.changes[-1].before if run.pilot.changes else 0)

    def looks(pilot: Pilot, _run: Any) -> None:
        striker.moment("race", pilot.changes[-1].before if pilot.changes else 0)

    for carrier in (RayCarrier, InlineCarrier):
        before(carrier, "carry_out", sent)
    for experiment in (ReasoningExperiment, EmbodiedExperiment):
        before(experiment, "save", saves)
    before(Run, "replan", replans)
    before(Pilot, "next_plan", looks)
    if striker.strike.how == "halt":  # in this process alone: an eager run's
        processes.Deadlines = partial(Deadlines, step=2.0)  # type: ignore[misc,assignment]
        before(processes.ProcessEnvironments, "_begin_step", striker.stepping)


def main() -> None:
    strike = Strike(**json.loads(sys.argv.pop(1)))
    watch(Striker(strike))
    from m2flow.cli.app import main as m2flow

    m2flow()


if __name__ == "__main__":
    main()
