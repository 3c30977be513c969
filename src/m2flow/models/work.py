"""What passes over a decoder ask of a lane, as `m2flow.plan.profile.work.Work`.

Forward passes, training and decoding as m2flow's trainers and its generation engine do them: the
trainer's layouts for passes over whole answers, layers divided by heads for decoding. `Rates` holds
the shares of the hardware's peaks that such programs attain, each with its source. Nothing is
measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

from m2flow.models.lengths import Answers
from m2flow.models.shape import KNOWN_MODELS, WEIGHT_BYTES, ModelShape
from m2flow.plan.profile.work import Work
from m2flow.training.division import Division

FORWARD_AND_BACKWARD = 3.0
"""A backward pass is twice the work of a forward pass (Kaplan et al. 2020, section 2.1)."""

FROZEN_FORWARD_AND_BACKWARD = 2.0
"""Passes over frozen weights have gradients of what goes into a product, and none of the
weights, which are half of the backward pass."""

RECOMPUTED_FORWARD = 1.0
"""Forward passes besides, where activations are computed again (Chen et al. 2016)."""

MASTERS, MOMENTS, GRADIENTS = "float32 weights", "moments", "gradients"

EIGHT_BIT_BYTES = 1 + 4 / 256
"""Of a moment in 8 bits, in blocks of 256 with a scale of float32 (Dettmers et al. 2021)."""


def trained_bytes(
    number_bytes: int = WEIGHT_BYTES, *, moments_8bit: bool = False, masters: bool = True
) -> dict[str, float]:
    """Return the bytes of a trained parameter by what they are for.

    Args:
        number_bytes: of a number that is computed with. Beside 16 bits weight, gradient and the two
            moments of Adam are in single precision; else all of them have as many.
        moments_8bit: whether moments have 8 bits all the same.
        masters: whether weights of 16 bits have a copy in single precision.
    """
    wide = max(4, number_bytes)
    beside = {GRADIENTS: wide, MOMENTS: 2 * (EIGHT_BIT_BYTES if moments_8bit else wide)}
    copied = {MASTERS: wide} if number_bytes < wide and masters else {}
    return {"weights": number_bytes, **copied, **beside}


def on_host(each: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return what stays on the device of `trained_bytes` where the optimizer is in host memory, and
    what is there: moments, a copy of the weights, and one of the gradient that they are stepped by.
    """
    stays = {what: size for what, size in each.items() if what not in (MASTERS, MOMENTS)}
    wide = each[GRADIENTS]
    return stays, {MASTERS: wide, GRADIENTS: wide, MOMENTS: each[MOMENTS]}


TRAINED_BYTES = sum(trained_bytes().values())
"""Of a trained parameter in 16 bits: 18."""

HOST_STEP_BYTES = 34
"""Of a parameter whose optimizer is in host memory, what an update moves there and back (a gradient
in single precision, a 16-bit weight) or reads and writes there (28). An assumption: a lane's share
of host memory is as fast as its link to it."""

ADAM_BYTES = 16
"""Of a parameter, what an optimizer step reads, and writes again, with gradients of 16 bits
(Rajbhandari et al. 2020, section 3.1)."""

KEPT_BY_NORMS = {
    "gemma": (10, 0), "gemma2": (18, 0), "gemma3_text": (18, 4), "qwen3": (8, 3),
    "qwen3_moe": (8, 3),
}  # fmt: skip
"""Numbers of 16 bits that the norms of a layer keep of a token for the backward pass, by the type
of a model: for each unit of width, and for each unit of queries and keys. `USUAL_NORMS` for others.
A norm keeps what comes in, in single precision, the same brought to size 1, and what goes out."""

USUAL_NORMS = (8, 0)

KEPT_OF_CHANNELS, KEPT_OF_EXPERTS = 4, 2
"""Numbers that a channel of the feed-forward block keeps: the gate, what the gate lets through, the
other input, and their product; and a chosen expert for each unit of width: its input and output."""

GRADIENT_BYTES = 4
"""Of a parameter's gradient."""

LOGIT_BYTES = 12
"""Of a token and a row of the vocabulary: 16-bit logits, their single-precision copy, and the
gradients of both."""

