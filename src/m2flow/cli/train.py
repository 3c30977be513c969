"""`m2flow train`: a recipe from start to report, or on from its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.cli.planning import planned
from m2flow.cli.recipe import read_recipe, read_yaml, validated
from m2flow.engine.plan import Plan
from m2flow.engine.runner import StepResult
from m2flow.errors import UserError
from m2flow.observe.loggers import Loggers, make_loggers
from m2flow.observe.machine import describe_machine
from m2flow.observe.progress import TrainProgress, summary
from m2flow.observe.run_directory import RunDirectory, first_and_last, read_metrics
from m2flow.observe.timeline import Timeline
from m2flow.plan import explain, to_json
from m2flow.reasoning.config import ReasoningRecipe
from m2flow.reasoning.flow import grpo_flow

if TYPE_CHECKING:
    from m2flow.flow import Batch
    from m2flow.reasoning.experiment import ReasoningExperiment
    from m2flow.reasoning.workers import ModelSource
    from m2flow.runtime.launch import Run

MAY_CHANGE = {
    "steps", "mode", "lanes", "deadline_seconds", "logger", "samples_logged_per_step",
    "evaluation", "checkpoint",
}  # fmt: skip
"""Keys that may differ when a run is resumed: they change no weight."""


def train(
    recipe_path: Path,
    overrides: Sequence[str] = (),
    *,
    plan_file: Path | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
) -> Path | None:
    """Run a recipe.

    Args:
        recipe_path: the YAML file.
        overrides: `key=value`.
        plan_file: a plan to run instead of the mode's.
        run_dir: where the run is kept; a new folder below `runs/` by default.
        resume: go on from the last checkpoint in `run_dir`.
        dry_run: print what would be run, and start nothing.

    Returns:
        The run directory; None for a dry run.

    Raises:
        UserError: the input is wrong; nothing was started or written.
        RunFailed: the run stopped.
    """
    recipe = read_recipe(recipe_path, overrides)
    if dry_run:
        print("\n".join(describe(recipe, plan_file)))
        return None
    if resume and run_dir is not None:
        _check_same(recipe, run_dir)
    with TrainProgress() as progress:
        progress.start(
            f"m2flow: {recipe.name}, seed {recipe.seed}, {recipe.steps} steps of "
            f"{recipe.prompts_per_step} x {recipe.samples_per_prompt} samples, mode {recipe.mode}"
        )
        _, plan = planned(recipe, plan_file)
        from m2flow.reasoning.experiment import ReasoningExperiment  # imports torch: seconds

        experiment = ReasoningExperiment(recipe)
        directory = RunDirectory.create(run_dir, recipe.name, resume=resume)
        Training(experiment, plan, directory, progress, resumed=resume).run()
    print(summary(*first_and_last(read_metrics(directory.path)), directory.path))
    return directory.path


def describe(recipe: ReasoningRecipe, plan_file: Path | None = None) -> list[str]:
    """What a recipe amounts to, in lines for people: every value, derived sizes, graph, plan."""
    import yaml

    graph, plan = planned(recipe, plan_file)
    lines = [yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).rstrip(), "derived:"]
    lines += [f"  {key}: {value}" for key, value in recipe.derived().items()]
    lines += ["flow:", *(f"  {line}" for line in graph.describe())]
    return lines + explain(plan, graph, recipe.prompts_per_step)


def _check_same(recipe: ReasoningRecipe, run_dir: Path) -> None:
    """A run goes on as it began."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise UserError("holds no run to resume", key="--run-dir", value=str(run_dir))
    before = validated(read_yaml(path))
    old, new = before.model_dump(mode="json"), recipe.model_dump(mode="json")
    for key in old:
        if key not in MAY_CHANGE and old[key] != new[key]:
            raise UserError(
                "differs from the run that is to be resumed",
                key=key,
                value=new[key],
                expected=repr(old[key]),
                hint="start a new run to change it",
            )


