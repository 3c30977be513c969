"""What a workload is: the protocols through which the run and the command line know it.

A `Workload` says what can be said without torch: its recipe, its flow, the prices of its stages.
An `Experiment` is one recipe of it made concrete: data, starting model, figures. A package
registers a workload under the entry point group `m2flow.workloads`; see `registry`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from m2flow.engine.plan import LaneSpec
from m2flow.flow import Batch, Flow
from m2flow.flow.graph import FlowGraph
from m2flow.plan.profile.work import Pricer
from m2flow.workloads.common.recipe import Recipe

if TYPE_CHECKING:
    from m2flow.observe.films import Film
    from m2flow.runtime.driver.run import Run
    from m2flow.runtime.driver.runner import StepResult


class RunProgress(Protocol):
    """Is told how far something has come, such as `m2flow.observe.progress.TrainProgress`."""

    def phase(self, name: str, total: int | None = None, completed: int = 0) -> None:
        """Begin a phase of so many steps."""

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """So many steps of the phase are done."""

    def note(self, text: str) -> None:
        """Say something once."""


@dataclass(frozen=True)
class Assumed:
    """What replaces the recipe's own facts when a plan is computed for a cluster.

    Attributes:
        model: a `config.json`, its folder or a known name; None for the recipe's model.
        prompt_tokens, answer_tokens: mean lengths; None where they are to be assumed.
    """

    model: str | None = None
    prompt_tokens: float | None = None
    answer_tokens: float | None = None


NOTHING_ASSUMED = Assumed()


@dataclass(frozen=True)
class Examination:
    """What `m2flow eval` asks: how well a model answers questions in a file, or a policy acts.

    Attributes:
        model: a checkpoint of a run or a Hugging Face folder.
        data: the file, JSON lines, or a recipe that says where a published policy acts; None where
            the run that the checkpoint is of says what is asked.
        samples: answers for each question.
        temperature: of the sampling; None is 0 for one sample and 1 for several.
        max_new_tokens: longest answer; None for that of the run that the model is a checkpoint of,
            else for what real answers need.
        top_k, top_p, min_p: as the keys of `generation` of a reasoning recipe.
        engine: what draws the answers, as `generation.engine`.
        dtype: what it computes in, as `generation.dtype`; None for what the run has drawn in that
            the model is a checkpoint of, if the engine can, else for `auto`.
        cache_gb: what keys and values may take, as `generation.cache_gb`.
        layout: how lanes share a model, as `layouts.generator`; None where each holds all of it.
        stop: strings that end an answer, as `generation.stop`; None for those of the run that the
            model is a checkpoint of, if it is one.
        reward: the function that scores answers, as `reward`; None for the one that the run has
            trained by of which the model is a checkpoint, else for `math`.
        limit: only the first so many questions; or so many episodes.
        seed: fixes what is drawn.
        question_column, answer_column: of the file, as those of `data`; None for the usual names.
        template, chat, system_prompt, chat_options: how a question becomes a prompt, as those of
            `data`; None for those of the run that the model is a checkpoint of, if it is one.
        lanes: where it runs; none for all that this machine has, as `lanes: auto` in a recipe.
        skip_bad_rows: leave rows that cannot be read out, instead of refusing the file.
        deadline_seconds: longest that one call may take; None for that of the recipe which is
            examined by, or of the run that the model is a checkpoint of, else ten minutes.
    """

    model: Path
    data: Path | None
    samples: int = 1
    temperature: float | None = None
    max_new_tokens: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    engine: str = "native"
    dtype: str | None = None
    cache_gb: float | None = None
    layout: str | None = None
    stop: Sequence[str] | None = None
    reward: str | None = None
    limit: int | None = None
    seed: int = 0
    question_column: str | None = None
    answer_column: str | None = None
    template: str | None = None
    chat: bool | None = None
    system_prompt: str | None = None
    chat_options: Mapping[str, Any] | None = None
    lanes: Sequence[LaneSpec] = ()
    skip_bad_rows: bool = False
    deadline_seconds: float | None = None


class Experiment(Protocol):
    """A recipe made concrete.

    Making one writes nothing and refuses whatever of recipe, data and model can be refused before
    a run begins.
    """

    @property
    def recipe(self) -> Recipe:
        """The recipe."""

    @property
    def makes_model(self) -> bool:
        """Whether `prepare` builds or trains the starting model, and so writes it."""

    def prepare(self, folder: Path, progress: RunProgress) -> None:
        """Make the model that training starts from.

        Called once, before the methods below, if `makes_model`.

        Args:
            folder: holds the starting model afterwards. If it holds one already that is whole, as
                after an interruption, that one is taken.
            progress: told about a training that comes first.
        """

    def flow(self, checkpoint: Path | None = None) -> Flow:
        """The flow with its workers, none of them loaded; they go on from a checkpoint if given."""

    def batch(self, step: int) -> Batch:
        """Source items of a step, counted from 0: a function of recipe and step alone.

        Or of the results that `note` was told too; steps are then asked for in their order, and
        with staleness up to `2 * max_staleness` results may still be missing, so that items may
        follow from results that are further back alone. Whatever they follow from is saved with a
        checkpoint.
        """

    def note(self, result: StepResult) -> None:
        """A step is done; called for each, in order."""

    def held_out(self) -> Batch | None:
        """Items of the flow's `evaluate` method; None for no evaluation."""

    def metrics(self, result: StepResult) -> dict[str, float]:
        """Figures of a training step beside those that every run has."""

    def evaluation(self, result: StepResult) -> dict[str, float]:
        """Figures of an evaluation, named `eval/...`, the one that counts most first; none where
        nothing could be judged."""

    def samples(self, result: StepResult, count: int) -> list[dict[str, Any]]:
        """A few rollouts of a step, as rows of samples.jsonl."""

    def rollouts(self, result: StepResult) -> list[dict[str, Any]]:
        """All rollouts of a step, as rows that say what may have been wrong with it."""

    def alarms(self, result: StepResult) -> Sequence[str]:
        """What went wrong in a step without ending it, in words; each is shown once in a run."""

    def films(self, result: StepResult) -> Sequence[Film]:
        """Films of an evaluation's episodes, for the report; the first is the best to look at."""

    def save(self, run: Run, checkpoints: Path, step: int) -> None:
        """Write the checkpoint of a step; `recipe.checkpoint.keep` of them are kept.

        Args:
            run: whose workers write.
            checkpoints: the run's folder of checkpoints, absolute, which all lanes see. That of the
                step is `step_NNNNNN` in it, which the launcher sees too.
            step: training steps done.
        """