LAYER_HIDDEN, LAYER_CHANNELS = 6, 3
"""Numbers that a layer's forward pass holds for a token: widths of the residual stream (itself,
normalised; queries, keys and values, and their copy; what attention and the MLP make) and of the
feed-forward block (both its inputs, and their product)."""

BETWEEN_HIDDEN, BETWEEN_CHANNELS = 8, 3
"""Numbers that a layer must move for a token outside of its products: twice the residual stream and
what is added to it, both read and written; and both inputs and the product of the feed-forward
block."""

MOVED_AGAIN, LOGITS_MOVED = 3.7, 2
"""How often a trainer moves those numbers, and each of the `LOGIT_BYTES` of a pass. By the profiler
m2flow's own with Liger's kernels spends 47 and 25 of 243 ms on them, with 8,192 tokens of a model
of 1.5 billion parameters on one H200 (`benchmarks/results/gpu/2026-11-26/training.json`)."""

DENSE_REFERENCE = KNOWN_MODELS["Qwen2.5-7B"]
"""What a trainer attains of arithmetic was fitted to a published step of this model."""

DRAWN_LOGIT_BYTES = 28
"""Of a request and a row of the vocabulary: logits in single precision, and in double precision
they, their probabilities and those summed up."""

LOGITS_AT_A_TIME = 1 << 26
"""Logits that a trainer has in memory at most; those of further tokens follow."""

PLAIN_HEADS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
"""Architectures whose logits are the head's output, capped where their configuration says so.
Others compute all logits at once."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Attained shares of the peaks.

    The first two are fitted to one published step (RLinf, arXiv 2509.15965: GRPO on a 7B model, 64
    H100, 102 s log-probabilities / 368 s training); `benchmarks/paper_tables.py` fits them again
    and refuses to run where they differ. `grouped` has a source of its own. The others are of
    generation, but the last one: fitted to half of the models in measured tables of vLLM 0.24's
    kernels on H100 and H200 (aiconfigurator 0.12); the other half is held out.
    `benchmarks/analytic.py --fit` fits them again.

    Attributes:
        training: of peak FLOP/s in forward and backward passes of a dense model, recomputed
            activations counted as work.
        forward: of peak FLOP/s in a trainer's forward pass over whole sequences.
        between: of a trainer's pass over `DENSE_REFERENCE`, what is spent outside of products and
            attention. Dense models that move more for each operation attain that much less. From
            m2flow's own trainer, a model of 1.5 billion parameters on one H200: 0.088 would give
            the mini-batch of long answers (`benchmarks/results/gpu/2026-11-26/training.json`),
            0.148 those of a whole GRPO step (`2026-11-27b/grpo_step.json`).
        grouped: of a dense model's arithmetic that a trainer's many small experts attain. NVIDIA's
            performance summary of Megatron Bridge (25.11) has 5,275 tokens/s for each of 16 H100
            that train Qwen3-30B-A3B without dropping tokens (PP2, EP8); this share gives 5,330.
            That run is in FP8, so that BF16 hardly attains more.
        prefill: of peak FLOP/s in products and attention of an engine's prefill.
        experts: of peak FLOP/s in an engine's grouped products of experts.
        decode_bandwidth: of memory bandwidth in generation: weights, keys and values.
        layer_seconds: of a layer of a decoding step beside memory and arithmetic: the kernels' own
            latencies.
        prefill_layer_seconds: the same of a prefill, which is launched kernel by kernel.
        round_seconds: of each decoding step beside all that: scheduling and sampling that the
            device's work does not hide. The tables have none. The published rollout above would
            take 2 ms (488 s without, 591 s published); m2flow's own engine on one H200, 48 and 512
            requests at a time, 0.1 and 0.3 ms (`2026-11-27b/long_tail.json` in that folder).
    """

    training: float = 0.438
    forward: float = 0.387
    between: float = 0.12
    grouped: float = 0.28
    prefill: float = 0.723
    experts: float = 0.617
    decode_bandwidth: float = 0.876
    layer_seconds: float = 33.1e-6
    prefill_layer_seconds: float = 80.1e-6
    round_seconds: float = 0.0

    def arithmetic(self, model: ModelShape, fraction: float) -> float:
        """Return a fraction of peak FLOP/s for this model.

        Grouped products get less, and so do narrow layers and large vocabularies, which move more
        for each operation.
        """
        if model.expert_share:
            return fraction * (1 - model.expert_share * (1 - self.grouped))
        more = moved_bytes(model) / moved_bytes(DENSE_REFERENCE) - 1
        return fraction / (1 + self.between * more)


