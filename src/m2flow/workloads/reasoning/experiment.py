"""What a reasoning recipe means: its task, its starting model, the batch of any step, its figures.

The batch of a step is a function of recipe and step alone, so that a resumed run needs nothing
else. With further draws or a curriculum it follows from the results of earlier steps too, by a
sampler whose state lies in each checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m2flow.algorithms.sampling import derive_seed
from m2flow.errors import RunFailed, UserError
from m2flow.flow import Batch
from m2flow.models.causal_lm import TinySpec, build_tiny, load_model, load_tokenizer
from m2flow.models.tokenizer import byte_tokenizer, character_tokenizer
from m2flow.plan.file import read_json, to_json
from m2flow.runtime.driver.runner import StepResult
from m2flow.training import checkpoint
from m2flow.training.rollouts import TokenPairs
from m2flow.training.supervised import adamw, train_supervised
from m2flow.workloads.common.workload import RunProgress
from m2flow.workloads.reasoning.algorithm_section import OF_GROUPS
from m2flow.workloads.reasoning.config import OF_TINY, ReasoningRecipe
from m2flow.workloads.reasoning.encoding import (
    SPECIAL_TOKENS,
    Names,
    chat_of,
    encode,
    limit_of_folder,
    may_not_fit,
    prompt_rows,
    token_rows,
)
from m2flow.workloads.reasoning.figures import (
    rounds_of,
    sample_figures,
    sample_row,
    sampling_figures,
)
from m2flow.workloads.reasoning.flow import GRPO, PPO, Reinforce, recipe_flow
from m2flow.workloads.reasoning.health import CUT, HealthCheck, hints
from m2flow.workloads.reasoning.judging import check_judging_models
from m2flow.workloads.reasoning.named import check_task, rewards_of, task_of
from m2flow.workloads.reasoning.sampler import Asked, Curriculum, Sampler, SamplerState
from m2flow.workloads.reasoning.tasks import TASKS, DemonstratedTask, Problem, Table
from m2flow.workloads.reasoning.tasks.jsonl import Jsonl, RowsRead
from m2flow.workloads.reasoning.workers import Critic, ModelSource, carried
from m2flow.workloads.reasoning.workers.carried import BEGUN, BegunAnswer, ended_groups
from m2flow.workloads.reasoning.workers.further_draws import with_spares
from m2flow.workloads.reasoning.workers.source import dtype_on

if TYPE_CHECKING:
    from m2flow.observe.films import Film
    from m2flow.runtime.driver.run import Run

_log = logging.getLogger(__name__)

SAMPLER = "sampler.json"
"""File of a checkpoint: where the data stood."""

DATA = "data.json"
"""File of a checkpoint: which rows of a data set are trained on, where there is one."""

CARRIED = "carried.safetensors"
"""File of a checkpoint: answers that go on, where there are such."""

METRIC_NAMES = {"loss": "loss/policy", "critic/loss": "loss/critic"}
"""What the training's losses are called in metrics.jsonl."""


