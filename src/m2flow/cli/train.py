"""`m2flow train`: a recipe from start to report, or on from its last checkpoint."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.cli.planning import check_runnable, planned
from m2flow.cli.recipe import read_recipe
from m2flow.cli.resume import check_directory, resume_point, step_of
from m2flow.engine.plan import Plan
from m2flow.engine.runner import StepResult
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
    from m2flow.runtime.ahead import LanesAhead
    from m2flow.runtime.launch import Run

WORKERS_NEED = (
    "m2flow.models.causal_lm",
    "m2flow.generation.native",
    "m2flow.training.policy",
    "m2flow.reasoning.learning",
)
"""What takes lanes seconds to import."""

WARMUP = "warmup"
"""Folder in the run directory of the model that reinforcement begins with, if it is made here."""


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
    check_directory(recipe, run_dir, resume)
    _, plan = planned(recipe, plan_file)
    check_runnable(plan)
    _check_loggers(recipe)
    # A picture that is redrawn would paint over the debugger's prompt.
    with TrainProgress(live=False if plan.mode == "eager" else None) as progress:
        progress.start(
            f"m2flow: {recipe.name}, seed {recipe.seed}, {recipe.steps} steps of "
            f"{recipe.prompts_per_step} x {recipe.samples_per_prompt} samples, mode {plan.mode}"
        )
        checkpoint = resume_point(recipe, run_dir) if resume and run_dir is not None else None
        with _lanes_ahead(plan) as lanes:
            from m2flow.reasoning.experiment import ReasoningExperiment  # imports torch: seconds

            experiment = ReasoningExperiment(recipe)
            training = Training(
                experiment, plan, lanes, run_dir, progress, resumed=resume, checkpoint=checkpoint
            )
            directory = training.run()
    print(summary(*first_and_last(read_metrics(directory.path)), directory.path))
    return directory.path


@contextmanager
def _lanes_ahead(plan: Plan) -> Iterator[LanesAhead | None]:
    """The plan's lanes, which start beside what else there is to do; None for an eager run."""
    if plan.mode == "eager":
        yield None
        return
    from m2flow.runtime.ahead import LanesAhead

    with LanesAhead(plan.lanes, WORKERS_NEED) as lanes:
        yield lanes


def describe(recipe: ReasoningRecipe, plan_file: Path | None = None) -> list[str]:
    """What a recipe amounts to, in lines for people: every value, derived sizes, graph, plan."""
    import yaml

    graph, plan = planned(recipe, plan_file)
    lines = [yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False).rstrip(), "derived:"]
    lines += [f"  {key}: {value}" for key, value in recipe.derived().items()]
    lines += ["flow:", *(f"  {line}" for line in graph.describe())]
    return lines + explain(plan, graph, recipe.prompts_per_step)


def _check_loggers(recipe: ReasoningRecipe) -> None:
    """Refuse a logger whose package is missing before anything is written."""
    with tempfile.TemporaryDirectory() as nowhere:
        make_loggers(recipe.logger, RunDirectory(nowhere)).close()