RATES = Rates()


def moved_bytes(model: ModelShape) -> float:
    """Return what a trainer moves outside of products and attention for each of their operations.

    That is bytes for each FLOP of a forward pass: norms, gates, rotations, sums of the residual
    stream, and logits.
    """
    numbers = BETWEEN_HIDDEN * model.hidden + BETWEEN_CHANNELS * model.intermediate
    layers = MOVED_AGAIN * WEIGHT_BYTES * model.layers * numbers
    logits = LOGITS_MOVED * LOGIT_BYTES * model.logits
    return (layers + logits) / model.forward_flops(1, 0)


def ring_bytes(num_bytes: float, lanes: int) -> float:
    """Return what each lane sends in a ring all-reduce of so many bytes."""
    return 2 * (lanes - 1) / lanes * num_bytes


def of_numbers(work: Work, number_bytes: int) -> Work:
    """Return work that is priced with numbers of 16 bits with numbers of so many bytes: all that
    is read and sent, and in which precision it is computed."""
    if number_bytes == WEIGHT_BYTES:
        return work
    return replace(
        work,
        single_precision=number_bytes > WEIGHT_BYTES,
        read_bytes=work.read_bytes * number_bytes / WEIGHT_BYTES,
        sent_bytes=work.sent_bytes * number_bytes / WEIGHT_BYTES,
        then=tuple(of_numbers(part, number_bytes) for part in work.then),
    )


def fullest(ranks: int, sequences: float, deviation: float) -> float:
    """Return the fullest rank's load over the mean one's, sequences dealt out without looking.

    The largest of `ranks` sums of `sequences` independent lengths, by Blom's normal score of the
    largest.

    Args:
        ranks: data-parallel ranks that wait for one another.
        sequences: of each rank.
        deviation: standard deviation of a length over the mean.
    """
    if ranks <= 1 or sequences <= 0:
        return 1.0
    score = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + deviation * score / math.sqrt(max(sequences, 1.0))


def fullest_balanced(ranks: int, sequences: float, answers: Answers) -> float:
    """Return the same where sequences are dealt out in their order by tokens, as trainers do it.

    Where a rank's part should end there is a sequence, which goes to one side as a whole
    (`m2flow.training.sharded.dealt`): that moves either end of the part by up to half of it, all
    distances alike. Sequences of nearly one length fall as if nobody had looked.

    Args:
        ranks, sequences: as of `fullest`.
        answers: whose lengths they have.
    """
    # The variance of a uniform distribution of two ends, in a sequence that is met by its tokens.
    moved = math.sqrt(answers.cubes / 6) / max(sequences, 1.0)
    return min(fullest(ranks, sequences, answers.deviation), fullest(ranks, 1.0, moved))


# Generation: the layers divided over `lanes` lanes ------------------------------------------------


def prefill(
    model: ModelShape, tokens: float, context: float, lanes: int = 1, rates: Rates = RATES
) -> Work:
    """Return the work of so many prompt tokens that attend to `context` tokens in the mean."""
    seconds = model.layers * rates.prefill_layer_seconds
    return _generating(model, tokens, context, tokens, 0.0, lanes, seconds, rates)


def decoding(
    model: ModelShape, running: float, kv_tokens: float, lanes: int = 1, rates: Rates = RATES
) -> Work:
    """Return the work of one more token of each running request.

    Args:
        running: requests that decode together.
        kv_tokens: in the cache, of all of them.
    """
    context = kv_tokens / running if running else 0.0
    seconds = model.layers * rates.layer_seconds + rates.round_seconds
    return _generating(model, running, context, kv_tokens, running, lanes, seconds, rates)


