"""A reasoning run, less the running: what a recipe means in terms of models, data and flows.

It makes the starting checkpoint, the batch of any step (a function of recipe and step
alone, so that a resumed run needs nothing else), and the figures of a finished step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from m2flow.algorithms.sampling import derive_seed
from m2flow.engine.runner import StepResult
from m2flow.errors import UserError
from m2flow.flow import Batch, Ragged
from m2flow.models.causal_lm import TinySpec, build_tiny, load_model, load_tokenizer
from m2flow.models.tokenizer import byte_tokenizer, character_tokenizer
from m2flow.reasoning.config import ReasoningRecipe
from m2flow.reasoning.tasks import DemonstratedTask, Problem, Task, make_task
from m2flow.reasoning.workers import ModelSource
from m2flow.training.rollouts import TokenPairs
from m2flow.training.supervised import Progress, SupervisedConfig, train_supervised


def task_of(recipe: ReasoningRecipe) -> Task:
    """The task that a recipe names.

    Raises:
        UserError: a data key is missing, or belongs to another task, or the data are wrong.
    """
    data = recipe.data
    settings: dict[str, Any] = {"seed": recipe.seed}
    if data.task == "jsonl":
        settings |= {"path": data.path, "eval_path": data.eval_path, "on_bad_row": data.on_bad_row}
    elif data.task == "gym":
        settings |= {"dataset": data.dataset, "options": dict(data.options)}
    else:
        settings |= dict(data.options)
    if data.template is not None:
        settings["template"] = data.template
    for key, needed in (("path", "jsonl"), ("dataset", "gym")):
        if data.task == needed and getattr(data, key) is None:
            raise UserError(f"the {needed} task needs it", key=f"data.{key}")
        if data.task != needed and getattr(data, key) is not None:
            raise UserError(
                f"belongs to the {needed} task, and data.task is {data.task}", key=f"data.{key}"
            )
    return make_task(data.task, **{k: v for k, v in settings.items() if v is not None})


class ReasoningExperiment:
    """What a recipe means.

    Args:
        recipe: the validated recipe.

    Raises:
        UserError: the task or its data are wrong.
    """

    def __init__(self, recipe: ReasoningRecipe) -> None:
        self.recipe = recipe
        self.task = task_of(recipe)
        if recipe.warmup.steps and not isinstance(self.task, DemonstratedTask):
            raise UserError(
                f"the task {self.task.name!r} has no demonstrations to warm up on",
                key="warmup.steps",
                value=recipe.warmup.steps,
                hint="set it to 0",
            )
        self._tokenizer: Any = None

    # --- the starting point -----------------------------------------------------------------------

    def prepare(
        self, folder: Path, on_progress: Callable[[Progress], None] | None = None
    ) -> ModelSource:
        """The model that reinforcement starts from.

        Args:
            folder: where a model built or warmed up here is written, in Hugging Face layout.
            on_progress: told about the supervised warm-up.
        """
        recipe = self.recipe
        dtype = getattr(torch, recipe.model.dtype)
        if recipe.model.path is not None:
            tokenizer = load_tokenizer(recipe.model.path)
            if not recipe.warmup.steps:
                return ModelSource(recipe.model.path, recipe.model.dtype)
            model = load_model(recipe.model.path, dtype)
        else:
            characters = self.task.characters
            tokenizer = byte_tokenizer() if characters is None else character_tokenizer(characters)
            sizes = recipe.model.model_dump(exclude={"path", "dtype"})
            model = build_tiny(
                TinySpec(**sizes),
                vocab_size=len(tokenizer),
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                seed=recipe.seed,
                dtype=dtype,
            )
        if recipe.warmup.steps:
            self._warm_up(model, tokenizer, on_progress)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return ModelSource(str(folder), recipe.model.dtype)

    def _warm_up(
        self, model: Any, tokenizer: Any, on_progress: Callable[[Progress], None] | None
    ) -> None:
        warmup = self.recipe.warmup
        assert isinstance(self.task, DemonstratedTask)
        shown = [self.task.demonstration(n) for n in range(warmup.steps * warmup.samples_per_step)]
        prompts = tokenizer([prompt for prompt, _ in shown])["input_ids"]
        answers = tokenizer([answer for _, answer in shown])["input_ids"]
        pairs = TokenPairs.from_rows(prompts, [[*ids, tokenizer.eos_token_id] for ids in answers])
        config = SupervisedConfig(
            steps=warmup.steps, batch_size=warmup.samples_per_step, seed=self.recipe.seed
        )
        train_supervised(model, pairs, config, on_progress=on_progress, progress_every=25)

    # --- the data ---------------------------------------------------------------------------------

    def batch(self, step: int, model: ModelSource) -> Batch:
        """The prompts of a step (counted from 0)."""
        first = step * self.recipe.prompts_per_step
        indices = range(first, first + self.recipe.prompts_per_step)
        problems = [self.task.train(index) for index in indices]
        seeds = [derive_seed(self.recipe.seed, 1, index) for index in indices]
        return self._encoded(problems, seeds, model)

    def held_out(self, model: ModelSource) -> Batch | None:
        """The problems of an evaluation; None if there are to be none."""
        problems = self.task.held_out(self.recipe.evaluation.problems)
        if not problems:
            return None
        return self._encoded(problems, [0] * len(problems), model)

    def _encoded(
        self, problems: Sequence[Problem], seeds: Sequence[int], model: ModelSource
    ) -> Batch:
        if self._tokenizer is None:
            self._tokenizer = model.tokenizer()
        return encode(problems, seeds, self._tokenizer, self._context(model), self._max_new)

    def _context(self, model: ModelSource) -> int:
        from transformers import AutoConfig

        if not hasattr(self, "_positions"):
            self._positions = int(AutoConfig.from_pretrained(model.path).max_position_embeddings)
        return self._positions

    @property
    def _max_new(self) -> int:
        return self.recipe.generation.max_new_tokens

    # --- the figures ------------------------------------------------------------------------------

    def metrics(self, result: StepResult) -> dict[str, float]:
        """The figures of a training step, as metrics.jsonl names them."""
        output = result.output
        figures = sample_figures(output, self.recipe.samples_per_prompt)
        tokens = figures["tokens/generated"]
        figures |= {
            "seconds/step": result.seconds,
            "throughput/tokens_per_s": tokens / result.seconds,
            "throughput/samples_per_s": len(output) / result.seconds,
            "version": float(result.version),
            "staleness/mean": result.staleness or 0.0,
        }
        figures |= {f"seconds/{name}": s for name, s in result.stage_seconds().items()}
        for name, value in result.metrics.items():
            figures["loss/policy" if name == "loss" else f"train/{name}"] = value
        return figures

    def samples(self, result: StepResult, count: int) -> list[dict[str, Any]]:
        """A few rollouts of a step, spread over its groups, for people to read."""
        output = result.output
        every = max(1, len(output) // max(1, count))
        rows = range(0, len(output), every)[:count]
        return [sample_row(output, row) for row in rows]


def encode(
    problems: Sequence[Problem],
    seeds: Sequence[int],
    tokenizer: Any,
    context: int,
    max_new_tokens: int,
) -> Batch:
    """Problems as items.

    Args:
        problems: the problems.
        seeds: one for each; what is sampled for an item depends on its seed alone.
        tokenizer: turns prompts into token ids.
        context: positions of the model.
        max_new_tokens: room that an answer needs.

    Raises:
        UserError: a prompt does not fit into the context, or cannot be written in the vocabulary.
    """
    try:
        rows = tokenizer([problem.prompt for problem in problems])["input_ids"]
    except Exception as error:
        raise UserError(
            "the model's tokenizer cannot encode the data",
            key="data",
            value=str(error),
            hint="use a model whose vocabulary covers the text",
        ) from error
    for problem, ids in zip(problems, rows, strict=True):
        if len(ids) + max_new_tokens > context:
            where = f"line {problem.metadata['line']}" if "line" in problem.metadata else "a prompt"
            raise UserError(
                f"{where} has {len(ids)} tokens, and with generation.max_new_tokens = "
                f"{max_new_tokens} it does not fit into the model's context of {context}",
                key="data",
                hint="shorten the prompts, ask for fewer tokens, or use a longer context "
                "(model.max_position_embeddings)",
            )
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([torch.tensor(ids) for ids in rows]),
            "prompt": [problem.prompt for problem in problems],
            "answer": [problem.answer for problem in problems],
            "metadata": [dict(problem.metadata) for problem in problems],
            "seed": list(seeds),
        }
    )


def sample_figures(output: Batch, group_size: int) -> dict[str, float]:
    """Figures of scored samples whose groups are consecutive."""
    rewards = torch.tensor(output["reward"], dtype=torch.float64)
    groups = rewards.view(-1, group_size)
    truncated = sum(reason != "stop" for reason in output["finish_reason"])
    tokens = sum(output["num_tokens"])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "accuracy/mean": float((rewards >= 1.0).double().mean()),
        "reward/zero_variance_share": float(
            (groups.max(1).values == groups.min(1).values).double().mean()
        ),
        "samples": float(len(output)),
        "tokens/generated": float(tokens),
        "tokens/prompt": float(sum(output["num_prompt_tokens"])),
        "length/mean": tokens / len(output),
        "length/truncated_share": truncated / len(output),
    }


def sample_row(output: Batch, row: int) -> dict[str, Any]:
    """One rollout for samples.jsonl."""
    values: Mapping[str, Any] = output.row(row)
    return {
        "item": output.ids[row],
        "prompt": values["prompt"],
        "completion": values["text"],
        "reward": values["reward"],
        "answer": values["answer"],
        "finish_reason": values["finish_reason"],
    }
