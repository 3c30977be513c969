"""Scoring a model on a file of problems: a flow of its own, of two stages."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from m2flow.algorithms.confidence import of_shares
from m2flow.algorithms.sampling import derive_seed
from m2flow.errors import RunFailed, UserError
from m2flow.flow import Flow, Stream
from m2flow.generation.supported import ENGINES, check_installed
from m2flow.plan import parse_lanes, with_memory
from m2flow.rewards.final_answer import chosen_letter, extract_answer, right_letter
from m2flow.rewards.gym import gym_answer
from m2flow.rewards.number import read_number, same_number, without_symbols
from m2flow.rewards.reward import path_of
from m2flow.rewards.symbolic import canonical, same_expression
from m2flow.workloads.common.examining import deadline_of, examined
from m2flow.workloads.common.recipe import LEAST_TEMPERATURE, Recipe
from m2flow.workloads.common.resume import recipe_of, run_of
from m2flow.workloads.common.workload import Examination
from m2flow.workloads.reasoning.config import PRETRAINED, ReasoningRecipe
from m2flow.workloads.reasoning.data import (
    DEFAULT_TEMPLATE,
    OnBadRow,
    check_template,
    read_problems,
)
from m2flow.workloads.reasoning.encoding import Names, chat_of, encode, limit_of_folder
from m2flow.workloads.reasoning.named import loaded
from m2flow.workloads.reasoning.reward_sections import RewardPart
from m2flow.workloads.reasoning.rows import TO_HOLD_OUT
from m2flow.workloads.reasoning.supported import check_generation
from m2flow.workloads.reasoning.tasks import Problem, gym
from m2flow.workloads.reasoning.workers import Generator, ModelSource, Verifier, outcome

FINAL_ANSWERS = frozenset(map(path_of, ("addition", "gym", "math")))
"""Rewards that judge the final answer of a completion: of these one can be the most frequent."""

COMPARED = 8
"""Of the spellings of a problem's answers so many are compared, the most frequent ones."""

_log = logging.getLogger(__name__)


class Evaluate(Flow):
    """Draw answers and score them."""

    generator: Generator
    verifier: Verifier

    def evaluate(self, prompts: Stream) -> Stream:
        return outcome(self.verifier.score(self.generator.generate(prompts)))


def model_folder(path: Path) -> Path:
    """The Hugging Face folder that a path means: itself, or the `model` folder of a checkpoint."""
    return path / "model" if (path / "model").is_dir() else path


def examine(asked: Examination) -> dict[str, Any]:
    """Accuracy, pass@k and maj@k of a model on a file, as `m2flow eval` prints them."""
    rewards, figures = answered(asked)
    return {
        "about": f"{len(rewards)} problems of {asked.data}, {asked.samples} answer(s) each",
        "model": str(asked.model),
        "data": str(asked.data),
        "problems": len(rewards),
        "samples": asked.samples,
        **accuracy(rewards, asked.samples),
        **figures,
    }