class Training:
    """One process's part of a run: from the start, or a checkpoint, to the end.

    Args:
        experiment: what is trained.
        plan: how it is carried out.
        lanes: where; None for in this process.
        run_dir: where everything is written; None for a new folder below `runs/`.
        progress: what the person at the terminal sees.
        resumed: go on with the run in `run_dir`.
        checkpoint: from here; None from the start.
    """

    def __init__(
        self,
        experiment: ReasoningExperiment,
        plan: Plan,
        lanes: LanesAhead | None,
        run_dir: Path | None,
        progress: TrainProgress,
        *,
        resumed: bool,
        checkpoint: Path | None,
    ) -> None:
        self.experiment, self.plan, self.progress = experiment, plan, progress
        self.lanes = lanes
        self.recipe = experiment.recipe
        self.run_dir, self.resumed, self.checkpoint = run_dir, resumed, checkpoint
        self.first_step = 0 if checkpoint is None else step_of(checkpoint)
        self.timeline = Timeline()
        self._directory: RunDirectory | None = None
        self._publishing: dict[str, str] = {}

    def run(self) -> RunDirectory:
        """Train to the last step, and write the report; where it lies."""
        if self.checkpoint is not None:
            self.progress.note(f"going on from {self.checkpoint}")
        elif self.resumed:
            self.progress.note("no checkpoint was saved: beginning again")
        self._train(self._starting_model())
        directory = self._begun()
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
        if self.resumed:
            directory.cut_after(self._last_kept_step)
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
        self._directory = directory
        return directory

    @property
    def _last_kept_step(self) -> int:
        """Rows of later steps will be written again; without a checkpoint that is all of them."""
        return -1 if self.checkpoint is None else self.first_step

    def _starting_model(self) -> ModelSource:
        """The model reinforcement began with; made now, unless a resumed run has it."""
        from m2flow.reasoning.workers import ModelSource

        model = self.recipe.model
        if model.path is not None and not self.experiment.makes_model:
            return ModelSource(model.path, model.dtype)
        if self.resumed and self.run_dir is not None:
            folder = self.run_dir / WARMUP
            if (folder / "config.json").is_file():
                return ModelSource(str(folder), model.dtype)
        folder = self._begun().path / WARMUP
        if self.recipe.warmup.steps:
            self.progress.phase("warm-up", self.recipe.warmup.steps)
        return self.experiment.prepare(
            folder, lambda at: self.progress.update(at.step, {"loss": at.loss})
        )

    def _train(self, model: ModelSource) -> None:
        from m2flow.runtime.launch import launch

        recipe, experiment = self.recipe, self.experiment
        flow = grpo_flow(recipe, model, experiment.task, self.checkpoint)
        held_out = experiment.held_out(model)
        also = {"evaluate": len(held_out)} if held_out is not None else {}
        with launch(
            flow,
            items_per_step=recipe.prompts_per_step,
            plan=self.plan,
            lanes=self.plan.lanes if self.lanes is None else self.lanes.pool(),
            first_step=self.first_step,
            also=also,
        ) as run:
            directory = self._begun()
            resumed_step = self._last_kept_step if self.resumed else None
            loggers = make_loggers(recipe.logger, directory, resumed_step)
            try:
                self._steps(run, model, held_out, loggers)
            finally:
                loggers.close()
                self.timeline.write(directory.timeline)
                directory.close()

    def _steps(
        self, run: Run, model: ModelSource, held_out: Batch | None, loggers: Loggers
    ) -> None:
        recipe, done = self.recipe, self.first_step
        if done == 0 and held_out is not None:
            loggers.log(0, self._evaluation(run, 0, held_out))
        self.progress.phase("training", recipe.steps, done)
        figures: dict[str, float] = {}
        while done < recipe.steps:
            pause = min(
                recipe.steps,
                _next(done, recipe.evaluation.every),
                _next(done, recipe.checkpoint.every),
            )
            batches = (self.experiment.batch(step, model) for step in range(done, pause))
            for result in run.steps(batches):
                done = result.step + 1
                figures = self._figures(result, done)
                self._explain_publishing(run)
                if done < pause:
                    loggers.log(done, figures)
            last = done == recipe.steps
            if held_out is not None and (last or done % recipe.evaluation.every == 0):
                figures |= self._evaluation(run, done, held_out)
            loggers.log(done, figures)
            if last or done % recipe.checkpoint.every == 0:
                self._save(run, done)

    def _figures(self, result: StepResult, step: int) -> dict[str, float]:
        """The figures of a step that is done; its rollouts and spans are kept here."""
        figures = self.experiment.metrics(result)
        if self.plan.predicted_seconds is not None:
            figures["plan/predicted_seconds"] = self.plan.predicted_seconds
        for source, published in result.published.items():
            figures[f"publish/{source}/bytes"] = float(published.num_bytes)
            figures[f"publish/{source}/seconds"] = published.seconds
        rows = self.experiment.samples(result, self.recipe.samples_logged_per_step)
        self._begun().append_samples(step, rows)
        for span in result.spans:
            self.timeline.add(span)
        self.timeline.end_step(step, result.started, result.started + result.seconds)
        self.progress.update(step, figures)
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

    def _evaluation(self, run: Run, step: int, held_out: Batch) -> dict[str, float]:
        result = run.run_method("evaluate", held_out)
        rewards = result.output["reward"]
        accuracy = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        lengths = result.output["num_tokens"]
        self.progress.note(f"step {step}: held-out greedy accuracy {accuracy:.1%}")
        return {
            "eval/accuracy": accuracy,
            "eval/length": sum(lengths) / len(lengths),
            "eval/problems": float(len(rewards)),
            "eval/seconds": result.seconds,
        }

    def _save(self, run: Run, step: int) -> None:
        extra: dict[str, Any] = {"version": step, "seed": self.recipe.seed}
        run.worker_call_everywhere(
            "learner",
            "save_checkpoint",
            str(self._begun().checkpoints.resolve()),
            step,
            extra,
            self.recipe.checkpoint.keep,
        )
        self.timeline.write(self._begun().timeline)


def _next(done: int, every: int) -> int:
    """The first multiple of `every` after `done`."""
    return (done // every + 1) * every