def _generating(
    model: ModelShape, tokens: float, context: float, kv_tokens: float, rows: float, lanes: int,
    seconds: float, rates: Rates,
) -> Work:  # fmt: skip
    """Return the work of an engine's pass: products, attention, experts, and what lies between.

    Args:
        model, lanes, rates: as of `decoding`.
        tokens: that are worked on.
        context: tokens that each of them attends to in the mean.
        kv_tokens: whose keys and values are read.
        rows: of logits; those of a prefill are too few to count.
        seconds: of latencies.
    """

    def work(flops: float, read_bytes: float, share: float = rates.prefill) -> Work:
        return Work(flops / lanes, read_bytes, arithmetic=share, bandwidth=rates.decode_bandwidth)

    weights, head = model.shared_parameters, model.head_parameters
    products = work(2 * weights * tokens, WEIGHT_BYTES * weights / lanes)
    attention = work(
        model.attention_flops(tokens, context), model.kv_bytes_on_lane(lanes) * kv_tokens
    )
    channels = model.channels_of_a_token
    numbers = BETWEEN_HIDDEN * model.hidden + BETWEEN_CHANNELS * channels / lanes
    between = work(0.0, WEIGHT_BYTES * model.layers * numbers * tokens)
    logits = work(2 * head * rows, WEIGHT_BYTES * head / lanes)
    # Experts wait for their weights: few tokens meet each of them.
    read = work(0.0, model.expert_bytes_read(tokens) / lanes)
    grouped = work(2 * model.experts_of_a_token * tokens, 0.0, rates.experts)
    sent_bytes, span, messages = _sums(model, tokens, lanes)
    return replace(
        products,
        sent_bytes=sent_bytes,
        span=span,
        messages=messages,
        seconds=seconds,
        then=(attention, between, read, grouped, logits),
    )


def _sums(model: ModelShape, tokens: float, lanes: int) -> tuple[float, int, float]:
    """Return bytes, span and number of the sums over the lanes: two a layer.

    Shoeybi et al. 2019, arXiv 1909.08053, section 3.
    """
    if lanes == 1:
        return 0.0, 1, 0.0
    count = 2 * model.layers
    return count * ring_bytes(tokens * model.hidden * WEIGHT_BYTES, lanes), lanes, count


def drawing_parameters(model: ModelShape, lanes: int) -> float:
    """Return the parameters that each of `lanes` lanes keeps to generate.

    m2flow's engine divides the layers alone: embedding, last norm and head are on every lane.
    """
    outside = model.outer_parameters
    return outside + (model.parameters - outside) / lanes


# Passes over whole answers: the model divided as a training layout says ---------------------------


def lane_parameters(model: ModelShape, division: Division) -> float:
    """Return the parameters that a lane keeps, with whatever belongs to each of them."""
    kept = model.parameters - model.expert_parameters + model.expert_parameters / division.ep
    return kept / (division.fsdp * division.tp)


def forward_pass(
    model: ModelShape, answers: Answers, count: float, division: Division, microbatch: float,
    rates: Rates = RATES, prompts: float = 1.0, number_bytes: int = WEIGHT_BYTES,
    balanced: bool = True,
) -> Work:  # fmt: skip
    """Return the work of log-probabilities or values of `count` answers.

    Args:
        microbatch: tokens that a lane computes at a time, for which the shards are gathered once.
        prompts: that are computed for each answer, below 1 where answers share theirs.
        number_bytes: of a number that is computed with.
        balanced: whether lanes that work side by side even out their tokens.
    """
    share, walk = rates.arithmetic(model, rates.forward), _Walk(1.0, 1, 0.5, balanced)
    work = _passes(model, answers, count, division, microbatch, walk, share, prompts)
    return of_numbers(work, number_bytes)