def answered(asked: Examination) -> tuple[list[list[float]], dict[str, float]]:
    """Draw answers of the model to the problems of the file, and score them by `asked.reward`.

    Returns:
        For each problem the rewards of its answers, 0 of those that could not be scored; and the
        temperature, the share of problems that most answers are right about where the reward is one
        of `FINAL_ANSWERS`, the answers' mean length, the share that did not end by themselves, the
        share that could not be scored, and the seconds of generation and scoring.

    Raises:
        UserError: model or data are missing or wrong, or a prompt does not fit.
        RunFailed: no answer could be scored.
    """
    _check(asked)
    source = ModelSource.at(str(model_folder(asked.model)), "auto")
    tokenizer, (limit, context) = source.tokenizer(), limit_of_folder(source.path)
    settings = as_trained(asked, context)
    assert settings.max_new_tokens is not None and settings.temperature is not None
    assert settings.reward is not None
    rewards_by = loaded([_part_of(asked, settings.reward)], "--reward")
    options = settings.chat_options
    chat = chat_of(
        tokenizer, settings.chat, settings.system_prompt, options, "--chat", "--chat-option"
    )
    problems = _problems(settings)
    seeds = [derive_seed(asked.seed, 2, index) for index in range(len(problems))]
    names = Names(str(asked.data), "--max-new-tokens", limit)
    batch = encode(problems, seeds, tokenizer, context, settings.max_new_tokens, names, chat)
    # Without a limit: the one model that has a state makes way for nobody.
    lanes = with_memory(asked.lanes or parse_lanes("auto"), None)
    flow = Evaluate(
        generator=Generator(
            source,
            samples_per_prompt=asked.samples,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            engine=asked.engine,
            dtype=settings.dtype,
            cache_gb=asked.cache_gb,
            stop=settings.stop or (),
            chat_options=None if chat is None else options,
        ),
        verifier=Verifier(source, rewards_by),
    )
    deadline = deadline_of(asked, _recipe_of(asked.model))
    result = examined(flow, batch, lanes, asked.layout, "generator", deadline)
    rewards, output = result.output["reward"], result.output
    failures = [why for why in output["failure"] if why]
    if len(failures) == len(output):
        raise RunFailed(f"no answer could be scored: {failures[0]}")
    if failures:
        said = "%s: %d of %d answers could not be scored (first: %s)"
        _log.warning(said, asked.data, len(failures), len(output), failures[0])
    groups = [range(n, n + asked.samples) for n in range(0, len(rewards), asked.samples)]
    elections = {}
    by = settings.reward
    if path_of(by) in FINAL_ANSWERS:
        winners = [
            majority([output["text"][row] for row in rows], output["answer"][rows[0]], by)
            for rows in groups
        ]
        right = [
            winner is not None and rewards[rows[winner]] >= 1.0
            for winner, rows in zip(winners, groups, strict=True)
        ]
        elections[f"maj@{asked.samples}"] = sum(right) / len(right)
    figures = {
        "temperature": settings.temperature,
        **elections,
        "mean_tokens": sum(output["num_tokens"]) / len(output),
        "truncated_share": sum(r != "stop" for r in output["finish_reason"]) / len(output),
        "failed_share": len(failures) / len(output),
        "seconds": result.seconds,
    }
    return [[rewards[row] for row in rows] for rows in groups], figures


def _check(asked: Examination) -> None:
    """Refuse what neither data nor tokenizer are needed for."""
    if asked.data is None:
        raise UserError("is missing", key="--data", expected="problems as JSON lines")
    engine, temperature = ENGINES[asked.engine], asked.temperature or 0.0
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise UserError(
            "is too low to divide by",
            key="--temperature",
            value=temperature,
            expected=f"0 for the likeliest tokens, or at least {LEAST_TEMPERATURE}",
        )
    if 0.0 < temperature < engine.least_temperature:
        raise UserError(
            f"{engine.label} draws at {engine.least_temperature} where less is asked",
            key="--temperature",
            value=temperature,
            expected=f"0 for the likeliest tokens, or at least {engine.least_temperature}",
        )
    check_installed(asked.engine)
    if asked.dtype is not None and asked.dtype not in ("auto", *ENGINES[asked.engine].dtypes):
        known = " or ".join(ENGINES[asked.engine].dtypes)
        raise UserError(
            "is unknown to the engine", key="--dtype", value=asked.dtype, expected=known
        )
    if asked.engine == "native":
        check_generation(str(model_folder(asked.model)), "MODEL")
    if asked.template is not None:
        check_template(asked.template, "--template")


def _problems(asked: Examination) -> list[Problem]:
    assert asked.data is not None and asked.template is not None and asked.reward is not None
    on_bad_row: OnBadRow = "skip" if asked.skip_bad_rows else "fail"
    return read_problems(
        asked.data,
        template=asked.template,
        on_bad_row=on_bad_row,
        question=asked.question_column,
        answer=asked.answer_column,
        column_key="--{}-column",
        seed=asked.seed,
        splits=TO_HOLD_OUT,
        rewards=(asked.reward,),
    )[: asked.limit]


