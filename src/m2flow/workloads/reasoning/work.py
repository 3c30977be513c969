"""What the stages of a reasoning recipe ask of a lane: the workload's `prices`.

Sizes come from the recipe, the model's shape from its configuration; neither weights nor data are
read. What only a run would show (how long prompts and answers are, what a reward costs) is assumed.
Each assumption is told, and so is whatever a price has that m2flow cannot do yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.models.lengths import Answers, fit_lengths
from m2flow.models.shape import WEIGHT_BYTES, ModelShape, read_model
from m2flow.models.work import (
    HOST_STEP_BYTES,
    HOSTED_BYTES,
    TRAINED_BYTES,
    decoding,
    forward_pass,
    lane_parameters,
    prefill,
    training_bytes,
    training_pass,
    update,
)
from m2flow.plan.profile import Quantiles
from m2flow.plan.profile.hardware import Device
from m2flow.plan.profile.work import (
    FlowWork,
    LayoutWork,
    Pricer,
    Rounds,
    StageWork,
    Work,
    WorkerWork,
    rising,
)
from m2flow.training.division import Division
from m2flow.workloads.reasoning.config import ReasoningRecipe
from m2flow.workloads.reasoning.supported import is_divided, shape_of
from m2flow.workloads.reasoning.workers.source import by_heads, layout_of

PROMPT_TOKENS = 150
"""Of a question in words, with its template."""

ANSWER_SHARE = 0.27
"""Mean length of an answer over the longest that is allowed: 7,504 of 27,648 tokens in the run to
which the attained fractions of the hardware are fitted (RLinf, arXiv 2509.15965, GRPO on 7B)."""

ADDITION_SHARE = 0.55
"""The same of the addition task, whose answers take most of the room they are given."""

SHARE_AT_LIMIT = 0.02
"""Of the answers that are cut off."""

BYTES_PER_TOKEN = 4
"""Of text in words: a model that reads bytes sees so many times as many tokens."""

SCORE_SECONDS, ADDITION_SCORE_SECONDS = 1e-3, 20e-6
"""To score one answer by a rule; to compare two sums."""

CALL_SECONDS = 1e-3
"""Of a call of a stage that computes nothing on the device."""

GROUP_SECONDS = 2e-6
"""Of an advantage, for each sample."""

RUNNING = (64, 128)
"""Limits on running requests that are offered beside the recipe's own, where they are lower."""

QUANTILES = 129
"""Of answer lengths; the last of them still tells cut answers from long ones."""

DECODING = "decoding steps of captured graphs (1.5 ms beside memory and arithmetic)"


def prices(
    recipe: ReasoningRecipe,
    graph: FlowGraph,
    model: str | Path | None = None,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
) -> Pricer:
    """Return what the stages of a recipe's flow ask of each kind of lane.

    Args:
        recipe: every size.
        graph: its flow.
        model: a folder, a `config.json` or a known name; None: the recipe's own model.
        prompt_tokens, answer_tokens: means, where they are known.

    Raises:
        UserError: the model's shape is not known, or no such lengths can be.
    """
    shape = shape_of(recipe) if model is None else read_model(model)
    answers, assumed = answers_of(recipe, model, prompt_tokens, answer_tokens)
    assumed += (f"{score_seconds(recipe) * 1e3:g} ms to score an answer, on one lane",)
    source = model or recipe.model.path
    divided = source is None or is_divided(str(source))
    if not divided:
        assumed += ("transformers' own forward pass costs what the native engine's would",)
    return lambda device, lanes: RecipeWork(recipe, shape, answers, device, lanes, divided).work(
        graph, assumed
    )


def answers_of(
    recipe: ReasoningRecipe,
    model: str | Path | None,
    prompt_tokens: float | None,
    answer_tokens: float | None,
) -> tuple[Answers, tuple[str, ...]]:
    """Lengths, and what was assumed of them."""
    longest = recipe.generation.max_new_tokens
    addition = recipe.data.task == "addition"
    bytes_read = model is None and recipe.model.path is None and not addition
    assumed: list[str] = []
    if prompt_tokens is None:
        prompt_tokens = PROMPT_TOKENS * (BYTES_PER_TOKEN if bytes_read else 1)
        if addition:
            prompt_tokens = 2 * recipe.data.options.get("max_digits", 4) + 2
        assumed.append(f"prompts of {prompt_tokens:g} tokens")
    if answer_tokens is None:
        answer_tokens = (ADDITION_SHARE if addition else ANSWER_SHARE) * longest
        assumed.append(f"answers of {answer_tokens:.0f} tokens in the mean, of {longest} at most")
    assumed.append(f"lengths are log-normal, {SHARE_AT_LIMIT:.0%} of the answers reach the limit")
    try:
        lengths = fit_lengths(answer_tokens, longest, SHARE_AT_LIMIT)
    except UserError as error:
        raise UserError(
            "no answers are so long in the mean under this limit",
            key="--answer-tokens",
            value=answer_tokens,
            expected=error.expected,
        ) from None
    return Answers(prompt_tokens, lengths), tuple(assumed)


def score_seconds(recipe: ReasoningRecipe) -> float:
    """Return the seconds that scoring one answer takes."""
    return ADDITION_SCORE_SECONDS if recipe.data.task == "addition" else SCORE_SECONDS