class Training:
    """One process's part of a run: from the start, or a checkpoint, to the end.

    Args:
        experiment: what is trained.
        plan: how it is carried out.
        directory: where everything is written.
        progress: what the person at the terminal sees.
        resumed: go on from the last checkpoint.
    """

    def __init__(
        self,
        experiment: ReasoningExperiment,
        plan: Plan,
        directory: RunDirectory,
        progress: TrainProgress,
        *,
        resumed: bool,
    ) -> None:
        self.experiment, self.plan = experiment, plan
        self.recipe = experiment.recipe
        self.directory, self.progress = directory, progress
        self.checkpoint = self._resume_point() if resumed else None
        self.first_step = 0 if self.checkpoint is None else int(self.checkpoint.name[5:])
        self.timeline = Timeline()

    def _resume_point(self) -> Path | None:
        from m2flow.training.checkpoint import resume_point

        return resume_point(self.directory.checkpoints)

    def run(self) -> None:
        """Train to the last step, and write the report."""
        recipe, directory = self.recipe, self.directory
        if self.first_step >= recipe.steps:
            raise UserError(
                "the run has taken this many steps already", key="steps", value=recipe.steps,
                hint="ask for more steps to go on",
            )  # fmt: skip
        if self.checkpoint is not None:
            directory.cut_after(self.first_step)
            self.progress.note(f"going on from {self.checkpoint}")
        directory.write_config(recipe.model_dump(mode="json"))
        directory.write_plan(to_json(self.plan))
        directory.write_run(
            recipe=recipe.name,
            mode=self.plan.mode,
            seed=recipe.seed,
            steps=recipe.steps,
            machine=describe_machine(),
            started=time.time(),
            finished=None,
        )
        resumed_step = self.first_step if self.checkpoint is not None else None
        loggers = make_loggers(recipe.logger, directory, resumed_step)
        try:
            self._train(self._starting_model(), loggers)
        finally:
            loggers.close()
            self.timeline.write(directory.timeline)
            directory.close()
        directory.write_run(finished=time.time())
        from m2flow.observe.report import write_report

        write_report(directory.path)

    def _starting_model(self) -> ModelSource:
        """The model reinforcement began with; made now, unless the run is resumed."""
        from m2flow.reasoning.workers import ModelSource

        folder = self.directory.path / "warmup"
        if (folder / "config.json").is_file():
            return ModelSource(str(folder), self.recipe.model.dtype)
        if self.recipe.warmup.steps:
            self.progress.phase("warm-up", self.recipe.warmup.steps)
        return self.experiment.prepare(
            folder, lambda at: self.progress.update(at.step, {"loss": at.loss})
        )

    def _train(self, model: ModelSource, loggers: Loggers) -> None:
        from m2flow.runtime.launch import launch

        recipe, experiment = self.recipe, self.experiment
        flow = grpo_flow(recipe, model, experiment.task, self.checkpoint)
        first_batch = experiment.batch(self.first_step, model)
        held_out = experiment.held_out(model)
        also = {"evaluate": len(held_out)} if held_out is not None else {}
        with launch(
            flow,
            items_per_step=len(first_batch),
            plan=self.plan,
            first_step=self.first_step,
            also=also,
        ) as run:
            if self.first_step == 0:
                self._evaluate(run, 0, held_out, loggers)
            self.progress.phase("training", recipe.steps, self.first_step)
            done = self.first_step
            while done < recipe.steps:
                pause = min(
                    _next(done, recipe.evaluation.every), _next(done, recipe.checkpoint.every)
                )
                pause = min(pause, recipe.steps)
                for result in run.steps(self._batches(done, pause, model)):
                    done = result.step + 1
                    self._report(result, done, loggers)
                last = done == recipe.steps
                if last or done % recipe.evaluation.every == 0:
                    self._evaluate(run, done, held_out, loggers)
                if last or done % recipe.checkpoint.every == 0:
                    self._save(run, done)

    def _batches(self, start: int, end: int, model: ModelSource) -> Iterator[Batch]:
        return (self.experiment.batch(step, model) for step in range(start, end))

    def _report(self, result: StepResult, step: int, loggers: Loggers) -> None:
        metrics = self.experiment.metrics(result)
        if self.plan.predicted_seconds is not None:
            metrics["plan/predicted_seconds"] = self.plan.predicted_seconds
        loggers.log(step, metrics)
        rows = self.experiment.samples(result, self.recipe.samples_logged_per_step)
        self.directory.append_samples(step, rows)
        for span in result.spans:
            self.timeline.add(span)
        self.timeline.end_step(step, result.started, result.started + result.seconds)
        self.progress.update(step, metrics)

    def _evaluate(self, run: Run, step: int, held_out: Batch | None, loggers: Loggers) -> None:
        if held_out is None:
            return
        result = run.run_method("evaluate", held_out)
        rewards = result.output["reward"]
        accuracy = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        lengths = result.output["num_tokens"]
        loggers.log(
            step,
            {
                "eval/accuracy": accuracy,
                "eval/length": sum(lengths) / len(lengths),
                "eval/problems": float(len(rewards)),
                "eval/seconds": result.seconds,
            },
        )
        self.progress.note(f"step {step}: held-out greedy accuracy {accuracy:.1%}")

    def _save(self, run: Run, step: int) -> None:
        extra: dict[str, Any] = {"version": step, "seed": self.recipe.seed}
        run.worker_call(
            "learner",
            "save_checkpoint",
            str(self.directory.checkpoints.resolve()),
            step,
            extra,
            self.recipe.checkpoint.keep,
        )


def _next(done: int, every: int) -> int:
    """The first multiple of `every` after `done`."""
    return (done // every + 1) * every