def majority(texts: Sequence[str], gold: str, by: str = "math") -> int | None:
    """Which of several completions first gives the answer that most of them give; None for none.

    Choices are the same where their letters are; of other answers those that are spelled alike, and
    of the `COMPARED` most frequent spellings those that `math_reward` holds for equal. Of answers
    that are given equally often the one that comes first wins.

    Args:
        texts: the completions.
        gold: the right answer.
        by: the reward. Answers to a data set of reasoning-gym are what its scorer reads, and apart
            from numbers those that are spelled alike: of lists and boards the order counts.

    Source: Wang et al. 2022 (arXiv 2203.11171), self-consistency.
    """
    of_gym = path_of(by) == path_of("gym")
    gold = without_symbols(gold)
    numeric, votes = read_number(gold) is not None, Counter[Any]()
    lettered = right_letter(gold) is not None
    first: dict[Any, tuple[int, str]] = {}
    for place, text in enumerate(texts):
        if of_gym:
            answer = gym_answer(text) or None
        else:
            answer = extract_answer(without_symbols(text), numeric=numeric, choice=lettered)
        if answer is None:
            continue
        answer = (chosen_letter(answer) if lettered and not of_gym else None) or answer
        number = read_number(answer)
        key = canonical(answer) if number is None else (number.value, number.percent)
        first.setdefault(key, (place, answer))
        votes[key] += 1
    kept: list[Any] = []
    for key, count in votes.most_common(COMPARED):
        same = next((one for one in kept if _same(first[one][1], first[key][1], of_gym)), None)
        if same is None:
            kept.append(key)
        else:
            del votes[key]
            votes[same] += count
            first[same] = min(first[same], first[key])
    if not votes:
        return None
    return first[max(votes, key=lambda key: (votes[key], -first[key][0]))][0]


def _same(one: str, other: str, alike: bool) -> bool:
    """Are two answers one; `alike`: only if both are numbers, since their spellings differ."""
    numbers = read_number(one), read_number(other)
    if numbers[0] is None or numbers[1] is None:
        return not alike and same_expression(one, other)
    return same_number(numbers[0], numbers[1])


def accuracy(rewards: Sequence[Sequence[float]], samples: int) -> dict[str, float]:
    """The share of right answers with its interval, and pass@k for k = samples and powers of 2."""
    correct = [sum(reward >= 1.0 for reward in answers) for answers in rewards]
    ks = sorted({1, samples} | {2**n for n in range(1, samples.bit_length()) if 2**n <= samples})
    low, high = of_shares([count / samples for count in correct])
    return {
        "accuracy": sum(correct) / (len(correct) * samples),
        "accuracy_low": low,
        "accuracy_high": high,
        **{f"pass@{k}": sum(pass_at_k(samples, c, k) for c in correct) / len(correct) for k in ks},
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k answers is right, estimated without bias.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _recipe_of(model: Path) -> Recipe | None:
    """The recipe of the run that a model is a checkpoint of, if it is one."""
    run = run_of(model)
    return None if run is None else recipe_of(run)


def _part_of(asked: Examination, function: str) -> RewardPart:
    """The part of the run's reward that has the function, with its deadline; or the function."""
    recipe = _recipe_of(asked.model)
    parts = recipe.reward if isinstance(recipe, ReasoningRecipe) else None
    named = [part for part in parts or () if part.function == function]
    return (named or [RewardPart(function=function)])[0].model_copy(update={"weight": 1.0})


def as_trained(asked: Examination, context: int | None) -> Examination:
    """What is asked, and where it says nothing as the run trained whose checkpoint the model is.

    Of a model that no run has made: the template of `jsonl` and answers of usual length.

    Args:
        asked: the examination.
        context: positions of the model; of those, answers get half at most where nothing is said.
    """
    recipe = _recipe_of(asked.model)
    usual: dict[str, Any] = {
        "chat_options": {}, "temperature": float(asked.samples > 1), "reward": "math",
    }  # fmt: skip
    if isinstance(recipe, ReasoningRecipe):
        if recipe.reward is not None and len(recipe.reward) == 1:
            usual["reward"] = recipe.reward[0].function
        data, generation = recipe.data, recipe.generation
        own = {"addition": "{question}", "gym": gym.DEFAULT_TEMPLATE}.get(data.task)
        usual |= {
            "max_new_tokens": generation.max_new_tokens,
            "stop": generation.stop,
            "template": own or DEFAULT_TEMPLATE if data.template is None else data.template,
            "chat": data.chat,
        }
        dtype = generation.dtype or recipe.model.dtype
        if dtype in ("auto", *ENGINES[asked.engine].dtypes):
            usual["dtype"] = dtype
        if asked.chat is not False:
            usual |= {"system_prompt": data.system_prompt, "chat_options": data.chat_options}
    else:
        longest: int = PRETRAINED["generation"]["max_new_tokens"]
        longest = longest if context is None else max(1, min(longest, context // 2))
        usual |= {"max_new_tokens": longest, "stop": (), "template": DEFAULT_TEMPLATE}
    return replace(asked, **{k: value for k, value in usual.items() if getattr(asked, k) is None})
