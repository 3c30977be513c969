"""`Training`: one process's part of a run, from its first step here to its report."""

from __future__ import annotations

import shlex
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.engine.plan import Plan
from m2flow.errors import CannotWrite, M2FlowError, RunFailed, Stopped, UserError, writing
from m2flow.observe.ending import this_process
from m2flow.observe.jsonl import write_atomically
from m2flow.observe.machine import describe_machine, package_versions
from m2flow.observe.metrics_log import MetricsLog
from m2flow.observe.progress import Progress
from m2flow.observe.run_directory import (
    RunDirectory,
    alarms_of,
    held,
    read_document,
    read_metrics,
)
from m2flow.observe.timeline import Timeline
from m2flow.plan.file import to_json
from m2flow.runtime.driver.journal import Journal
from m2flow.runtime.driver.runner import StepResult
from m2flow.training.checkpoint import step_of, sweep, wait_until_seen
from m2flow.training.optimizer import NOT_TAKEN, NotFinite
from m2flow.training.skipping import SKIPPED, too_many
from m2flow.workloads.common.examining import in_waves, wave_size
from m2flow.workloads.common.launching import launched, write_decision
from m2flow.workloads.common.profile_key import profile_key
from m2flow.workloads.common.recipe import AUTO_MODE
from m2flow.workloads.common.stopping import StepInterrupted, StepOverdue, Stopping
from m2flow.workloads.common.workload import Experiment

if TYPE_CHECKING:
    from m2flow.flow import Batch
    from m2flow.runtime.driver.ahead import LanesAhead
    from m2flow.runtime.driver.run import Run

GIVE_UP_SECONDS = 10.0
"""Longest that lanes may take to stop where the step at hand is given up."""

ALARMS_KEPT = 50
"""The first so many alarms of a run are told and stand in its `run.json`, each once."""

ALARM_CHARACTERS = 500
"""Of an alarm, which may have in it what a reward function or a tool has raised."""

EVALUATED = "eval/seconds"
"""What the row of a step has after an evaluation, whatever the workload."""

WHY = {
    "race": "trying",
    "won": "settled on",
    "failed": "the plan failed; instead",
    "lanes": "the lanes are others; now",
}
"""In words why a run goes over to another plan; see `Change.why`."""