class ReasoningExperiment:
    """A recipe made concrete; see `m2flow.workloads.common.Experiment`.

    Weights that are only loaded by the lanes are theirs to refuse.

    Args:
        recipe: the validated recipe.
        model: the starting model, where it is made already.

    Raises:
        UserError: the task, its data, the reward, the model's sizes or its tokenizer are wrong.
    """

    tasks: Table = TASKS
    """The tasks that there are."""

    names = Names()
    """What the recipe calls the sizes that a prompt must fit into."""

    cut = CUT
    """Where answers are cut off, and what helps."""

    def __init__(self, recipe: ReasoningRecipe, model: ModelSource | None = None) -> None:
        self.recipe = recipe
        self.task = task_of(recipe, self.tasks)
        self.rewards = rewards_of(recipe, self.tasks)
        check_judging_models(recipe)
        self._hinted: set[HealthCheck] = set()
        self._failing = 0
        """Steps in a row of which half of the samples or more have no reward."""
        self._tokenizer: Any = None
        self._tiny = _tiny_spec(recipe) if recipe.model.path is None else None
        tokenizer = self._starting_tokenizer()
        path, positions = recipe.model.path, recipe.model.max_position_embeddings
        self._context: int | None = positions
        if path is not None:
            key, self._context = limit_of_folder(path)
            self.names = replace(self.names, context=f"{key} of {path}")
        data = recipe.data
        self._chat = chat_of(
            tokenizer, data.chat, data.system_prompt, data.chat_options, tools=self._told_tools
        )
        if data.max_prompt_tokens is not None:
            self._drop_long(tokenizer, data.max_prompt_tokens)
        self._held_out = self.task.held_out(recipe.evaluation.problems)
        check_task(recipe, self.task)
        self._check_prompts(tokenizer)
        self._dtype = dtype_on(recipe.model.dtype, "cpu")  # of what is built or warmed up here
        self._warming: Any = None
        if path is not None and recipe.warmup.steps:
            self._warming = load_model(path, self._dtype)
        self.model = model or ModelSource.at(path, recipe.model.dtype)
        """The model that reinforcement starts from, once it is made."""
        self._sampler = self._sampler_of(recipe)
        self._begun: dict[int, tuple[BegunAnswer, ...]] = {}  # by the turn of their problem

    def _sampler_of(self, recipe: ReasoningRecipe) -> Sampler | None:
        """What chooses the problems of a step; None where they follow from the step alone."""
        wanted, rows = recipe.data.curriculum, self.task.num_train
        curriculum = None
        if wanted is not None:
            assert rows is not None, "a file has rows"
            curriculum = Curriculum(rows, *wanted.band, wanted.outside)
        carries = recipe.generation.tokens_per_step is not None
        if curriculum is None and not recipe.further_draws and not carries:
            return None
        return Sampler(
            seed=recipe.seed,
            slots=recipe.prompts_per_step,
            spares=recipe.further_draws,
            lag=recipe.feedback_lag,
            curriculum=curriculum,
        )

    @property
    def _told_tools(self) -> Sequence[Mapping[str, Any]]:
        """Tools of which the chat template is told."""
        return ()

    @property
    def makes_model(self) -> bool:
        """Whether `prepare` builds or trains a model, and so writes one."""
        return self.recipe.model.path is None or self.recipe.warmup.steps > 0

    def _drop_long(self, tokenizer: Any, limit: int) -> None:
        """Have the task train on, and hold out, no prompt of more tokens.

        Raises:
            UserError: nothing is left to train on; or to evaluate on, where there was something.
        """
        assert isinstance(self.task, Jsonl)

        def fits(problem: Problem) -> bool:
            if not may_not_fit(problem, limit, 0, self._around(tokenizer)):
                return True
            return len(prompt_rows(tokenizer, [problem], self._chat)[0]) <= limit

        dropped, dropped_held_out = self.task.keep(fits)
        if dropped:
            _log.warning(
                "%s: %d rows whose prompt has more than %d tokens are not trained on",
                self.recipe.data.path, dropped, limit,
            )  # fmt: skip
        if dropped_held_out:
            data, problems = self.recipe.data, self.recipe.evaluation.problems
            if problems and not self.task.held_out(problems):
                raise UserError(
                    "leaves no held-out row to evaluate on",
                    key="data.max_prompt_tokens",
                    value=limit,
                    hint="raise it, hold out other rows, or set evaluation.problems to 0",
                )
            _log.warning(
                "%s: %d held-out rows whose prompt has more than %d tokens are not evaluated on",
                data.eval_path or data.path, dropped_held_out, limit,
            )  # fmt: skip

    def _around(self, tokenizer: Any) -> int:
        """Tokens that stand around a prompt's own."""
        return SPECIAL_TOKENS + len(prompt_rows(tokenizer, [Problem("", "")], self._chat)[0])

    def _check_prompts(self, tokenizer: Any) -> None:
        """Encode the first prompts, and those of a file that might not be written, or not fit."""
        first = self.recipe.prompts_per_step
        problems = [self.task.train(index) for index in range(first)]
        rest = map(self.task.train, range(first, self.task.num_train or 0))
        around = self._around(tokenizer)
        context, new = self._context, self._max_new
        forms = {_form(problem) for problem in problems}
        for problem in rest:
            if _form(problem) not in forms or may_not_fit(problem, context, new, around):
                problems.append(problem)
                forms.add(_form(problem))
        data = self.recipe.data
        files = (data.path or "data", data.eval_path or data.path or "data")
        for file, some in zip(files, (problems, self._held_out), strict=True):
            if some:
                names = replace(self.names, data=file)
                token_rows(some, tokenizer, self._context, self._max_new, names, self._chat)

    # --- the starting point -----------------------------------------------------------------------

    def _starting_tokenizer(self) -> Any:
        if self.recipe.model.path is not None:
            return load_tokenizer(self.recipe.model.path)
        characters = self.task.characters
        return byte_tokenizer() if characters is None else character_tokenizer(characters)

    def prepare(self, folder: Path, progress: RunProgress | None = None) -> ModelSource:
        """The model that reinforcement starts from, in Hugging Face layout.

        Args:
            folder: holds a model that is built or warmed up here; the model is whole once its
                `config.json` is there, and taken as it is then.
            progress: told about the supervised warm-up.
        """
        recipe = self.recipe
        if self.makes_model:
            self.model = ModelSource(str(folder), recipe.model.dtype)
            if not (folder / "config.json").is_file():
                self._make(folder, progress)
        return self.model

    def _make(self, folder: Path, progress: RunProgress | None) -> None:
        recipe = self.recipe
        tokenizer = self._starting_tokenizer()
        if self._tiny is None:
            assert recipe.model.path is not None
            model: Any = self._warming or load_model(recipe.model.path, self._dtype)
            self._warming = None
        else:
            model = build_tiny(
                self._tiny,
                vocab_size=len(tokenizer),
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                seed=recipe.seed,
                dtype=self._dtype,
            )
        if recipe.warmup.steps:
            self._warm_up(model, tokenizer, progress)
        partial = folder / ".partial"
        if partial.exists():
            shutil.rmtree(partial)
        try:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        except Exception:  # such as a disk that is full: leave the room to others
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, folder / file.name)
        partial.rmdir()

    def _warm_up(self, model: Any, tokenizer: Any, progress: RunProgress | None) -> None:
        warmup = self.recipe.warmup
        if progress is not None:
            progress.phase("warm-up", warmup.steps)
        assert isinstance(self.task, DemonstratedTask)
        shown = [self.task.demonstration(n) for n in range(warmup.steps * warmup.samples_per_step)]
        asked = [Problem(prompt, answer) for prompt, answer in shown]
        prompts = prompt_rows(tokenizer, asked, self._chat)
        texts = [answer for _, answer in shown]
        answers = tokenizer(texts, add_special_tokens=False)["input_ids"]
        pairs = TokenPairs.from_rows(prompts, [[*ids, tokenizer.eos_token_id] for ids in answers])
        self._show(model, pairs, progress)

    def _show(self, model: Any, pairs: TokenPairs, progress: RunProgress | None) -> None:
        """Train the model on demonstrations."""
        warmup, told = self.recipe.warmup, None if progress is None else progress.update
        train_supervised(
            model,
            pairs,
            steps=warmup.steps,
            batch_size=warmup.samples_per_step,
            seed=self.recipe.seed,
            optimizer=adamw(warmup.steps, warmup.learning_rate),
            on_progress=told and (lambda step, loss: told(step, {"loss": loss})),
        )

    # --- the data ---------------------------------------------------------------------------------

    def flow(self, checkpoint: Path | None = None) -> GRPO | Reinforce | PPO:
        """The flow on the starting model, or on a checkpoint of it."""
        self.resume_data(checkpoint)
        return recipe_flow(self.recipe, self.model, self.rewards, checkpoint)

    def resume_data(self, checkpoint: Path | None) -> None:
        """Go on with the problems where a checkpoint was.

        Raises:
            UserError: the rows of the data set are others than they were.
        """
        if checkpoint is not None:
            self._check_rows(checkpoint)
        if checkpoint is not None and self._sampler is not None:
            try:
                state = read_json(SamplerState, checkpoint / SAMPLER, "state of the data", SAMPLER)
            except UserError as error:
                raise UserError(str(error), hint="go on from another checkpoint") from error
            self._sampler.restore(state)
            going_on = self._sampler.carried(state.step)
            self._begun = carried.read(checkpoint / CARRIED) if going_on else {}

    @cached_property
    def _rows(self) -> RowsRead | None:
        """Which rows of a data set are trained on; None where problems are generated."""
        return self.task.rows_read() if isinstance(self.task, Jsonl) else None

    def _check_rows(self, checkpoint: Path) -> None:
        """Refuse other rows than a checkpoint has been trained on; those of an earlier version do
        not say which."""
        if self._rows is None or not (checkpoint / DATA).is_file():
            return
        before = read_json(RowsRead, checkpoint / DATA, "state of the data", DATA)
        if before != self._rows:
            raise UserError(
                "has changed since the checkpoint: the rows to train on are others "
                f"({before.count} then, {self._rows.count} now)",
                key="data.path",
                value=self.recipe.data.path,
                hint="put it back as it was, or start a new run",
            )

    def batch(self, step: int) -> Batch:
        """The prompts of a step (counted from 0)."""
        if self._sampler is not None:
            return self._sampled(self._sampler.asked(step))
        first = step * self.recipe.prompts_per_step
        indices = range(first, first + self.recipe.prompts_per_step)
        problems = [self.task.train(index) for index in indices]
        seeds = [derive_seed(self.recipe.seed, 1, index) for index in indices]
        return self._encoded(problems, seeds)

    def _sampled(self, slots: Sequence[Sequence[Asked]]) -> Batch:
        """The prompts that a sampler has chosen, each with those that may take its place."""
        every = [one for slot in slots for one in slot]
        problems = [self.task.train(one.number) for one in every]
        seeds = [derive_seed(self.recipe.seed, 1, one.turn) for one in every]
        prompts = self._encoded(problems, seeds)
        numbered = prompts.with_columns(problem=[one.number for one in every])
        if self.recipe.generation.tokens_per_step is not None:
            there = [self._begun.get(one.turn, ()) for one in every]
            numbered = numbered.with_columns(**{BEGUN: there})
        return with_spares(numbered, self.recipe.further_draws)

    def note(self, result: StepResult) -> None:
        """A step is done; what is asked later may follow from how it went."""
        if self._sampler is None:
            return
        output, group = result.output, self.recipe.samples_per_prompt
        found = rounds_of(output, group)
        known = [(number, rate) for slot in found for number, rate in slot if rate is not None]
        begun: Sequence[BegunAnswer | None] = (
            output[BEGUN] if BEGUN in output else [None] * len(output)
        )
        of_slots = [
            tuple(one for one in begun[first : first + group] if one is not None)
            for first in range(0, len(output), group)
        ]
        going_on = [slot for slot, answers in enumerate(of_slots) if answers]
        last = self._sampler.note(result.step, [len(slot) for slot in found], known, going_on)
        for asked, answers in zip(last, of_slots, strict=True):
            self._begun.pop(asked.turn, None)
            if answers:
                self._begun[asked.turn] = answers

    def held_out(self) -> Batch | None:
        """The problems of an evaluation; None if there are to be none."""
        if not self._held_out:
            return None
        return self._encoded(self._held_out, [0] * len(self._held_out))

    def _encoded(self, problems: Sequence[Problem], seeds: Sequence[int]) -> Batch:
        if self._tokenizer is None:
            self._tokenizer = self.model.tokenizer()
        tokenizer, context = self._tokenizer, self._context
        return encode(
            problems, seeds, tokenizer, context, self._max_new, self.names, chat=self._chat
        )

    @property
    def _max_new(self) -> int:
        return self.recipe.generation.max_new_tokens

    # --- the figures ------------------------------------------------------------------------------

    def metrics(self, result: StepResult) -> dict[str, float]:
        """The figures of a training step, as metrics.jsonl names them."""
        output = ended_groups(result.output)
        figures = self._figures_of(output, result.step) if len(output) else {"samples": 0.0}
        if BEGUN in output:
            begun = result.output[BEGUN]
            going_on = sum(one is not None for one in begun)
            figures["sampling/carried_share"] = going_on / len(begun)
        elif self._sampler is not None:
            group = self.recipe.samples_per_prompt
            of_problems = sampling_figures(output, group, self._compares)
            figures |= of_problems | self._sampler.figures_of(result.step)
        for name, value in result.metrics.items():
            figures[METRIC_NAMES.get(name, name if "/" in name else f"train/{name}")] = value
        return figures

    @property
    def _compares(self) -> bool:
        """Whether the algorithm compares the samples of a prompt."""
        return self.recipe.algorithm.name in OF_GROUPS

    def _figures_of(self, output: Batch, step: int) -> dict[str, float]:
        group = self.recipe.samples_per_prompt if self._compares else None
        figures = sample_figures(output, group)
        if self.recipe.verifies and "verified" in output:  # of functions, whatever models add
            right = [worth >= 1.0 for worth in output["verified"] if worth is not None]
            figures["accuracy/mean"] = sum(right) / len(right) if right else math.nan
        if "version" in output:
            oldest = min(first for first, _ in output["version"])
            figures["staleness/oldest_token"] = float(step - oldest)
        return figures

    def evaluation(self, result: StepResult) -> dict[str, float]:
        """The figures of an evaluation, as means over the problems that could be judged."""
        failures = result.output["failure"]
        judged = result.output.select([row for row, why in enumerate(failures) if not why])
        if not len(judged):
            return {}
        rewards, lengths = judged["reward"], judged["num_tokens"]
        figures = {
            "eval/accuracy": sum(reward >= 1.0 for reward in rewards) / len(rewards),
            "eval/reward": sum(rewards) / len(rewards),
            "eval/length": sum(lengths) / len(lengths),
            "eval/problems": float(len(rewards)),
        }
        failed = len(failures) - len(judged)
        return figures | ({"eval/failed_share": failed / len(failures)} if failed else {})

    def samples(self, result: StepResult, count: int) -> list[dict[str, Any]]:
        """A few rollouts of a step for people to read: those without a reward, then any.

        Of groups that have ended: others have no reward yet.
        """
        output = ended_groups(result.output)
        every = max(1, len(output) // max(1, count))
        rows = range(0, len(output), every)[:count]
        failed = [row for row, why in enumerate(output["failure"]) if why][:count]
        return [sample_row(output, row) for row in dict.fromkeys((*failed, *rows))][:count]

    def rollouts(self, result: StepResult) -> list[dict[str, Any]]:
        """All rollouts of a step whose groups have ended, as those few are shown."""
        return self.samples(result, len(result.output))

    def alarms(self, result: StepResult) -> Sequence[str]:
        """Why samples of a step have no reward, each reason once; and what its figures warn of.

        Raises:
            RunFailed: no sample has one: there is nothing to learn from. Or half of them have none,
                once more in a row than `max_skipped_updates`.
        """
        output, most = ended_groups(result.output), self.recipe.max_skipped_updates
        if not len(output):
            return ()
        why = list(dict.fromkeys(reason for reason in output["failure"] if reason))
        failed = sum(bool(reason) for reason in output["failure"])
        self._failing = self._failing + 1 if 2 * failed >= len(output) else 0
        none_has = failed == len(output) == len(result.output)
        if none_has or self._failing > most:
            share = f"all {failed} samples of step {result.step + 1}"
            if failed < len(output):
                share = f"{failed} of {len(output)} samples of step {result.step + 1}, and half or "
                share += f"more of {self._failing} steps in a row (max_skipped_updates: {most})"
            row = next(row for row, reason in enumerate(output["failure"]) if reason)
            first = sample_row(output, row)
            raise RunFailed(
                f"{why[0]}; so for {share}. The first: "
                f"prompt {first['prompt'][-200:]!r}, completion {first['completion'][-200:]!r}"
            )
        alarms = [f"{one}; the sample is not trained on" for one in why]
        for check, hint in hints(self.metrics(result), self.recipe, self.cut).items():
            if check not in self._hinted:
                self._hinted.add(check)
                alarms.append(hint)
        return alarms

    def films(self, result: StepResult) -> Sequence[Film]:
        """Text is not filmed."""
        return ()

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, run: Run, checkpoints: Path, step: int) -> None:
        """Write a checkpoint of the policy, and of the critic if there is one."""
        checkpoint.sweep(checkpoints)
        if self._rows is not None:
            (checkpoint.begin(checkpoints, step) / DATA).write_text(to_json(self._rows))
        if self._sampler is not None:
            state = to_json(self._sampler.state(step))
            folder = checkpoint.begin(checkpoints, step)
            (folder / SAMPLER).write_text(state)
            if turns := self._sampler.carried(step):
                carried.write(folder / CARRIED, {turn: self._begun[turn] for turn in turns})
        for name in run.plan.placements.keys() & {Critic.part}:
            run.worker_call_everywhere(name, "save_part", str(checkpoints), step)
        keep = self.recipe.checkpoint.keep
        run.worker_call_everywhere("learner", "save_checkpoint", str(checkpoints), step, keep)


def _tiny_spec(recipe: ReasoningRecipe) -> TinySpec:
    try:
        return TinySpec(**recipe.model.model_dump(include=set(OF_TINY)))
    except UserError as error:
        raise UserError(f"model.{error}") from error


def _form(problem: Problem) -> tuple[str, ...]:
    """Whose turns stand before a problem's prompt: not every template writes all of them."""
    return tuple(turn["role"] for turn in problem.before)
