"""What an embodied recipe means: its environment, the starts of any step, its figures.

The starts of a step are a function of recipe and step alone, so that a resumed run needs nothing
else.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from m2flow.algorithms.sampling import derive_seed
from m2flow.environments import Deadlines, rendering
from m2flow.environments.demonstrations import read_demonstrations
from m2flow.environments.hosting import hosted
from m2flow.environments.registry import maker, variables_of
from m2flow.environments.slots import let_go
from m2flow.environments.spec import EnvironmentSpec
from m2flow.environments.trial import made, try_out
from m2flow.errors import RunFailed, UserError
from m2flow.flow import Batch
from m2flow.runtime.driver.runner import StepResult
from m2flow.training import checkpoint
from m2flow.workloads.common.workload import RunProgress
from m2flow.workloads.embodied.cloning import clone, device_with_room, expert_of, write
from m2flow.workloads.embodied.config import EmbodiedRecipe
from m2flow.workloads.embodied.flow import EmbodiedGRPO, EmbodiedPPO, EmbodiedSAC, recipe_flow
from m2flow.workloads.embodied.workers.columns import FILM, NO_FILM, OPTIONAL_FILM
from m2flow.workloads.embodied.workers.further_draws import SPARES, TRIED
from m2flow.workloads.embodied.workers.source import WEIGHTS, PolicySource

if TYPE_CHECKING:
    from m2flow.observe.films import Film
    from m2flow.runtime.driver.run import Run

METRIC_NAMES = {"loss": "loss/policy", "value_loss": "loss/value"}
"""What the training's losses are called in metrics.jsonl."""

EVALUATED = 1 << 40
"""Numbers of rollouts of evaluations begin here: no step of training comes so far."""

SILENT_STEPS = 3
"""Steps in a row without a group that teaches, after which it is said; of the first one at once."""

CANDIDATES = 4
"""Episodes that are filmed for each film that is kept, where drawing is quick: solved ones lead."""


