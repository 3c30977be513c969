"""What the stages of an agentic recipe ask of a lane: those of reasoning, with turns and tools.

A turn is one call of the generator for all trajectories that are there: it reads all that stands
before, and decodes until the longest of the turns has ended. What only a run would show (how many
turns there are, how long they and the tools' answers are, what a call of a tool takes) is assumed,
and each assumption is told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from m2flow.errors import UserError
from m2flow.flow.graph import FlowGraph, StageNode
from m2flow.flow.worker import ONE_LANE
from m2flow.models.lengths import lengths_below
from m2flow.models.shape import read_model
from m2flow.plan.profile import Quantiles
from m2flow.plan.profile.hardware import Device
from m2flow.plan.profile.work import (
    FlowWork,
    LayoutWork,
    Pricer,
    StageWork,
    Work,
)
from m2flow.workloads.agentic.config import SMALL_TASKS, AgenticRecipe, ToolPart
from m2flow.workloads.common.workload import Assumed
from m2flow.workloads.reasoning.supported import divides_by_heads, is_divided, shape_of
from m2flow.workloads.reasoning.work import (
    BY_TRANSFORMERS,
    CALL_SECONDS,
    GROUP_SECONDS,
    KEYS_AND_VALUES,
    LATENT,
    SHARE_AT_LIMIT,
    RecipeWork,
    answers_of,
    equal_share,
    score_seconds,
    told_of_equal_groups,
)

TURN_SHARE, RESULT_SHARE = 0.4, 0.5
"""Mean length of a turn, and of a tool's answer, over the longest that is allowed."""

SMALL_PROMPT_TOKENS = 16
"""Of the small tasks that come with m2flow."""

CALL_OF_TOOL_SECONDS = 2e-4
"""Of any call, beside what the tool does."""

TOOL_SECONDS = {"calculator": CALL_OF_TOOL_SECONDS, "search": 5e-3, "python": 0.15}
"""Of a call: a formula; a query over a corpus that is not here; a program with its sandbox. What
another tool takes nobody knows."""

SEARCH_SECONDS_PER_BYTE = 4e-11
"""Of a query, of each byte of the corpus: 7 to 40 ms over a million passages of 600 bytes."""

OTHER_TOOL_SECONDS = 0.2


def prices(recipe: AgenticRecipe, graph: FlowGraph, assumed: Assumed) -> Pricer:
    """Return what the stages of a recipe's flow ask of each kind of lane.

    Args:
        recipe: every size.
        graph: its flow.
        assumed: the model, and mean lengths of prompts and of what the model draws in all turns.

    Raises:
        UserError: the model's shape is not known, or no such lengths can be.
    """
    if recipe.agent is not None:
        raise UserError(
            "what an agent of yours takes is in no data sheet",
            key="--cluster",
            hint="measure it: m2flow profile RECIPE, or a run in mode auto",
        )
    shape = shape_of(recipe) if assumed.model is None else read_model(assumed.model)
    episode, turn = recipe.episode, recipe.generation.max_new_tokens
    turns = (1 + episode.max_turns) / 2
    drawn = turns * TURN_SHARE * turn
    if assumed.answer_tokens is not None:
        drawn = assumed.answer_tokens
        if not drawn < episode.max_turns * turn:
            raise UserError(
                "no trajectories draw so many tokens in the mean under these limits",
                key="--answer-tokens",
                value=drawn,
                expected=f"less than episode.max_turns x generation.max_new_tokens = "
                f"{episode.max_turns * turn}",
            )
    result = RESULT_SHARE * episode.max_result_tokens
    whole = min(drawn + (turns - 1) * result, 0.9 * episode.max_tokens)
    limited = recipe.model_copy(
        update={"generation": recipe.generation.model_copy(
            update={"max_new_tokens": episode.max_tokens}
        )}
    )  # fmt: skip
    prompt_tokens = assumed.prompt_tokens
    if prompt_tokens is None and recipe.data.task in SMALL_TASKS:
        prompt_tokens = SMALL_PROMPT_TOKENS
    answers, told = answers_of(limited, assumed.model, prompt_tokens, whole)
    seconds = max(map(_tool_seconds, recipe.tools))
    told += (
        f"{turns:g} turns of a trajectory in the mean, {drawn / turns:.0f} tokens drawn in each",
        f"{result:.0f} tokens of a tool's answer, after {seconds * 1e3:g} ms",
        f"all that stands behind a prompt: {whole:.0f} tokens in the mean",
        f"{score_seconds(recipe) * 1e3:g} ms to score a trajectory, on one lane",
    )
    equal = equal_share(recipe) if recipe.turn_reward is None else 0.0
    told += told_of_equal_groups(recipe, equal)
    lengths = lengths_below(min(drawn / turns, 0.95 * turn), turn, SHARE_AT_LIMIT)
    each = AssumedTurns(
        episode.max_turns, seconds, episode.tool_concurrency, tuple(lengths.stratified(64))
    )

    if shape.latent_attention:
        told += (LATENT,)
    source = assumed.model or recipe.model.path
    divided = source is None or is_divided(source)
    if not divided:
        told += (BY_TRANSFORMERS,)
    by_heads = divides_by_heads(recipe, assumed.model)

    def work(device: Device, lanes: int) -> FlowWork:
        base = RecipeWork(
            recipe, shape, answers, device, lanes, divided, by_heads=by_heads, trained=1 - equal
        )
        return _with_turns(base.work(graph, told), base, graph, each)

    return work