class Training:
    """One process's part of a run: from the start, or a checkpoint, to the end.

    Args:
        experiment: what is trained.
        plan: how it is carried out; None for the best one that is found.
        lanes: where; None for in this process.
        run_dir: where everything is written; None for a new folder below `runs/`.
        progress: what the person at the terminal sees.
        resumed: go on with the run in `run_dir`.
        checkpoint: from here; None from the start.
        stopping: hears of signals that ask for the end.
    """

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan | None,
        lanes: LanesAhead | None,
        run_dir: Path | None,
        progress: Progress,
        *,
        resumed: bool,
        checkpoint: Path | None,
        stopping: Stopping,
    ) -> None:
        self.experiment, self.plan, self.progress = experiment, plan, progress
        self.lanes = lanes
        self.recipe = experiment.recipe
        self.run_dir, self.resumed, self.checkpoint = run_dir, resumed, checkpoint
        self.first_step = 0 if checkpoint is None else step_of(checkpoint)
        self.timeline = Timeline()
        self._directory: RunDirectory | None = None
        self._held = ExitStack()
        self._publishing: dict[str, str] = {}
        self._changes = 0
        self._losses = self._returns = 0
        self._alarms: dict[str, int] = {}  # to the step that each was first told of
        self._silent = False  # of further ones
        self._journal: Journal | None = None
        self._stopping = stopping
        self._done = self._saved = self.first_step

    def run(self) -> RunDirectory:
        """Train to the last step, and write the report; where it lies.

        Raises:
            Stopped: a signal has ended the run.
            RunFailed: it has failed.
            CannotWrite: there is no room for what it has to write.
        """
        with self._held:
            return self._run_to_its_end()

    def _run_to_its_end(self) -> RunDirectory:
        try:
            return self._run()
        except (Stopped, Exception) as error:
            # A signal to all processes takes lanes with it.
            cut_off = isinstance(error, Stopped | RunFailed)
            cut_off = cut_off or self._stopping.is_consequence(error)
            if self._stopping.asked is None or not cut_off or isinstance(error, CannotWrite):
                self._note_end(error)
                raise
            ended = Stopped(self._stopping.asked, self._how_far())
            self._note_end(ended)
            raise ended from error
        except SystemExit as error:
            failed = RunFailed(f"code that the run calls has called exit({error.code})")
            self._note_end(failed)
            raise failed from error

    def _note_end(self, error: BaseException) -> None:
        """Write into `run.json` why the run has ended, if the disk has room.

        Nothing is left of a fresh run that is refused before a step of it is done.
        """
        directory, facts = self._directory, dict[str, object]()
        if directory is None and self.resumed and not isinstance(error, UserError | Stopped):
            assert self.run_dir is not None
            directory = RunDirectory(self.run_dir)  # its workers could not be brought up
            facts["finished"] = None
        if directory is not None:
            if isinstance(error, UserError) and not self.resumed and self._done == 0:
                directory.discard()
                return
            why = (str(error).splitlines() or [""])[0]
            if not isinstance(error, M2FlowError | Stopped):
                why = f"{type(error).__name__}: {why}"
            with suppress(CannotWrite):
                directory.note_end(**facts, ended=time.time(), why=why)
                if not isinstance(error, CannotWrite | Stopped):
                    account = "".join(traceback.format_exception(error))
                    write_atomically(directory.failure, account.encode("utf-8", "replace"))

    def _how_far(self) -> str:
        """Say how far a stopped run has come, and which command resumes it."""
        if self._directory is None:
            return "nothing was begun"
        path = shlex.quote(str(self._directory.path))
        if self._saved == 0:
            kept = f"ended after step {self._done}; no checkpoint was saved"
        else:
            kept = f"ended after step {self._done}; saved is step {self._saved}"
        return f"{kept}; go on with --run-dir {path} --resume"

    def _run(self) -> RunDirectory:
        if self.checkpoint is not None:
            self.progress.note(f"going on from {self.checkpoint}")
        elif self.resumed:
            self.progress.note("no checkpoint was saved: beginning again")
        self._prepare()
        self._train()
        directory = self._begun()
        if self._journal is not None:
            self._journal.remove()
        directory.write_run(finished=time.time())
        from m2flow.observe.report import write_report

        write_report(directory.path)
        return directory

    def _begun(self) -> RunDirectory:
        """The run's directory; made at the last moment, so that a refusal leaves nothing behind."""
        if self._directory is not None:
            return self._directory
        recipe = self.recipe
        directory = RunDirectory.create(self.run_dir, recipe.name, resume=self.resumed)
        before = read_document(directory.run) or {}
        if self.resumed:
            directory.cut_after(self._last_kept_step)
            directory.failure.unlink(missing_ok=True)
            told = [one for one in alarms_of(before) if one["step"] <= self._last_kept_step]
            self._alarms = {one["alarm"]: one["step"] for one in told}
        else:
            self._held.enter_context(held(directory.path))
        directory.write_config(recipe.model_dump(mode="json"))
        directory.write_run(
            recipe=recipe.name,
            mode=AUTO_MODE if self.plan is None else self.plan.mode,
            seed=recipe.seed,
            steps=recipe.steps,
            machine=describe_machine(),
            versions=package_versions(),
            started=before.get("started", time.time()),
            finished=None,
            process=this_process(),
            ended=None,
            why=None,
            alarms=self._alarms_told,
        )
        self._directory = directory
        return directory

    @property
    def _last_kept_step(self) -> int:
        """Return the last step whose rows stay; -1 without a checkpoint."""
        return -1 if self.checkpoint is None else self.first_step

    def _prepare(self) -> None:
        """Make the starting model, unless the recipe names one or a resumed run has made it."""
        if self.experiment.makes_model:
            folder = self._begun().warmup.absolute()  # lanes may work in another folder
            with writing("the starting model", folder):
                self.experiment.prepare(folder, self.progress)

    def _train(self) -> None:
        recipe, held_out = self.recipe, self.experiment.held_out()
        run = launched(
            self.experiment,
            self.plan,
            None if self.lanes is None else self.lanes.pool(),
            self.progress,
            checkpoint=None if self.checkpoint is None else self.checkpoint.absolute(),
            first_step=self.first_step,
            also={} if held_out is None else {"evaluate": self._evaluated_at_once(held_out)},
        )
        with run:
            # A signal to all processes takes the lanes along: nothing is to bring them back.
            run.may_heal = lambda: self._stopping.asked is None
            run.heed = self._stopping.heed
            directory = self._begun()
            self._write_plan(run)
            self._keep_rollouts(run)
            resumed_step = self._last_kept_step if self.resumed else None
            log = MetricsLog(directory, recipe.logger, resumed_step, self.progress)
            try:
                self._steps(run, held_out, log)
            except BaseException:
                with suppress(CannotWrite):  # what has ended the run is said, and no later mishap
                    self._close(log)
                raise
            self._close(log)

    def _keep_rollouts(self, run: Run) -> None:
        """Have rollouts kept until a checkpoint holds their step; use those that were kept."""
        if not self.recipe.journal_gb:
            return
        self._journal = Journal(self._begun().journal, int(1e9 * self.recipe.journal_gb))
        self._journal.forget_before(self.first_step)
        steps = self._journal.steps()
        if steps and steps[0] > self.first_step:  # of a future that is abandoned
            self._journal.remove()
        elif steps:
            first, last = steps[0] + 1, steps[-1] + 1  # as everything else tells them, from 1
            words = f"{first}" if first == last else f"{first} to {last}"
            self.progress.note(f"rollouts of step {words} are there: they are not made again")
        run.keep_rollouts(self._journal)

    def _close(self, log: MetricsLog) -> None:
        log.close()
        self._write_timeline()

    def _write_plan(self, run: Run) -> None:
        """Write the plan of the steps to come, and from what it was chosen."""
        directory = self._begun()
        directory.write_json(directory.plan, to_json(run.plan))
        if run.pilot is not None:
            free = [lane for lane in run.plan.lanes if lane.reserved_for is None]
            write_decision(directory, run.graph, run.pilot, profile_key(self.recipe, free))

    def _steps(self, run: Run, held_out: Batch | None, log: MetricsLog) -> None:
        recipe, done = self.recipe, self.first_step
        if held_out is not None and (done == 0 or self._evaluation_is_missing(done)):
            log.add(done, self._evaluation(run, done, held_out))
        self.progress.phase("training", recipe.steps, done)
        figures: dict[str, float] = {}
        while done < recipe.steps:
            pause = min(
                recipe.steps,
                _next(done, recipe.evaluation.every),
                _next(done, recipe.checkpoint.every),
            )
            try:
                try:
                    for result in run.steps(self._batches(done, pause)):
                        self._done = step = result.step + 1
                        self.experiment.note(result)
                        figures = self._figures(run, result, step)
                        self._explain_publishing(run)
                        if step < pause:
                            log.add(step, figures)
                        done = step
                    if done == pause and held_out is not None and self._is_evaluated(done):
                        figures |= self._evaluation(run, done, held_out)
                finally:
                    if done == pause:
                        log.add(done, figures)
            except StepOverdue as overdue:
                in_order = self.lanes is None or not isinstance(overdue, StepInterrupted)
                if in_order and done > self._saved and run.give_up(done, GIVE_UP_SECONDS):
                    self._save(run, done)
                raise
            stopped, last = self._stopping.step_is_over(), done == recipe.steps
            due = last or stopped or done % recipe.checkpoint.every == 0
            if due and done > self._saved:  # a signal may have come while it was saved
                self._save(run, done)
            if last or stopped:
                self._write_plan(run)  # a race may have ended with the plan that ran already
            if stopped and not last:
                raise Stopped(stopped)

    def _is_evaluated(self, step: int) -> bool:
        """Whether an evaluation is due after a step."""
        return step == self.recipe.steps or step % self.recipe.evaluation.every == 0

    def _evaluation_is_missing(self, step: int) -> bool:
        """Whether the run has ended between the checkpoint of a step and the evaluation after it,
        as a signal makes it."""
        return self._is_evaluated(step) and not any(
            row["step"] == step and EVALUATED in row for row in read_metrics(self._begun().path)
        )

    def _batches(self, start: int, end: int) -> Iterator[Batch]:
        """The source items of steps, until a signal asks for the end."""
        for step in range(start, end):
            if not self._stopping.step_begins():
                return
            yield self.experiment.batch(step)

    def _figures(self, run: Run, result: StepResult, step: int) -> dict[str, float]:
        """The figures of a step that is done; its rollouts and spans are kept here.

        Raises:
            NotFinite: too many optimizer steps were left out, one of this step the last of them.
        """
        figures = self.experiment.metrics(result) | step_figures(result)
        if (tokens := figures.get("tokens/generated")) is not None:
            figures["throughput/tokens_per_s"] = tokens / result.seconds
        if (samples := figures.get("samples")) is not None:  # less those that are carried over
            figures["throughput/samples_per_s"] = samples / result.seconds
        figures |= self._lanes_lost(run) | self._against_plan(run, result)
        if result.recalled:  # its seconds are not those in which its rollouts were made
            figures = {
                name: value for name, value in figures.items() if not name.startswith("throughput/")
            }
            figures["rollouts/recalled"] = float(result.recalled)
        rows = self.experiment.samples(result, self.recipe.samples_logged_per_step)
        self._begun().append_samples(step, rows)
        self._keep_skipped(step, result, figures)
        if why := too_many(result.notes):
            raise NotFinite(why)
        self._tell(step, (*self.experiment.alarms(result), *result.notes))
        self.timeline.add(step, result.spans, result.started, result.started + result.seconds)
        self.progress.update(step, figures)
        return figures

    def _tell(self, step: int, alarms: Iterable[str]) -> None:
        """Say what a step alarms about, and has not before; the report says it too.

        Once `ALARMS_KEPT` are known a further one is not remembered, nor told unless it says why no
        step was taken: each sample may have an error of its own.
        """
        known = len(self._alarms)
        for alarm in dict.fromkeys(_shortened(alarm) for alarm in alarms):
            new = alarm not in self._alarms
            if new and len(self._alarms) < ALARMS_KEPT:
                self._alarms[alarm] = step
            elif not alarm.startswith(NOT_TAKEN):
                if new and not self._silent:
                    self._silent = True
                    self.progress.note(
                        f"step {step}: {ALARMS_KEPT} alarms were told; further ones are not"
                    )
                continue
            self.progress.note(f"step {step}: {alarm}")
        if len(self._alarms) > known:
            self._begun().write_run(alarms=self._alarms_told)

    @property
    def _alarms_told(self) -> list[dict[str, Any]]:
        """Return the first alarms of the run, as `run.json` has them."""
        return [{"step": when, "alarm": what} for what, when in self._alarms.items()]

    def _lanes_lost(self, run: Run) -> dict[str, float]:
        """Say which lanes were lost, and which are back; how often that was so far."""
        lost, self._losses = run.losses[self._losses :], len(run.losses)
        back, self._returns = run.returns[self._returns :], len(run.returns)
        for one in (*lost, *back):
            self.progress.note(str(one))
        if back or any(loss.given_up for loss in lost):
            self._write_plan(run)
        restarts = self._returns + sum(not loss.given_up for loss in run.losses)
        healed = sum(loss.healed for loss in run.losses)
        figures = {
            "lanes/restarts": float(restarts),
            "lanes/healed": float(healed),
            "snapshots/seconds": run.snapshot_seconds,
        }
        return figures | {"lanes/missing": float(run.missing)} if self.recipe.elastic else figures

    def _keep_skipped(self, step: int, result: StepResult, figures: dict[str, float]) -> None:
        """Write all rollouts of a step of which some update was skipped, or else those that have
        no reward, or of which an episode was given up."""
        shares = [share for name, share in figures.items() if name.endswith(f"/{SKIPPED}")]
        failed = figures.get("reward/failed_share") or figures.get("episodes/failed")
        if failed and not any(shares):
            rows = self.experiment.rollouts(result)
            wanted = (row for row in rows if row.get("failure") or row.get("failed"))
            self._begun().write_skipped(step, wanted)
        if any(shares):
            where = self._begun().write_skipped(step, self.experiment.rollouts(result))
            self.progress.note(
                f"step {step}: a loss or gradient was not finite: {max(shares):.0%} of the "
                f"optimizer steps were left out; the rollouts are in {where}"
            )

    def _against_plan(self, run: Run, result: StepResult) -> dict[str, float]:
        """Figures of the step's prediction, and seconds of a change to another plan."""
        figures: dict[str, float] = {}
        if (predicted := run.plan.predicted_seconds) is not None:
            figures["plan/predicted_seconds"] = predicted
            figures["plan/measured_over_predicted"] = result.seconds / predicted
        if run.pilot is None:
            return figures
        changes = run.pilot.changes
        figures["plan/changes"] = float(len(changes))
        new, self._changes = changes[self._changes :], len(changes)
        for change in new:
            self.progress.note(
                f"step {change.before + 1}: {WHY[change.why]} {change.mode} "
                f"({change.becomes:.2f} s a step expected; pause {change.pause:.2f} s)"
            )
        if new:
            figures["plan/pause_seconds"] = float(sum(change.pause for change in new))
            self._write_plan(run)
        return figures

    def _explain_publishing(self, run: Run) -> None:
        """Say how weights travel, as soon as it is known, and when another way is taken."""
        ways = run.explain_publishing()
        new = [f"{way}: {ways[way]}" for way in ways if way not in self._publishing]
        if new:
            self._publishing = ways
            self._begun().write_run(publishing=[f"{way}: {why}" for way, why in ways.items()])
        for line in new:
            self.progress.note(line)

    def _evaluated_at_once(self, held_out: Batch) -> int:
        """Return how many items of an evaluation are under way at a time."""
        return wave_size(len(held_out), self.recipe.evaluated_at_once)

    def _evaluation(self, run: Run, step: int, held_out: Batch) -> dict[str, float]:
        ask = partial(run.run_method, "evaluate")
        result = in_waves(ask, held_out, self._evaluated_at_once(held_out))
        figures = self.experiment.evaluation(result)
        films = self.experiment.films(result)
        written = self._begun().write_films(step, films)
        said = "nothing that was held out could be judged"
        if figures:
            name, value = next(iter(figures.items()))
            said = f"held-out {name.removeprefix('eval/')} {value:.1%}"
        self.progress.note(f"step {step}: {said}")
        if written and step == self.recipe.steps:
            self.progress.note(f"film of an episode: {films[0].title}: {written[0]}")
        return figures | {EVALUATED: result.seconds}

    def _save(self, run: Run, step: int) -> None:
        """Write the checkpoint of a step. One that fails takes no room, and the last one stays.

        Raises:
            CannotWrite: there is no room for it.
            UserError: lanes have written it where the launcher does not see it.
        """
        self._write_timeline()
        checkpoints = self._begun().checkpoints.resolve()
        self._begun().synchronise()
        try:
            with writing(f"the checkpoint of step {step}", checkpoints):
                self.experiment.save(run, checkpoints, step)
            wait_until_seen(checkpoints, step)
        except (CannotWrite, UserError):
            sweep(checkpoints)
            raise
        self._saved = step
        if self._journal is not None:
            self._journal.forget_before(step)

    def _write_timeline(self) -> None:
        with writing("the timeline", self._begun().timeline):
            self.timeline.write(self._begun().timeline)


def _shortened(alarm: str) -> str:
    """An alarm, cut where it is long."""
    return alarm if len(alarm) <= ALARM_CHARACTERS else f"{alarm[:ALARM_CHARACTERS]}…"


def step_figures(result: StepResult) -> dict[str, float]:
    """Figures of a step that every workload has, as metrics.jsonl names them."""
    figures = {
        "seconds/step": result.seconds,
        "throughput/samples_per_s": len(result.output) / result.seconds,
        "version": float(result.version),
        "staleness/mean": result.staleness or 0.0,
    }
    figures |= {f"seconds/{name}": s for name, s in result.stage_seconds().items()}
    for source, published in result.published.items():
        figures[f"publish/{source}/bytes"] = float(published.num_bytes)
        figures[f"publish/{source}/seconds"] = published.seconds
    return figures


def _next(done: int, every: int) -> int:
    """The first multiple of `every` after `done`."""
    return (done // every + 1) * every