class EmbodiedExperiment:
    """A recipe made concrete; see `m2flow.workloads.common.Experiment`.

    Args:
        recipe: the validated recipe.

    Raises:
        UserError: there is no such environment, or the policy does not fit it.
    """

    def __init__(self, recipe: EmbodiedRecipe) -> None:
        recipe.require_model()
        self.recipe = recipe
        self.spec = spec_of(recipe)
        critic = recipe.algorithm.has_critic
        self._source = PolicySource(
            recipe.policy, self.spec, recipe.seed, critic=critic, model=recipe.model
        )
        self._source.make()  # refuses what does not fit; not kept, since it may be large
        if recipe.warmup.steps and recipe.warmup.data is not None:
            read_demonstrations(recipe.warmup.data, self.spec)  # the same
        self._start: Path | None = None
        self._failing = 0  # steps in a row of which most was given up
        self._silent = 0  # steps in a row of which no group taught anything

    @property
    def makes_model(self) -> bool:
        """Whether the policy is cloned from demonstrations; else its weights follow the seed."""
        return self.recipe.warmup.steps > 0

    def prepare(self, folder: Path, progress: RunProgress | None = None) -> None:
        """The policy that reinforcement starts from; one that lies there already is taken."""
        if not (folder / WEIGHTS).is_file():
            policy = self._source.make()
            policy.to(device_with_room(policy, self.recipe))
            clone(policy, self.recipe, self.spec, progress)
            write(policy.cpu(), folder, WEIGHTS)
            torch.cuda.empty_cache()  # for the lanes; does nothing where no accelerator was used
        self._start = folder

    def flow(self, checkpoint: Path | None = None) -> EmbodiedPPO | EmbodiedGRPO | EmbodiedSAC:
        """The flow from the beginning, or from a checkpoint."""
        return recipe_flow(self.recipe, self.spec, self._start, checkpoint)

    def batch(self, step: int) -> Batch:
        """The starts of a step (counted from 0)."""
        count = self.recipe.items_per_step
        return self._starts(1, step * count, count)

    def held_out(self) -> Batch | None:
        """The starts of an evaluation; None if there are to be none."""
        count = self.recipe.evaluation.episodes
        return self._starts(4, EVALUATED, count, evaluated=True) if count else None

    def _starts(self, kind: int, first: int, count: int, *, evaluated: bool = False) -> Batch:
        numbers = range(first, first + count)
        films = self.recipe.evaluation.films if evaluated else 0
        filmed = torch.full((count,), NO_FILM)
        filmed[: CANDIDATES * films] = OPTIONAL_FILM
        filmed[:films] = FILM
        single = evaluated or not self.recipe.rollout.automatic_reset
        draws = 0 if evaluated else self.recipe.algorithm.further_draws
        spares = {SPARES: [self._spares(n, draws) for n in numbers]} if draws else {}
        return Batch(
            {
                **spares,
                "rollout": torch.tensor(numbers),
                "seed": torch.tensor([derive_seed(self.recipe.seed, kind, n) for n in numbers]),
                "initial_state": torch.tensor([self._state(n, count, evaluated) for n in numbers]),
                "greedy": torch.full((count,), evaluated),
                "single": torch.full((count,), single),
                "film": filmed,
                "turn": torch.zeros(count, dtype=torch.int64),
            }
        )

    def note(self, result: StepResult) -> None:
        """Starts follow from the step alone."""

    def _state(self, number: int, count: int, evaluated: bool) -> int:
        """The initial state of a start; -1 where states have no numbers, and the seed decides.

        Rollouts of training begin once in each state before they begin in any twice; with automatic
        reset all episodes of a rollout begin in its state. An evaluation's starts are spread evenly
        over all states, and so over the tasks.
        """
        states = self.spec.num_initial_states
        if states is None:
            return -1
        if evaluated:
            place, spread = number - EVALUATED, count % states
            whole = count - spread  # of these each state has as many
            return place % states if place < whole else (place - whole) * states // spread
        return self._walked(8, number, states)

    def _walked(self, kind: int, number: int, states: int) -> int:
        """The state at a place of a walk that comes to each once before it comes to any twice."""
        epoch, place = divmod(number, states)
        random = torch.Generator().manual_seed(derive_seed(self.recipe.seed, kind, epoch))
        return int(torch.randperm(states, generator=random)[place])

    def _spares(self, number: int, draws: int) -> tuple[tuple[int, int], ...]:
        """Seed and initial state of the starts that may take a start's place, in order.

        Their states are of a walk of their own, whether the ones before are used or not.
        """
        states = self.spec.num_initial_states
        return tuple(
            (
                derive_seed(self.recipe.seed, 9, number, draw),
                -1 if states is None else self._walked(10, number * draws + draw, states),
            )
            for draw in range(draws)
        )

    # --- the figures ------------------------------------------------------------------------------

    def metrics(self, result: StepResult) -> dict[str, float]:
        """The figures of a training step, as metrics.jsonl names them."""
        figures = episode_figures(result.output)
        steps = float(sum(result.output["steps_taken"]))
        figures |= {"environment_steps": steps, "throughput/steps_per_s": steps / result.seconds}
        if self.recipe.algorithm.success_bounds is not None:
            dropped = sum(map(bool, result.output["dropped"]))
            figures["groups/dropped"] = float(dropped // self.recipe.group_size)
        if self.recipe.algorithm.further_draws:
            again = sum(result.output[TRIED])
            figures["groups/drawn_again"] = float(again // self.recipe.group_size)
        for name, value in result.metrics.items():
            figures[METRIC_NAMES.get(name, f"train/{name}")] = value
        return figures

    def evaluation(self, result: StepResult) -> dict[str, float]:
        """The figures of an evaluation; none where no episode came to an end."""
        figures = episode_figures(result.output)
        if not figures["episodes/finished"]:
            return {}
        names = {"episodes/success_once": "eval/success", "episodes/return": "eval/return",
                 "episodes/success": "eval/success_at_end", "episodes/length": "eval/length",
                 "episodes/finished": "eval/episodes",
                 "episodes/failed": "eval/failed"}  # fmt: skip
        return {ours: figures[name] for name, ours in names.items()}

    def success_by_task(self, starts: Batch, result: StepResult) -> dict[str, float]:
        """Share of an evaluation's episodes that solved each task; nothing where there is one task.

        Args:
            starts: those of the evaluation.
            result: of it.
        """
        found: dict[str, list[float]] = {name: [] for name, _ in self.spec.tasks}
        states = starts["initial_state"].tolist()
        for state, episodes in zip(states, result.output["episodes"], strict=True):
            if self.spec.tasks:
                found[self.spec.task_of(state)] += [one["success_once"] for one in episodes]
        return {name: sum(some) / len(some) for name, some in found.items() if some}

    def success_by_start(self, starts: Batch, result: StepResult) -> list[float]:
        """Share of successes of each numbered initial state, whose episodes depend on each other: a
        policy without chance does the same in all of them. Where states are not numbered each
        episode is one of its own.

        Args:
            starts: those of the evaluation.
            result: of it.
        """
        numbered = self.spec.num_initial_states is not None
        found: dict[int, list[float]] = {}
        rows = zip(starts["initial_state"].tolist(), result.output["episodes"], strict=True)
        for row, (state, episodes) in enumerate(rows):
            solved = [float(one["success_once"]) for one in episodes]
            if solved:
                found.setdefault(state if numbered else row, []).extend(solved)
        return [fmean(some) for some in found.values()]

    def samples(self, result: StepResult, count: int) -> list[dict[str, Any]]:
        """Nothing to read: episodes are filmed."""
        return []

    def rollouts(self, result: StepResult) -> list[dict[str, Any]]:
        """The figures of all rollouts of a step; what was seen and done stays on the lanes."""
        output = result.output.without("film")
        return [{"item": item, **output.row(row)} for row, item in enumerate(output.ids)]

    def alarms(self, result: StepResult) -> Sequence[str]:
        """That episodes were given up; how many, the metrics say of each step. That the policy is
        not to learn at all, or finds nothing to learn from in its groups.

        Raises:
            RunFailed: half of the step's episodes were, in half of its rollouts, once more in a row
                than `max_skipped_updates`.
        """
        failed = [int(count) for count in result.output["failed"]]
        finished = sum(len(some) for some in result.output["episodes"])
        bad = sum(failed) >= max(1, finished) and 2 * sum(map(bool, failed)) >= len(failed)
        self._failing = self._failing + 1 if bad else 0
        most = self.recipe.max_skipped_updates
        if self._failing > most:
            raise RunFailed(
                f"half or more of the episodes were given up in {self._failing} steps in a row "
                f"(max_skipped_updates: {most}): simulators crash, hang or give NaN; of step "
                f"{result.step + 1} it was {sum(failed)}, and {finished} came to an end"
            )
        found, still = [], self.recipe.algorithm.value_warmup_steps
        if still >= self.recipe.steps:
            found.append(
                f"the critic alone learns in all {self.recipe.steps} steps "
                f"(algorithm.value_warmup_steps: {still}): the policy stays as it is"
            )
        if self.recipe.algorithm.name == "sac" and not result.metrics.get("updates"):
            begin, there = self.recipe.replay.begin, result.metrics.get("replay", 0.0)
            if there / (result.step + 1) * self.recipe.steps < begin:
                found.append(
                    f"nothing will be learned: the buffer will not have replay.begin = {begin} "
                    f"transitions by the last of {self.recipe.steps} steps"
                )
        if any(failed):
            found.append("a simulator crashed, hung or gave NaN: its episode is not trained on")
            if not sum(result.output["steps_taken"]):
                found.append("no step is left of any episode: there is nothing to learn from")
        if self.recipe.algorithm.name == "grpo" and finished:
            self._silent = 0 if _teaches(result.output) else self._silent + 1
            if self._silent >= (SILENT_STEPS if result.step else 1):
                found.append(self._why_silent(result.output))
        return found

    def _why_silent(self, output: Batch) -> str:
        """In words why no group of a step teaches anything, and what helps."""
        algorithm = self.recipe.algorithm
        alike = f"in each group all episodes have the same {algorithm.reward}"
        if algorithm.success_bounds is not None:
            alike += ", or their share of successes is outside algorithm.success_bounds"
        if episode_figures(output)["episodes/success_once"] >= 0.5:
            return f"no group teaches anything: {alike}: take a harder task"
        helps = "take an easier task, a larger algorithm.group_size, or a policy that succeeds now "
        helps += "and then (warmup.steps)"
        if algorithm.reward == "success":
            helps += ", or compare returns (algorithm.reward: return)"
        return f"no group teaches anything: {alike}: {helps}"

    def films(self, result: StepResult) -> Sequence[Film]:
        """Films of an evaluation, where the environment can draw itself: solved episodes first."""
        both = zip(result.output["film"], result.output["episodes"], strict=True)
        found = [(film, episodes[0]["success_once"]) for film, episodes in both if film]
        found.sort(key=lambda one: -one[1])
        return [film for film, _ in found[: self.recipe.evaluation.films]]

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, run: Run, checkpoints: Path, step: int) -> None:
        """Write a checkpoint of the policy and its trainer."""
        checkpoint.sweep(checkpoints)
        keep = self.recipe.checkpoint.keep
        run.worker_call_everywhere("learner", "save_checkpoint", str(checkpoints), step, keep)


def spec_of(recipe: EmbodiedRecipe) -> EnvironmentSpec:
    """What the recipe's environment takes and gives, from one that is made for it.

    Raises:
        UserError: there is no such environment, it does not do what it says, nothing can draw its
            pictures, or there is no expert for the demonstrations.
    """
    section = recipe.environment
    if section.python is not None:
        return _spec_elsewhere(recipe, section.python)
    simulated = section.name, section.arguments
    # Refuses where nothing can draw. MuJoCo reads them when it is imported, by the maker.
    rendering.use_here(variables_of(*simulated), required=False)
    environment = made(section.name, maker(*simulated))
    if recipe.warmup.steps and recipe.warmup.data is None:
        expert_of(recipe, environment)
    if not section.has_processes:
        try_out(environment, section.name, min(recipe.deadline_seconds, Deadlines().reset))
    else:
        let_go(environment)
    return environment.spec


def _spec_elsewhere(recipe: EmbodiedRecipe, python: str) -> EnvironmentSpec:
    """The spec of an environment that another interpreter makes."""
    if shutil.which(python) is None:
        raise UserError(
            "is no program", key="environment.python", value=python, expected="an interpreter"
        )
    if recipe.warmup.steps and recipe.warmup.data is None:
        raise UserError(
            "demonstrations are played where the run is, which has not the simulator",
            key="warmup.steps",
            value=recipe.warmup.steps,
            expected="warmup.data, or 0 beside environment.python",
        )
    section = recipe.environment
    elsewhere = hosted(
        *(section.name, section.arguments, 1),
        processes=1,
        python=python,
        deadlines=section.hung_after,
    )
    elsewhere.close()
    return elsewhere.spec


def _teaches(output: Batch) -> bool:
    """Whether a rollout of a step was learned from that was better or worse than its group."""
    rows = zip(output["largest"], output["dropped"], strict=True)
    return any(largest["advantage"] != 0 and not dropped for largest, dropped in rows)


def episode_figures(output: Batch) -> dict[str, float]:
    """Means over the episodes that ended in a step's rollouts."""
    episodes = [one for some in output["episodes"] for one in some]
    names = ("return", "length", "success_once", "success")
    figures: dict[str, float] = {}
    if episodes:  # of none they would read 0
        figures = {f"episodes/{name}": fmean(one[name] for one in episodes) for name in names}
        figures |= {
            "reward/mean": figures["episodes/return"],
            "success/mean": figures["episodes/success_once"],
        }
    return figures | {
        "episodes/finished": float(len(episodes)),
        "episodes/failed": float(sum(int(count) for count in output["failed"])),
    }
