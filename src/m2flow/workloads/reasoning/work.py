"""What the stages of a reasoning recipe ask of a lane: the workload's `prices`.

Sizes come from the recipe, the model's shape from its configuration; neither weights nor data are
read. What only a run would show (how long prompts and answers are, what a reward costs) is assumed.
Each assumption is told, and so is whatever a price has that m2flow cannot do yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.worker import ONE_LANE, Layout
from m2flow.generation.supported import ENGINES
from m2flow.models.lengths import Answers, lengths_below
from m2flow.models.shape import WEIGHT_BYTES, ModelShape, read_model
from m2flow.models.work import (
    decoding,
    drawing_parameters,
    drawing_parts,
    lane_parameters,
    of_numbers,
    prefill,
)
from m2flow.plan.profile import Quantiles
from m2flow.plan.profile.hardware import Device
from m2flow.plan.profile.work import (
    FlowWork,
    Held,
    LayoutWork,
    Pricer,
    Rounds,
    StageWork,
    Work,
    WorkerWork,
    rising,
)
from m2flow.workloads.reasoning.algorithm_section import OF_GROUPS
from m2flow.workloads.reasoning.config import CACHE_SHARE, ReasoningRecipe
from m2flow.workloads.reasoning.passes import PassWork, number_bytes
from m2flow.workloads.reasoning.pieces import Pieces
from m2flow.workloads.reasoning.supported import (
    divides_by_heads,
    is_divided,
    judging_shape,
    shape_of,
)
from m2flow.workloads.reasoning.workers.source import by_heads, layout_of

PROMPT_TOKENS = 150
"""Of a question in words, with its template."""

ANSWER_SHARE = 0.27
"""Mean length of an answer over the longest that is allowed: 7,504 of 27,648 tokens in the run to
which the attained fractions of the hardware are fitted (RLinf, arXiv 2509.15965, GRPO on 7B)."""

ADDITION_SHARE = 0.55
"""`ANSWER_SHARE` of the addition task, whose answers take most of the room they are given."""

SHARE_AT_LIMIT = 0.02
"""Of the answers that are cut off; fewer where the mean is far below the limit."""

LEAST_TOLD = 1e-4
"""A share below which hardly any are."""

BYTES_PER_TOKEN = 4
"""Of text in words: a model that reads bytes sees so many times as many tokens."""

SCORE_SECONDS, ADDITION_SCORE_SECONDS = 1e-3, 20e-6
"""To score one answer by a rule; to compare two sums."""

EQUAL_SHARE = 0.3
"""Of the groups whose rewards are all the same, so that nothing is learned from them."""

JUDGE_TEMPLATE_TOKENS = 100
"""Of what a judge is asked, beside question, right answer and answer."""

CALL_SECONDS = 1e-3
"""Of a call of a stage that computes nothing on the device."""

GROUP_SECONDS = 2e-6
"""Of an advantage, for each sample."""

CRITIC = "critic"
"""The worker that says what states are worth."""

KEYS_AND_VALUES = "keys and values"

RUNNING = (64, 128)
"""Limits on running requests that are offered beside the recipe's own, where they are lower."""

QUANTILES = 129
"""Of answer lengths; the last of them still tells cut answers from long ones."""

BY_TRANSFORMERS = "transformers' own forward pass costs what the native engine's would"

LATENT = "attention of keys and values from a compressed state costs what plain attention would"

DECODING = "decoding steps of captured graphs, whose scheduling and sampling take no time"

DECODING_TOGETHER = "such decoding steps of generation on several lanes"