def training_pass(
    model: ModelShape, answers: Answers, count: float, division: Division, microbatch: float,
    recomputes: bool = False, rates: Rates = RATES, frozen: bool = False,
    prompts: float = 1.0, number_bytes: int = WEIGHT_BYTES,
) -> Work:  # fmt: skip
    """Return the work of forward and backward passes, without the update.

    The shards are gathered for either pass, and gradients scattered after the backward, which are
    summed in float32 at least: each is half of an all-reduce.

    Args:
        model, answers, count, division, microbatch, rates, prompts, number_bytes: as of
            `forward_pass`.
        recomputes: whether activations are computed again in the backward pass.
        frozen: whether adapters are trained in the place of the weights, which have no gradients.
    """
    passes = FROZEN_FORWARD_AND_BACKWARD if frozen else FORWARD_AND_BACKWARD
    passes += RECOMPUTED_FORWARD if recomputes else 0.0
    share = rates.arithmetic(model, rates.training)
    gradients = 0 if frozen else max(GRADIENT_BYTES, number_bytes) / number_bytes
    walk = _Walk(passes, 3 if recomputes else 2, (2 + gradients) / 2)
    work = _passes(model, answers, count, division, microbatch, walk, share, prompts)
    return of_numbers(work, number_bytes)


@dataclass(frozen=True, slots=True)
class _Walk:
    """What is done with a micro-batch: `passes` forward passes' arithmetic, the layers gone through
    `times` times, and `rings` of weights, where they are in shards; and whether lanes have
    `balanced` what they do.
    """

    passes: float
    times: int
    rings: float
    balanced: bool = True


def _passes(
    model: ModelShape, answers: Answers, count: float, division: Division, microbatch: float,
    walk: _Walk, share: float, prompts: float,
) -> Work:  # fmt: skip
    shares = max(1, min(division.shares, math.ceil(count)))
    each = count / shares
    if walk.balanced:
        uneven = fullest_balanced(shares, each, answers)
    else:
        uneven = fullest(shares, each, answers.deviation)
    tokens = each * answers.computed(prompts) * uneven
    rounds = math.ceil(tokens / (microbatch * division.cp))
    weights = model.weight_bytes / division.tp
    return Work(
        walk.passes
        * model.forward_flops(tokens, answers.context_of(prompts))
        / (division.tp * division.cp),
        read_bytes=walk.times * rounds * _read_bytes(model, tokens / rounds, division),
        sent_bytes=walk.rings * rounds * ring_bytes(weights, division.fsdp),
        span=division.lanes,
        apart=division.lanes // division.fsdp,
        overlapped=True,  # FSDP gathers the next block while it computes one
        arithmetic=share,
        then=tuple(_exchanges(model, division, tokens, walk.times)),
    )


def _read_bytes(model: ModelShape, tokens: float, division: Division) -> float:
    """Return the bytes of weights that a lane reads to go through its layers once.

    It counts for short calls alone: from some hundred tokens on arithmetic takes longer.
    """
    dense = WEIGHT_BYTES * (model.shared_parameters + model.head_parameters) / division.tp
    return dense + model.expert_bytes_read(tokens) / (division.tp * division.ep)


def _exchanges(model: ModelShape, division: Division, tokens: float, times: int) -> Iterator[Work]:
    """Yield what lanes tell each other of `tokens` tokens: within layers, so nothing goes on then.

    Of tensor parallelism two sums a layer and the gathered logits (Shoeybi et al. 2019, arXiv
    1909.08053, section 3); of context parallelism keys and values; of expert parallelism a token's
    hidden state, to each of its experts' lanes and back.
    """
    tp, cp, ep = division.tp, division.cp, division.ep
    wide = tokens * model.hidden * WEIGHT_BYTES
    if tp > 1:
        count = 2 * model.layers * times
        logits = times * tokens * model.logits * WEIGHT_BYTES * (tp - 1) / tp
        yield Work(sent_bytes=count * ring_bytes(wide, tp) + logits, span=tp)
    if cp > 1:
        yield Work(sent_bytes=times * tokens * model.kv_bytes_per_token * (cp - 1) / cp, span=cp)
    if ep > 1:
        there_and_back = 2 * model.mixtures * model.experts_per_token * wide
        yield Work(sent_bytes=times * there_and_back * (ep - 1) / ep, span=ep, apart=ep)