def _tool_seconds(part: ToolPart) -> float:
    """What a call of a tool takes."""
    from m2flow.tools.search import corpus_file

    if part.tool == "search" and "corpus" in part.options:
        file = corpus_file(str(part.options["corpus"]))
        if file is not None and file.is_file():
            return CALL_OF_TOOL_SECONDS + SEARCH_SECONDS_PER_BYTE * file.stat().st_size
    return TOOL_SECONDS.get(part.tool, OTHER_TOOL_SECONDS)


@dataclass(frozen=True)
class AssumedTurns:
    """What is assumed of turns.

    Attributes:
        most: of a trajectory.
        tool_seconds: of a call of a tool.
        concurrency: calls carried out at a time.
        lengths: tokens drawn in a turn, the shortest first, for equal shares of the turns.
    """

    most: int
    tool_seconds: float
    concurrency: int
    lengths: tuple[float, ...]


def _with_turns(
    work: FlowWork, base: RecipeWork, graph: FlowGraph, turns: AssumedTurns
) -> FlowWork:
    """The work of a reasoning flow with that of the loop's stages."""
    stages = {node.name: _stage(work.stages[node.name], node, base, turns) for node in graph.nodes}
    workers = {**work.workers, "generator": base.generator([ONE_LANE])}
    return replace(work, stages=stages, workers=workers)


def _stage(found: StageWork, node: StageNode, base: RecipeWork, turns: AssumedTurns) -> StageWork:
    size = 16 * base.answers.tokens
    match node.method:
        case "turn":
            drawing = LayoutWork(
                call=lambda n: _turn(base, turns, n),
                working_bytes=lambda n: _turn_bytes(base, n),
            )
            return StageWork((drawing,), size, turns=_spread(turns.most))
        case "call":

            def seconds(n: int) -> float:
                rounds = -(-n // turns.concurrency)
                return CALL_SECONDS + rounds * turns.tool_seconds + n * GROUP_SECONDS

            return StageWork((LayoutWork(call=lambda n: Work(seconds=seconds(n))),), size)
    return found


def _turn_bytes(base: RecipeWork, count: int) -> dict[str, float]:
    """Bytes that one turn of so many trajectories takes beside the state."""
    running = min(count, base.recipe.generation.max_running)
    beside = base.drawing_beside(running, count * base.answers.tokens)
    return {KEYS_AND_VALUES: _cache_bytes(base, count, sum(beside.values())), **beside}


def _cache_bytes(base: RecipeWork, count: int, beside: float) -> float:
    """Bytes of keys and values of so many trajectories, beside the state; an engine with a budget
    takes all of it, or what is left beside its state and so many bytes of its calls."""
    if base.caches_in_state:
        return 0.0
    reserved = base.reserved(base.recipe.generation.cache_gb)
    if reserved is not None:
        left = base.device.usable_bytes - base.drawn_weight_bytes - beside
        return max(0.0, min(reserved, left))
    running = min(count, base.recipe.generation.max_running)
    return running * base.answers.longest * base.token_bytes(1)


def _turn(base: RecipeWork, turns: AssumedTurns, count: int) -> Work:
    """One turn of so many trajectories: their contexts, then steps until the longest has ended."""
    context = base.answers.tokens / 2
    running = min(count, base.recipe.generation.max_running)
    work: list[Work] = []
    begun, share = 0.0, 1.0 / len(turns.lengths)
    for number, length in enumerate(turns.lengths):
        left = max(1.0, running * (1.0 - number * share))
        step = base.decoding(left, left * context)
        steps = (length - begun) * (count / running)
        work.append(step.times(steps))
        begun = length
    begin = base.prefill(count * context, context / 2)
    return replace(begin, then=(*begin.then, *work))


def _spread(most: int) -> Quantiles:
    """Numbers of turns: each from one to the most alike."""
    return Quantiles(tuple(float(n) for n in range(1, most + 1) for _ in range(8)))