class Workload(Protocol):
    """A family of flows with its workers, data, recipe type and prices."""

    @property
    def recipe(self) -> type[Recipe]:
        """The type of its recipes."""

    @property
    def modules(self) -> Sequence[str]:
        """Modules that its workers need and that take seconds to import."""

    def flow(self, recipe: Any, model: str | None = None) -> Flow:
        """The flow of a recipe for tracing and planning; its workers are never loaded.

        Args:
            recipe: of the workload's type.
            model: as in `Assumed`.

        Raises:
            UserError: the model is one that the workload's workers cannot run.
        """

    def check_here(self, recipe: Any) -> None:
        """Refuse a recipe that cannot be trained here: a package is missing, or it only evaluates.

        Raises:
            UserError: names the command that installs it, or the key.
        """

    def lacking(self, recipe: Any) -> Sequence[str]:
        """What the recipe names and this machine does not have, a line each, for a dry run.

        Raises:
            UserError: all of it is there, and a run would refuse it.
        """

    def prices(self, recipe: Any, graph: FlowGraph, assumed: Assumed) -> Pricer:
        """What the stages of the recipe's flow ask of each kind of lane.

        Asked for plans of clusters, for the memory account of a dry run, and by runs on
        accelerators.

        Raises:
            UserError: the model's sizes are not known, or an assumption cannot hold.
        """

    def profile_key(self, recipe: Any) -> Mapping[str, Mapping[str, object]]:
        """What a profile of the recipe depends on, as the parts `model` and `shapes`."""

    def model_name(self, recipe: Any) -> str:
        """A name of the starting model that `Experiment.prepare` makes: the same for the same."""

    def experiment(self, recipe: Any) -> Experiment:
        """The recipe made concrete; imports torch."""

    @property
    def reads_problems(self) -> bool:
        """Whether `examine` puts the problems of any file, as JSON lines, to a model."""

    def examine(self, examination: Examination) -> dict[str, Any]:
        """Figures of a model, in the order in which they are printed: numbers, but for "about".

        Raises:
            UserError: model or data are missing or wrong, or the workload has no such questions.
        """