def update(
    model: ModelShape, division: Division, replicas: int, adapters: float | None = None
) -> Work:
    """Return the work of an optimizer step; replicas sum their gradients first.

    So do lanes that each have all of a parameter and a term of its gradient.

    Args:
        model, division: what is trained, and how it is divided.
        replicas: gangs that sum their gradients.
        adapters: parameters that are trained in the place of the model's; None for all of these.
    """
    own = lane_parameters(model, division)
    dense: float = model.parameters - (model.expert_parameters if division.ep > 1 else 0)
    if adapters is not None:  # on no experts
        own, dense = adapters / (division.fsdp * division.tp), adapters
    copies, terms = division.cp * division.ep, 0.0
    if copies > 1:
        terms = ring_bytes(GRADIENT_BYTES * dense, copies)
    return Work(
        read_bytes=2 * ADAM_BYTES * own,
        sent_bytes=ring_bytes(GRADIENT_BYTES * own, replicas),
        span=division.lanes * replicas,
        apart=division.lanes,
        then=(Work(sent_bytes=terms, span=division.lanes, apart=division.lanes // copies),)
        if terms
        else (),
    )


def training_bytes(
    model: ModelShape, division: Division, microbatch: int, recomputes: bool
) -> float:
    """Return the bytes of each lane that a training pass takes beside the state.

    Args:
        microbatch: tokens that the lane computes at a time.
    """
    return sum(training_parts(model, division, microbatch, recomputes).values())


def training_parts(
    model: ModelShape,
    division: Division,
    microbatch: int,
    recomputes: bool,
    number_bytes: int = WEIGHT_BYTES,
    gradients: bool = True,
) -> dict[str, float]:
    """Return the same by what the bytes are for.

    Shards of what stands outside of the layers stay gathered through a pass, and the gradient of it
    stands whole, before it is scattered and as it is.

    Args:
        model, division, microbatch, recomputes: as of `training_bytes`.
        number_bytes: of a number that is computed with.
        gradients: whether the weights have some; not where they are frozen, or nothing is trained.
    """
    tp, cp = division.tp, division.cp
    width = number_bytes / WEIGHT_BYTES
    layer = layer_activations(model, tp)
    kept, layers_kept = layer * model.layers, model.layers
    if recomputes:  # of all other layers what comes in
        kept, layers_kept = WEIGHT_BYTES * model.hidden * model.layers + layer, 1
    found = {"activations": width * kept * microbatch}
    if division.fsdp > 1:
        outside = model.outer_parameters / tp
        block = (model.parameters - model.outer_parameters) / tp / model.layers
        whole = (2 if gradients else 1) * outside
        found["gathered weights"] = number_bytes * (2 * block + whole)
        if gradients:
            found["scattered gradients"] = GRADIENT_BYTES * outside
    if cp > 1:
        of_lanes = cp * microbatch * model.kv_bytes_per_token * layers_kept / model.layers
        found["gathered keys and values"] = width * of_lanes
    logits = microbatch * model.logits
    if model.model_type in PLAIN_HEADS:
        logits = min(logits, LOGITS_AT_A_TIME)
    return {**found, "logits": float(LOGIT_BYTES * logits)}


def layer_activations(model: ModelShape, lanes: int = 1) -> float:
    """Return the bytes in 16 bits that a layer keeps of a token for its backward pass.

    By transformers' modules, with attention by a fused kernel: it keeps queries, keys, values and
    what it gives, and no scores.

    Args:
        lanes: that divide the layer by heads and channels; all that norms keep is on each.
    """
    of_width, of_heads = KEPT_BY_NORMS.get(model.model_type, USUAL_NORMS)
    of_width += KEPT_OF_EXPERTS * model.experts_per_token
    divided = (2 + of_heads) * (model.heads + model.kv_heads) * model.head_dim
    divided += KEPT_OF_CHANNELS * model.channels_of_a_token
    return WEIGHT_BYTES * (of_width * model.hidden + divided / lanes)


def drawing_parts(
    model: ModelShape, running: int, prompt_tokens: int, lanes: int, number_bytes: int
) -> dict[str, float]:
    """Return the bytes of each lane that generation takes beside weights, keys and values.

    Args:
        running: requests that decode together.
        prompt_tokens: that are computed together.
    """
    channels = model.channels_of_a_token
    wide = LAYER_HIDDEN * model.hidden + LAYER_CHANNELS * channels / lanes
    return {
        "activations": float(number_bytes * max(running, prompt_tokens) * wide),
        "logits": float(DRAWN_LOGIT_BYTES * running * model.vocabulary),
    }