PREFILL_TOKENS = 8192
"""Of prompts, that the native engine computes together at most."""


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
    pieces = pieces_of(recipe, answers)
    if pieces is not None:
        most = recipe.generation.tokens_per_step
        assumed += (f"groups end after {pieces.steps:.2g} steps of {most} tokens in the mean",)
    equal = equal_share(recipe)
    trained = (1 - equal) / (1.0 if pieces is None else pieces.steps)
    assumed += told_of_equal_groups(recipe, equal)
    judges = judging_works(recipe, answers)
    if "judge" in judges:
        written = judges["judge"].answers.lengths.mean
        assumed += (f"judgements of {written:.0f} tokens in the mean",)
    assumed += (f"{score_seconds(recipe) * 1e3:g} ms to score an answer, on one lane",)
    if shape.latent_attention:
        assumed += (LATENT,)
    source = model or recipe.model.path
    divided = source is None or is_divided(str(source))
    if not divided:
        assumed += (BY_TRANSFORMERS,)
    divided = divided and ENGINES[recipe.generation.engine].divides
    by_heads = divides_by_heads(recipe, None if model is None else str(model))
    return lambda device, lanes: RecipeWork(
        recipe, shape, answers, device, lanes, divided, judges, by_heads, pieces, trained
    ).work(graph, assumed)


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
    for key, said in (("--prompt-tokens", prompt_tokens), ("--answer-tokens", answer_tokens)):
        if said is not None and not math.isfinite(said):
            raise UserError("is not finite", key=key, value=said)
    if prompt_tokens is None:
        prompt_tokens = PROMPT_TOKENS * (BYTES_PER_TOKEN if bytes_read else 1)
        if addition:
            prompt_tokens = 2 * recipe.data.options.get("max_digits", 4) + 2
        assumed.append(f"prompts of {prompt_tokens:g} tokens")
    if answer_tokens is None:
        answer_tokens = (ADDITION_SHARE if addition else ANSWER_SHARE) * longest
        assumed.append(f"answers of {answer_tokens:.0f} tokens in the mean, of {longest} at most")
    try:
        lengths = lengths_below(answer_tokens, longest, SHARE_AT_LIMIT)
    except UserError as error:
        raise UserError(
            "no answers are so long in the mean under this limit",
            key="--answer-tokens",
            value=answer_tokens,
            expected=error.expected,
        ) from None
    cut = lengths.above(longest)
    share = "hardly any" if cut < LEAST_TOLD else f"{100 * cut:.2g}%"
    assumed.append(f"lengths are log-normal, {share} of the answers reach the limit")
    return Answers(prompt_tokens, lengths), tuple(assumed)


def pieces_of(recipe: ReasoningRecipe, answers: Answers) -> Pieces | None:
    """Return what a step draws where answers go on in later steps; None where they end in it."""
    most = recipe.generation.tokens_per_step
    return None if most is None else Pieces.of(answers.lengths, most, recipe.samples_per_prompt)


def equal_share(recipe: ReasoningRecipe) -> float:
    """Return the share of the groups that training leaves out, as their rewards are all the same.

    Rewards of models that judge hardly ever are, nor those with a KL.
    """
    algorithm = recipe.algorithm
    by_models = recipe.reward_model.path is not None or recipe.judge.path is not None
    if algorithm.name not in OF_GROUPS or by_models:
        return 0.0
    learns = algorithm.kl_coefficient or algorithm.entropy_coefficient or algorithm.scale == "step"
    idle = recipe.training.drop_zero_advantage and not learns
    left_out = idle or algorithm.equal_groups == "drop"
    return EQUAL_SHARE ** (1 + recipe.further_draws) if left_out else 0.0


def told_of_equal_groups(recipe: ReasoningRecipe, equal: float) -> tuple[str, ...]:
    """Say what is assumed of them."""
    said = f"{EQUAL_SHARE:.0%} of the groups teach nothing"
    if recipe.further_draws:
        return (f"{said} and are drawn again",)
    return (f"{said}, and training leaves them out",) if equal else ()


def score_seconds(recipe: ReasoningRecipe) -> float:
    """Return the seconds that scoring one answer takes."""
    return ADDITION_SCORE_SECONDS if recipe.data.task == "addition" else SCORE_SECONDS


@dataclass(frozen=True)
class JudgeWork:
    """A model that judges.

    Attributes:
        model: its shape.
        answers: what it reads of each answer, and writes.
        dtype: that it computes in, as recipes have it.
        max_running: judgements that it draws at a time; 0 for a classifier, which draws none.
        divided: whether drawing divides it over several lanes.
    """

    model: ModelShape
    answers: Answers
    dtype: str
    max_running: int = 0
    divided: bool = True