@dataclass(frozen=True)
class RecipeWork:
    """A recipe's sizes, and one kind of lane."""

    recipe: ReasoningRecipe
    model: ModelShape
    answers: Answers
    device: Device
    lanes: int
    divided: bool = True

    def work(self, graph: FlowGraph, assumed: tuple[str, ...]) -> FlowWork:
        stages = {node.name: self._stage(node) for node in graph.nodes}
        workers = {worker: self._worker(worker, graph) for worker in graph.workers}
        if self.device.kind == "gpu":
            assumed += (_not_yet(DECODING),)
        return FlowWork(stages, workers, self.model.name, assumed)

    def _stage(self, node: StageNode) -> StageWork:
        """Describe one stage, by what its method is called."""
        size = 16 * self.answers.tokens  # ids, log-probabilities, masks
        match node.method:
            case "generate":
                lengths = Quantiles.of(self.answers.lengths.stratified(4 * QUANTILES), QUANTILES)
                return StageWork(tuple(map(self._generating, self._heads_divided())), size, lengths)
            case "logprobs" | "values":
                return StageWork(tuple(map(self._passing, self._divisions())), size)
            case "train":
                return StageWork(tuple(map(self._training, self._divisions())), size)
        each = score_seconds(self.recipe) if node.method == "score" else GROUP_SECONDS
        return StageWork((LayoutWork(call=lambda n: Work(seconds=CALL_SECONDS + n * each)),))

    def _worker(self, name: str, graph: FlowGraph) -> WorkerWork:
        methods = {node.method for node in graph.nodes if node.worker == name}
        size = float(self.model.weight_bytes)
        if "generate" in methods:
            return WorkerWork([(one, size / one.lanes) for one in self._heads_divided()], size)
        if not methods & {"logprobs", "values", "train"}:
            return WorkerWork(())
        each, beside = WEIGHT_BYTES, 0
        if "train" in methods and (rank := self.recipe.model.lora_rank):
            beside = TRAINED_BYTES * self.model.adapter_parameters(rank)
        elif "train" in methods:
            each = TRAINED_BYTES - (HOSTED_BYTES if self.recipe.training.optimizer_on_host else 0)
        return WorkerWork(
            [
                (
                    layout_of(one, self.model),
                    each * lane_parameters(self.model, one) + beside / one.lanes,
                )
                for one in self._divisions()
            ]
        )

    def _heads_divided(self) -> Sequence[Layout]:
        """Return the layouts of generation: tensor-parallel within a machine; vLLM has one lane."""
        if self.recipe.generation.engine == "vllm" or not self.divided:
            return [ONE_LANE]
        sizes = [n for n in rising(min(self.lanes, self.device.lanes_per_node)) if n & (n - 1) == 0]
        return [by_heads(n, self.model.kv_heads) for n in sizes]

    def _divisions(self) -> Iterator[Division]:
        """Yield the layouts of training and passes; those that exchange much, within a machine."""
        near = min(self.lanes, self.device.lanes_per_node)
        some = [2**n for n in range(1, near.bit_length())]
        yield from (Division(fsdp=n) for n in rising(self.lanes))
        if self.recipe.model.lora_rank:
            return
        for tp in () if self.model.experts else some:
            yield Division(tp=tp)
            if layout_of(Division(tp=tp), self.model).obstacle() is None:
                shards = [2**n for n in range(1, (self.lanes // tp).bit_length())]
                yield from (Division(tp=tp, fsdp=fsdp) for fsdp in shards)
        yield from (Division(cp=n) for n in some)
        if self.model.experts:
            yield from (Division(ep=n) for n in rising(self.lanes) if n > 1)

    def _generating(self, layout: Layout) -> LayoutWork:
        model, prompt, lanes = self.model, self.answers.prompt_tokens, layout.lanes
        own = self.recipe.generation.max_running
        rounds = Rounds(
            admit=lambda prompts: prefill(model, prompts * prompt, prompt / 2, lanes),
            round=lambda running, tokens: decoding(model, running, tokens, lanes),
            start=prompt,
            unit_bytes=model.kv_bytes_on_lane(lanes),
            limits=(*(limit for limit in RUNNING if limit < own), own),
        )
        return LayoutWork(layout, rounds=rounds)

    def _microbatch(self) -> float:
        """Return the tokens that a lane computes at a time in the mean."""
        return max(self.recipe.training.tokens_per_microbatch, self.answers.tokens)

    def _packed(self, count: int, division: Division) -> int:
        """Return the most tokens of so many answers that a lane computes at a time."""
        longest = math.ceil(self.answers.longest / division.cp)
        return min(max(self.recipe.training.tokens_per_microbatch, longest), count * longest)

    def _passing(self, division: Division) -> LayoutWork:
        model = self.model
        return LayoutWork(
            layout_of(division, model),
            lambda n: forward_pass(model, self.answers, n, division, self._microbatch()),
            working_bytes=lambda n: training_bytes(
                model, division, self._packed(n, division), True
            ),
        )

    def _training(self, division: Division) -> LayoutWork:
        model = self.model
        recomputes = self.recipe.training.checkpoints_on(self.device.kind)
        return LayoutWork(
            layout_of(division, model),
            lambda n: training_pass(
                model, self.answers, n, division, self._microbatch(), recomputes
            ),
            lambda replicas: self._update(division, replicas),
            lambda n: training_bytes(model, division, self._packed(n, division), recomputes),
        )

    def _update(self, division: Division, replicas: int) -> Work:
        work = update(self.model, division, replicas)
        if not self.recipe.training.optimizer_on_host or self.recipe.model.lora_rank:
            return work
        moved = HOST_STEP_BYTES * lane_parameters(self.model, division)
        return replace(work, read_bytes=0.0, seconds=self.device.host_copy_seconds(moved))


def _not_yet(what: str) -> str:
    return f"{what}: m2flow cannot do this yet"