def judging_works(recipe: ReasoningRecipe, answers: Answers) -> dict[str, JudgeWork]:
    """Return the models that judge, by the name of their worker.

    Raises:
        UserError: nobody knows the shape of one.
    """
    found: dict[str, JudgeWork] = {}
    judge = recipe.judge
    if (path := recipe.reward_model.path) is not None:
        shape = judging_shape(path, "reward_model.path")
        dtype = recipe.reward_model.dtype
        found["reward_model"] = JudgeWork(replace(shape, outputs=1), answers, dtype)
    if judge.path is not None:
        asked = JUDGE_TEMPLATE_TOKENS + answers.prompt_tokens + answers.lengths.mean
        lengths = lengths_below(
            ANSWER_SHARE * judge.max_new_tokens, judge.max_new_tokens, SHARE_AT_LIMIT
        )
        shape = judging_shape(judge.path, "judge.path")
        found["judge"] = JudgeWork(
            shape,
            Answers(asked, lengths),
            judge.dtype,
            judge.max_running,
            is_divided(judge.path),
        )
    return found


@dataclass(frozen=True)
class RecipeWork:
    """A recipe's sizes, and one kind of lane.

    Attributes:
        recipe: every setting.
        model: the shape of the policy.
        answers: what is read and drawn.
        device: of each lane.
        lanes: how many there are.
        divided: whether generation divides the model over several lanes.
        judges: models that judge, by worker.
        by_heads: whether trainers divide the model by heads.
        pieces: what a step draws of answers that go on in later ones; None where they end in it.
        trained: share of the answers that are trained on.
    """

    recipe: ReasoningRecipe
    model: ModelShape
    answers: Answers
    device: Device
    lanes: int
    divided: bool = True
    judges: Mapping[str, JudgeWork] = field(default_factory=dict)
    by_heads: bool = True
    pieces: Pieces | None = None
    trained: float = 1.0

    def work(self, graph: FlowGraph, assumed: tuple[str, ...]) -> FlowWork:
        stages = {node.name: self._stage(node) for node in graph.nodes}
        workers = {worker: self._worker(worker, graph) for worker in graph.workers}
        if self.device.kind == "gpu":
            assumed += (DECODING if self._captures else _not_yet(DECODING),)
            gangs = [one for one in self._heads_divided() if one.lanes > 1 and not one.obstacle()]
            streams = any(node.method == "generate" for node in graph.nodes)  # turns: on one lane
            if streams and self._captures and self.recipe.generation.engine == "native" and gangs:
                assumed += (_not_yet(f"{DECODING_TOGETHER} ({gangs[0].name} and more)"),)
        return FlowWork(stages, workers, self.model.name, assumed)

    @property
    def _captures(self) -> bool:
        """Whether generation replays its decode steps on this device."""
        own = self.recipe.generation.engine == "native"
        can = self.divided and not self.model.experts and self.recipe.generation.captured_decode
        return can or not own

    @property
    def _drawn_number(self) -> int:
        return number_bytes(self.recipe.generation.dtype or self.recipe.model.dtype, self.device)

    @property
    def drawn_weight_bytes(self) -> float:
        """Return the bytes of the weights that generation computes with."""
        return float(self.model.parameters * self._drawn_number)

    @property
    def _published_bytes(self) -> float:
        """Return the bytes of a version as the learner has it: of a whole model, or of adapters."""
        learner = self._passes("learner")
        merged = self.recipe.model.lora_publish == "merged"
        return float(learner.number * (self.model.parameters if merged else learner.adapters or 0))

    def _stage(self, node: StageNode) -> StageWork:
        """Describe one stage, by what its method is called."""
        size = 16 * self.answers.tokens  # ids, log-probabilities, masks
        match node.method:
            case "score" if node.worker in self.judges:
                return self._judging(self.judges[node.worker], size)
            case "generate":
                section = self.recipe.generation
                return self._drawing(
                    size,
                    section.max_running,
                    section.cache_gb,
                    in_state=self.caches_in_state,
                )
            case "draw_again":
                share = EQUAL_SHARE ** (1 + node.options["draw"])
                return StageWork(
                    tuple(self._again(one, share) for one in self._heads_divided()), size
                )
            case "logprobs" | "values":
                own = self._passes(node.worker)
                passing = [own.passing(one, own.at_a_time) for one in own.divisions()]
                return StageWork(tuple(passing), size)
            case "train":
                own = self._passes(node.worker)
                return StageWork(tuple(map(own.training, own.divisions())), size)
        scores = node.method in ("score", "score_again")
        each = score_seconds(self.recipe) if scores else GROUP_SECONDS
        return StageWork((LayoutWork(call=lambda n: Work(seconds=CALL_SECONDS + n * each)),))

    def _passes(self, name: str | None) -> PassWork:
        """Return what a worker asks that computes whole answers: a critic has the policy's body
        with one output, and is trained in full."""
        recipe, model = self.recipe, self.model
        if name == CRITIC:
            full = recipe.model.model_copy(update={"lora_rank": 0})
            recipe = recipe.model_copy(update={"model": full})
            model = replace(model, outputs=1)
        return PassWork(
            recipe, model, self.answers, self.device, self.lanes, self.by_heads, self.trained
        )

    def _of(self, judging: JudgeWork) -> RecipeWork:
        """Return the same of a model that judges, in the policy's place."""
        generation = self.recipe.generation.model_copy(update={"dtype": judging.dtype})
        section = self.recipe.model.model_copy(update={"dtype": judging.dtype})
        return replace(
            self,
            recipe=self.recipe.model_copy(update={"generation": generation, "model": section}),
            model=judging.model,
            answers=judging.answers,
            divided=judging.divided,
            pieces=None,
        )

    def _judging(self, judging: JudgeWork, size: float) -> StageWork:
        own = self._of(judging)
        if judging.max_running:
            return own._drawing(size, judging.max_running, self.recipe.judge.cache_gb)
        at_a_time, passes = self.recipe.reward_model.tokens_per_microbatch, own._passes(None)
        layouts = [passes.passing(one, at_a_time, packs=False) for one in passes.in_shards()]
        return StageWork(tuple(layouts), size)

    def _judging_state(self, judging: JudgeWork) -> WorkerWork:
        """Return the weights of a model that judges."""
        model, own = judging.model, self._of(judging)
        if judging.max_running:
            divided = own._heads_divided()
            kept = [(one, drawing_parameters(model, one.lanes)) for one in divided]
        else:
            shards = self._passes(None).in_shards()
            kept = [(layout_of(one, None), lane_parameters(model, one)) for one in shards]
        each = own._drawn_number
        return WorkerWork([(one, {"weights": float(each * count)}) for one, count in kept])

    def _drawing(
        self,
        size: float,
        max_running: int,
        cache_gb: float | None,
        *,
        in_state: bool = False,
    ) -> StageWork:
        drawn = self.answers.lengths.stratified(4 * QUANTILES)
        if self.pieces is not None:
            drawn = list(self.pieces.drawn)
        lengths = Quantiles.of(drawn, QUANTILES)
        reserved = self.reserved(cache_gb)
        layouts = [
            self._generating(one, max_running, reserved, in_state) for one in self._heads_divided()
        ]
        return StageWork(tuple(layouts), size, lengths)

    def _again(self, layout: Layout, share: float) -> LayoutWork:
        """Describe a call that draws a share of its samples again, until the last has ended."""
        answers, lanes = self.answers, layout.lanes
        most = self.recipe.generation.max_running

        def work(samples: int) -> Work:
            count = samples * share
            steps = answers.lengths.maximum * max(1.0, count / most)
            running = max(1.0, count * answers.lengths.mean / steps)
            step = self.decoding(running, running * answers.tokens / 2, lanes)
            prompts = answers.prompt_tokens * count / self.recipe.samples_per_prompt
            begin = self.prefill(prompts, answers.prompt_tokens / 2, lanes)
            return replace(begin, then=(*begin.then, step.times(steps)))

        held = answers.longest * self.token_bytes(lanes)

        def working(samples: int) -> Held:
            count = 0.0 if self.caches_in_state else min(samples * share, most)
            return {KEYS_AND_VALUES: count * held}

        return LayoutWork(layout, work, working_bytes=working)

    def _worker(self, name: str, graph: FlowGraph) -> WorkerWork:
        if name in self.judges:
            return self._judging_state(self.judges[name])
        methods = {node.method for node in graph.nodes if node.worker == name}
        if "generate" in methods:
            return self.generator(self._heads_divided())
        return self._passes(name).state(methods)

    def _heads_divided(self) -> Sequence[Layout]:
        """Return the layouts of generation: tensor-parallel within a machine, if divided at all."""
        if not self.divided:
            return [ONE_LANE]
        sizes = [n for n in rising(min(self.lanes, self.device.lanes_per_node)) if n & (n - 1) == 0]
        return [by_heads(n, self.model.kv_heads) for n in sizes]

    def decoding(self, running: float, kv_tokens: float, lanes: int = 1) -> Work:
        """Return `m2flow.models.work.decoding` with the numbers that are generated with."""
        return of_numbers(decoding(self.model, running, kv_tokens, lanes), self._drawn_number)

    def prefill(self, tokens: float, context: float, lanes: int = 1) -> Work:
        """Return `m2flow.models.work.prefill` with the numbers that are generated with."""
        return of_numbers(prefill(self.model, tokens, context, lanes), self._drawn_number)

    def token_bytes(self, lanes: int) -> float:
        """Return the bytes of a token's keys and values on each of so many lanes."""
        return self.model.kv_bytes_on_lane(lanes) * self._drawn_number / WEIGHT_BYTES

    def reserved(self, cache_gb: float | None) -> float | None:
        """Return what an engine takes for keys and values at once; None for what it needs."""
        if cache_gb is not None:
            return 1e9 * cache_gb
        return CACHE_SHARE * self.device.memory_bytes if self.device.kind == "gpu" else None

    def drawing_beside(self, running: int, read: float, lanes: int = 1) -> dict[str, float]:
        """Return what generation takes beside state, keys and values.

        Args:
            running: requests that decode together.
            read: tokens of prompts that come together.
            lanes: of a replica.
        """
        together = min(PREFILL_TOKENS, math.ceil(read))
        return drawing_parts(self.model, running, together, lanes, self._drawn_number)

    @property
    def caches_in_state(self) -> bool:
        """Whether generation's keys and values are a part of its worker's state: an engine of
        another package has taken them when it is there, and gives them up when it steps aside."""
        generation = self.recipe.generation
        return generation.engine != "native" and self.reserved(generation.cache_gb) is not None

    def generator(self, layouts: Sequence[Layout]) -> WorkerWork:
        """Return the state of the worker that generates, and what is published to it."""
        cache = self.reserved(self.recipe.generation.cache_gb) if self.caches_in_state else None
        cached = {} if cache is None else {KEYS_AND_VALUES: cache}
        each = self._drawn_number
        states = [
            (one, {"weights": each * drawing_parameters(self.model, one.lanes), **cached})
            for one in layouts
        ]
        return WorkerWork(states, self._published_bytes, dropped=tuple(cached))

    def _generating(
        self, layout: Layout, own: int, reserved: float | None, in_state: bool
    ) -> LayoutWork:
        recipe, pieces = self.recipe, self.pieces
        prompt, lanes, there = self.answers.prompt_tokens, layout.lanes, 0.0
        if pieces is not None:
            there = pieces.there

        def admit(prompts: int) -> Work:
            begin = self.prefill(prompts * prompt, prompt / 2, lanes)
            if pieces is None:
                return begin
            begun = prompts * recipe.samples_per_prompt * there
            again = self.prefill(begun, prompt + pieces.context, lanes)
            return replace(begin, then=(*begin.then, again))

        rounds = Rounds(
            admit=admit,
            round=lambda running, tokens: self.decoding(running, tokens, lanes),
            start=prompt + there,
            longest=self.answers.longest,
            unit_bytes=self.token_bytes(lanes),
            limits=(*(limit for limit in RUNNING if limit < own), own),
            what=KEYS_AND_VALUES,
            reserved_bytes=reserved,
            in_state=in_state,
        )
        running = min(own, recipe.samples_per_step)
        read = recipe.prompts_per_step * prompt + recipe.samples_per_step * there
        beside = self.drawing_beside(running, read, lanes)
        return LayoutWork(layout, working_bytes=lambda _prompts: beside, rounds=rounds)


def _not_yet(what: str) -> str:
    return f"{what}: m2flow cannot do this yet"
